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

// Result of comparing one tensor or object part of the base with this rank's state.
enum class BaseMatch : std::uint8_t {
  kNotWritten = 0,  // This rank writes no part of the tensor or object part.
  kSame = 1,        // Everything this rank would write is in the base, byte for byte.
  kDiffers = 2,     // Something differs, or could not be compared.
};

struct BaseMatches {
  std::vector<BaseMatch> tensors;  // By ordinal in the base.
  std::vector<BaseMatch> objects;  // By position in the base's Objects().
  // By position in the task: the number of its tensor or object in the base, or kNotInBase.
  static constexpr std::uint32_t kNotInBase = 0xFFFFFFFF;
  std::vector<std::uint32_t> task_tensors;
  std::vector<std::uint32_t> task_objects;
  // Unchanged bytes, by proof: hashes of leaves, or comparison with the stored bytes.
  std::uint64_t bytes_by_leaf = 0;
  std::uint64_t bytes_by_comparison = 0;
  // The first reason why a part of the base was not compared: damaged, unreadable, or past the
  // deadline.
  Status base_problem;
};

// Compares everything that `task` would write with the data of `base` under the same keys, before
// any of it is written. If a chunk of the base has the same region as one that this rank would
// write, or a run of whole leaves in common with it, leaf hashes decide: 16 bytes are read for each
// 64 KiB. Other bytes of tensors are compared with the stored bytes, which are themselves verified
// by their hashes; objects are compared by length and hash. An equal digest alone is never enough.
// The comparison of a tensor in host memory ends at its first difference, so changed tensors cost
// little.
//
// A tensor that this save would store in another form also counts as differing: one that should
// have a file of its own and is in pieces in the base, one that is not where `rule` puts it, one
// that should have page hashes and has none. Each rank checks page hashes at its own cells, so a
// tensor is the same only if it is the same on all ranks that have a part of it.
//
// Device memory is hashed on the device; only the ends of leaves are copied to the host, and a
// tensor that would need more counts as differing.
//
// Tensors not compared when `deadline` passes count as differing. The deadline is checked between
// blocks; a read that hangs is waited for.
//
// Fails if this rank cannot read its own bytes (kCancelled, or the failure of a device or reader)
// or the index of the base.
Result<BaseMatches> CompareWithBase(FileSystem& fs, const OpenedCheckpoint& base,
                                    const StateDict& state, const RankTask& task,
                                    PlacementRule rule, bool page_hashes, const BlockRules& rules,
                                    const Deadline& deadline);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_BASE_COMPARE_H_
