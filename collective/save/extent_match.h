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

// Which bytes of a tensor's chunks, as a rank would write them, hashes of leaves of a base can
// decide. The extents of the base come one by one, in any order, and none is kept: of a tensor in a
// million of them a rank mostly has few chunks. O((extents + chunks) log chunks) time; memory for
// the chunks, and 32 bytes for each extent that shares whole leaves with one.
//
//   ExtentMatch match(meta, chunks);
//   for (row : extents) match.Add(row, extents.At(row));
//   for (piece : match.Cut()) ...
class ExtentMatch {
 public:
  // `chunks`: all of this tensor. Both must outlive it.
  ExtentMatch(const TensorMeta& meta, std::span<const RankTask::Chunk> chunks);

  // kDataLoss where extents hold so much of the chunks more than once that they cannot be the
  // tensor's.
  Status Add(std::uint32_t row, const ChunkRecord& stored);
  // Whether a chunk has cells of it; true also where that is uncertain, between flat ranges.
  bool Touches(const ChunkRecord& stored) const;

  // Chunks one after the other as they were given, each in pieces in the order of its packed bytes
  // without gaps: one where an extent is exactly the chunk, else whole leaves that stand side by
  // side here and in an extent, and what is between them. To be called once, at the end.
  struct ExtentPart {
    std::uint32_t chunk = 0;  // Position in `chunks`.
    std::uint64_t begin = 0;  // In the packed bytes of the chunk's item.
    std::uint64_t bytes = 0;
    std::optional<std::uint32_t> row = {};  // Of the extent that has them as leaves,
    std::uint64_t leaf = 0;                 // from this one on. None: no leaves are these bytes.
  };
  std::vector<ExtentPart> Cut();

 private:
  // Where a chunk is in the tensor's row-major bytes.
  struct Span {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
    std::uint64_t reach = 0;  // The largest end up to here: chunks that nobody checked may overlap.
    std::uint32_t chunk = 0;
  };
  // Leaves that stand side by side in a chunk and an extent.
  struct Shared {
    std::uint64_t begin = 0;  // In the tensor.
    std::uint64_t bytes = 0;
    std::uint64_t leaf = 0;
    std::uint32_t chunk = 0;
    std::uint32_t row = 0;
  };

  std::span<const std::uint32_t> ChunksOf(const Region& region) const;
  static std::span<const Span> Near(const std::vector<Span>& spans, std::uint64_t first,
                                    std::uint64_t end);

  const TensorMeta& meta_;
  const std::span<const RankTask::Chunk> chunks_;
  std::vector<std::uint32_t> by_region_;            // Positions of chunks.
  std::vector<Span> runs_;                          // Chunks that are one run, by `first`;
  std::vector<Span> others_;                        // and those that are not.
  std::vector<std::optional<std::uint32_t>> same_;  // Of each chunk: the row that is exactly it.
  std::vector<Shared> shared_;
  std::uint64_t extents_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_EXTENT_MATCH_H_
