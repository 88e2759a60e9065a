// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_PARTITION_PROOF_H_
#define TENSORMOUNT_SHARD_PARTITION_PROOF_H_

#include <cstdint>
#include <vector>

#include "tensormount/box.h"

#include "shard/region_set.h"

namespace tensormount {

// The result of a proof method; each method is fast for some kinds of regions.
enum class Proof {
  kPartition,     // Every cell of the shape lies in exactly one region.
  kNotPartition,  // Some cell is in no region, or in several.
  kUnknown,       // The method does not apply.
};

// Cells that are not in exactly one region.
struct Miscount {
  Box box;
  std::int64_t surplus = 0;  // Number of regions that contain these cells, minus one.
};

// Proof methods; Prove in coverage.cc tries them in order of cost. All are exact: an answer other
// than kUnknown is a proof, for any regions. None compares pairs of regions.
//
// All require that Box::Whole(shape) is not empty.

// One pass over volumes: kNotPartition if they do not add up; kPartition if the regions are
// consecutive ranges of the row-major order. `*linear`: whether each region is a range of that
// order.
Proof ProveByOrder(const RegionSet& regions, bool* linear);

// kPartition if the boxes are the cells of a grid, each once, in any order. kNotPartition if there
// are as many boxes as cells, but some cell has two boxes. Otherwise kUnknown. Expected O(n): cuts
// are looked up by hashing, and not even that if boxes come in order.
Proof ProveAsGrid(const RegionSet& regions);

// Compares the sum of the regions' indicator functions with the indicator function of the shape.
// Such a sum is determined by its corners: differences along every axis leave +1 and -1 alternately
// at the 2^axes corners of each box, and zero everywhere only for the zero function. So the regions
// are a partition if and only if all corners cancel with those of the shape. Only axes on which
// something is cut count. Expected O(n * 2^axes), in any order, but with a small table only if
// neighbours come soon after each other. kUnknown with many such axes.
//
// Leftover corners show where the sum differs: if they are few, `differences` (if not null) gets
// all such cells as disjoint boxes; otherwise it stays empty.
Proof ProveByCorners(const RegionSet& regions, std::vector<Miscount>* differences);
// Like ProveByCorners, but the corners are the two ends of each region in the row-major order.
// kUnknown if a region is not a range of that order.
Proof ProveByEnds(const RegionSet& regions);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_PARTITION_PROOF_H_
