// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_SAVE_PLAN_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_SAVE_PLAN_H_

#include <cstdint>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/status.h"

#include "collective/validate/layout_check.h"
#include "index/content.h"

namespace tensormount {

// Under kAuto, a tensor of at least this size whose shards are long runs has a file of its own.
inline constexpr std::uint64_t kTensorFileBytes = 4 * 1024 * 1024;
// A shard that is one run of the tensor's row-major order is long, whatever its length; others
// must have runs of this length on average.
inline constexpr std::uint64_t kLongRunBytes = 1024 * 1024;
// Under kAuto, tensors smaller than this share the writer's pack.
inline constexpr std::uint64_t kPackBytes = 64 * 1024;
// Replicas are not split into parts smaller than this.
inline constexpr std::uint64_t kMinPartBytes = 256 * 1024;
// Parts of one tensor file begin at multiples of this where elements allow it.
inline constexpr std::uint64_t kPageBytes = 4096;

// Something that one rank writes: a contiguous part of the packed bytes of a shard that it holds.
struct PlannedChunk {
  std::uint32_t tensor = 0;  // In GlobalLayout::tensors.
  std::uint32_t item = 0;    // The writer's shard that it is cut from.
  std::uint64_t begin = 0;   // First byte in the packed order of that shard.
  std::uint64_t bytes = 0;
  Region region;  // The cells.
  Placement placement = Placement::kPack;
  std::uint64_t offset = 0;  // kTensorFile: where in the file. Otherwise decided by the writer.
  std::uint32_t part = 0;    // Counts the chunks of a tensor: the n of KEY#n.
};

struct RankPlan {
  std::vector<PlannedChunk> chunks;     // By placement, then tensor, then part.
  std::vector<std::uint32_t> objects;   // In GlobalLayout::objects.
  std::vector<std::uint32_t> recorded;  // Tensors without cells that this rank records.
  std::uint64_t bytes = 0;              // Of all of these.
};

// A tensor file that several ranks write: `owner` seals it when all are done.
struct SharedFile {
  std::uint32_t tensor = 0;
  int owner = 0;
};

// Who writes what and where. Pure, the same on every rank.
struct SavePlan {
  std::vector<Placement> placement;    // By tensor.
  std::vector<std::uint32_t> writers;  // By tensor: how many ranks write it.
  std::vector<RankPlan> ranks;
  std::vector<SharedFile> shared;
};

// Every cell is written once. Replicas are split over their holders so that the bytes that ranks
// write in all come out even, inside a tensor too (not for element types under a byte).
// kUnsupported where a forced placement cannot be had:
//   kTensorFile   a shard consists of many short runs of the tensor;
//   kSafetensors  no rank holds all tensors whole, or the format lacks a dtype.
Result<SavePlan> PlanSave(const GlobalLayout& layout, PlacementRule rule);

// A maximal run of the tensor's row-major bytes within a region.
struct GlobalRun {
  std::uint64_t packed = 0;  // First byte in the region's packed order.
  std::uint64_t offset = 0;  // In the tensor.
  std::uint64_t bytes = 0;
  friend bool operator==(const GlobalRun&, const GlobalRun&) = default;
};
// All of them, or nothing where there are more than `limit`.
Result<std::vector<GlobalRun>> GlobalRuns(const TensorMeta& meta, const Region& region,
                                          std::uint64_t limit);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_SAVE_PLAN_H_
