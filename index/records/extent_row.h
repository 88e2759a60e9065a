// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_EXTENT_ROW_H_
#define TENSORMOUNT_INDEX_RECORDS_EXTENT_ROW_H_

#include <cstddef>
#include <cstdint>

#include "base/coding.h"

// The packed row of an extent table (docs/format.md, "Extent table"), for code that works on a
// million of them without decoding each. Where bytes stand comes first, what they are second, so
// that the logical part of a row is one run of bytes.

namespace tensormount::extent_row {

// Offsets of the fields in a row. Fields need no alignment: rows of odd sizes follow each other,
// and LoadLittle copies. The first two fields are numbers in tables of their own manifest or
// checkpoint; InventoryMerger replaces them and nothing else.
inline constexpr std::size_t kFile = 0;        // u32
inline constexpr std::size_t kManifest = 4;    // u32
inline constexpr std::size_t kOffset = 8;      // u64
inline constexpr std::size_t kFirstLeaf = 16;  // u64
inline constexpr std::size_t kFlags = 24;      // u32; the logical part begins here
inline constexpr std::size_t kLength = 28;     // u64
inline constexpr std::size_t kHash = 36;       // 16 bytes
inline constexpr std::size_t kFlatFirst = 52;  // i64
inline constexpr std::size_t kFlatCount = 60;  // i64
inline constexpr std::size_t kBegin = 68;  // i64 an axis, then i64 extents, then strides if wide

// Bits of the flags.
inline constexpr std::uint32_t kHasHash = 1;
inline constexpr std::uint32_t kFlat = 2;
inline constexpr std::uint32_t kStrided = 4;  // In wide rows alone.
inline constexpr std::uint32_t kPending = 8;  // In memory alone (ChunkRecord::pending).
// That may stand on disk.
inline constexpr std::uint32_t kKnownFlags = kHasHash | kFlat | kStrided;

// `wide`: rows of a table that has strided chunks.
// Bytes of a row: 68 of fixed fields, then 16 an axis, or 24 with strides. 100 bytes for a chunk of
// a matrix.
constexpr std::size_t Bytes(int rank, bool wide) {
  return kBegin + (wide ? 24 : 16) * static_cast<std::size_t>(rank);
}

// These trust the row's length alone: `row` has Bytes(rank, wide) bytes, and axis is below rank.
// What they return may be any number (ExtentTable::At checks).
inline std::int64_t Begin(const char* row, int axis) {
  return LoadLittle<std::int64_t>(row + kBegin + 8 * static_cast<std::size_t>(axis));
}
inline std::int64_t Extent(const char* row, int rank, int axis) {
  return LoadLittle<std::int64_t>(row + kBegin + 8 * static_cast<std::size_t>(rank + axis));
}
// Of a wide row.
inline std::int64_t Stride(const char* row, int rank, int axis) {
  return LoadLittle<std::int64_t>(row + kBegin + 8 * static_cast<std::size_t>(2 * rank + axis));
}
// Bits over kKnownFlags are refused where rows are decoded; here they are just returned.
inline std::uint32_t Flags(const char* row) { return LoadLittle<std::uint32_t>(row + kFlags); }

}  // namespace tensormount::extent_row

#endif  // TENSORMOUNT_INDEX_RECORDS_EXTENT_ROW_H_
