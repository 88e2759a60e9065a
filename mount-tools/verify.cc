// SPDX-License-Identifier: Apache-2.0
// `tensormount verify` (commands.h): verifies checkpoints one after the other, also after a
// failure, and prints damage and a summary of each. The exit status is the largest of all.
#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include <fmt/core.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/foreign/format.h"
#include "index/foreign/verify_foreign.h"
#include "index/read/count_values.h"
#include "index/read/known_defects.h"
#include "index/read/report_json.h"
#include "index/store/costs.h"
#include "index/store/store.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"
#include "mount-tools/value_columns.h"

namespace tensormount::tools {
namespace {

// Prints the report of one checkpoint. Returns whether the checkpoint is intact; with --partial
// missing data are accepted.
bool PrintVerdict(const std::string& name, const VerifyReport& report, const VerifyArgs& args,
                  Terminal& terminal) {
  const bool quick = args.quick;
  for (const std::string& warning : report.warnings) terminal.Warn(name + ": " + warning);
  std::size_t lost = 0;
  // Damaged files for which the line about other checkpoints with the same file was printed.
  std::set<std::string_view> shared;
  for (const VerifyReport::Damage& damage : report.damages) {
    lost += damage.lost ? 1 : 0;
    if (terminal.json) {
      nlohmann::ordered_json json = {{"event", "damage"}, {"checkpoint", name}};
      json.update(DamageJson(damage));
      terminal.Json(json);
    } else if (damage.lost) {
      terminal.Line(fmt::format("{}: {}: {}{}", name, damage.object,
                                damage.file.empty() ? "" : damage.file + ": ", damage.reason));
      // damage.reason names only the first few keys, so with --verbose all are printed.
      if (terminal.verbose && damage.keys.size() > 1) {
        for (const std::string& key : damage.keys) {
          terminal.Line(fmt::format("{}: lost: {}", name, key));
        }
      }
    } else {
      terminal.Line(fmt::format("{}: {}: {}: byte {}: {}", name, damage.object, damage.file,
                                damage.offset, damage.reason));
      if (!damage.shared_with.empty() && shared.insert(damage.file).second) {
        terminal.Line(fmt::format("{}: {}: the same file is part of {}, which {} damaged too", name,
                                  damage.file, fmt::join(damage.shared_with, ", "),
                                  damage.shared_with.size() == 1 ? "is" : "are"));
      }
    }
  }
  const bool whole = report.damages.empty();
  if (terminal.json) {
    nlohmann::ordered_json json = {{"event", "verified"}, {"checkpoint", name}};
    json.update(VerifiedJson(report, quick));
    terminal.Json(json);
  } else if (!terminal.quiet) {
    if (report.bytes_without_hash > 0) {
      terminal.Line(
          fmt::format("{}: {} have no hashes: only metadata, lengths and readability were checked",
                      name, HumanBytes(report.bytes_without_hash)));
    }
    const std::string verdict = whole ? "whole" : Counted(report.damages.size(), "damage");
    terminal.Line(fmt::format("{}: {}: {}, {}, {} checked{}", name, verdict,
                              Counted(report.tensors, "tensor"), Counted(report.chunks, "chunk"),
                              HumanBytes(report.bytes_checked),
                              quick ? " (quick: no data read)" : ""));
  }
  return whole || (args.partial && lost == report.damages.size());
}

// Looks for NaNs and infinities. Returns kDone, kCheckFailed if there are any, or kFailed.
int FindNonfiniteIn(const OpenedCheckpoint& checkpoint, const std::string& name,
                    const VerifyArgs& args, Terminal& terminal) {
  NonfiniteSearch search;
  search.exempt = args.nonfinite_exempt;
  search.recorded_only = args.quick;
  Result<NonfiniteTensors> result = NonfiniteTensors();
  {
    Progress progress(terminal, "count values of " + name);
    search.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return Status();
    };
    result = FindNonfinite(checkpoint, search);
  }
  if (!result.ok()) {
    terminal.Fail(result.status().WithContext(name));
    return result.status().code() == Code::kDataLoss ? kCheckFailed : kFailed;
  }
  for (const NonfiniteTensors::Found& one : result.value().found) {
    const TensorMeta& meta = one.tensor.meta;
    if (terminal.json) {
      nlohmann::ordered_json json = {
          {"event", "nonfinite"}, {"checkpoint", name}, {"key", meta.key()}};
      AddCountsJson(meta, one.counts, json);
      terminal.Json(json);
    } else {
      const std::uint64_t values = ValuesIn(meta.dtype(), meta.elements());
      terminal.Line(fmt::format("{}: tensor {}: {} among {} values", name, meta.key(),
                                DescribeNonfinite(one.counts), values));
    }
  }
  const bool found = !result.value().found.empty();
  if (result.value().left_out > 0) {
    terminal.Fail(Status(Code::kUnsupported,
                         fmt::format("{}: the values of {} were not counted when they were saved; "
                                     "without --quick they are read",
                                     name, Counted(result.value().left_out, "tensor"))));
    return kFailed;
  }
  return found ? kCheckFailed : kDone;
}

// Verifies one checkpoint. Returns kDone, kCheckFailed or kFailed.
int VerifyOne(const FoundSource& source, const VerifyArgs& args, Terminal& terminal) {
  const bool foreign = source.kind == SourceKind::kForeign;
  const std::string name = source.path.substr(source.path.rfind('/') + 1);
  VerifyOptions options;
  options.quick = args.quick;
  options.roots = terminal.roots;
  Result<VerifyReport> report = VerifyReport();
  {
    Progress progress(terminal, "verify " + name);
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return Status();
    };
    report = foreign ? VerifyForeign(*source.fs, source.path, options)
                     : VerifyCheckpoint(*source.fs, source.path, options);
  }
  if (!report.ok()) {
    // kDataLoss means that damage prevents the opening: the check has failed.
    terminal.Fail(report.status().WithContext(name));
    return report.status().code() == Code::kDataLoss ? kCheckFailed : kFailed;
  }
  if (!foreign) NameSharers(*source.fs, source.path, report.value());
  // Hashes do not show data that were wrong when they were saved, so known defects of the program
  // that saved the checkpoint are added as warnings.
  const auto opened = OpenFound(source, terminal.roots);
  if (opened.ok()) {
    for (std::string& note : FindKnownDefects(*opened.value())) {
      report.value().warnings.push_back(std::move(note));
    }
  }
  const int verdict = PrintVerdict(name, report.value(), args, terminal) ? kDone : kCheckFailed;
  if (!args.nonfinite) return verdict;
  if (!opened.ok()) {
    terminal.Fail(opened.status().WithContext(name));
    return std::max(verdict, opened.status().code() == Code::kDataLoss ? kCheckFailed : kFailed);
  }
  return std::max(verdict, FindNonfiniteIn(*opened.value(), name, args, terminal));
}

