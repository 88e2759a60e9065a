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

// The slow half of coverage, which is only asked where the proofs of partition_proof.h said no or
// had no answer. How it cuts decides how fast it is and in which boxes a hole is told, never what
// is missing.

// Finds the cells that no box has (unless only overlaps are asked for) and the boxes that meet. All
// regions must be boxes. O(n log n) where cuts can be found that few boxes lie across.
CoverageFindings SearchCoverage(const RegionSet& boxes, std::size_t max_pairs, bool only_overlaps);

// By where boxes begin, the outermost axis first: the order in which findings are listed.
bool RowMajorLess(const Box& a, const Box& b);

// Joins boxes that make up one box until there are none, and sorts them in row-major order. Two
// boxes do where they agree on all axes but one and touch on that one. Boxes must be disjoint. O(n
// log n) a round over all axes; every round but the last joins some.
void JoinBoxes(int rank, std::vector<Box>& boxes);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COVERAGE_SEARCH_H_
