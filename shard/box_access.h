// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_BOX_ACCESS_H_
#define TENSORMOUNT_SHARD_BOX_ACCESS_H_

#include <cstdint>
#include <vector>

#include "tensormount/box.h"

namespace tensormount {

// Makes boxes from numbers that are already checked. Parts of a checked box need no check: their
// extents and ends are not larger, so ends and volume cannot overflow. Unchecked numbers need
// Box::Make.
class BoxAccess {
 public:
  static Box Make(const Dims& begin, const Dims& extent) { return Box(begin, extent); }
  // A copy of `box` with [begin, begin + extent) on one axis.
  static Box WithAxis(Box box, int axis, std::int64_t begin, std::int64_t extent) {
    box.begin_[axis] = begin;
    box.extent_[axis] = extent;
    return box;
  }
};

// Row-major strides of a packed box: [2, 3, 4] gives [12, 4, 1]. Strides that overflow become
// INT64_MAX.
Dims PackedStrides(const Dims& extents);

// Subtracts `cut` from each of `boxes`, leaving disjoint boxes; boxes that do not meet `cut` stay,
// and covered ones are removed. O(boxes * axes).
//
// On each axis in turn the parts before and after `cut` become boxes, and the slab between is
// processed further. So there are at most two new boxes per axis, and outer axes give the larger
// ones: [0:4, 0:4] without [1:3, 1:2] leaves
//   [0:1, 0:4]  [3:4, 0:4]   rows before and behind,
//   [1:3, 0:1]  [1:3, 2:4]   of the rows between, columns before and behind.
void SubtractBox(std::vector<Box>& boxes, const Box& cut);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_BOX_ACCESS_H_
