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

// The likely cause of an invalid layout as text, such as "rank 5 reports the box of rank 4: wrong
// tensor-parallel rank?". Each function below looks for the pattern of one known mistake in a
// trainer, and checks it against the layout before it reports the mistake. Patterns look at all
// regions, some at pairs of regions, so they run only if the layout has errors.
class LayoutCauses {
 public:
  // `regions`: the distinct regions of one tensor. `holders`: by region, the ranks that hold it,
  // rising. `coverage`: the holes and overlaps. All must outlive this object.
  LayoutCauses(int world, const RegionSet& regions, const std::vector<std::vector<int>>& holders,
               const CoverageReport& coverage);

  std::string CauseOfMissing(const Box& box) const;
  // `regions` are positions of the regions that contain the box.
  std::string CauseOfOverlap(const Box& box, const std::vector<std::uint32_t>& regions) const;

 private:
  // The Find functions each look for one pattern that may explain all holes and overlaps, and
  // return an empty string if it does not fit. The constructor tries them in this order; the first
  // that fits is reported for every hole and overlap.
  // FindTransposed: ranks exchanged the coordinates of their position in a grid, (j, i) instead of
  // (i, j).
  std::string FindTransposed() const;
  // A region has two of its axes exchanged: it overlaps other regions and, swapped back, fills a
  // hole.
  std::string FindSwapped() const;
  bool FillsHole(std::size_t region, const Box& box) const;
  // Some ranks hold no shard, although the regular distance between the ranks with shards suggests
  // that they should.
  std::string FindAbsent() const;
  // The ranks hold the right number of cells, but some cells twice and others never: a rank uses
  // another rank's offset.
  std::string FindRepeatedOffset() const;
  // Every region is short by the same number of cells at its end, for example because an extent was
  // rounded down.
  std::string FindAllShort() const;
  // Describes the region next to a hole that is too short or shifted; empty if there is none.
  std::string Neighbour(const Box& box) const;
  // Describes an overlap for which no better cause was found: the regions and how they relate.
  std::string DescribeOverlap(const std::vector<std::uint32_t>& regions) const;
  std::int64_t Usual(int axis) const;  // The most frequent extent of regions along `axis`.
  std::string Units(std::int64_t count, int axis) const;
  bool SameAcross(std::size_t region, const Box& box, int axis) const;

  int world_;
  const RegionSet& regions_;
  const std::vector<std::vector<int>>& holders_;
  const CoverageReport& coverage_;
  std::vector<int> ranks_;           // Ranks that hold a region; rising.
  std::vector<std::int64_t> usual_;  // By axis: the most frequent extent of regions.
  bool all_boxes_ = true;
  std::string general_;  // The cause that explains all holes and overlaps; empty: none.
};

// A likely reason why ranks have different shapes of one tensor; empty if none fits.
std::string CauseOfShapes(const Dims& a, const Dims& b);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_CAUSE_H_
