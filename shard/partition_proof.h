// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_PARTITION_PROOF_H_
#define TENSORMOUNT_SHARD_PARTITION_PROOF_H_

#include <cstdint>
#include <vector>

#include "tensormount/box.h"

#include "shard/region_set.h"

namespace tensormount {

// Answers of exact methods that each are fast for some sets of regions.
enum class Proof {
  kPartition,     // Every cell of the shape lies in exactly one region.
  kNotPartition,  // Some cell does not.
  kUnknown,       // Not of the kind that the method is for.
};

// Cells that not exactly one region has.
struct Miscount {
  Box box;
  std::int64_t surplus = 0;  // How many more than one have all of them: -1 where none has.
};

// They are asked in the order of their costs (Prove in coverage.cc), and all are exact: an answer
// other than kUnknown is a proof, whatever the regions. None looks at pairs of regions.
//
// Below, a set is one for which Box::Whole(shape) is not empty.

// By volumes, in one pass: no, where these do not add up; yes, where the regions are ranges of the
// row-major order that come one after the other. All of them being ranges is said in `linear`.
Proof ProveByOrder(const RegionSet& regions, bool* linear);

// Yes, where the boxes are the cells of a grid, each once, in any order; else unknown. Expected
// O(n): cuts are found and followed by hashing, and not even that where boxes come in order.
Proof ProveAsGrid(const RegionSet& regions);

// Regions are added up as functions that are 1 on their cells, and compared with the one that is 1
// on the shape. Such a sum is known by its corners alone: taking differences along every axis
// leaves, of a box, +1 and -1 in turn at its 2^axes corners, and only of the zero function nothing
// at all. So the regions are a partition if and only if all corners cancel out, those of the shape
// taken off. Expected O(n * 2^axes), over axes on which something is cut; in any order, but with a
// small table only where neighbours come soon after each other. Unknown with many such axes.
//
// Corners that are left over tell where the sum differs, however many regions there are: where
// these are few, `differences` (if not null) gets all such cells, as disjoint boxes; it stays empty
// otherwise.
Proof ProveByCorners(const RegionSet& regions, std::vector<Miscount>* differences);
// The same along the one axis of the row-major order; all regions must be ranges of it.
Proof ProveByEnds(const RegionSet& regions);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_PARTITION_PROOF_H_
