// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_MTIME_H_
#define TENSORMOUNT_INDEX_STORE_MTIME_H_

#include <cstdint>
#include <span>

#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"
#include "index/records/inventory.h"

namespace tensormount {

// Decides the mtimes (in whole seconds) of a checkpoint that is being published: of tensors,
// objects, common.json and checkpoint.json. `priors` are its parent and the checkpoint that it
// replaces. The mtimes let `rsync -a` of the new checkpoint over a copy of any prior find every
// file that differs. For each file:
//   the same in every prior that has it      the latest of their mtimes
//   differs from one                         max(now, latest + 1)
//   in no prior                              max(now, the latest checkpoint.json's + 1), which no
//                                            file of an earlier checkpoint of the chain can have
// checkpoint.json always changes, so its mtime is above all others of the priors. "The same" means
// key, dtype, shape and digest; for an object part key, index, grid, length and hash; for common
// values every bit. Data without digest or hash are never the same. `inventory` must be sorted as
// by InventoryMerger. `now` in seconds since 1970.
Status DecideMtimes(std::span<const CheckpointIndex* const> priors, std::int64_t now,
                    Inventory& inventory);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_MTIME_H_
