// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_FILE_ROOTS_H_
#define TENSORMOUNT_INDEX_RECORDS_FILE_ROOTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "tensormount/status.h"

#include "base/hash.h"
#include "index/records/inventory.h"

namespace tensormount {

// Roots of data files (docs/format.md, "Hashes"). A root is the hash of the file's length and of
// the offsets, lengths and hashes of its stored ranges, in the order of their offsets; no data are
// read. InventoryMerger sets FileRecord::root. Nearly every file is named by one manifest and gets
// its root from FileRootsOf. A file of several writers gets its root from SharedFileRoots, while
// InventoryMerger::TakeRows passes the extents of the tensors.

// A stored range in the form that the file root hashes: u64 offset, u64 length, hash.
struct RangeHash {
  std::uint64_t offset;
  std::uint64_t length;
  Hash128 hash;
};
static_assert(sizeof(RangeHash) == 32);

struct FileRoot {
  Hash128 root;              // Zero for a foreign file.
  std::uint64_t ranges = 0;  // Number of stored ranges in the file, empty ones included.
};

// The root of each file of `inventory`, in the order of its file table. kDataLoss, with file and
// range, if a range refers to a file outside of the table, exceeds its file, overlaps another
// range, or has no hash. Ranges of foreign files may overlap and lack hashes. Needs 32 bytes of
// memory for each range.
Result<std::vector<FileRoot>> FileRootsOf(const Inventory& inventory);

// Collects the ranges of files that several manifests name, and computes the root of a file when
// its last range was added. If a file has the data of one tensor, it is complete after the rows of
// that tensor, so memory holds the ranges of few files at a time. Not thread-safe.
class SharedFileRoots {
 public:
  // Announces a file that gets `ranges` ranges from all its manifests together.
  void Expect(std::uint32_t file, std::uint64_t ranges);
  // Add ranges whose file numbers are positions in `files`, and set the roots of files that are
  // now complete. Ranges of files that were not announced, or that are complete, are ignored.
  // kDataLoss if ranges of a file overlap.
  Status Add(std::vector<FileRecord>& files, const ExtentTable& rows);
  Status Add(std::vector<FileRecord>& files, std::uint32_t file, const RangeHash& range);
  // Fails if an announced file lacks ranges.
  Status Finish(const std::vector<FileRecord>& files) const;

 private:
  struct Collected {
    // Number of ranges that Expect announced. 0: the file was not announced, or its root is set.
    std::uint64_t expected = 0;
    std::vector<RangeHash> ranges;
  };
  std::vector<Collected> files_;  // By file number, up to the last announced file.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_FILE_ROOTS_H_
