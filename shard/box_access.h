// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_BOX_ACCESS_H_
#define TENSORMOUNT_SHARD_BOX_ACCESS_H_

#include "tensormount/box.h"

namespace tensormount {

// Boxes from numbers that the library has already checked: cuts of checked boxes stay checked.
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

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_BOX_ACCESS_H_
