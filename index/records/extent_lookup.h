// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_EXTENT_LOOKUP_H_
#define TENSORMOUNT_INDEX_RECORDS_EXTENT_LOOKUP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tensormount/status.h"

#include "index/records/extent_table.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// A byte range in a tensor's row-major order, from the first byte of a region to the end of its
// last byte. The range may contain bytes that are not in the region: nearly all of them, for a
// column of a matrix.
struct ByteBounds {
  std::uint64_t first = 0;
  std::uint64_t end = 0;
};
// Bounds of a non-empty `region` within the shape. For elements smaller than a byte the bounds are
// widened to whole bytes.
ByteBounds BoundsOf(const TensorMeta& meta, const Region& region);
// The bounds of `region` (within the shape) if every byte between them belongs to the region, as
// for whole tensor rows. Empty for all other regions, and for a region without cells.
std::optional<ByteBounds> RunInTensor(const TensorMeta& meta, const Region& region);

// The extents of one tensor, prepared for finding the few chunks that a read touches. Beside the
// packed table rows it has three arrays of u64. A read calls Candidates for a range of table rows,
// skips those that MayTouch refuses, and decodes the others: O(log n + candidates). Immutable, so
// thread-safe.
class ExtentLookup {
 public:
  // Decodes and checks every table row (O(n)), so that readers may trust table().At(i). kDataLoss
  // if a row breaks a rule, is pending, out of order, exceeds the shape, or does not have the
  // length of its region.
  static Result<std::shared_ptr<const ExtentLookup>> Make(const TensorMeta& meta,
                                                          std::shared_ptr<const ExtentTable> table);

  // A range [begin, end) of table rows.
  struct Rows {
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  // The table rows that may hold bytes [first, end) of the tensor's row-major order. The range
  // contains all such rows, and possibly others.
  Rows Candidates(std::uint64_t first, std::uint64_t end) const;
  // False means that table row i has no byte of [first, end) in row-major order. True means
  // "perhaps", because only the row's first and last byte are compared.
  bool MayTouch(std::size_t i, std::uint64_t first, std::uint64_t end) const {
    return rows_[i].first < end && rows_[i].end > first;
  }
  const ExtentTable& table() const { return *table_; }
  const std::shared_ptr<const ExtentTable>& shared_table() const { return table_; }

  // file_run() is set if the whole tensor is one contiguous range of a file, whatever its chunks:
  // byte n of the tensor is byte offset + n of the file. The tensor can then be read, mapped or
  // passed through as a plain range. Empty for other tensors and for tensors without bytes.
  struct FileRun {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
  };
  std::optional<FileRun> file_run() const { return file_run_; }
  // Weight of this object in a cache, in bytes: three u64 for each table row, and the packed rows.
  std::size_t memory() const {
    return rows_.size() * sizeof(Bounds) + table_->packed().size() + 128;
  }

 private:
  // Positions of a table row in the tensor's bytes.
  struct Bounds {
    std::uint64_t first = 0;
    std::uint64_t end = 0;      // Behind the last byte.
    std::uint64_t max_end = 0;  // The largest end of this row and all rows before it.
  };
  std::shared_ptr<const ExtentTable> table_;
  std::vector<Bounds> rows_;
  std::optional<FileRun> file_run_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_EXTENT_LOOKUP_H_
