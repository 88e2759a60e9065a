// SPDX-License-Identifier: Apache-2.0
// Chooses the regular grid of chunks that a Zarr client sees: the grid of the stored chunks if they
// form one, else a computed one.
#include "fs/formats/zarr_grid.h"

#include <algorithm>
#include <charconv>

#include "index/records/extent_table.h"

namespace tensormount::fs {
namespace {

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// The chunk shape of the regular grid that the stored chunks form; nullopt if they form none.
// Every cell of the tensor is stored (ZarrGrid::Make).
Result<std::optional<Dims>> StoredGrid(const CheckpointIndex& index, const TensorEntry& tensor) {
  const Dims& shape = tensor.meta.shape();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> table,
                               index.Extents(tensor));
  // One pass over the extents, without allocations for each chunk.
  std::optional<Dims> cell;
  for (std::size_t i = 0; i < table->size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(i));
    if (chunk.region.empty()) continue;
    const Box& box = chunk.region.box();
    if (chunk.region.is_flat() || !box.Within(shape)) return std::optional<Dims>();
    // Chunks are sorted by their first element, so the first chunk is at the origin and has the
    // shape of the grid's chunks.
    if (!cell) cell = box.extent();
    for (int a = 0; a < shape.rank(); ++a) {
      const std::int64_t extent = (*cell)[a];
      if (box.begin(a) % extent != 0 ||
          box.extent(a) != std::min(extent, shape[a] - box.begin(a))) {
        return std::optional<Dims>();
      }
    }
  }
  return cell;
}

// Halves the shape of a chunk along its first axis with an extent above 1, until the chunk has at
// most kMaxCellBytes. An odd extent is rounded up to keep the grid regular, so a chunk may have
// bytes of two stored chunks.
Dims Halved(Dims cell, const TensorMeta& meta) {
  const std::uint64_t per_element = std::max<std::uint64_t>(meta.bytes() / meta.elements(), 1);
  std::uint64_t elements = 1;
  for (const std::int64_t n : cell) elements *= static_cast<std::uint64_t>(n);
  for (int a = 0; a < cell.rank(); ++a) {
    while (cell[a] > 1 && elements > ZarrGrid::kMaxCellBytes / per_element) {
      elements /= static_cast<std::uint64_t>(cell[a]);
      cell[a] = (cell[a] + 1) / 2;
      elements *= static_cast<std::uint64_t>(cell[a]);
    }
  }
  return cell;
}

}  // namespace

ZarrGrid::ZarrGrid(const Dims& shape, const Dims& chunk)
    : shape_(shape), chunk_(chunk), counts_(shape), chunks_(1) {
  for (int a = 0; a < shape.rank(); ++a) {
    chunk_[a] = std::max<std::int64_t>(chunk[a], 1);
    counts_[a] = CeilDiv(shape[a], chunk_[a]);
    // Cannot overflow: there are at most as many chunks as elements.
    chunks_ *= static_cast<std::uint64_t>(counts_[a]);
  }
}

ZarrGrid ZarrGrid::RowBlocks(const TensorMeta& meta, std::uint64_t max_chunks) {
  const Dims& shape = meta.shape();
  const std::uint64_t element = std::max<std::uint64_t>(meta.bits() / 8, 1);
  std::uint64_t target = std::max(kRowBlockBytes / element, std::uint64_t{1});
  for (;;) {
    Dims chunk = shape;
    // Axes whose rows exceed the target are cut into single indices. The first axis whose rows fit
    // is cut into groups of rows of about the target size. Later axes stay whole, so a block is one
    // run of bytes.
    std::uint64_t left = meta.elements();  // Elements below one index of the axes before `a`.
    for (int a = 0; a < shape.rank() && left > target; ++a) {
      left /= static_cast<std::uint64_t>(shape[a]);
      chunk[a] = static_cast<std::int64_t>(std::max<std::uint64_t>(target / left, 1));
      if (left <= target) break;
    }
    const ZarrGrid grid(shape, chunk);
    // The doubling ends at the latest when one chunk is the whole tensor.
    if (grid.chunks() <= max_chunks || target >= meta.elements()) return grid;
    target *= 2;  // Cannot overflow: elements fit 63 bits.
  }
}

Result<ZarrGrid> ZarrGrid::Make(const CheckpointIndex& index, const TensorEntry& tensor,
                                std::uint64_t max_chunks) {
  const Dims& shape = tensor.meta.shape();
  if (tensor.meta.elements() == 0) return ZarrGrid(shape, shape);
  if (tensor.chunks <= max_chunks) {
    std::optional<Dims> cell = shape;
    if (tensor.chunks != 1) {
      TENSORMOUNT_ASSIGN_OR_RETURN(cell, StoredGrid(index, tensor));
    }
    if (cell) {
      const ZarrGrid grid(shape, Halved(*cell, tensor.meta));
      if (grid.chunks() <= max_chunks) return grid;
    }
  }
  return RowBlocks(tensor.meta, max_chunks);
}

// Splits the number into an index for each axis; the last axis varies fastest.
Box ZarrGrid::BoxOf(std::uint64_t number) const {
  Dims begin = shape_;
  Dims extent = shape_;
  for (int a = shape_.rank() - 1; a >= 0; --a) {
    const std::uint64_t count = static_cast<std::uint64_t>(counts_[a]);
    begin[a] = static_cast<std::int64_t>(number % count) * chunk_[a];
    extent[a] = std::min(chunk_[a], shape_[a] - begin[a]);
    number /= count;
  }
  // Cannot fail: the box lies within the shape, which was checked.
  return Box::Make(begin, extent).value();
}

std::string ZarrGrid::NameOf(std::uint64_t number) const {
  const Box box = BoxOf(number);
  std::string name = "c";
  for (int a = 0; a < box.rank(); ++a) name += '.' + std::to_string(box.begin(a) / chunk_[a]);
  return name;
}

std::optional<std::uint64_t> ZarrGrid::NumberOf(std::string_view name) const {
  if (!name.starts_with('c') || chunks_ == 0) return std::nullopt;
  const std::string_view all = name;
  name.remove_prefix(1);
  std::uint64_t number = 0;
  for (int a = 0; a < shape_.rank(); ++a) {
    if (!name.starts_with('.')) return std::nullopt;
    name.remove_prefix(1);
    std::int64_t at = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), at);
    if (error != std::errc() || at < 0 || at >= counts_[a]) return std::nullopt;
    name.remove_prefix(static_cast<std::size_t>(end - name.data()));
    number = number * static_cast<std::uint64_t>(counts_[a]) + static_cast<std::uint64_t>(at);
  }
  // Refuses other spellings: "c.01" would be a second name of the same file.
  if (!name.empty() || NameOf(number) != all) return std::nullopt;
  return number;
}

}  // namespace tensormount::fs
