// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COVERAGE_H_
#define TENSORMOUNT_SHARD_COVERAGE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensormount/box.h"

namespace tensormount {

// A region and who holds it: an index that the caller chose (a rank, a chunk number).
struct OwnedRegion {
  Region region;
  std::uint32_t owner = 0;
};

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

// Pure and exact for arbitrary regions, boxes and flat ranges mixed. Regions must lie within
// `shape`; empty ones are ignored. Replicas (equal regions) must have been removed by the caller.
// Lists at most `limit` (at least one) findings of each kind. Cost is near linear for row cuts and
// regular grids, O(n log n) sweeps otherwise.
CoverageReport CheckCoverage(const Dims& shape, std::span<const OwnedRegion> regions,
                             std::size_t limit = 16);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COVERAGE_H_
