// SPDX-License-Identifier: Apache-2.0
// `tensormount rm`, `gc` and `fsck` (commands.h): each is a call of Store and a report. rm renames
// into the trash, which is atomic and fast; gc deletes a checkpoint that was in the trash for the
// grace period, if no reader has locked it. So with file locks a reader can read an open checkpoint
// to the end.
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/file_system_for.h"
#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"

namespace tensormount::tools {

int RunRm(const RmArgs& args, Terminal& terminal) {
  // All names are checked before the first checkpoint is removed. The checkpoints may be in several
  // stores.
  std::vector<std::pair<Store, std::string>> targets;
  for (const std::string& path : args.checkpoints) {
    auto parts = SplitCheckpointPath(path);
    if (!parts.ok()) return terminal.Fail(parts.status());
    auto store = Store::Open(parts.value().store);
    if (store.status().code() == Code::kNotFound && Store::Open(path).ok()) {
      return terminal.Fail(
          Status(
              Code::kInvalidArgument,
              fmt::format("{}: is a store; name a checkpoint in it, {}/NAME; nothing was removed",
                          path, WithoutTrailingSlashes(path))),
          fmt::format("`tensormount ls {}` lists the checkpoints", path));
    }
    if (!store.ok()) return terminal.Fail(store.status());
    const std::string folder = store.value().CheckpointPath(parts.value().name);
    if (!store.value().fs().Exists(folder)) {
      return terminal.Fail(
          Status(Code::kNotFound, fmt::format("{}: no such checkpoint; nothing was removed", path)),
          fmt::format("`tensormount ls {}` lists the checkpoints", parts.value().store));
    }
    if (!args.force) {
      const Status held =
          pins::CheckUnpinned(store.value().fs(), store.value().path(), parts.value().name);
      if (!held.ok()) {
        return terminal.Fail(held.WithMessage(held.message() + "; nothing was removed"),
                             held.code() == Code::kPermissionDenied
                                 ? "remove the pin with `tensormount unpin`, or use `rm --force`"
                                 : "");
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
        fmt::format("run `tensormount gc {}` to free the space", targets.front().first.path()));
  }
  return terminal.Flush();
}

int RunGc(const GcArgs& args, Terminal& terminal) {
  auto store = Store::Open(args.store);
  if (!store.ok()) return terminal.Fail(store.status());
  Store::GcOptions options;
  options.dry_run = args.dry_run;
  options.grace = std::chrono::seconds(args.grace_seconds.value_or(kDefaultGraceSeconds));
  // Without locks only the grace period protects readers, so it is trusted there only if the user
  // chose it.
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
    // Each save leaves an empty directory that claims its generation number. For these only their
    // number is printed.
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
  // With --json the document above has these errors too.
  for (const std::string& path : report.value().failed) {
    terminal.Fail(Status(Code::kUnavailable, "not removed: " + path));
  }
  const int flushed = terminal.Flush();
  return flushed == kDone && !report.value().failed.empty() ? kFailed : flushed;
}

// Checks a store that is not opened, because a damaged superblock would prevent opening it.
int RunFsck(const FsckArgs& args, Terminal& terminal) {
  const auto fs = FileSystemFor(args.store);
  if (!fs.ok()) return terminal.Fail(fs.status());
  auto findings = Store::FsckFolder(
      *fs.value(), args.store,
      {.rebuild = args.rebuild, .read_data = args.read_data, .roots = terminal.roots});
  if (!findings.ok()) return terminal.Fail(findings.status());
  bool sound = true;
  std::size_t unread = 0;
  for (const Store::FsckFinding& finding : findings.value()) {
    // Damage that was repaired is printed, but does not change the exit status.
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
                              !sound ? "the store is damaged; see the lines above"
                              : unread != 0
                                  ? "not all of the store could be checked; see the lines above"
                                  : "sound"));
  }
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  if (!sound) return kCheckFailed;
  return unread != 0 ? kFailed : kDone;
}

}  // namespace tensormount::tools
