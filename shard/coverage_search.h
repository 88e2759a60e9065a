// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COVERAGE_SEARCH_H_
#define TENSORMOUNT_SHARD_COVERAGE_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tensormount/box.h"

#include "shard/region_set.h"

namespace tensormount {

// A hole list longer than this is not kept (the count goes on): it would be unreadable anyway.
inline constexpr std::size_t kMaxHoles = std::size_t{1} << 20;

// What is wrong with a set of boxes. Both lists are bounded: a layout that is wrong all over has as
// many findings as it has boxes, or more, and the first of them say as much as all.
struct CoverageFindings {
  std::vector<Box> holes;  // Disjoint.
  std::uint64_t missing_elements = 0;
  bool holes_dropped = false;  // There are more than are worth keeping.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;  // Boxes that meet, by position.
  bool pairs_dropped = false;
};

// Finds the cells that no box has (unless only overlaps are asked for) and the boxes that meet. All
// regions must be boxes. O(n log n) where cuts can be found that few boxes lie across.
CoverageFindings SearchCoverage(const RegionSet& boxes, std::size_t max_pairs, bool only_overlaps);

bool RowMajorLess(const Box& a, const Box& b);

// Joins boxes that make up one box until there are none, and sorts them in row-major order.
void JoinBoxes(int rank, std::vector<Box>& boxes);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COVERAGE_SEARCH_H_
