// SPDX-License-Identifier: Apache-2.0
// `tensormount copy`, declared in commands.h as every subcommand is. What is done and in which
// order is index/store/copy.h's; here are words and numbers of it.
#include "index/store/copy.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "fs/views/hf_parts.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/terminal.h"

namespace tensormount::tools {
namespace {

// What went on with a checkpoint that is there now: "1.2 GB copied, 3.4 GB linked".
std::string Parts(const CopiedCheckpoint& one) {
  std::string text = HumanBytes(one.bytes_copied) + " copied";
  if (one.files_linked > 0) {
    text += fmt::format(", {} in {} linked", HumanBytes(one.bytes_linked),
                        Counted(one.files_linked, "file"));
  }
  if (one.files_kept > 0) {
    text += fmt::format(", {} of an earlier copy checked and kept", HumanBytes(one.bytes_kept));
  }
  return text;
}

void PrintCopied(const CopiedCheckpoint& one, const std::string& destination, Terminal& terminal) {
  for (const std::string& warning : one.warnings) terminal.Warn(one.name + ": " + warning);
  if (one.links_refused > 0) {
    terminal.Warn(fmt::format("{}: {} could not be linked and {} copied: {}", one.name,
                              Counted(one.links_refused, "file"),
                              one.links_refused == 1 ? "was" : "were", one.refusal));
  }
  if (terminal.json) {
    terminal.Json(CopiedJson(one));
  } else if (one.status.ok() && !terminal.quiet) {
    terminal.Line(one.was_there
                      ? fmt::format("{}: is there already", JoinPath(destination, one.name))
                      : fmt::format("copied {}: {}", JoinPath(destination, one.name), Parts(one)));
  }
}

}  // namespace

int RunCopy(const CopyArgs& args, Terminal& terminal) {
  const std::string& destination = args.paths.back();
  const std::vector<std::string> sources(args.paths.begin(), args.paths.end() - 1);
  CopyOptions options;
  if (!args.limit_rate.empty()) {
    const Result<std::uint64_t> rate = fs::ParsePartSize(args.limit_rate);
    if (!rate.ok()) {
      return terminal.Fail(
          Status(Code::kInvalidArgument,
                 fmt::format("--limit-rate {}: bytes a second: a number, or of K, M, G, KB, MB, GB "
                             "(powers of 1000), KiB, MiB, GiB (of 1024)",
                             args.limit_rate)));
    }
    options.limit_rate = rate.value();
  }
  const Interrupt interrupt;
  Result<CopyReport> copied = CopyReport();
  {
    // In a block of its own, so that its line is gone before the report.
    Progress progress(terminal, "copy");
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return interrupt.Check();
    };
    copied = CopyCheckpoints(HostFileSystem(), sources, destination, options);
  }
  if (!copied.ok()) {
    const Status& why = copied.status();
    const bool goes_on = why.code() == Code::kCancelled || why.code() == Code::kResourceExhausted;
    return interrupt.ExitStatus(
        why, terminal.Fail(why, goes_on ? "the same command goes on where it was: what is copied "
                                          "waits in .staging/ for a day"
                                        : ""));
  }
  int worst = kDone;
  for (const CopiedCheckpoint& one : copied.value().checkpoints) {
    PrintCopied(one, copied.value().destination, terminal);
    if (!one.status.ok()) worst = terminal.Fail(one.status);
  }
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : worst;
}

}  // namespace tensormount::tools
