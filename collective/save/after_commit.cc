// SPDX-License-Identifier: Apache-2.0
// See after_commit.h: calls of index/store/, whose failures end up in the report of the save.
#include "collective/save/after_commit.h"

#include <set>

#include "base/log.h"
#include "collective/guarded.h"
#include "index/records/inventory.h"
#include "index/store/pins.h"
#include "index/store/retention.h"

namespace tensormount {
namespace {

// A save waits for nobody who prunes: the next one will do what this one leaves.
constexpr double kWaitSeconds = 1;

void Tell(const Status& failure, SaveReport& report) {
  if (failure.ok()) return;
  report.not_pruned.push_back(failure.ToString());
  Log(LogLevel::kWarning, "save " + report.path + ": " + failure.ToString());
}

Status RemoveBy(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                SaveReport& report) {
  PruneOptions prune;
  prune.wait_seconds = kWaitSeconds;
  if (options.retention) {
    prune.rules = *options.retention;
  } else {
    // Its own mark is no reason to look at all checkpoints.
    TENSORMOUNT_ASSIGN_OR_RETURN(auto ephemeral, pins::ReadEphemeral(fs, staging.store));
    ephemeral.erase(staging.uuid);
    if (ephemeral.empty()) return {};
    prune.rules = RetentionRules();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, staging.store));
  TENSORMOUNT_ASSIGN_OR_RETURN(const PruneReport pruned,
                               retention::Prune(fs, store, prune, {.saved = staging.uuid}));
  for (const std::string& note : pruned.notes) Tell(Status(Code::kNotFound, note), report);
  for (const std::string& waits : pruned.waiting) {
    report.not_pruned.push_back(waits + ": removed, and its space waits in .trash");
  }
  for (const PruneReport::Decision& d : pruned.decisions) {
    if (d.removed) report.pruned.push_back(d.checkpoint);
    if (d.unread) report.not_pruned.push_back(d.checkpoint + ": " + d.reason);
    if (!d.failed.ok()) Tell(d.failed.WithContext(d.checkpoint), report);
  }
  return {};
}

}  // namespace

void MarkIfEphemeral(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                     SaveReport& report) {
  if (!options.ephemeral) return;
  Tell(Guarded([&] {
         return pins::MarkEphemeral(fs, staging.store, staging.uuid, staging.name);
       }).WithContext("it will not count as ephemeral"),
       report);
}

void RemoveByRules(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                   SaveReport& report) {
  Tell(Guarded([&] { return RemoveBy(fs, staging, options, report); }), report);
}

Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure) {
  Status said = failure;
  (void)Guarded([&]() -> Status {
    said = retention::WithTrashHint(fs, store, failure);
    return {};
  });
  return said;
}

}  // namespace tensormount
