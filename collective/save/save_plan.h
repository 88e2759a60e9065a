// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_SAVE_PLAN_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_SAVE_PLAN_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/status.h"

#include "collective/layout/layout.h"
#include "index/records/inventory.h"

// Plans which rank writes which bytes, and where. Each owner (a rank that checks keys, layout.h)
// plans its own keys; rank 0 decides the rest from the owners' surveys, because no owner sees the
// keys of another: the limit over all keys (kMaxTensorFiles) and the one common writer
// (kSafetensors).
//
//   owner o                     rank 0
//   Survey()  -- survey o -->   Decide(surveys)
//   Plan()    <-- decision --

namespace tensormount {

// Under kAuto, a tensor of at least this size whose shards are long runs has a file of its own.
inline constexpr std::uint64_t kTensorFileBytes = 4 * 1024 * 1024;
// Least average size of runs that count as long. A shard that is one run of the tensor's row-major
// order always counts as long.
inline constexpr std::uint64_t kLongRunBytes = 1024 * 1024;
// Under kAuto, tensors smaller than this share the writer's pack.
inline constexpr std::uint64_t kPackBytes = 64 * 1024;
// Replicas are not split into parts much smaller than this.
inline constexpr std::uint64_t kMinPartBytes = 256 * 1024;
// Replicas are cut at multiples of this size, unless they are cut at whole rows: in a tensor file
// at multiples of the file's bytes if the shard is one run there, else of the shard's bytes.
inline constexpr std::uint64_t kPageBytes = 4096;
// Under kAuto at most this many tensors, the largest ones, have files of their own.
inline constexpr std::uint32_t kMaxTensorFiles = 4096;

// A contiguous part of the packed bytes of a shard that one rank holds and writes.
struct PlannedChunk {
  std::uint32_t tensor = 0;   // Position in GlobalLayout::tensors.
  std::uint32_t holding = 0;  // Position in LayoutTensor::holdings.
  std::uint32_t item = 0;     // The writer's shard that the chunk is cut from.
  std::uint32_t part = 0;     // Counts the chunks of a tensor: the n of KEY#n.
  std::uint64_t begin = 0;    // First byte in the packed order of that shard.
  std::uint64_t bytes = 0;
  // With kTensorFile: offset in the file. For other placements the writer chooses the offset.
  std::uint64_t offset = 0;
};

struct RankPlan {
  std::vector<PlannedChunk> chunks;     // Sorted by tensor, then part.
  std::vector<std::uint32_t> objects;   // Positions in GlobalLayout::objects.
  std::vector<std::uint32_t> recorded;  // Tensors without cells that this rank records.
  std::uint64_t bytes = 0;              // Size of all chunks and objects.
};

struct SavePlan {
  std::vector<Placement> placement;    // By tensor: the kind of file for it.
  std::vector<std::uint32_t> writers;  // By tensor: number of ranks that write it.
  std::vector<RankPlan> ranks;
  // By tensor: the rank that seals a tensor file of several writers once all are done; -1: none.
  std::vector<int> sealers;
};

struct PlanRules {
  PlacementRule placement = PlacementRule::kAuto;
  SaveStrategy strategy = SaveStrategy::kParallel;
  std::uint32_t owners = 1;
  std::uint32_t max_tensor_files = kMaxTensorFiles;  // Limit for all owners together.
};

// Plans one owner's keys, with the same result on every machine. `layout` must outlive this object.
//
// Every cell is written once. With kParallel, replicas are split over their holders so that all
// ranks write about the same number of bytes; also within a tensor (except for element types under
// a byte), and also if groups of holders overlap (even_shares.h). An owner does not know the plans
// of other owners: it evens out its own keys, and a hash of the key orders holders with equal
// loads.
class SavePlanner {
 public:
  SavePlanner(const GlobalLayout& layout, const PlanRules& rules);
  ~SavePlanner();

  // The summary of this owner's keys for rank 0. kUnsupported if a forced placement is impossible:
  //   kTensorFile   a shard consists of many short runs of the tensor;
  //   kSafetensors  a tensor is cut, or the format lacks its dtype.
  Result<std::string> Survey();
  // Runs at rank 0: decides what no owner can decide alone, from the surveys of all owners. Fails
  // with kUnsupported if no rank holds all tensors whole (kSafetensors).
  static Result<std::string> Decide(std::span<const std::string> surveys, const PlanRules& rules,
                                    int world);
  // Call after Survey. `owner`: the index of this owner.
  Result<SavePlan> Plan(std::string_view decision, std::uint32_t owner);

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

// The cells in bytes [begin, begin + bytes) of a region's packed order. Fails with kInvalidArgument
// if the bytes lie outside of the region, or begin or end inside an element.
Result<Region> PartOfRegion(const TensorMeta& meta, const Region& region, std::uint64_t begin,
                            std::uint64_t bytes);

// A maximal run of the tensor's row-major bytes within a region.
struct GlobalRun {
  std::uint64_t packed = 0;  // First byte in the region's packed order.
  std::uint64_t offset = 0;  // Offset in the tensor's row-major bytes.
  std::uint64_t bytes = 0;
  friend bool operator==(const GlobalRun&, const GlobalRun&) = default;
};
// All runs of the region. Fails with kUnsupported if there are more than `limit`.
Result<std::vector<GlobalRun>> GlobalRuns(const TensorMeta& meta, const Region& region,
                                          std::uint64_t limit);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_SAVE_PLAN_H_
