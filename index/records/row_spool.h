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

// Rows of chunks of many tensors: they come in by manifest and go out by tensor. What is more than
// the caller wants in memory stands in a file of its own meanwhile, in one run for each Spill, of
// which a tensor has at most one segment; so a publish needs memory for the rows of one tensor and
// not for those of all. Not thread-safe.
class RowSpool {
 public:
  // Appends rows to those of `tensor`, a number of the caller's, dense from 0, of tensors that all
  // have their own rank; numbers of files and the manifest replaced as by
  // ExtentTable::AppendMapped.
  Status Append(std::uint32_t tensor, const ExtentTable& rows,
                std::span<const std::uint32_t> file_map, std::uint32_t manifest);
  // Bytes of rows that are in memory.
  std::uint64_t held_bytes() const { return held_bytes_; }
  // Moves what is in memory to the end of a file, which is made at `path` at the first call and has
  // no name from then on, so that nothing of it is left whatever happens. `order`: all numbers in
  // the order in which they will be taken, so that taking reads runs from their begin to their end.
  // kResourceExhausted where the disk is full.
  Status Spill(FileSystem& fs, const std::string& path, std::span<const std::uint32_t> order);
  // All rows of `tensor` in the order in which they were appended; the spool forgets them.
  Result<ExtentTable> Take(std::uint32_t tensor);

 private:
  // What one run has of a tensor.
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
