// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SHARD_PLACEMENTS_H_
#define TENSORMOUNT_TESTS_SHARD_PLACEMENTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "shard/tensor_meta.h"
#include "tests/shard/boxes.h"

namespace tensormount {

// Memory for a box of elements in any order of axes, with gaps, some axes backwards.
struct StridedMemory {
  Dims strides;            // In elements.
  std::int64_t first = 0;  // Element of `bytes` at which the box begins.
  std::vector<std::byte> bytes;
};
inline StridedMemory RandomMemory(Random& rnd, const Dims& extents, std::int64_t element_bytes) {
  StridedMemory memory;
  memory.strides = Dims::Filled(extents.rank(), 0);
  std::vector<int> order;
  for (int a = 0; a < extents.rank(); ++a) order.push_back(a);
  if (rnd.OneIn(2)) rnd.Shuffle(order);
  std::int64_t step = rnd.OneIn(4) ? 2 : 1;
  std::int64_t last = 0;
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    const bool backwards = rnd.OneIn(5);
    memory.strides[*at] = backwards ? -step : step;
    const std::int64_t reach = (extents[*at] - 1) * step;
    if (backwards) memory.first += reach;
    last += reach;
    step = step * extents[*at] + (rnd.OneIn(3) ? rnd.Int(1, 3) : 0);
  }
  memory.bytes.resize(static_cast<std::size_t>((last + 1) * element_bytes));
  return memory;
}

// Element `position` of tensor bytes goes to where `placed` says: cell by cell.
inline void ForEachByte(const PlacedBox& placed, const Dims& byte_shape,
                        const std::function<void(std::int64_t tensor, std::int64_t memory)>& fn) {
  const std::vector<std::int64_t> cells = CellsOf(placed.box, byte_shape);
  for (std::size_t n = 0; n < cells.size(); ++n) {
    std::int64_t rest = static_cast<std::int64_t>(n);
    std::int64_t memory = placed.offset;
    for (int a = placed.box.rank() - 1; a >= 0; --a) {
      memory += rest % placed.box.extent(a) * placed.strides[a];
      rest /= placed.box.extent(a);
    }
    fn(cells[n], memory);
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SHARD_PLACEMENTS_H_
