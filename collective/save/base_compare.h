// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_BASE_COMPARE_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_BASE_COMPARE_H_

#include <cstdint>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/deadline.h"
#include "base/file_system.h"
#include "collective/save/block_reader.h"
#include "collective/save/rank_task.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// What a rank found of one tensor or object part of the base, in the state that it saves.
enum class InBase : std::uint8_t {
  kNotHere = 0,  // This rank writes nothing of it.
  kSame = 1,     // All that it would write stands there, byte for byte.
  kDiffers = 2,  // Something does not, or could not be compared.
};

struct ComparedWithBase {
  std::vector<InBase> tensors;  // By ordinal in the base.
  std::vector<InBase> objects;  // By position in the base's Objects().
  // The number in the base of each tensor and each object of the task, or kNotInBase.
  static constexpr std::uint32_t kNotInBase = 0xFFFFFFFF;
  std::vector<std::uint32_t> task_tensors;
  std::vector<std::uint32_t> task_objects;
  // Of what is the same: proved by hashes of leaves, and by comparison with the stored bytes.
  std::uint64_t bytes_by_leaf = 0;
  std::uint64_t bytes_by_comparison = 0;
  // The first thing of the base that could not be compared because it is damaged or unreadable.
  Status base_problem;
};

// Compares everything that `task` would write with what `base` holds under the same keys, before
// any of it is written. Where a chunk of the base is exactly what this rank would write, or has
// whole leaves in it that stand side by side there too, their hashes decide: 16 bytes are read for
// each 64 KiB. All else is compared with the stored bytes, which are themselves compared with their
// hashes. Never a digest alone. A tensor ends with its first difference, so that what changed costs
// next to nothing.
//
// What stands there in another form than this save would give it counts as differing, too: a tensor
// that shall have a file of its own and is in pieces there, one that is not where `rule` wants it,
// one that shall have page hashes and has none. Each rank looks for page hashes where it has cells,
// so a tensor is the same only where all ranks say so that have some of it.
//
// Memory of a device is hashed there; of it only the ends of leaves are brought to the host, and
// where more would be needed the tensor counts as differing.
//
// What is not compared when `deadline` passes counts as differing. That is looked at between
// blocks; a read that does not return is waited for.
//
// Fails where this rank cannot get at its own bytes: kCancelled, or what befell a device or reader.
Result<ComparedWithBase> CompareWithBase(FileSystem& fs, const OpenedCheckpoint& base,
                                         const StateDict& state, const RankTask& task,
                                         PlacementRule rule, bool page_hashes,
                                         const BlockRules& rules, const Deadline& deadline);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_BASE_COMPARE_H_
