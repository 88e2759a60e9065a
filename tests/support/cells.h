// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_CELLS_H_
#define TENSORMOUNT_TESTS_SUPPORT_CELLS_H_

#include <cstdint>

#include "tensormount/box.h"

namespace tensormount {

// Row by row of the last axis, obvious, for oracles. Calls fn(position, element, length): the cells
// from `position` on of the region's row-major order are those from number `element` on of the
// tensor's, `length` of them.
template <typename Fn>
void ForEachCellRow(const Dims& shape, const Region& region, Fn fn) {
  std::int64_t position = 0;
  for (const Box& box : region.Boxes()) {
    const std::int64_t volume = box.volume();
    const int last = box.rank() - 1;
    const std::int64_t length = last < 0 ? 1 : box.extent(last);
    for (std::int64_t row = 0; row * length < volume; ++row) {
      std::int64_t rest = row;
      std::int64_t element = last < 0 ? 0 : box.begin(last);
      std::int64_t step = last < 0 ? 1 : shape[last];
      for (int a = last - 1; a >= 0; --a) {
        element += (box.begin(a) + rest % box.extent(a)) * step;
        rest /= box.extent(a);
        step *= shape[a];
      }
      fn(position, element, length);
      position += length;
    }
  }
}

// Cell by cell: fn(position, element).
template <typename Fn>
void ForEachCell(const Dims& shape, const Region& region, Fn fn) {
  ForEachCellRow(shape, region,
                 [&](std::int64_t position, std::int64_t element, std::int64_t length) {
                   for (std::int64_t i = 0; i < length; ++i) fn(position + i, element + i);
                 });
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_CELLS_H_
