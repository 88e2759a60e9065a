// SPDX-License-Identifier: Apache-2.0
// Which chunks a read may touch, without looking at all of them. Rows are sorted by the first cell
// of their region in row-major order; beside them stands how far any row up to here reaches. Two
// binary searches then bound the candidates: O(log n) where regions are ranges or rows, more
// candidates where they are columns, each of which a comparison of bounds takes out.
#include "index/records/extent_lookup.h"

#include <algorithm>

namespace tensormount {

// By way of the first and the last element.
ByteBounds BoundsOf(const TensorMeta& meta, const Region& region) {
  const Dims& shape = meta.shape();
  const Box& box = region.box();
  Dims a = box.begin();
  Dims b = a;
  if (region.is_flat()) {
    std::int64_t lo = region.flat_first();
    std::int64_t hi = lo + region.volume() - 1;
    for (int axis = box.rank() - 1; axis >= 0; --axis) {
      a[axis] += lo % box.extent(axis);
      b[axis] += hi % box.extent(axis);
      lo /= box.extent(axis);
      hi /= box.extent(axis);
    }
  } else {
    for (int axis = 0; axis < box.rank(); ++axis) b[axis] = box.end(axis) - 1;
  }
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  for (int axis = 0; axis < shape.rank(); ++axis) {
    first = first * static_cast<std::uint64_t>(shape[axis]) + static_cast<std::uint64_t>(a[axis]);
    last = last * static_cast<std::uint64_t>(shape[axis]) + static_cast<std::uint64_t>(b[axis]);
  }
  const std::uint64_t bits = meta.bits();
  return {first * bits / 8, ((last + 1) * bits + 7) / 8};
}

Result<std::shared_ptr<const ExtentLookup>> ExtentLookup::Make(
    const TensorMeta& meta, std::shared_ptr<const ExtentTable> table) {
  std::shared_ptr<ExtentLookup> lookup(new ExtentLookup);
  const std::size_t n = table->size();
  lookup->first_.reserve(n);
  lookup->end_.reserve(n);
  lookup->max_end_.reserve(n);
  // `before` is where the last row began. It must not fall: the binary search over first_ relies on
  // it, and a table of an index that was tampered with may have any order.
  std::uint64_t before = 0;
  std::uint64_t max_end = 0;
  bool linear = n > 0 && meta.bytes() > 0;
  std::uint32_t linear_file = 0;
  for (std::size_t i = 0; i < n; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(i));
    const auto bad = [&](std::string_view why) {
      return Status(Code::kDataLoss, "index: tensor " + meta.key() + " " + chunk.region.ToString() +
                                         ": " + std::string(why));
    };
    if (!chunk.region.Within(meta.shape())) return bad("not within the tensor's shape");
    if (chunk.pending) return bad("its chunk is not resolved");
    Result<std::uint64_t> bytes =
        ChunkBytes(meta.dtype(), meta.shape(), chunk.region, chunk.strides);
    if (!bytes.ok()) return bad(bytes.status().message());
    if (bytes.value() != chunk.length) return bad("its length is not its region's");
    std::uint64_t first = before;  // Empty ones stand where they are and hold nothing.
    std::uint64_t end = before;
    if (!chunk.region.empty()) {
      const ByteBounds bounds = BoundsOf(meta, chunk.region);
      first = bounds.first;
      end = bounds.end;
      if (first < before) return bad("chunks are not in order");
      if (linear) {
        if (lookup->max_end_.empty()) linear_file = chunk.file;
        linear = chunk.strides.rank() == 0 && chunk.file == linear_file && chunk.offset == first &&
                 chunk.length == end - first;
      }
    }
    max_end = std::max(max_end, end);
    lookup->first_.push_back(first);
    lookup->end_.push_back(end);
    lookup->max_end_.push_back(max_end);
    before = first;
  }
  if (linear) lookup->linear_file_ = linear_file;
  lookup->table_ = std::move(table);
  return std::shared_ptr<const ExtentLookup>(std::move(lookup));
}

// Row i can hold a byte at or behind `first` only if some row up to it reaches past `first`:
// max_end_ never falls, so the first such row is found by binary search. And no row that begins at
// or behind `end` can hold one before it. Example: rows of 10 bytes each, [25, 31): max_end_ 10 20
// 30 40, so begin is row 2; first_ 0 10 20 30, so end is 4.
ExtentLookup::Rows ExtentLookup::Candidates(std::uint64_t first, std::uint64_t end) const {
  Rows rows;
  rows.begin = static_cast<std::size_t>(std::upper_bound(max_end_.begin(), max_end_.end(), first) -
                                        max_end_.begin());
  rows.end = static_cast<std::size_t>(std::lower_bound(first_.begin(), first_.end(), end) -
                                      first_.begin());
  rows.end = std::max(rows.begin, rows.end);
  return rows;
}

}  // namespace tensormount