// All checkpoints of a store or training directory; for other sources only the source itself.
Result<std::vector<FoundSource>> AllOf(const FoundSource& source, const Terminal& terminal) {
  std::vector<FoundSource> all;
  if (source.kind == SourceKind::kStore) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(*source.fs, source.path));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> list, store.List());
    for (const CheckpointListing& item : list) {
      all.push_back({.fs = source.fs,
                     .kind = SourceKind::kCheckpoint,
                     .path = store.CheckpointPath(item.name)});
    }
  } else if (source.kind == SourceKind::kForeignSteps) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                                 ForeignFolder::Open(*source.fs, source.path, terminal.roots));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto steps, ReadForeignSteps(folder));
    // If all steps were removed meanwhile, the list is empty.
    for (const ForeignStep& step : steps.value_or(ForeignSteps()).steps) {
      all.push_back({.fs = source.fs,
                     .kind = SourceKind::kForeign,
                     .path = JoinPath(source.path, step.name)});
    }
  } else {
    all.push_back(source);
  }
  return all;
}

}  // namespace

int RunVerify(const VerifyArgs& args, Terminal& terminal) {
  const auto source = FindSourceArgument(args.source, terminal);
  if (!source.ok()) {
    terminal.Fail(source.status());
    return source.status().code() == Code::kDataLoss ? kCheckFailed : kFailed;
  }
  for (const std::string& warning : source.value().warnings) terminal.Warn(warning);
  const auto all = AllOf(source.value(), terminal);
  if (!all.ok()) return terminal.Fail(all.status());
  int worst = kDone;
  for (const FoundSource& one : all.value()) {
    // std::max keeps kFailed (a checkpoint could not be checked), which is larger than
    // kCheckFailed.
    worst = std::max(worst, VerifyOne(one, args, terminal));
  }
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : worst;
}

}  // namespace tensormount::tools
