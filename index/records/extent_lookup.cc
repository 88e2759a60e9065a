// SPDX-License-Identifier: Apache-2.0
// Finds the chunks that a read may touch. Table rows are sorted by the first cell of their region
// in row-major order. Bounds::max_end never decreases. Two binary searches then bound the
// candidates. For ranges of bytes or tensor rows that takes O(log n); for tensor columns there are
// more candidates, which MayTouch removes.
#include "index/records/extent_lookup.h"

#include <algorithm>

namespace tensormount {

// Computes the bounds from the first and the last element of the region.
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

// For elements smaller than a byte the bounds are whole bytes, so equal sizes also mean that the
// region begins and ends at a byte.
std::optional<ByteBounds> RunInTensor(const TensorMeta& meta, const Region& region) {
  if (region.empty()) return std::nullopt;
  const ByteBounds bounds = BoundsOf(meta, region);
  const std::uint64_t bits = static_cast<std::uint64_t>(region.volume()) * meta.bits();
  if (bits != (bounds.end - bounds.first) * 8) return std::nullopt;
  return bounds;
}

Result<std::shared_ptr<const ExtentLookup>> ExtentLookup::Make(
    const TensorMeta& meta, std::shared_ptr<const ExtentTable> table) {
  auto lookup = std::make_shared<ExtentLookup>();
  const std::size_t n = table->size();
  lookup->rows_.reserve(n);
  // Start of the previous table row. Starts must not decrease, because the binary search over
  // first bytes relies on the order, and a tampered index may have any.
  std::uint64_t before = 0;
  std::uint64_t max_end = 0;
  bool one_run = n > 0 && meta.bytes() > 0;
  std::optional<FileRun> run;
  for (std::size_t i = 0; i < n; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(i));
    const auto bad = [&](std::string_view why) {
      return Status(Code::kDataLoss, "index: tensor " + meta.key() + " " + chunk.region.ToString() +
                                         ": " + std::string(why));
    };
    if (!chunk.region.Within(meta.shape())) return bad("not within the tensor's shape");
    if (chunk.pending) return bad("the location of its bytes is not recorded");
    Result<std::uint64_t> bytes =
        ChunkBytes(meta.dtype(), meta.shape(), chunk.region, chunk.strides);
    if (!bytes.ok()) return bad(bytes.status().message());
    if (bytes.value() != chunk.length) return bad("the length does not match its region");
    std::uint64_t first = before;  // An empty region gets the position of the row before.
    std::uint64_t end = before;
    if (!chunk.region.empty()) {
      const ByteBounds bounds = BoundsOf(meta, chunk.region);
      first = bounds.first;
      end = bounds.end;
      if (first < before) return bad("chunks are not in order");
      if (one_run && !run && chunk.offset >= first) run = {chunk.file, chunk.offset - first};
      one_run = one_run && run && chunk.strides.rank() == 0 && chunk.file == run->file &&
                chunk.offset == run->offset + first && chunk.length == end - first;
    }
    max_end = std::max(max_end, end);
    lookup->rows_.push_back({first, end, max_end});
    before = first;
  }
  if (one_run) lookup->file_run_ = run;
  lookup->table_ = std::move(table);
  return std::shared_ptr<const ExtentLookup>(std::move(lookup));
}

// Table row i can hold a byte at or behind `first` only if one of the rows up to i reaches past
// `first`. max_end never decreases, so binary search finds the first such i. A row that begins at
// or behind `end` holds no byte before `end`. Example: rows of 10 bytes each and the range [25,
// 31). max_end is 10 20 30 40, so begin is row 2; first is 0 10 20 30, so end is 4.
ExtentLookup::Rows ExtentLookup::Candidates(std::uint64_t first, std::uint64_t end) const {
  Rows rows;
  rows.begin = static_cast<std::size_t>(
      std::ranges::upper_bound(rows_, first, {}, &Bounds::max_end) - rows_.begin());
  rows.end = static_cast<std::size_t>(std::ranges::lower_bound(rows_, end, {}, &Bounds::first) -
                                      rows_.begin());
  rows.end = std::max(rows.begin, rows.end);
  return rows;
}

}  // namespace tensormount
