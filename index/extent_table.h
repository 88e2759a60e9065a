// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_EXTENT_TABLE_H_
#define TENSORMOUNT_INDEX_EXTENT_TABLE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/hash.h"

namespace tensormount {

// One stored piece of a tensor. Regions are in elements; the bytes of a chunk are the packed
// row-major order of its region, or, in a foreign file, a strided window: the byte at
// `offset` + sum over axes of index[a] * strides[a] begins the element at begin + index of a box.
struct ChunkRecord {
  Region region;
  std::uint32_t file = 0;        // Index into the checkpoint's file table.
  std::uint64_t offset = 0;      // In that file.
  std::uint64_t length = 0;      // Bytes; of a strided window from its first to the end of its last.
  Dims strides;                  // Bytes along each axis, none negative; empty: packed.
  // Of a foreign file, in memory only: offset and length name an item, and where in it the bytes
  // are is found when they are wanted (index/adopt/foreign.h, ItemResolver).
  bool pending = false;
  bool has_hash = true;          // False only for foreign files.
  Hash128 hash;                  // ChunkRoot over its leaves.
  std::uint32_t manifest = 0;    // Which manifest holds its leaf hashes,
  std::uint64_t first_leaf = 0;  // and where in that manifest's leaf section they begin.
};

// All chunks of one tensor, packed as they stand in manifests and in the index (docs/format.md,
// "Extent table"): fixed-size rows for one rank of tensor, so that a million chunks are merged and
// written without being decoded. Decoding checks every field.
class ExtentTable {
 public:
  explicit ExtentTable(int rank) : rank_(rank) {}
  // Takes packed rows from disk: kDataLoss where the size is no multiple of the row's.
  static Result<ExtentTable> FromPacked(int rank, std::string rows);

  static std::size_t RowBytes(int rank);
  int rank() const { return rank_; }
  std::size_t size() const { return rows_.size() / RowBytes(rank_); }
  std::string_view packed() const { return rows_; }
  // Packed row i, unchecked (index/extent_row.h).
  std::string_view Row(std::size_t i) const {
    return std::string_view(rows_).substr(i * RowBytes(rank_), RowBytes(rank_));
  }

  // Makes room for so many rows in all.
  void Reserve(std::size_t rows) { rows_.reserve(rows * RowBytes(rank_)); }
  // Bytes of data in all chunks, for estimates.
  std::uint64_t DataBytes() const;
  void Append(const ChunkRecord& chunk);
  // Appends rows of `other` (same rank) with file and manifest numbers replaced:
  // file_map[old] = new. kDataLoss where a number is outside the map.
  Status AppendMapped(const ExtentTable& other, std::span<const std::uint32_t> file_map,
                      std::uint32_t manifest);
  // Replaces file and manifest numbers in place. kDataLoss where one is outside its map.
  Status Remap(std::span<const std::uint32_t> file_map,
               std::span<const std::uint32_t> manifest_map);
  // Decodes row i: kDataLoss where a field breaks a rule (rank, negative, region outside itself).
  Result<ChunkRecord> At(std::size_t i) const;
  Result<std::vector<ChunkRecord>> All() const;
  // Rows in the order of their regions' first element, then file, offset: the canonical order.
  void Sort();

 private:
  int rank_;
  std::string rows_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_EXTENT_TABLE_H_
