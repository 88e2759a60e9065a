// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COVERAGE_H_
#define TENSORMOUNT_SHARD_COVERAGE_H_

#include <cstdint>
#include <vector>

#include "tensormount/box.h"

#include "shard/region_set.h"

namespace tensormount {

struct Overlap {
  Box box;  // Cells in two regions.
  // Owners of the two regions, in the order of the regions in the input.
  std::uint32_t first = 0;
  std::uint32_t second = 0;
};

// Whether regions cover a shape exactly, or where they do not.
struct CoverageReport {
  // Cells in no region: disjoint boxes, merged where possible, in row-major order.
  std::vector<Box> missing;
  // Cells in two regions, in row-major order.
  std::vector<Overlap> overlaps;
  // Number of all missing cells, listed or not.
  std::uint64_t missing_elements = 0;
  // Whether there are more findings than the lists have.
  bool truncated = false;

  bool complete() const { return missing.empty() && overlaps.empty(); }
};

// Example: in shape [4, 4], rank 0 has rows 0 and 1, rank 1 the flat elements 6 to 11, and no rank
// the last row. missing is {[3:4, 0:4]} with 4 elements; overlaps is {[1:2, 2:4], 0, 1}: elements 6
// and 7.

// Finds where regions do not cover the shape exactly once; exact for any mix of boxes and flat
// ranges. The caller must have removed replicas (equal regions, see GroupEqual). Lists at most
// `limit` (at least one) findings of each kind; at most 2^31 regions. Without errors it costs as
// much as IsPartition; to find errors costs more, depending on them (coverage_search.h).
CoverageReport CheckCoverage(const RegionSet& regions, std::size_t limit = 16);

// Whether every cell of the shape lies in exactly one region: CheckCoverage().complete() without
// the findings. Expected linear time, in any order, for ranges of the row-major order, regular
// grids, and everything else that is cut on up to six axes. Replicas make the result false, so a
// caller may try IsPartition first and remove replicas (GroupEqual) only if it is false.
bool IsPartition(const RegionSet& regions);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COVERAGE_H_
