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

// The part of a save that takes over what its base holds already (docs/semantics.md, "Steps over
// time"): every rank compares what it would write, rank 0 decides what is taken and which files are
// linked, and the ranks share the linking. Two exchanges; none where there is no base.
//
//   rank r                            rank 0
//   CompareWithBase  -- findings -->  what is taken, PlanLinks
//   BaseLinker       <-- decision --
//                    -- vote ------>  taken by all, or by nobody
//
// With SaveOptions::inherit what no rank has of the base is taken too, and what goes wrong fails
// the save. Without it the save writes everything then.

// At rank 0, when the staging is made: whether the base can be used, and this is no save that
// writes everything anew. Otherwise the staging's base is cleared and its base_note says why.
// Fails where what is to be inherited cannot be had.
Status CheckBase(FileSystem& fs, const SaveOptions& options, Staging& staging);

// What a rank brings.
struct ReuseInput {
  FileSystem& fs;
  const StateDict& state;
  const RankTask& task;
  const Staging& staging;
  const SaveOptions& options;
  BlockRules rules;
};

// What came of it.
struct Reused {
  bool any = false;            // The same on all ranks.
  RankTask left;               // What this rank still has to write; if any.
  LinkedRecords records;       // Of this rank's share,
  LinkCounts linked;           // and what was done for it.
  ReuseReport report;          // Of all, but for what `linked` says of this rank.
  std::uint64_t in_a_row = 0;  // Of LinkedManifestName.
  // At rank 0.
  CommonValues inherited;  // Common records of the base that the state does not set.
  std::string root;        // Of foreign files of an adopted base.
};

// Collective. Fails, on all ranks alike, where ranks cannot be reached, with kCancelled, and where
// what must be inherited cannot be. `common`: at rank 0 what the ranks set.
Result<Reused> TakeFromBase(Collective& collective, const ReuseInput& input,
                            const CommonValues& common);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_REUSE_H_
