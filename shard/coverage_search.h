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

// Largest number of listed holes. Further holes are only counted, because nobody could read a
// longer list.
inline constexpr std::size_t kMaxHoles = std::size_t{1} << 20;

// The errors of a set of boxes. Both lists are bounded, because a completely wrong layout has as
// many findings as boxes, and the first ones suffice.
struct CoverageFindings {
  std::vector<Box> holes;  // Disjoint.
  std::uint64_t missing_elements = 0;
  bool holes_dropped = false;                                  // There are more than kMaxHoles.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;  // Positions of boxes that overlap.
  // There are more than `max_pairs` pairs (SearchCoverage).
  bool pairs_dropped = false;
};

// The search is slow, and is used only if the proofs of partition_proof.h failed or did not apply.
// It cuts the cells in two along an axis, again and again. Where it cuts affects the speed and the
// division of a hole into boxes, never the set of missing cells.

// Finds the cells in no box (unless only overlaps are requested) and the boxes that overlap. All
// regions must be boxes. O(n log n) if there are cuts that cross few boxes.
CoverageFindings SearchCoverage(const RegionSet& boxes, std::size_t max_pairs, bool only_overlaps);

// Orders boxes by begin, outermost axis first: the order of findings.
bool RowMajorLess(const Box& a, const Box& b);

// Joins boxes until no two form one box, and sorts them in row-major order. Two boxes form one if
// they are equal on all axes but one and touch on that one. Boxes must be disjoint. O(n log n) per
// round over all axes; every round but the last joins some.
void JoinBoxes(int rank, std::vector<Box>& boxes);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COVERAGE_SEARCH_H_
