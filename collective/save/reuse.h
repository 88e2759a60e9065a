// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_REUSE_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_REUSE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "collective/comm/collective.h"
#include "collective/save/base_compare.h"
#include "collective/save/block_reader.h"
#include "collective/save/rank_task.h"
#include "index/records/common_state.h"
#include "index/store/linking.h"
#include "index/store/store.h"

namespace tensormount {

// The part of a save that reuses the data of its base (docs/steps.md, "Reuse"): every rank compares
// what it would write, rank 0 decides what is taken and which files are linked, and the ranks share
// the linking. Two exchanges; none without a base.
//
//   rank r                            rank 0
//   CompareWithBase  -- findings -->  what is taken, PlanLinks
//   BaseLinker       <-- decision --
//                    -- vote ------>  taken by all ranks, or by none
//
// With SaveOptions::inherit, base data that no rank has are taken too, and a failure fails the
// save. Without `inherit`, the save writes everything after a failure.

// Runs at rank 0 when the staging is made: opens the base. If the base cannot be used, or this save
// must be full (SaveOptions::full_every), the result is null, the staging's base is cleared, and
// its base_note gives the reason. Fails if data to be inherited are not available.
Result<std::shared_ptr<OpenedCheckpoint>> CheckBase(FileSystem& fs, const SaveOptions& options,
                                                    Staging& staging);

struct ReuseInput {
  FileSystem& fs;
  const StateDict& state;
  const RankTask& task;
  const Staging& staging;
  const SaveOptions& options;
  BlockRules rules;
  // At rank 0: the base that CheckBase opened. Other ranks leave this null and open the base in
  // TakeFromBase.
  std::shared_ptr<OpenedCheckpoint> base;
};

struct ReuseResult {
  bool any = false;       // Whether data are taken; the same on all ranks.
  RankTask remaining;     // If `any`: what this rank still has to write.
  LinkedRecords records;  // Records of the data that this rank linked.
  LinkCounts linked;      // Counts of the files that this rank linked.
  ReuseReport report;     // Report for all ranks, without counts of linked files.
  // Number of consecutive saves, including this one, that linked files; a part of the name of their
  // manifests (LinkedManifestName).
  std::uint64_t consecutive_linked = 0;
  // The following fields are set at rank 0 only.
  CommonValues inherited;  // Common records of the base that no rank sets.
  std::string root;        // Root of the foreign files of an adopted base.
};

// Collective. Fails on all ranks alike if ranks cannot be reached, if the save is cancelled
// (kCancelled), or if data to be inherited cannot be taken. `common`: at rank 0, the values that
// ranks set.
Result<ReuseResult> TakeFromBase(Collective& collective, const ReuseInput& input,
                                 const CommonValues& common);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_REUSE_H_
