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
#include "index/read/stretch_read.h"
#include "index/records/inventory.h"

// The one way to read all that a checkpoint has stored, each byte once: `verify` compares what a
// scan finds with the hashes of the records, `verify` of a foreign checkpoint only wants the bytes
// to be readable, and adoption writes down the hashes that it finds.

// A scan reads each stored range once, hashes its leaves, and takes what it contributes to the
// digest of its tensor; it judges nothing. What cannot be read is a finding and not an error, so
// that verify can go on; whoever wants to stop says so from the visit.
namespace tensormount {

// Bytes that stand side by side in a data file: a chunk of a tensor, a part of an object, or what
// belongs to neither.
// Plain numbers, since there may be millions: the names and regions stay in the inventory.
struct ScanRange {
  enum class Kind : std::uint8_t { kChunk, kObject, kExtra };
  Kind kind = Kind::kChunk;
  std::uint32_t owner = 0;  // The number of the tensor, object part or extra range.
  std::uint32_t row = 0;    // Of a chunk: in the extents of its tensor.
  std::uint32_t file = kNoFile;
  std::uint64_t offset = 0;  // In the file.
  std::uint64_t length = 0;
  // Whether what a chunk contributes to the digest of its tensor is wanted; it costs a second pass
  // over bytes that are in cache.
  bool digest = true;
};

// All of them: the chunks of each tensor, then object parts, then extra ranges. A row of extents
// that cannot be decoded is a range without a file, of which a scan tells why.
// The order is fixed, and callers rely on it: adopt gives hashes back by position.
std::vector<ScanRange> RangesOf(const Inventory& inventory);

// "tensor w [0:16, :]", "object rng part [1]", "header".
std::string RangeName(const Inventory& inventory, const ScanRange& range);

// What was found in a range.
struct ScanFinding {
  // What could not be done, and why; `failure` is ok with kNone alone.
  enum class Step : std::uint8_t {
    kNone,
    kRecord,  // Its record says nothing that can be read: no file, no region.
    kOpen,    // Its file does not open.
    kRead,    // Its bytes end, or could not be read, read.bytes behind its first.
    kCheck,   // Its file is not, or not for certain, what it was when it was opened.
  };
  Step step = Step::kNone;
  Status failure;
  // Leaves of all of its bytes, where nothing failed. The contribution to a digest is 0 for what is
  // no chunk, and for items that are pending still: where in them the tensor is, nobody knows.
  StretchReader::Findings read;
};

// Memory: a buffer of some MiB a thread, and an open file each. Neither grows with the checkpoint.
class Scan {
 public:
  // Both are called on several threads.
  // Two functions, because files of a stored checkpoint, of a foreign one, and of one that is
  // verified without opening it are opened in different ways.
  struct Files {
    std::function<Result<std::unique_ptr<File>>(std::uint32_t file)> open;
    // Whether the file is still what it was: called after bytes of it were read.
    std::function<Status(std::uint32_t file, File& open)> check;
  };
  // Told of each range once, on some thread, by its position in the vector. Not ok ends the scan.
  using Visit = std::function<Status(std::size_t position, ScanFinding& found)>;

  // `inventory` must outlive this. `threads`: 0 as many as cores. `watch` may be empty.
  Scan(const Inventory& inventory, Files files, int threads, Watch watch)
      : inventory_(inventory),
        files_(std::move(files)),
        threads_(threads),
        watch_(std::move(watch)) {}

  // Reads the ranges, which are of the inventory, in the order in which they stand in files: what
  // storage likes best, and each thread keeps open the file of the range before. The failure of
  // `visit` or of the watch, or kResourceExhausted where memory ran out.
  Status Run(const std::vector<ScanRange>& ranges, const Visit& visit);
  // Read in the last run, in whole blocks.
  std::uint64_t bytes() const { return done_; }

 private:
  // What a thread keeps from one range to the next.
  struct Worker;
  // Fills `found`, whatever happens.
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
