// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_ZARR_GRID_H_
#define TENSORMOUNT_FS_FORMATS_ZARR_GRID_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"

namespace tensormount::fs {

// How zarr/ cuts a tensor: chunks of one shape, those at the upper edges padded to it. Chunks are
// numbered in row-major order of the grid. Depends on the checkpoint alone.
//
// What Zarr wants: one chunk shape for the whole array, chunk (i, j) begins at (i, j) times that
// shape, and those that reach over the upper edge are stored whole, with the fill value outside.
// Shards of ranks are often just that: rows, columns or a grid, ceil-sized, smaller at the upper
// edges.
// A value of some hundred bytes; making one reads the extents of the tensor once, where it has more
// than one chunk.
class ZarrGrid {
 public:
  // Row blocks: what a client reads at least, since it reads chunks whole. Large enough that
  // opening a file costs nothing beside it, small enough that some of them fit in any client's
  // memory.
  static constexpr std::uint64_t kRowBlockBytes = std::uint64_t{32} << 20;

  // Stored chunks larger than this are cut: clients read a chunk whole to have one row of it.
  static constexpr std::uint64_t kMaxCellBytes = std::uint64_t{256} << 20;

  // The grid that the tensor is stored in, so that a chunk is one stored one; row blocks where
  // that is none (flat ranges, uneven shards) or has over `max_chunks` (>= 1) chunks.
  // Whether the stored boxes are a grid is decided by their positions alone: each begins at a
  // multiple of the first one's extent and reaches to the next multiple or to the edge. That none
  // is missing was proven when the checkpoint was published.
  static Result<ZarrGrid> Make(const CheckpointIndex& index, const TensorEntry& tensor,
                               std::uint64_t max_chunks);
  // Row blocks of about kRowBlockBytes, larger where there would be over `max_chunks`.
  // As many rows as fit, or, where one row is larger, parts of a row: then of the next axis. Never
  // fails.
  static ZarrGrid RowBlocks(const TensorMeta& meta, std::uint64_t max_chunks);

  const Dims& chunk() const { return chunk_; }      // Each at least 1, as the format asks.
  std::uint64_t chunks() const { return chunks_; }  // 0 for tensors without elements.
  // `number` must be below chunks().
  Box BoxOf(std::uint64_t number) const;           // Without padding.
  std::string NameOf(std::uint64_t number) const;  // "c.0.1"; "c" of a scalar.
  std::optional<std::uint64_t> NumberOf(std::string_view name) const;

 private:
  ZarrGrid(const Dims& shape, const Dims& chunk);
  Dims shape_;
  Dims chunk_;
  Dims counts_;  // Of chunks along each axis.
  std::uint64_t chunks_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_ZARR_GRID_H_
