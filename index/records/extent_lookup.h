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

// Bytes of a tensor's row-major order, from the first that a region has to the end of the last; a
// column of a matrix has few of those in between.
struct ByteBounds {
  std::uint64_t first = 0;
  std::uint64_t end = 0;
};
// `region` must not be empty and lie within the shape. Where elements are less than a byte, widened
// to whole bytes.
ByteBounds BoundsOf(const TensorMeta& meta, const Region& region);

// The extents of one tensor, made ready for finding the few chunks that a read touches. Immutable.
// Three arrays of u64 beside the packed rows, indexed by row. A read asks Candidates for a range of
// rows, passes over those that MayTouch refuses, and decodes the rest: O(log n + candidates).
// Thread-safe, as nothing changes.
class ExtentLookup {
 public:
  // kDataLoss where a row breaks a rule, is pending, lies outside the shape or has not its region's
  // length.
  // O(n), once a tensor: decodes and checks every row, so that readers who go on with table().At(i)
  // meet no row that they must distrust.
  static Result<std::shared_ptr<const ExtentLookup>> Make(const TensorMeta& meta,
                                                          std::shared_ptr<const ExtentTable> table);

  // Rows that may hold bytes [first, end) of the tensor's row-major order: all that do, and maybe
  // others.
  // A range of row numbers, not of bytes: [begin, end).
  struct Rows {
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  Rows Candidates(std::uint64_t first, std::uint64_t end) const;
  // Whether bytes [begin, end) of row i may be in this stretch; false only where certain.
  // `first` and `end` are bytes of the tensor's row-major order, as above. A row's own bounds are
  // from its first to its last byte there; a column of a matrix holds few of the bytes in between.
  bool MayTouch(std::size_t i, std::uint64_t first, std::uint64_t end) const {
    return first_[i] < end && end_[i] > first;
  }
  const ExtentTable& table() const { return *table_; }
  const std::shared_ptr<const ExtentTable>& shared_table() const { return table_; }

  // The file of which byte n is byte n of the tensor, for every stored chunk; nullopt: none.
  // Such a tensor can be read, mapped or passed through as a plain range of one file.
  std::optional<std::uint32_t> linear_file() const { return linear_file_; }
  // Bytes that a cache should count for it: three u64 a row, and the packed rows.
  std::size_t memory() const { return first_.size() * 24 + table_->packed().size() + 128; }

 private:
  ExtentLookup() = default;
  std::shared_ptr<const ExtentTable> table_;
  // Byte positions in the tensor of each row's first byte and of the end of its last; the largest
  // such end of all rows up to it.
  std::vector<std::uint64_t> first_;
  std::vector<std::uint64_t> end_;
  std::vector<std::uint64_t> max_end_;
  std::optional<std::uint32_t> linear_file_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_EXTENT_LOOKUP_H_
