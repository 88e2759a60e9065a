// SPDX-License-Identifier: Apache-2.0
// Chunks of one tensor as fixed-size table rows in their on-disk form. Merging a million rows moves
// bytes and decodes nothing. Undecoded rows are untrusted: arithmetic on them wraps instead of
// overflowing, and At() checks the fields.
#include "index/records/extent_table.h"

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/coding.h"
#include "index/records/extent_row.h"

namespace tensormount {
namespace {

using extent_row::Begin;
using extent_row::Extent;

Status BrokenRow(std::size_t row, std::string_view why) {
  return Status(Code::kDataLoss,
                "extent table: row " + std::to_string(row) + ": " + std::string(why));
}

// Coordinates of the first element of a table row's region. The arithmetic wraps, because unchecked
// values may overflow; At() refuses bad values.
void FirstElement(const char* row, int rank, std::int64_t* out) {
  for (int a = 0; a < rank; ++a) out[a] = Begin(row, a);
  if ((LoadLittle<std::uint32_t>(row + extent_row::kFlags) & extent_row::kFlat) == 0) return;
  auto left = LoadLittle<std::uint64_t>(row + extent_row::kFlatFirst);
  for (int a = rank - 1; a >= 0 && left != 0; --a) {
    const auto extent = static_cast<std::uint64_t>(Extent(row, rank, a));
    if (extent == 0) return;
    out[a] = static_cast<std::int64_t>(static_cast<std::uint64_t>(out[a]) + left % extent);
    left /= extent;
  }
}

// Decodes the strides of a wide table row. The chunk's region is already decoded.
Status DecodeStrides(const char* row, int rank, ChunkRecord& chunk) {
  const bool strided = (extent_row::Flags(row) & extent_row::kStrided) != 0;
  const auto bad = [](std::string_view why) { return Status(Code::kDataLoss, std::string(why)); };
  if (strided && (rank == 0 || chunk.region.is_flat()))
    return bad("the row has strides, but its region is not a box");
  std::int64_t reach = 0;
  for (int a = 0; a < rank; ++a) {
    const std::int64_t stride = extent_row::Stride(row, rank, a);
    if (!strided) {
      if (stride != 0) return bad("the row has strides, but not the flag for strides");
      continue;
    }
    if (stride < 0) return bad("a stride is negative");
    const std::int64_t steps = std::max<std::int64_t>(chunk.region.box().extent(a) - 1, 0);
    const auto along = CheckedMul(steps, stride);
    const auto sum = along ? CheckedAdd(reach, *along) : std::nullopt;
    if (!sum || static_cast<std::uint64_t>(*sum) > INT64_MAX - chunk.offset) {
      return bad("strides overflow");
    }
    reach = *sum;
    chunk.strides.push_back(stride);
  }
  return Status();
}

}  // namespace

std::size_t ExtentTable::row_bytes() const { return extent_row::Bytes(rank_, wide_); }

// Takes the rows without decoding them. O(1), except for the search for pending rows if
// `from_memory` is set.
Result<ExtentTable> ExtentTable::FromPacked(int rank, std::string rows, bool wide,
                                            bool from_memory) {
  if (rank < 0 || rank > kMaxRank) {
    return Status(Code::kDataLoss,
                  "extent table: regions cannot have " + std::to_string(rank) + " axes");
  }
  ExtentTable table(rank, wide);
  const std::size_t row_bytes = table.row_bytes();
  if (rows.size() % row_bytes != 0) {
    return Status(Code::kDataLoss, "extent table: " + std::to_string(rows.size()) +
                                       " bytes are not a multiple of the row size, " +
                                       std::to_string(row_bytes));
  }
  table.rows_ = std::move(rows);
  for (std::size_t at = 0; from_memory && at < table.rows_.size(); at += row_bytes) {
    if ((extent_row::Flags(table.rows_.data() + at) & extent_row::kPending) != 0) {
      table.pending_ = true;
      break;
    }
  }
  return table;
}

std::uint64_t ExtentTable::DataBytes() const {
  std::uint64_t bytes = 0;
  for (std::size_t at = 0; at < rows_.size(); at += row_bytes()) {
    bytes += LoadLittle<std::uint64_t>(rows_.data() + at + extent_row::kLength);
  }
  return bytes;
}

// A narrow table row is a wide row without its last rank * 8 bytes, so zeros are appended to each
// row.
void ExtentTable::Widen() {
  if (wide_) return;
  const std::size_t narrow = row_bytes();
  wide_ = true;
  std::string rows;
  rows.reserve(rows_.size() / narrow * row_bytes());
  for (std::size_t at = 0; at < rows_.size(); at += narrow) {
    rows.append(rows_, at, narrow);
    rows.append(row_bytes() - narrow, '\0');
  }
  rows_ = std::move(rows);
}

// Encodes the chunk in the layout of docs/format.md, "Extent table".
void ExtentTable::Append(const ChunkRecord& chunk) {
  const bool strided = chunk.strides.rank() > 0;
  if (strided) Widen();
  pending_ = pending_ || chunk.pending;
  const std::size_t at = rows_.size();
  rows_.resize(at + row_bytes());
  char* row = rows_.data() + at;
  const Box& box = chunk.region.box();
  StoreLittle(row + extent_row::kFile, chunk.file);
  StoreLittle(row + extent_row::kManifest, chunk.manifest);
  StoreLittle(row + extent_row::kOffset, chunk.offset);
  StoreLittle(row + extent_row::kFirstLeaf, chunk.first_leaf);
  StoreLittle(row + extent_row::kFlags, (chunk.has_hash ? extent_row::kHasHash : 0u) |
                                            (chunk.region.is_flat() ? extent_row::kFlat : 0u) |
                                            (strided ? extent_row::kStrided : 0u) |
                                            (chunk.pending ? extent_row::kPending : 0u));
  StoreLittle(row + extent_row::kLength, chunk.length);
  StoreLittle(row + extent_row::kHash, chunk.hash.low);
  StoreLittle(row + extent_row::kHash + 8, chunk.hash.high);
  StoreLittle(row + extent_row::kFlatFirst, chunk.region.flat_first());
  StoreLittle(row + extent_row::kFlatCount,
              chunk.region.is_flat() ? chunk.region.volume() : std::int64_t{0});
  for (int a = 0; a < rank_; ++a) {
    StoreLittle(row + extent_row::kBegin + 8 * static_cast<std::size_t>(a), box.begin(a));
    StoreLittle(row + extent_row::kBegin + 8 * static_cast<std::size_t>(rank_ + a), box.extent(a));
    if (strided) {
      StoreLittle(row + extent_row::kBegin + 8 * static_cast<std::size_t>(2 * rank_ + a),
                  chunk.strides[a]);
    }
  }
}

Status ExtentTable::AppendAll(const ExtentTable& other) {
  if (other.rank_ != rank_)
    return Status(Code::kDataLoss, "extent table: regions have different numbers of axes");
  if (wide_ && !other.wide_) {
    ExtentTable wide = other;
    wide.Widen();
    return AppendAll(wide);
  }
  if (other.wide_) Widen();
  pending_ = pending_ || other.pending_;
  rows_.append(other.rows_);
  return Status();
}

// After a failure some rows of `other` remain in the table; callers then discard the whole
// inventory.
Status ExtentTable::AppendMapped(const ExtentTable& other, std::span<const std::uint32_t> file_map,
                                 std::uint32_t manifest, std::uint64_t leaves) {
  const std::size_t before = size();
  TENSORMOUNT_RETURN_IF_ERROR(AppendAll(other));
  const std::size_t row_bytes = this->row_bytes();
  for (std::size_t at = before * row_bytes; at < rows_.size(); at += row_bytes) {
    char* row = rows_.data() + at;
    const auto file = LoadLittle<std::uint32_t>(row + extent_row::kFile);
    if (file >= file_map.size()) {
      return Status(Code::kDataLoss,
                    "extent table: file number " + std::to_string(file) + " is out of range");
    }
    StoreLittle(row + extent_row::kFile, file_map[file]);
    StoreLittle(row + extent_row::kManifest, manifest);
    if (leaves == 0) continue;
    const auto first = LoadLittle<std::uint64_t>(row + extent_row::kFirstLeaf);
    StoreLittle(row + extent_row::kFirstLeaf, first + leaves);
  }
  return Status();
}

// InventoryMerger and ForeignBuilder call this after files were sorted by name.
Status ExtentTable::Remap(std::span<const std::uint32_t> file_map,
                          std::span<const std::uint32_t> manifest_map) {
  const std::size_t row_bytes = this->row_bytes();
  for (std::size_t at = 0; at < rows_.size(); at += row_bytes) {
    char* row = rows_.data() + at;
    const auto file = LoadLittle<std::uint32_t>(row + extent_row::kFile);
    const auto manifest = LoadLittle<std::uint32_t>(row + extent_row::kManifest);
    if (file >= file_map.size())
      return BrokenRow(at / row_bytes, "the file number is out of range");
    if (manifest >= manifest_map.size()) {
      return BrokenRow(at / row_bytes, "the manifest number is out of range");
    }
    StoreLittle(row + extent_row::kFile, file_map[file]);
    StoreLittle(row + extent_row::kManifest, manifest_map[manifest]);
  }
  return Status();
}

// Also refuses a second encoding of the same record (a hash without its flag, a flat range that
// equals a box, strides without their flag): content roots hash the bytes of rows, so equal records
// must have equal bytes.
Result<ChunkRecord> ExtentTable::At(std::size_t i) const {
  if (i >= size()) return BrokenRow(i, "the row is past the end of the table");
  const char* row = rows_.data() + i * row_bytes();
  ChunkRecord chunk;
  chunk.file = LoadLittle<std::uint32_t>(row + extent_row::kFile);
  chunk.manifest = LoadLittle<std::uint32_t>(row + extent_row::kManifest);
  chunk.offset = LoadLittle<std::uint64_t>(row + extent_row::kOffset);
  chunk.first_leaf = LoadLittle<std::uint64_t>(row + extent_row::kFirstLeaf);
  chunk.length = LoadLittle<std::uint64_t>(row + extent_row::kLength);
  chunk.hash.low = LoadLittle<std::uint64_t>(row + extent_row::kHash);
  chunk.hash.high = LoadLittle<std::uint64_t>(row + extent_row::kHash + 8);
  const auto flags = LoadLittle<std::uint32_t>(row + extent_row::kFlags);
  const std::uint32_t known = extent_row::kKnownFlags | (pending_ ? extent_row::kPending : 0u);
  if ((flags & ~known) != 0) return BrokenRow(i, "unknown flags");
  chunk.pending = (flags & extent_row::kPending) != 0;
  chunk.has_hash = (flags & extent_row::kHasHash) != 0;
  if (!chunk.has_hash && chunk.hash != Hash128{})
    return BrokenRow(i, "the row has a hash, but not the flag for a hash");
  Dims begin;
  Dims extent;
  for (int a = 0; a < rank_; ++a) {
    begin.push_back(Begin(row, a));
    extent.push_back(Extent(row, rank_, a));
  }
  Result<Box> box = Box::Make(begin, extent);
  if (!box.ok()) return BrokenRow(i, box.status().message());
  const auto first = LoadLittle<std::int64_t>(row + extent_row::kFlatFirst);
  const auto count = LoadLittle<std::int64_t>(row + extent_row::kFlatCount);
  if ((flags & extent_row::kFlat) == 0) {
    if (first != 0 || count != 0) return BrokenRow(i, "a box has fields of a flat range");
    chunk.region = Region(box.value());
  } else {
    Result<Region> region = Region::Flat(box.value(), first, count);
    if (!region.ok()) return BrokenRow(i, region.status().message());
    if (!region.value().is_flat()) return BrokenRow(i, "a flat range is equal to a box");
    chunk.region = std::move(region).value();
  }
  if (chunk.offset + chunk.length < chunk.offset ||
      chunk.offset + chunk.length > static_cast<std::uint64_t>(INT64_MAX)) {
    return BrokenRow(i, "offset and length overflow");
  }
  if ((flags & extent_row::kStrided) != 0 && !wide_)
    return BrokenRow(i, "the row has strides, but the table has no columns for them");
  if (wide_) {
    if (Status strides = DecodeStrides(row, rank_, chunk); !strides.ok()) {
      return BrokenRow(i, strides.message());
    }
  }
  return chunk;
}

Result<std::vector<ChunkRecord>> ExtentTable::All() const {
  std::vector<ChunkRecord> chunks;
  chunks.reserve(size());
  for (std::size_t i = 0; i < size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, At(i));
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

void ExtentTable::Sort() {
  const std::size_t n = size();
  if (n < 2) return;
  const std::size_t row_bytes = this->row_bytes();
  // Lexicographic order of coordinates is row-major order for every shape.
  const auto key_len = static_cast<std::size_t>(rank_);
  std::vector<std::int64_t> keys(n * key_len);
  for (std::size_t i = 0; i < n; ++i) {
    FirstElement(rows_.data() + i * row_bytes, rank_, keys.data() + i * key_len);
  }
  const auto less = [&](std::size_t a, std::size_t b) {
    const std::int64_t* ka = keys.data() + a * key_len;
    const std::int64_t* kb = keys.data() + b * key_len;
    for (std::size_t k = 0; k < key_len; ++k) {
      if (ka[k] != kb[k]) return ka[k] < kb[k];
    }
    const char* ra = rows_.data() + a * row_bytes;
    const char* rb = rows_.data() + b * row_bytes;
    const auto fa = LoadLittle<std::uint32_t>(ra + extent_row::kFile);
    const auto fb = LoadLittle<std::uint32_t>(rb + extent_row::kFile);
    if (fa != fb) return fa < fb;
    return LoadLittle<std::uint64_t>(ra + extent_row::kOffset) <
           LoadLittle<std::uint64_t>(rb + extent_row::kOffset);
  };
  // Rows are usually sorted already, because a writer appends in order. Sorted rows are not moved.
  bool sorted = true;
  for (std::size_t i = 1; i < n && sorted; ++i) sorted = !less(i, i - 1);
  if (sorted) return;
  std::vector<std::uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return less(a, b); });
  std::string rows;
  rows.reserve(rows_.size());
  for (const std::uint32_t i : order) rows.append(rows_, i * row_bytes, row_bytes);
  rows_ = std::move(rows);
}

}  // namespace tensormount
