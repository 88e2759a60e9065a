// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_BOX_ACCESS_H_
#define TENSORMOUNT_SHARD_BOX_ACCESS_H_

#include <cstdint>
#include <vector>

#include "tensormount/box.h"

namespace tensormount {

// Boxes from numbers that the library has already checked: cuts of checked boxes stay checked. A
// part of a box has no larger extents and no larger end, so neither its end nor its volume can
// overflow where those of the whole did not. Box::Make is for everybody else.
class BoxAccess {
 public:
  static Box Make(const Dims& begin, const Dims& extent) { return Box(begin, extent); }
  // `box` with [begin, begin + extent) on one axis.
  static Box WithAxis(Box box, int axis, std::int64_t begin, std::int64_t extent) {
    box.begin_[axis] = begin;
    box.extent_[axis] = extent;
    return box;
  }
};

// Row-major steps of a packed box: [2, 3, 4] gives [12, 4, 1]. Requires a checked volume of the
// extents that are not zero.
Dims PackedStrides(const Dims& extents);

// Replaces each of `boxes` by what is left of it without `cut`, as disjoint boxes; boxes that `cut`
// does not meet stay as they are, and one that it covers goes. O(boxes * rank).
//
// One axis after the other, a box loses what lies before and behind `cut` on that axis, each as a
// box of its own, and goes on as the slab between. So there are at most two new boxes an axis, and
// outer axes give the larger ones: [0:4, 0:4] without [1:3, 1:2] leaves
//   [0:1, 0:4]  [3:4, 0:4]   rows before and behind,
//   [1:3, 0:1]  [1:3, 2:4]   of the rows between, columns before and behind.
void SubtractBox(std::vector<Box>& boxes, const Box& cut);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_BOX_ACCESS_H_
