// SPDX-License-Identifier: Apache-2.0
// Retention after a save: calls of index/store/ whose failures go into the report of the save.
#include "collective/save/after_commit.h"

#include <chrono>
#include <set>

#include "base/log.h"
#include "collective/guarded.h"
#include "index/records/inventory.h"
#include "index/store/pins.h"
#include "index/store/retention.h"
#include "index/store/store_moves.h"
#include "index/store/trash.h"

namespace tensormount {
namespace {

// Longest wait, in seconds, for a prune by another process. Short, because the next save removes
// the checkpoints that this save leaves.
constexpr double kWaitSeconds = 1;

// Time for what earlier saves had to leave in .trash. The other ranks wait for rank 0 meanwhile.
constexpr std::chrono::seconds kFreeFor(2);

void AddNote(const Status& failure, SaveReport& report) {
  if (failure.ok()) return;
  report.not_pruned.push_back(failure.ToString());
  Log(LogLevel::kWarning,
      report.path + " is saved, but a later step failed: " + failure.ToString());
}

Status RemoveBy(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                const std::string& replaced, SaveReport& report) {
  PruneOptions prune;
  prune.wait_seconds = kWaitSeconds;
  if (options.retention) {
    prune.rules = *options.retention;
  } else {
    // Without retention rules, all checkpoints are read only if another checkpoint is marked
    // ephemeral.
    TENSORMOUNT_ASSIGN_OR_RETURN(auto ephemeral, pins::ReadEphemeral(fs, staging.store));
    ephemeral.erase(staging.uuid);
    if (ephemeral.empty()) return {};
    prune.rules = RetentionRules();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, staging.store));
  if (options.retention && !replaced.empty()) {
    const Store::GcReport freed = store.FreeTrash({replaced}, fs.NowSeconds());
    if (freed.removed.empty()) {
      store_moves::MarkRemovedByRules(fs, JoinPath(staging.store, replaced), staging.name);
    }
    for (const auto* lines : {&freed.kept, &freed.failed}) {
      for (const std::string& line : *lines) {
        report.not_pruned.push_back(staging.name +
                                    ": replaced, but its space is not freed yet: " + line);
      }
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const PruneReport pruned,
      retention::Prune(fs, store, prune, {.saved = staging.uuid, .free_for = kFreeFor}));
  for (const std::string& note : pruned.notes) AddNote(Status(Code::kNotFound, note), report);
  for (const std::string& waits : pruned.waiting) {
    report.not_pruned.push_back(waits +
                                ": removed, but its space is not freed yet (it is in .trash)");
  }
  for (const PruneReport::Decision& d : pruned.decisions) {
    if (d.removed) report.pruned.push_back(d.checkpoint);
    if (d.unread) report.not_pruned.push_back(d.checkpoint + ": " + d.reason);
    if (!d.failed.ok()) AddNote(d.failed.WithContext(d.checkpoint), report);
  }
  return {};
}

}  // namespace

void MarkIfEphemeral(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                     SaveReport& report) {
  if (!options.ephemeral) return;
  AddNote(Guarded([&] {
            return pins::MarkEphemeral(fs, staging.store, staging.uuid, staging.name);
          }).WithContext("the checkpoint could not be marked ephemeral"),
          report);
}

void FreeBefore(FileSystem& fs, const Store& store, const SaveOptions& options) {
  if (!options.retention) return;
  // A failure is ignored: the save tells if the disk is full.
  (void)Guarded([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(store.CheckWritable());
    (void)trash::FreeLeftovers(store, fs.NowSeconds(), kFreeFor);
    return {};
  });
}

void RemoveByRules(FileSystem& fs, const Staging& staging, const SaveOptions& options,
                   const std::string& replaced, SaveReport& report) {
  AddNote(Guarded([&] { return RemoveBy(fs, staging, options, replaced, report); }), report);
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
