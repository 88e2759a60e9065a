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

// Roots of data files (docs/format.md, "Hashes"): over length and hash of every stored range of a
// file in the order of offsets, without a look at data. InventoryMerger fills FileRecord::root with
// them: for a file that one manifest names, which is nearly every one, by FileRootsOf; for a file
// that several writers share by SharedFileRoots, while the rows of tensors come by.

// A stored range as a file root hashes it, as it lies: u64 offset, u64 length, hash.
struct RangeHash {
  std::uint64_t offset;
  std::uint64_t length;
  Hash128 hash;
};
static_assert(sizeof(RangeHash) == 32);

struct FileRoot {
  Hash128 root;              // Zero for a foreign file.
  std::uint64_t ranges = 0;  // Stored ranges that were counted in it, empty ones too.
};

// Of each file of `inventory`, by position. kDataLoss names file and range: one that is in no file
// of the table, reaches past the end of its file, overlaps another one, or has no hash (of foreign
// files ranges may overlap and lack hashes). 32 bytes of memory for each range.
Result<std::vector<FileRoot>> FileRootsOf(const Inventory& inventory);

// Collects the ranges of files that several manifests name, and makes the root of each when its
// last range came: of a file that holds one tensor when the tensor was passed, so that memory is
// for the ranges of few files. Not thread-safe.
class SharedFileRoots {
 public:
  // `file` of the table will get `ranges` ranges, as several manifests together say.
  void Expect(std::uint32_t file, std::uint64_t ranges);
  // Ranges by numbers of the final table `files`, whose roots are filled in. Those of other files
  // are passed over. kDataLoss as above, and for more ranges than expected.
  Status Add(std::vector<FileRecord>& files, const ExtentTable& rows);
  Status Add(std::vector<FileRecord>& files, std::uint32_t file, const RangeHash& range);
  // Whether every file that was expected got its ranges.
  Status Finish(const std::vector<FileRecord>& files) const;

 private:
  struct Collected {
    std::uint64_t expected = 0;  // 0: none of ours, or done.
    std::vector<RangeHash> ranges;
  };
  std::vector<Collected> files_;  // By number; only as long as the last that is expected.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_FILE_ROOTS_H_
