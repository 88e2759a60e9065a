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

// What most likely made a layout unsound, in words. Every answer follows from what the ranks
// report; where nothing fits, there is none.
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
  std::string FindTransposed() const;
  std::string FindSwapped() const;
  bool FillsHole(std::size_t region, const Box& box) const;
  std::string FindAbsent() const;
  std::string FindReported() const;
  std::string FindAllShort() const;
  std::string Neighbour(const Box& box) const;
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
