// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_STATE_CELLS_H_
#define TENSORMOUNT_TESTS_STATE_CELLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "tensormount/shard.h"

// Slow and obvious: a global tensor of i32 as a plain array, and what a shard holds of it cell by
// cell.

namespace tensormount {

// A buffer of i32 at `data`, which stays the caller's.
inline BufferView Ints(void* data, const Dims& shape) {
  return BufferView::Host(DType::kI32, data, shape);
}

struct Array {
  Dims shape;
  std::vector<std::int32_t> values;  // Row-major.

  // With values that differ.
  static Array Counting(const Dims& shape, std::int32_t first = 0);
  // Of `shape`, its value at an index being `value_at(index)`.
  static Array Of(const Dims& shape, const std::function<std::int32_t(const Dims&)>& value_at);
  std::int32_t At(const Dims& index) const;
};

// A box of an array as one of its own.
Array Part(const Array& whole, const Box& box);

std::int64_t Position(const Dims& shape, const Dims& index);
void ForEachIndex(const Dims& shape, const std::function<void(const Dims&)>& fn);

// Where in memory the cells of a shard of i32 are: by global index (its row-major position).
std::map<std::int64_t, std::int32_t*> CellsOf(const Shard& shard);

// Whether every cell of the shard has the array's value, and the shapes are equal.
bool Holds(const Shard& shard, const Array& array);

// Packed memory for a region of an array, filled from it.
struct Piece {
  std::vector<std::int32_t> memory;
  Shard shard;
};
Piece MakePiece(const Array& array, const Region& region);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_STATE_CELLS_H_
