// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_CELLS_H_
#define TENSORMOUNT_TESTS_SUPPORT_CELLS_H_

#include <cstdint>

#include "tensormount/box.h"

namespace tensormount {

// Cell by cell, slow and obvious, for oracles. Calls fn(position, element): the cell at `position`
// of the region's row-major order is element number `element` of the tensor's.
template <typename Fn>
void ForEachCell(const Dims& shape, const Region& region, Fn fn) {
  std::int64_t position = 0;
  for (const Box& box : region.Boxes()) {
    const std::int64_t volume = box.volume();
    for (std::int64_t i = 0; i < volume; ++i) {
      std::int64_t rest = i;
      std::int64_t element = 0;
      std::int64_t step = 1;
      for (int a = box.rank() - 1; a >= 0; --a) {
        element += (box.begin(a) + rest % box.extent(a)) * step;
        rest /= box.extent(a);
        step *= shape[a];
      }
      fn(position++, element);
    }
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_CELLS_H_
