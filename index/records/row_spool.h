// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_ROW_SPOOL_H_
#define TENSORMOUNT_INDEX_RECORDS_ROW_SPOOL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/extent_table.h"

namespace tensormount {

// Extents of many tensors, added manifest by manifest and taken tensor by tensor. Spill moves the
// rows in memory to a temporary file as one run, in which each tensor has at most one segment. A
// publish therefore needs memory for the caller's limit, one manifest and one tensor. Not
// thread-safe.
class RowSpool {
 public:
  // Appends rows to the extents of `tensor`. The caller numbers tensors from 0 without gaps;
  // tensors may have different numbers of axes. Replaces file and manifest numbers like
  // ExtentTable::AppendMapped.
  Status Append(std::uint32_t tensor, const ExtentTable& rows,
                std::span<const std::uint32_t> file_map, std::uint32_t manifest);
  // Bytes of rows that are in memory.
  std::uint64_t held_bytes() const { return held_bytes_; }
  // Moves the rows in memory to the end of a file. The first call makes the file at `path` and
  // unlinks it, so that nothing remains after a crash. `order` lists all tensors in the order in
  // which they will be taken, so that runs are read sequentially. kResourceExhausted: the disk is
  // full.
  Status Spill(FileSystem& fs, const std::string& path, std::span<const std::uint32_t> order);
  // All rows of `tensor` in the order of Append. Removes them from the spool.
  Result<ExtentTable> Take(std::uint32_t tensor);

 private:
  // The part of a run that belongs to one tensor.
  struct Segment {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    bool wide = false;
  };
  struct Tensor {
    ExtentTable held;
    std::vector<Segment> spilled;
    Tensor() : held(0) {}
  };
  std::vector<Tensor> tensors_;
  std::uint64_t held_bytes_ = 0;
  std::unique_ptr<File> file_;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_ROW_SPOOL_H_
