// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_EXTENT_ROW_H_
#define TENSORMOUNT_INDEX_RECORDS_EXTENT_ROW_H_

#include <cstddef>
#include <cstdint>

#include "base/coding.h"

// The packed table row of an extent table (docs/format.md, "Extent table"), for code that handles a
// million rows without decoding them. The file position comes first and the logical part second, so
// that the logical part is one run of bytes.

namespace tensormount::extent_row {

// Offsets of a row's fields. Fields are unaligned; LoadLittle copies them.
// kFile and kManifest are positions in the tables of the manifest or checkpoint that the row
// belongs to. InventoryMerger replaces only these two.
inline constexpr std::size_t kFile = 0;        // u32
inline constexpr std::size_t kManifest = 4;    // u32
inline constexpr std::size_t kOffset = 8;      // u64
inline constexpr std::size_t kFirstLeaf = 16;  // u64
inline constexpr std::size_t kFlags = 24;      // u32; the logical part begins here
inline constexpr std::size_t kLength = 28;     // u64
inline constexpr std::size_t kHash = 36;       // 16 bytes
inline constexpr std::size_t kFlatFirst = 52;  // i64
inline constexpr std::size_t kFlatCount = 60;  // i64
// The begins of the region as i64 for each axis, then the extents as i64, then, in wide rows, the
// strides as i64.
inline constexpr std::size_t kBegin = 68;

// Bits of the flags.
inline constexpr std::uint32_t kHasHash = 1;
inline constexpr std::uint32_t kFlat = 2;
inline constexpr std::uint32_t kStrided = 4;  // Only in wide rows.
inline constexpr std::uint32_t kPending = 8;  // Only in memory (ChunkRecord::pending).
// All flags except kPending, which is never on disk.
inline constexpr std::uint32_t kKnownFlags = kHasHash | kFlat | kStrided;

// Bytes of a row for a tensor with `rank` axes: 68 of fixed fields, then 16 for each axis, or 24 if
// the table is `wide` (has strided chunks). A chunk of a matrix takes 100 bytes.
constexpr std::size_t Bytes(int rank, bool wide) {
  return kBegin + (wide ? 24 : 16) * static_cast<std::size_t>(rank);
}

// Unchecked access to a field: `row` must have Bytes(rank, wide) bytes, and `axis` must be below
// rank. The values may be any numbers (ExtentTable::At checks them).
inline std::int64_t Begin(const char* row, int axis) {
  return LoadLittle<std::int64_t>(row + kBegin + 8 * static_cast<std::size_t>(axis));
}
inline std::int64_t Extent(const char* row, int rank, int axis) {
  return LoadLittle<std::int64_t>(row + kBegin + 8 * static_cast<std::size_t>(rank + axis));
}
// The stride along `axis` of a wide row. Other rows have no strides.
inline std::int64_t Stride(const char* row, int rank, int axis) {
  return LoadLittle<std::int64_t>(row + kBegin + 8 * static_cast<std::size_t>(2 * rank + axis));
}
// The flags of a row, including unknown flags, which decoding refuses.
inline std::uint32_t Flags(const char* row) { return LoadLittle<std::uint32_t>(row + kFlags); }

}  // namespace tensormount::extent_row

#endif  // TENSORMOUNT_INDEX_RECORDS_EXTENT_ROW_H_
