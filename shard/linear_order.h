// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_LINEAR_ORDER_H_
#define TENSORMOUNT_SHARD_LINEAR_ORDER_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "shard/region_set.h"

namespace tensormount {

// The linear order numbers a tensor's elements as in a packed file: element (i, j) of shape [4, 6]
// is number 6 * i + j. A region whose elements have consecutive numbers is a range:
//
//   box [1:3, 0:6]            6 to 17: whole rows                         [6, 18)
//   box [2:3, 1:4]            13 to 15: within one row                    [13, 16)
//   box [1:3, 0:3]            6 to 8 and 12 to 14                         no range
//   box [1:3, 0:6] flat 4:9   counted in the box, which begins at 6       [10, 15)
//
// A box is a range if for some axis it has extent one on the axes before that axis, and spans the
// tensor on the axes after it. RangeOf decides by counting instead of by cases.

// [begin, end) of the row-major order of a tensor, in elements. Signed like Dims; base/byte_range.h
// is for bytes.
struct LinearRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Decides which regions are ranges of the row-major order of a tensor: rows, and the cuts of ZeRO
// and FSDP. Such regions are sorted, merged and proved by two numbers each, for any number of axes.
// Requires a checked shape that is not empty.
class LinearOrder {
 public:
  explicit LinearOrder(const Dims& shape) : rank_(shape.rank()) {
    for (int a = rank_ - 1; a >= 0; --a) {
      strides_[static_cast<std::size_t>(a)] = elements_;
      elements_ *= shape[a];
    }
  }

  // Number of elements of the tensor. The products in this class cannot overflow: each is the
  // number of elements of a slab, which a checked shape limits to below 2^63. An empty shape would
  // make strides zero, and is therefore not allowed.
  std::int64_t elements() const { return elements_; }

  // Whether region `i` is a range. Sets `volume`, and `range`, which is valid only if the result is
  // true. O(axes), without branches per axis, because it runs for every region of a job (millions).
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
    // All cells lie between the first and the last, so the region is a range if that interval has
    // exactly as many cells. Sums of index times stride are element numbers, and stay below the
    // volume.
    const bool filled = last - first + 1 == cells;
    if (!regions.is_flat(i)) {
      *range = {first, last + 1};
      *volume = cells;
    } else {
      // A flat range counts as a range only if the box around it is one. No range is missed: by the
      // canonical form of Region, a flat range within one row of another box is itself a box.
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
