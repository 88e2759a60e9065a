// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_SCAN_H_
#define TENSORMOUNT_INDEX_READ_SCAN_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/watch.h"
#include "index/read/stored_range_scanner.h"
#include "index/records/inventory.h"

// Reads all data that a checkpoint stores, range by range. `verify` compares the findings with the
// recorded hashes (for a foreign checkpoint it only checks that the bytes are readable). Adoption
// records the hashes.

// A scan hashes the leaves of each range and computes the range's contribution to the tensor's
// digest, but compares nothing. Unreadable data are a finding and not an error, so that verify
// continues. A Visit function can end the scan.
namespace tensormount {

// One stored range of a data file. Plain numbers, because there may be millions of ranges; names
// and regions stay in the inventory.
struct ScanRange {
  enum class Kind : std::uint8_t { kChunk, kObject, kExtra };
  Kind kind = Kind::kChunk;
  std::uint32_t owner = 0;  // Number of the tensor, object part or extra range.
  std::uint32_t row = 0;    // kChunk: table row in the tensor's extents.
  std::uint32_t file = kNoFile;
  std::uint64_t offset = 0;  // Offset in the file.
  std::uint64_t length = 0;
  // Whether to compute the chunk's contribution to its tensor's digest, which takes a second pass
  // over bytes in the cache.
  bool digest = true;
};

// All stored ranges in a fixed order: chunks by tensor, then object parts, then extra ranges.
// Adoption relies on the order. A table row that cannot be decoded becomes a range without a file,
// and its finding has the reason.
std::vector<ScanRange> RangesOf(const Inventory& inventory);

// Name of a range for messages: "tensor w [0:16, 0:256]", "object rng part [1]", "header".
std::string RangeName(const Inventory& inventory, const ScanRange& range);

// The result for one range.
struct ScanFinding {
  // The step that failed. `failure` is OK only with kNone.
  enum class Step : std::uint8_t {
    kNone,
    kRecord,  // The record has no valid file or region.
    kOpen,    // The file cannot be opened.
    // A read failed or the file ended, at byte read.bytes of the range; or a box exceeds the range.
    kRead,
    // The file changed since it was opened, or whether it changed could not be checked.
    kCheck,
  };
  Step step = Step::kNone;
  Status failure;
  // Leaf hashes of the whole range if nothing failed. The contribution to the digest is 0 without
  // ScanRange::digest, for objects and extra ranges, and for pending chunks, whose position in
  // their item is unknown.
  StoredRangeScanner::Findings read;
};

// Reads stored ranges on several threads. Each thread needs a buffer of some MiB and an open file,
// whatever the checkpoint's size.
class Scan {
 public:
  // Functions that open and check files. Stored checkpoints, foreign checkpoints, and checkpoints
  // that verify reads without opening have different ones. They are called on several threads.
  struct Files {
    std::function<Result<std::unique_ptr<File>>(std::uint32_t file)> open;
    // Called after a read. Returns OK if the file is unchanged.
    std::function<Status(std::uint32_t file, File& open)> check;
  };
  // Called once for each range, on some thread, with the position of the range in the vector. A
  // failure ends the scan.
  using Visit = std::function<Status(std::size_t position, ScanFinding& found)>;

  // `inventory` must outlive this object. `threads` is the number of threads, 0 for the number of
  // cores. `watch` may be empty.
  Scan(const Inventory& inventory, Files files, int threads, Watch watch)
      : inventory_(inventory),
        files_(std::move(files)),
        threads_(threads),
        watch_(std::move(watch)) {}

  // Reads the ranges, which must be of the inventory, in file order. That order is best for
  // storage, and each thread keeps its file open for the next range. Returns the failure of `visit`
  // or the watch, or kResourceExhausted if memory runs out.
  Status Run(const std::vector<ScanRange>& ranges, const Visit& visit);
  // Number of bytes that the last Run has read.
  std::uint64_t bytes() const { return done_; }

 private:
  // State that a thread keeps between ranges.
  struct Worker;
  void Read(const ScanRange& range, Worker& worker, ScanFinding& found);

  const Inventory& inventory_;
  const Files files_;
  const int threads_;
  const Watch watch_;
  std::atomic<std::uint64_t> done_{0};
  std::uint64_t total_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_SCAN_H_
