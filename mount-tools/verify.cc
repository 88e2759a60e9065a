// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "index/store.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

// Prints the report of one checkpoint; whether it is whole.
bool Print(const std::string& name, const VerifyReport& report, bool quick, Terminal& terminal) {
  for (const VerifyReport::Damage& damage : report.damages) {
    if (terminal.json) {
      terminal.Json(nlohmann::ordered_json{{"event", "damage"},
                                           {"checkpoint", name},
                                           {"object", damage.object},
                                           {"file", damage.file},
                                           {"offset", damage.offset},
                                           {"reason", damage.reason}});
    } else {
      terminal.Line(fmt::format("{}: {}: {}: byte {}: {}", name, damage.object, damage.file,
                                damage.offset, damage.reason));
    }
  }
  const bool whole = report.damages.empty();
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"event", "verified"},
                                         {"checkpoint", name},
                                         {"whole", whole},
                                         {"quick", quick},
                                         {"tensors", report.tensors},
                                         {"chunks", report.chunks},
                                         {"bytes", report.bytes_checked},
                                         {"damages", report.damages.size()}});
  } else if (!terminal.quiet) {
    terminal.Line(fmt::format("{}: {}: {} tensors, {} chunks, {} checked{}", name,
                              whole ? "whole" : fmt::format("{} damages", report.damages.size()),
                              report.tensors, report.chunks, HumanBytes(report.bytes_checked),
                              quick ? " (quick: no data read)" : ""));
  }
  return whole;
}

// kDone, kCheckFailed or kFailed.
int VerifyOne(const std::string& path, bool quick, Terminal& terminal) {
  const std::string name = path.substr(path.rfind('/') + 1);
  Progress progress(terminal, "verify " + name);
  VerifyOptions options;
  options.quick = quick;
  options.progress = [&](std::uint64_t done, std::uint64_t total) { progress.Set(done, total); };
  auto report = VerifyCheckpoint(HostFileSystem(), path, options);
  if (!report.ok()) {
    // What cannot even be opened is damaged: that is what the command is for.
    terminal.Fail(report.status().WithContext(name));
    return report.status().code() == Code::kDataLoss ? kCheckFailed : kFailed;
  }
  return Print(name, report.value(), quick, terminal) ? kDone : kCheckFailed;
}

// A foreign file has no hashes: its header is checked against every rule of the format, and all
// of it is read.
int VerifyForeign(const Source& source, bool quick, Terminal& terminal) {
  auto opened = OpenedCheckpoint::OpenSafetensors(HostFileSystem(), source.path);
  if (!opened.ok()) {
    terminal.Fail(opened.status());
    return opened.status().code() == Code::kDataLoss ? kCheckFailed : kFailed;
  }
  std::uint64_t bytes = 0;
  if (!quick) {
    auto file = HostFileSystem().OpenRead(source.path);
    if (!file.ok()) return terminal.Fail(file.status());
    Progress progress(terminal, "read");
    std::string block(1 << 20, '\0');
    for (;;) {
      auto n = file.value()->ReadAt(bytes, block.data(), block.size());
      if (!n.ok()) return terminal.Fail(n.status());
      bytes += n.value();
      progress.Set(bytes, 0);
      if (n.value() < block.size()) break;
    }
  }
  VerifyReport report;
  report.tensors = opened.value()->index().tensor_count();
  report.chunks = opened.value()->index().chunk_count();
  report.bytes_checked = bytes;
  if (!terminal.json && !terminal.quiet) {
    terminal.Line(
        fmt::format("{}: a safetensors file holds no hashes: header, lengths and "
                    "readability were checked",
                    source.path));
  }
  Print(opened.value()->name(), report, quick, terminal);
  return kDone;
}

}  // namespace

int RunVerify(const VerifyArgs& args, Terminal& terminal) {
  auto source = ResolveSource(HostFileSystem(), args.source);
  if (!source.ok()) return terminal.Fail(source.status());
  int worst = kDone;
  switch (source.value().kind) {
    case Source::Kind::kSafetensors:
      worst = VerifyForeign(source.value(), args.quick, terminal);
      break;
    case Source::Kind::kCheckpoint:
      worst = VerifyOne(source.value().path, args.quick, terminal);
      break;
    case Source::Kind::kStore: {
      auto store = Store::Open(HostFileSystem(), source.value().path);
      if (!store.ok()) return terminal.Fail(store.status());
      auto list = store.value().List();
      if (!list.ok()) return terminal.Fail(list.status());
      for (const CheckpointListing& item : list.value()) {
        worst = std::max(worst,
                         VerifyOne(store.value().CheckpointPath(item.name), args.quick, terminal));
      }
      break;
    }
  }
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : worst;
}

}  // namespace tensormount::tools
