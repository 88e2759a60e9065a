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

// How zarr/ cuts a tensor: chunks of one shape, numbered in row-major order of the grid; chunk (i,
// j) begins at (i, j) times that shape. Chunks at the upper edges are padded to the full shape with
// the fill value, as Zarr requires. The grid depends only on the checkpoint. The shards of ranks
// often form such a grid: rows, columns or blocks of one size, smaller at the upper edges.
// A grid takes a few hundred bytes. If the tensor has several chunks, Make may read all its
// extents.
class ZarrGrid {
 public:
  // Target size of a row block. Clients read whole chunks, so a block must be large enough to hide
  // the cost of opening a file, and small enough that several fit in a client's memory.
  static constexpr std::uint64_t kRowBlockBytes = std::uint64_t{32} << 20;

  // Stored chunks larger than this are split, because clients read a whole chunk to get one row.
  static constexpr std::uint64_t kMaxCellBytes = std::uint64_t{256} << 20;

  // The grid of the stored chunks; or row blocks if the stored chunks do not form a grid (flat
  // ranges, uneven shards), or if it would have over `max_chunks` (>= 1) chunks.
  // Stored chunks form a grid if each box begins at a multiple of the first box's extent and
  // reaches to the next multiple or to the edge. The publish, or the reader of a foreign format,
  // has checked that no box is missing.
  static Result<ZarrGrid> Make(const CheckpointIndex& index, const TensorEntry& tensor,
                               std::uint64_t max_chunks);
  // Blocks of consecutive rows, of about kRowBlockBytes, or larger if there would be over
  // `max_chunks` chunks. If one row is larger than that, the next axis is cut too. Never fails.
  static ZarrGrid RowBlocks(const TensorMeta& meta, std::uint64_t max_chunks);

  // Shape of the chunks. Each extent is at least 1, as the format requires.
  const Dims& chunk() const { return chunk_; }
  std::uint64_t chunks() const { return chunks_; }  // 0 for tensors without elements.
  // The part of the tensor that a chunk contains, without padding. `number` must be below chunks().
  Box BoxOf(std::uint64_t number) const;
  std::string NameOf(std::uint64_t number) const;  // "c.0.1"; "c" for a scalar.
  std::optional<std::uint64_t> NumberOf(std::string_view name) const;

 private:
  ZarrGrid(const Dims& shape, const Dims& chunk);
  Dims shape_;
  Dims chunk_;
  Dims counts_;  // Number of chunks along each axis.
  std::uint64_t chunks_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_ZARR_GRID_H_
