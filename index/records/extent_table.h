// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_EXTENT_TABLE_H_
#define TENSORMOUNT_INDEX_RECORDS_EXTENT_TABLE_H_

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
  std::uint32_t file = 0;    // Index into the checkpoint's file table.
  std::uint64_t offset = 0;  // In that file.
  std::uint64_t length = 0;  // Bytes; of a strided window from its first to the end of its last.
  Dims strides;              // Bytes along each axis, none negative; empty: packed.
  // Of a foreign file, in memory only: offset and length name an item, and where in it the bytes
  // are is found when they are wanted (index/read/foreign_inventory.h, ItemResolver).
  bool pending = false;
  bool has_hash = true;          // False only for foreign files.
  Hash128 hash;                  // ChunkRoot over its leaves.
  std::uint32_t manifest = 0;    // Which manifest holds its leaf hashes,
  std::uint64_t first_leaf = 0;  // and where in that manifest's leaf section they begin.
};

// All chunks of one tensor, packed as they stand in manifests and in the index (docs/format.md,
// "Extent table"): fixed-size rows for one rank of tensor, so that a million chunks are merged and
// written without being decoded. Decoding checks every field. A table with a strided chunk in it
// has wide rows, all of them.
// The rows of a million chunks of rank 2 are 100 MB and as many bytes to move; as ChunkRecords with
// Regions they would be several times that, and building them would be most of a publish.
//
// A value; not thread-safe while it is changed. In a table that is shared (CheckpointIndex) nothing
// changes any more.
class ExtentTable {
 public:
  // `rank`: axes of the tensor, 0 to kMaxRank. An empty table of any rank is legal.
  explicit ExtentTable(int rank, bool wide = false) : rank_(rank), wide_(wide) {}
  // Takes packed rows from disk: kDataLoss where the size is no multiple of the row's.
  // `from_memory`: rows that never were on disk, which may be pending.
  static Result<ExtentTable> FromPacked(int rank, std::string rows, bool wide = false,
                                        bool from_memory = false);

  int rank() const { return rank_; }
  bool wide() const { return wide_; }
  // Whether a row may be pending. Such a table is never written.
  bool pending() const { return pending_; }
  std::size_t row_bytes() const;
  std::size_t size() const { return rows_.size() / row_bytes(); }
  // All rows, one after the other: what is written to manifests and hashed. Valid until the next
  // change.
  std::string_view packed() const { return rows_; }
  // Packed row i, unchecked (index/records/extent_row.h).
  std::string_view Row(std::size_t i) const {
    return std::string_view(rows_).substr(i * row_bytes(), row_bytes());
  }

  // Makes room for so many rows in all.
  void Reserve(std::size_t rows) { rows_.reserve(rows * row_bytes()); }
  // Forgets all rows, and their memory: a string that is assigned an empty one keeps it.
  void Release() { std::string().swap(rows_); }
  // Bytes of data in all chunks.
  std::uint64_t DataBytes() const;
  // The first strided chunk makes the table wide, and all rows in it are written anew once.
  void Append(const ChunkRecord& chunk);
  // Appends rows of `other` as they are. kDataLoss where its rank is another one.
  Status AppendAll(const ExtentTable& other);
  // The same with file and manifest numbers replaced: file_map[old] = new. kDataLoss where a number
  // is outside the map.
  Status AppendMapped(const ExtentTable& other, std::span<const std::uint32_t> file_map,
                      std::uint32_t manifest);
  // Replaces file and manifest numbers in place. kDataLoss where one is outside its map.
  // Both are what makes merging cheap: 8 bytes a row are replaced, the rest is one copy.
  Status Remap(std::span<const std::uint32_t> file_map,
               std::span<const std::uint32_t> manifest_map);
  // Decodes row i: kDataLoss where a field breaks a rule (rank, negative, region outside itself).
  // What it cannot know, because a row does not say it: the tensor's shape and dtype. Whether the
  // region lies in the shape and has `length` bytes is for ExtentLookup and CompletenessCheck.
  Result<ChunkRecord> At(std::size_t i) const;
  // For small tables and tools; memory for every chunk at once.
  Result<std::vector<ChunkRecord>> All() const;
  // Rows in the order of their regions' first element, then file, offset: the canonical order.
  // O(n) where rows are in order already, as from one writer; else O(n log n). The order is part of
  // the format: the content root hashes rows in it, so equal contents get equal roots.
  void Sort();

 private:
  void Widen();

  int rank_;
  bool wide_ = false;
  bool pending_ = false;
  std::string rows_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_EXTENT_TABLE_H_
