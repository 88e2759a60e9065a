// SPDX-License-Identifier: Apache-2.0
// `tensormount rm`, `gc` and `fsck`: what an operator does to a store; see commands.h. In one file
// because each is a call of Store and a report.
// rm renames into the trash, which is atomic and quick; gc deletes what has been there for the
// grace and is locked by no reader. So a reader that has a checkpoint open reads it to the end.
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"

namespace tensormount::tools {

int RunRm(const RmArgs& args, Terminal& terminal) {
  // All names are looked at before the first one goes.
  // A store for each name: they may be of several stores.
  std::vector<std::pair<Store, std::string>> targets;
  for (const std::string& path : args.checkpoints) {
    auto parts = SplitCheckpointPath(path);
    if (!parts.ok()) return terminal.Fail(parts.status());
    auto store = Store::Open(HostFileSystem(), parts.value().store);
    if (store.status().code() == Code::kNotFound && Store::Open(HostFileSystem(), path).ok()) {
      return terminal.Fail(
          Status(Code::kInvalidArgument,
                 fmt::format("{}: a store: name a checkpoint of it, {}/NAME; nothing was removed",
                             path, WithoutTrailingSlashes(path))),
          fmt::format("`tensormount ls {}` lists them", path));
    }
    if (!store.ok()) return terminal.Fail(store.status());
    const std::string folder = store.value().CheckpointPath(parts.value().name);
    if (!HostFileSystem().Exists(folder)) {
      return terminal.Fail(
          Status(Code::kNotFound, fmt::format("{}: no such checkpoint; nothing was removed", path)),
          fmt::format("`tensormount ls {}` lists the checkpoints", parts.value().store));
    }
    if (!args.force) {
      const Status held =
          pins::CheckUnpinned(HostFileSystem(), store.value().path(), parts.value().name);
      if (!held.ok()) {
        return terminal.Fail(
            held.WithMessage(held.message() + "; nothing was removed"),
            held.code() == Code::kPermissionDenied ? "`tensormount unpin`, or `rm --force`" : "");
      }
    }
    targets.emplace_back(store.value(), parts.value().name);
  }
  for (auto& [store, name] : targets) {
    if (!args.dry_run) {
      const Status removed = store.Remove(name, {.force = args.force});
      if (!removed.ok()) return terminal.Fail(removed);
    }
    if (terminal.json) {
      terminal.Json(nlohmann::ordered_json{{"event", "removed"},
                                           {"checkpoint", store.CheckpointPath(name)},
                                           {"dry_run", args.dry_run}});
    } else if (!terminal.quiet) {
      terminal.Line(fmt::format("{} {}", args.dry_run ? "would remove" : "removed",
                                store.CheckpointPath(name)));
    }
  }
  if (!args.dry_run && !terminal.quiet && !terminal.json && !targets.empty()) {
    terminal.Line(
        fmt::format("its space is freed by `tensormount gc {}`", targets.front().first.path()));
  }
  return terminal.Flush();
}

int RunGc(const GcArgs& args, Terminal& terminal) {
  auto store = Store::Open(HostFileSystem(), args.store);
  if (!store.ok()) return terminal.Fail(store.status());
  Store::GcOptions options;
  options.dry_run = args.dry_run;
  options.grace = std::chrono::seconds(args.grace_seconds.value_or(kDefaultGraceSeconds));
  // Without locks the grace is all that protects readers, so only one that somebody chose is relied
  // on.
  options.trust_grace = args.grace_seconds.has_value();
  options.staging_age = std::chrono::seconds(args.staging_age_seconds);
  auto report = store.value().Gc(options);
  if (!report.ok()) return terminal.Fail(report.status());
  if (terminal.json) {
    terminal.Json(GcJson(report.value(), args.dry_run));
    const int flushed = terminal.Flush();
    return flushed == kDone && !report.value().failed.empty() ? kFailed : flushed;
  }
  if (!terminal.quiet) {
    const char* const verb = args.dry_run ? "would remove" : "removed";
    // Each save leaves a claim, which is an empty folder: only how many there were is of interest.
    std::uint64_t claims = 0;
    const std::string generations = std::string(store_paths::kGenerationsFolder) + "/";
    for (const std::string& path : report.value().removed) {
      if (path.starts_with(generations)) {
        ++claims;
      } else {
        terminal.Line(fmt::format("{} {}", verb, path));
      }
    }
    if (claims > 0) {
      terminal.Line(fmt::format("{} {} of earlier saves in {}", verb,
                                Counted(claims, "generation number"), generations));
    }
    for (const std::string& path : report.value().kept) {
      terminal.Line(fmt::format("kept {}", path));
    }
    terminal.Line(fmt::format("{} {}", HumanBytes(report.value().bytes_freed),
                              args.dry_run ? "would be freed" : "freed"));
  }
  // Told on standard error also with --json, which has them in its document.
  for (const std::string& path : report.value().failed) {
    terminal.Fail(Status(Code::kUnavailable, "left as it is: " + path));
  }
  const int flushed = terminal.Flush();
  return flushed == kDone && !report.value().failed.empty() ? kFailed : flushed;
}

// By folder and not by an opened store: the superblock may be what is damaged.
int RunFsck(const FsckArgs& args, Terminal& terminal) {
  auto findings = Store::FsckFolder(
      HostFileSystem(), args.store,
      {.rebuild = args.rebuild, .read_data = args.read_data, .roots = terminal.roots});
  if (!findings.ok()) return terminal.Fail(findings.status());
  bool sound = true;
  std::size_t unread = 0;
  for (const Store::FsckFinding& finding : findings.value()) {
    // What was repaired is told and does not count.
    if (finding.damage && !finding.repaired) sound = false;
    unread += finding.unread ? 1 : 0;
    if (terminal.json) {
      nlohmann::ordered_json json = {{"event", "finding"},          {"object", finding.object},
                                     {"problem", finding.problem},  {"remedy", finding.remedy},
                                     {"damage", finding.damage},    {"unread", finding.unread},
                                     {"repaired", finding.repaired}};
      if (!finding.shared_with.empty()) json["shared_with"] = finding.shared_with;
      terminal.Json(json);
    } else {
      terminal.Line(fmt::format("{}: {}{}{}", finding.object, finding.problem,
                                finding.remedy.empty() ? "" : "; ", finding.remedy));
    }
  }
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"event", "checked"},
                                         {"sound", sound && unread == 0},
                                         {"findings", findings.value().size()},
                                         {"unread", unread}});
  } else if (!terminal.quiet) {
    terminal.Line(fmt::format("{}: {}", args.store,
                              !sound        ? "damaged; see the lines above"
                              : unread != 0 ? "not all of it could be checked; see the lines above"
                                            : "sound"));
  }
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  if (!sound) return kCheckFailed;
  return unread != 0 ? kFailed : kDone;
}

}  // namespace tensormount::tools
