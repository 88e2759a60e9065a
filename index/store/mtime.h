// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_MTIME_H_
#define TENSORMOUNT_INDEX_STORE_MTIME_H_

#include <cstdint>
#include <span>

#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"
#include "index/records/inventory.h"

namespace tensormount {

// Decides the whole-second mtimes of a checkpoint that is being published (tensors, objects,
// common.json, checkpoint.json), so that `rsync -a` of it over a copy of any of `priors` (its
// parent, and the checkpoint that it replaces) moves what differs and nothing else:
//   the same as in every prior that has it   the latest of their mtimes
//   differs from one                         max(now, latest + 1)
//   in none of them                          max(now, the latest checkpoint.json's + 1), which no
//                                            file of an earlier checkpoint of the chain can have
// checkpoint.json always changes, so its mtime is above all others of the priors.
// "The same" is key, dtype, shape and digest, or an object part's length and hash, or the common
// values bit by bit. `inventory` must be sorted as InventoryMerger leaves it. `now` in seconds.
Status DecideMtimes(std::span<const CheckpointIndex* const> priors, std::int64_t now,
                    Inventory& inventory);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_MTIME_H_
