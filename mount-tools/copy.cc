// SPDX-License-Identifier: Apache-2.0
// `tensormount copy` (commands.h): options and report; index/store/copy.h does the copy.
#include "index/store/copy.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "fs/views/hf_parts.h"
#include "index/store/drain.h"
#include "index/store/retention.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/terminal.h"

namespace tensormount::tools {
namespace {

// The bytes of a copied checkpoint: "1.2 GB copied, 3.4 GB in 12 files linked".
std::string Parts(const CopiedCheckpoint& one, bool in_bucket) {
  std::string text = HumanBytes(one.bytes_copied) + " copied";
  if (one.files_linked > 0) {
    text += fmt::format(", {} in {} {}", HumanBytes(one.bytes_linked),
                        Counted(one.files_linked, "file"),
                        in_bucket ? "copied by the server" : "linked");
  }
  if (one.files_kept > 0) {
    text += fmt::format(", {} of an earlier copy checked and kept", HumanBytes(one.bytes_kept));
  }
  return text;
}

void PrintCopied(const CopiedCheckpoint& one, const std::string& destination, Terminal& terminal) {
  for (const std::string& warning : one.warnings) terminal.Warn(one.name + ": " + warning);
  if (one.links_refused > 0) {
    terminal.Warn(fmt::format("{}: {} could not be shared and {} copied: {}", one.name,
                              Counted(one.links_refused, "file"),
                              one.links_refused == 1 ? "was" : "were", one.refusal));
  }
  if (terminal.json) {
    terminal.Json(CopiedJson(one));
  } else if (one.status.ok() && !terminal.quiet) {
    terminal.Line(
        one.was_there
            ? fmt::format("{}: already in the store, skipped", JoinPath(destination, one.name))
            : fmt::format("copied {}: {}", JoinPath(destination, one.name),
                          Parts(one, destination.find("://") != std::string::npos)));
  }
}

// Copies until a signal ends it. A signal while nothing was to be done is the normal end.
int RunDrain(const CopyArgs& args, const CopyOptions& copy, const Interrupt& interrupt,
             Terminal& terminal) {
  if (args.paths.size() != 2) {
    return terminal.Fail(
        Status(Code::kInvalidArgument, "--drain copies one STORE: copy STORE OTHER --drain"));
  }
  DrainOptions options;
  options.copy = copy;
  bool caught_up = false;
  options.caught_up = [&] { caught_up = true; };
  options.copy.watch = [&](std::uint64_t, std::uint64_t total) {
    if (total != 0) caught_up = false;
    return interrupt.Check();
  };
  if (!args.retain.empty()) {
    const Result<RetentionRules> rules = RetentionRules::Parse(args.retain);
    if (!rules.ok()) return terminal.Fail(rules.status());
    options.retain = rules.value();
  }
  int worst = kDone;
  options.copied = [&](const std::string& destination, const CopiedCheckpoint& one) {
    PrintCopied(one, destination, terminal);
    if (!one.status.ok()) worst = terminal.Fail(one.status);
    (void)terminal.Flush();
  };
  options.pruned = [&](const PruneReport& report) {
    for (const PruneReport::Decision& d : report.decisions) {
      if (d.removed && !terminal.quiet && !terminal.json) {
        terminal.Line(fmt::format("removed {}: {}", d.checkpoint, d.reason));
      }
      if (!d.failed.ok()) terminal.Warn(d.checkpoint + ": " + d.failed.message());
    }
    if (terminal.json) terminal.Json(retention::PruneJson(report));
    (void)terminal.Flush();
  };
  options.warned = [&](const std::string& text) { terminal.Warn(text); };
  options.waiting = [&](const Status& why, std::chrono::seconds wait) {
    caught_up = false;
    terminal.Warn(fmt::format("{}; next try in {} s", why.message(), wait.count()));
  };
  const Status ended = DrainStore(args.paths[0], args.paths[1], options);
  if (ended.code() == Code::kCancelled && caught_up) return worst;
  return interrupt.ExitStatus(ended, terminal.Fail(ended));
}

}  // namespace

int RunCopy(const CopyArgs& args, Terminal& terminal) {
  const std::string& destination = args.paths.back();
  const std::vector<std::string> sources(args.paths.begin(), args.paths.end() - 1);
  CopyOptions options;
  if (!args.limit_rate.empty()) {
    const Result<std::uint64_t> rate = fs::ParsePartSize(args.limit_rate);
    if (!rate.ok()) {
      return terminal.Fail(Status(
          Code::kInvalidArgument,
          fmt::format("--limit-rate {}: not a number of bytes per second, optionally followed by "
                      "K, M, G, KB, MB, GB (powers of 1000) or KiB, MiB, GiB (powers of 1024)",
                      args.limit_rate)));
    }
    options.limit_rate = rate.value();
  }
  options.unconditional = args.unconditional;
  const Interrupt interrupt;
  options.cancel = interrupt.flag();
  if (args.drain) return RunDrain(args, options, interrupt, terminal);
  Result<CopyReport> copied = CopyReport();
  {
    // The destructor of `progress` erases the progress line before the report is printed.
    Progress progress(terminal, "copy");
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return interrupt.Check();
    };
    copied = CopyCheckpoints(sources, destination, options);
  }
  if (!copied.ok()) {
    const Status& why = copied.status();
    const bool goes_on = why.code() == Code::kCancelled || why.code() == Code::kResourceExhausted;
    return interrupt.ExitStatus(
        why, terminal.Fail(why, goes_on ? "run the same command again to continue; what was copied "
                                          "stays for a day"
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
