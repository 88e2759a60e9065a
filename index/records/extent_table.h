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

// One stored region of a tensor. Regions are in elements. The bytes of a chunk are the region in
// packed row-major order. In a foreign file they may instead be a strided window: the element at
// begin + index of a box starts at byte `offset` + sum over axes of index[a] * strides[a].
struct ChunkRecord {
  Region region;
  std::uint32_t file = 0;    // Position in the checkpoint's file table.
  std::uint64_t offset = 0;  // Offset of the first byte in the file.
  // Number of bytes. A strided window counts up to the end of its last element.
  std::uint64_t length = 0;
  // Distance in bytes between neighbours along each axis, not negative. Empty: the chunk is packed.
  Dims strides;
  // Only in memory, for foreign files: offset and length describe an item of the file, such as an
  // archive member, that contains the chunk. The first read locates the chunk in the item
  // (ItemResolver of index/read/foreign_inventory.h).
  bool pending = false;
  bool has_hash = true;  // False only for foreign files.
  Hash128 hash;          // ChunkRoot of the chunk's leaf hashes.
  // Number of the manifest that holds the chunk's leaf hashes.
  std::uint32_t manifest = 0;
  // Position of the first of these hashes in the leaf section of that manifest.
  std::uint64_t first_leaf = 0;
};

// All chunks of one tensor as packed table rows of a fixed size, the form of manifests and the
// index (docs/format.md, "Extent table"). A million chunks are merged and written without decoding:
// as packed rows of a matrix they take 100 MB, as ChunkRecords several times that, and building
// ChunkRecords would take most of a publish. Decoding checks the rules of a single row. If one
// chunk is strided, all rows are wide.
//
// A value type; not thread-safe while it is changed. Shared tables (CheckpointIndex) do not change.
class ExtentTable {
 public:
  // `rank` is the number of axes of the tensor, 0 to kMaxRank. An empty table may have any number.
  explicit ExtentTable(int rank, bool wide = false) : rank_(rank), wide_(wide) {}
  // Takes packed rows from disk. kDataLoss if the size is not a multiple of the row's, or `rank` is
  // out of range. `from_memory`: the rows were never on disk, so they may be pending.
  static Result<ExtentTable> FromPacked(int rank, std::string rows, bool wide = false,
                                        bool from_memory = false);

  int rank() const { return rank_; }
  bool wide() const { return wide_; }
  // Whether table rows may be pending. A table with pending rows is never written to disk.
  bool pending() const { return pending_; }
  std::size_t row_bytes() const;
  std::size_t size() const { return rows_.size() / row_bytes(); }
  // All table rows, as they are written to manifests. Valid until the next change.
  std::string_view packed() const { return rows_; }
  // Packed row i, unchecked (index/records/extent_row.h).
  std::string_view Row(std::size_t i) const {
    return std::string_view(rows_).substr(i * row_bytes(), row_bytes());
  }

  // Reserves memory for `rows` rows in total.
  void Reserve(std::size_t rows) { rows_.reserve(rows * row_bytes()); }
  // Removes all rows and frees their memory.
  void Release() { std::string().swap(rows_); }
  // Sum of the chunks' lengths.
  std::uint64_t DataBytes() const;
  // Adds a chunk. The first strided chunk makes the table wide, which rewrites all rows once.
  void Append(const ChunkRecord& chunk);
  // Appends the rows of `other`. kDataLoss if the tables have different numbers of axes.
  Status AppendAll(const ExtentTable& other);
  // Appends the rows of `other` with new file and manifest numbers: file number i becomes
  // file_map[i]. Copies the rows once and rewrites 8 bytes of each. kDataLoss if a file number is
  // outside the map.
  // `leaves`: is added to the positions of first leaves.
  Status AppendMapped(const ExtentTable& other, std::span<const std::uint32_t> file_map,
                      std::uint32_t manifest, std::uint64_t leaves = 0);
  // Replaces file and manifest numbers in place. kDataLoss if a number is outside its map.
  Status Remap(std::span<const std::uint32_t> file_map,
               std::span<const std::uint32_t> manifest_map);
  // Decodes row i. kDataLoss if a field breaks a rule (flags, sign, region, overflow). A table does
  // not know the tensor's shape and dtype: ExtentLookup and CompletenessCheck compare chunks with
  // these.
  Result<ChunkRecord> At(std::size_t i) const;
  // All rows, decoded. Only for small tables and tools, because every chunk is in memory.
  Result<std::vector<ChunkRecord>> All() const;
  // Sorts rows by the first element of their regions, then by file, then by offset. The order is
  // part of the format, because the content root hashes rows in it. O(n) for rows that are sorted
  // already, as those of a single writer are; O(n log n) for others.
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
