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

// Who writes what and where. Keys are planned by their owners, each for itself (layout.h); what
// concerns all keys is decided at rank 0 from what the owners say of theirs: survey, decide, plan.
//
//   owner o                     rank 0
//   Survey()  -- survey o -->   Decide(surveys)
//   Plan()    <-- decision --
//
// A limit over all keys (kMaxTensorFiles) and one common writer (kSafetensors) are the reason for
// the middle step: no owner sees the keys of another.

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
// Under kAuto no more tensors than this, the largest ones, have files of their own.
inline constexpr std::uint32_t kMaxTensorFiles = 4096;

// Something that one rank writes: a contiguous part of the packed bytes of a shard that it holds.
struct PlannedChunk {
  std::uint32_t tensor = 0;   // In GlobalLayout::tensors.
  std::uint32_t holding = 0;  // In LayoutTensor::holdings.
  std::uint32_t item = 0;     // The writer's shard that it is cut from.
  std::uint32_t part = 0;     // Counts the chunks of a tensor: the n of KEY#n.
  std::uint64_t begin = 0;    // First byte in the packed order of that shard.
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;  // kTensorFile: where in the file. Otherwise decided by the writer.
};

struct RankPlan {
  std::vector<PlannedChunk> chunks;     // By tensor, then part.
  std::vector<std::uint32_t> objects;   // In GlobalLayout::objects.
  std::vector<std::uint32_t> recorded;  // Tensors without cells that this rank records.
  std::uint64_t bytes = 0;              // Of all of these.
};

struct SavePlan {
  std::vector<Placement> placement;    // By tensor.
  std::vector<std::uint32_t> writers;  // By tensor: how many ranks write it.
  std::vector<RankPlan> ranks;
  // By tensor: who seals a tensor file that several ranks write, when all are done; -1: nobody.
  std::vector<int> sealers;
};

struct PlanRules {
  PlacementRule placement = PlacementRule::kAuto;
  SaveStrategy strategy = SaveStrategy::kParallel;
  std::uint32_t owners = 1;
  std::uint32_t max_tensor_files = kMaxTensorFiles;  // Of all owners together.
};

// Plans one owner's keys. Pure: the same on every machine. `layout` must outlive it.
//
// Every cell is written once. With kParallel replicas are split over their holders so that the
// bytes that ranks write in all come out even, inside a tensor too (not for element types under a
// byte), also where groups of holders overlap (even_shares.h). One of several owners does not know
// what the others give out: it evens out its own keys, and where holders have the same so far, a
// hash of the key says who comes first.
class SavePlanner {
 public:
  SavePlanner(const GlobalLayout& layout, const PlanRules& rules);
  ~SavePlanner();

  // What rank 0 must know of this owner's keys.
  // kUnsupported where a forced placement cannot be had:
  //   kTensorFile   a shard consists of many short runs of the tensor;
  //   kSafetensors  a tensor is cut, or the format lacks its dtype.
  Result<std::string> Survey();
  // At rank 0: `surveys` by owner. kUnsupported: no rank holds all tensors whole (kSafetensors).
  static Result<std::string> Decide(std::span<const std::string> surveys, const PlanRules& rules,
                                    int world);
  // After Survey. `owner`: which of the owners this is.
  Result<SavePlan> Plan(std::string_view decision, std::uint32_t owner);

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

// The cells that bytes [begin, begin + bytes) of a region's packed order are.
// kInvalidArgument where they lie outside, or begin or end inside an element.
Result<Region> PartOfRegion(const TensorMeta& meta, const Region& region, std::uint64_t begin,
                            std::uint64_t bytes);

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
