// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COVERAGE_H_
#define TENSORMOUNT_SHARD_COVERAGE_H_

#include <cstdint>
#include <vector>

#include "tensormount/box.h"

#include "shard/region_set.h"

namespace tensormount {

struct Overlap {
  Box box;                  // Cells that two of the regions claim.
  std::uint32_t first = 0;  // Owners, in increasing order of position in the input.
  std::uint32_t second = 0;
};

// Whether regions cover a shape exactly, or where they do not.
struct CoverageReport {
  std::vector<Box> missing;       // Disjoint, merged where they make one box, in row-major order.
  std::vector<Overlap> overlaps;  // Boxes in row-major order.
  // How many were found in all, where more than `limit` are not listed.
  std::uint64_t missing_elements = 0;
  bool truncated = false;

  bool complete() const { return missing.empty() && overlaps.empty(); }
};

// Example: of shape [4, 4], rank 0 has rows 0 and 1, rank 1 the flat elements 6 to 11, nobody the
// last row. missing is {[3:4, 0:4]} with 4 elements; overlaps is {[1:2, 2:4], 0, 1}: elements 6
// and 7.

// Pure and exact for arbitrary regions, boxes and flat ranges mixed: where they do not cover the
// shape, each exactly once. Replicas (equal regions) must have been removed by the caller, see
// GroupEqual. Lists at most `limit` (at least one) findings of each kind; at most 2^31 regions.
CoverageReport CheckCoverage(const RegionSet& regions, std::size_t limit = 16);

// The cost of CheckCoverage is that of IsPartition where nothing is wrong. Where something is, a
// search follows, whose cost depends on how it is wrong (coverage_search.h); what it lists is
// bounded.

// Whether every cell of the shape lies in exactly one region: CheckCoverage().complete() without
// the findings. Expected linear time, in any order, for ranges of the row-major order, for regular
// grids, and for all else that is cut on up to six axes. Without replicas this answers before
// anything need be grouped.
bool IsPartition(const RegionSet& regions);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COVERAGE_H_
