// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_STORED_RANGE_SCANNER_H_
#define TENSORMOUNT_INDEX_READ_STORED_RANGE_SCANNER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// Reads a stored range from its first byte to its last, and computes its leaf hashes and its
// contribution to the tensor's digest. Keeps a buffer (1 MiB for packed chunks, about 4 MiB for
// interleaved ones), so use one object for many ranges. Not thread-safe.
class StoredRangeScanner {
 public:
  // Called with the number of bytes that a read returned. A failure ends the scan of the range.
  using Progress = std::function<Status(std::uint64_t bytes)>;

  // Result for one range. After a failure only `bytes` is valid.
  struct Findings {
    std::vector<Hash128> leaves;
    Crc64 contribution = 0;   // Digest of the boxes.
    std::uint64_t bytes = 0;  // Bytes read before the end or the failure.
  };

  // Reads bytes [offset, offset + length) of the file. `boxes` are the tensor's boxes in these
  // bytes, placed relative to `offset` (the result of PlaceChunk for offset 0); if empty, no digest
  // is computed. `byte_shape` is the tensor's byte shape. kDataLoss if a box exceeds the range, or
  // if the file is too short; or the errno of a read, or the failure of `progress`. Bytes are read
  // twice if boxes are too interleaved for the buffer.
  Status Read(File& file, std::uint64_t offset, std::uint64_t length,
              std::span<const PlacedBox> boxes, const Dims& byte_shape, const Progress& progress,
              Findings& findings);

 private:
  // The part of the range that is in memory.
  class Window;
  // Buffer that is kept between ranges to save allocations.
  std::vector<std::byte> buffer_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_STORED_RANGE_SCANNER_H_
