// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_CAUSE_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_CAUSE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shard/coverage.h"
#include "shard/region_set.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// What most likely made a layout unsound, in words: "rank 5 holds what rank 4 should", not only
// that cells are missing. Each guess below is a pattern that one known mistake of a trainer leaves,
// and is made only where the pattern explains every cell of the report that it claims to; where
// nothing fits, there is none. Made for reports of people's size: patterns look at all regions,
// some at pairs of them, which is why nothing of this runs unless something is wrong.
class LayoutCauses {
 public:
  // Different regions of one tensor, who holds each (rising), and what is wrong with them. All
  // must outlive this.
  LayoutCauses(int world, const RegionSet& regions, const std::vector<std::vector<int>>& holders,
               const CoverageReport& coverage);

  std::string OfMissing(const Box& box) const;
  // `regions` are positions of regions that all have the box.
  std::string OfOverlap(const Box& box, const std::vector<std::uint32_t>& regions) const;

 private:
  // Patterns that explain everything at once, tried in this order; the first that fits is said for
  // every hole and overlap. Empty: does not fit.
  // Ranks exchanged the coordinates of their position in a grid: (j, i) instead of (i, j).
  std::string FindTransposed() const;
  // A region has two of its axes exchanged: it overlaps others, and turned it would fill a hole.
  std::string FindSwapped() const;
  bool FillsHole(std::size_t region, const Box& box) const;
  // Ranks that should hold something, by the step between those that do, hold nothing.
  std::string FindAbsent() const;
  // As many cells as there are, but some twice and others never: a rank has another one's offset.
  std::string FindReported() const;
  // Every region ends before the next one begins: an extent that was divided and rounded down.
  std::string FindAllShort() const;
  // Of one hole: the region beside it that is too short, or lies too far to one side.
  std::string Neighbour(const Box& box) const;
  // Of one overlap, without a better guess: what each has, and how that lies to the others.
  std::string Differing(const std::vector<std::uint32_t>& regions) const;
  std::int64_t Usual(int axis) const;  // The extent that most boxes have.
  std::string Units(std::int64_t count, int axis) const;
  bool SameAcross(std::size_t region, const Box& box, int axis) const;

  int world_;
  const RegionSet& regions_;
  const std::vector<std::vector<int>>& holders_;
  const CoverageReport& coverage_;
  std::vector<int> ranks_;           // That hold something.
  std::vector<std::int64_t> usual_;  // By axis.
  bool all_boxes_ = true;
  std::string general_;  // That explains everything.
};

// Why two shapes of one tensor may differ.
std::string CauseOfShapes(const Dims& a, const Dims& b);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_CAUSE_H_
