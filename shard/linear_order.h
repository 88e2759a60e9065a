// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_LINEAR_ORDER_H_
#define TENSORMOUNT_SHARD_LINEAR_ORDER_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "shard/region_set.h"

namespace tensormount {

// The linear order of a tensor numbers its elements as they stand in a packed file: element (i, j)
// of shape [4, 6] is number 6 * i + j. A region whose elements have consecutive numbers is a range:
//
//   box [1:3, 0:6]            6 to 17: whole rows                         [6, 18)
//   box [2:3, 1:4]            13 to 15: within one row                    [13, 16)
//   box [1:3, 0:3]            6 to 8 and 12 to 14                         no range
//   box [1:3, 0:6] flat 4:9   counted in the box, which begins at 6       [10, 15)
//
// Which boxes are ranges: those that, from some axis inwards, span the tensor, and have extent one
// on the axes before that axis. RangeOf finds out by counting instead of by cases.

// [begin, end) of the row-major order of a whole tensor, in elements. Signed as Dims are;
// base/byte_range.h is for bytes.
struct LinearRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Tells which regions are ranges of the row-major order of a whole tensor: rows, and what ZeRO and
// FSDP cut. Such regions are sorted, merged and proved by two numbers each, however many axes the
// tensor has. Requires a checked shape that is not empty.
class LinearOrder {
 public:
  explicit LinearOrder(const Dims& shape) : rank_(shape.rank()) {
    for (int a = rank_ - 1; a >= 0; --a) {
      strides_[static_cast<std::size_t>(a)] = elements_;
      elements_ *= shape[a];
    }
  }

  // The products cannot overflow: each is the elements of a slab, and all of them together are
  // fewer than 2^63 in a checked shape. An empty shape would make strides zero; hence the
  // requirement.
  std::int64_t elements() const { return elements_; }  // Of the whole tensor.

  // O(rank), without branches on the axes: this is run for every region of a job (millions), before
  // anything else is known of them. Gives the elements of region `i` as well; false, and `range`
  // says nothing, where it is no range.
  bool RangeOf(const RegionSet& regions, std::size_t i, LinearRange* range,
               std::int64_t* volume) const {
    const std::int64_t* low = regions.low(i);
    const std::int64_t* high = regions.high(i);
    std::int64_t first = 0;
    std::int64_t last = 0;
    std::int64_t cells = 1;
    for (int a = 0; a < rank_; ++a) {
      first += low[a] * strides_[static_cast<std::size_t>(a)];
      last += (high[a] - 1) * strides_[static_cast<std::size_t>(a)];
      cells *= high[a] - low[a];
    }
    // All cells lie between the first and the last, so as many as lie there fill it. Sums of index
    // times stride are numbers of elements of the tensor, and stay below its volume.
    const bool filled = last - first + 1 == cells;
    if (!regions.is_flat(i)) {
      *range = {first, last + 1};
      *volume = cells;
    } else {
      // Of a flat range the box around it must be filled. That loses nothing: a flat range that
      // lies within one row of a box that is no range is a box itself, by the canonical form of
      // Region.
      const std::int64_t begin = first + regions.flat_first(i);
      *range = {begin, begin + regions.flat_count(i)};
      *volume = regions.flat_count(i);
    }
    return filled;
  }

 private:
  int rank_;
  std::int64_t elements_ = 1;
  std::array<std::int64_t, kMaxAxes> strides_{};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_LINEAR_ORDER_H_
