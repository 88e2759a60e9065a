// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_LINEAR_ORDER_H_
#define TENSORMOUNT_SHARD_LINEAR_ORDER_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "shard/region_set.h"

namespace tensormount {

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

  std::int64_t elements() const { return elements_; }  // Of the whole tensor.

  // Gives the elements of region `i` as well; false, and `range` says nothing, where it is no
  // range.
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
    // All cells lie between the first and the last, so as many as lie there fill it.
    const bool filled = last - first + 1 == cells;
    if (!regions.is_flat(i)) {
      *range = {first, last + 1};
      *volume = cells;
    } else {
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
