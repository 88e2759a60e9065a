// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_EXTENT_MATCH_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_EXTENT_MATCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tensormount/status.h"

#include "collective/save/rank_task.h"
#include "index/records/extent_table.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// Finds the bytes of a tensor's chunks, as a rank would write them, that leaf hashes of a base can
// decide. Extents of the base are added one by one, in any order, and not kept, because a tensor
// may have a million extents and few of this rank's chunks. O((extents + chunks) log chunks) time;
// memory for the chunks, and 32 bytes for each extent that shares whole leaves with one.
//
//   ExtentMatch match(meta, chunks);
//   for (row : extents) match.Add(row, extents.At(row));
//   for (piece : match.Cut()) ...
class ExtentMatch {
 public:
  // `chunks`: all chunks of the tensor that this rank would write. Both arguments must outlive this
  // object.
  ExtentMatch(const TensorMeta& meta, std::span<const RankTask::Chunk> chunks);

  // Adds an extent of the base, row number `row` of its table. Fails with kDataLoss if extents
  // cover the chunks so often that they cannot belong to the tensor.
  Status Add(std::uint32_t row, const ChunkRecord& stored);
  // Whether a chunk has cells of the extent. For flat ranges also true in some cases without common
  // cells.
  bool Touches(const ChunkRecord& stored) const;

  // Returns the chunks in the given order, each cut into parts without gaps: one part if an extent
  // equals the chunk; if none does, runs of whole leaves that are contiguous both in the chunk and
  // in an extent, and the bytes between these runs. Call once, after all Add calls.
  struct ExtentPart {
    std::uint32_t chunk = 0;  // Position in `chunks`.
    std::uint64_t begin = 0;  // Offset in the packed bytes of the chunk's item.
    std::uint64_t bytes = 0;
    std::optional<std::uint32_t> row = {};  // The extent with these bytes as leaves; empty: none.
    std::uint64_t leaf = 0;                 // Number of the first of these leaves in the extent.
  };
  std::vector<ExtentPart> Cut();

 private:
  // A chunk's range in the tensor's row-major bytes.
  struct Span {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
    // Largest `end` up to this span; chunks may overlap if the layout was not checked.
    std::uint64_t reach = 0;
    std::uint32_t chunk = 0;
  };
  // Leaves that are contiguous in a chunk and in an extent.
  struct Shared {
    std::uint64_t begin = 0;  // Offset in the tensor's row-major bytes.
    std::uint64_t bytes = 0;
    std::uint64_t leaf = 0;
    std::uint32_t chunk = 0;
    std::uint32_t row = 0;
  };

  std::span<const std::uint32_t> ChunksOf(const Region& region) const;
  static std::span<const Span> SpansNear(const std::vector<Span>& spans, std::uint64_t first,
                                         std::uint64_t end);

  const TensorMeta& meta_;
  const std::span<const RankTask::Chunk> chunks_;
  std::vector<std::uint32_t> by_region_;            // Positions of chunks, sorted by region.
  std::vector<Span> runs_;                          // Chunks that are one run, sorted by `first`.
  std::vector<Span> others_;                        // All other chunks.
  std::vector<std::optional<std::uint32_t>> same_;  // By chunk: the row of an equal extent.
  std::vector<Shared> shared_;
  std::uint64_t extents_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_EXTENT_MATCH_H_
