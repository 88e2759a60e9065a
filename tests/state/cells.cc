// SPDX-License-Identifier: Apache-2.0
#include "tests/state/cells.h"

namespace tensormount {

Array Array::Counting(const Dims& shape, std::int32_t first) {
  Array array{shape, {}};
  ForEachIndex(shape, [&](const Dims&) { array.values.push_back(first++); });
  return array;
}

Array Array::Of(const Dims& shape, const std::function<std::int32_t(const Dims&)>& value_at) {
  Array array{shape, {}};
  ForEachIndex(shape, [&](const Dims& index) { array.values.push_back(value_at(index)); });
  return array;
}

std::int32_t Array::At(const Dims& index) const {
  return values.at(static_cast<std::size_t>(Position(shape, index)));
}

Array Part(const Array& whole, const Box& box) {
  return Array::Of(box.extent(), [&](Dims at) {
    for (int a = 0; a < at.rank(); ++a) at[a] += box.begin(a);
    return whole.At(at);
  });
}

std::int64_t Position(const Dims& shape, const Dims& index) {
  std::int64_t position = 0;
  for (int a = 0; a < shape.rank(); ++a) position = position * shape[a] + index[a];
  return position;
}

void ForEachIndex(const Dims& shape, const std::function<void(const Dims&)>& fn) {
  for (const std::int64_t e : shape) {
    if (e == 0) return;
  }
  Dims index = Dims::Filled(shape.rank(), 0);
  for (;;) {
    fn(index);
    int a = shape.rank() - 1;
    while (a >= 0 && ++index[a] == shape[a]) index[a--] = 0;
    if (a < 0) return;
  }
}

std::map<std::int64_t, std::int32_t*> CellsOf(const Shard& shard) {
  std::map<std::int64_t, std::int32_t*> cells;
  const BufferView& data = shard.data;
  const Box& box = shard.region.box();
  std::int64_t nth = 0;  // In the row-major order of the box.
  const std::int64_t first = shard.region.flat_first();
  const std::int64_t end = first + shard.region.volume();
  ForEachIndex(box.extent(), [&](const Dims& inside) {
    const std::int64_t n = nth++;
    if (n < first || n >= end) return;
    Dims global;
    for (int a = 0; a < box.rank(); ++a) global.push_back(box.begin(a) + inside[a]);
    std::int64_t at = 0;
    if (data.shape.rank() == 1 && data.shape[0] == end - first) {
      at = (n - first) * data.strides[0];
    } else {
      const int lacking = box.rank() - data.shape.rank();
      for (int a = lacking; a < box.rank(); ++a) at += inside[a] * data.strides[a - lacking];
    }
    cells[Position(shard.global_shape, global)] = static_cast<std::int32_t*>(data.data) + at;
  });
  return cells;
}

bool Holds(const Shard& shard, const Array& array) {
  if (!(shard.global_shape == array.shape)) return false;
  for (const auto& [position, value] : CellsOf(shard)) {
    if (*value != array.values.at(static_cast<std::size_t>(position))) return false;
  }
  return true;
}

Piece MakePiece(const Array& array, const Region& region) {
  Piece piece;
  piece.memory.resize(static_cast<std::size_t>(region.volume()) + 1);  // Never null.
  const Dims extents = region.is_flat() ? Dims{region.volume()} : region.box().extent();
  piece.shard = {
      .global_shape = array.shape,
      .region = region,
      .data = BufferView::Host(DType::kI32, static_cast<void*>(piece.memory.data()), extents)};
  for (const auto& [position, value] : CellsOf(piece.shard)) {
    *value = array.values.at(static_cast<std::size_t>(position));
  }
  return piece;
}

}  // namespace tensormount
