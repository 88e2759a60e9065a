// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_STRETCH_READ_H_
#define TENSORMOUNT_INDEX_READ_STRETCH_READ_H_

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

// Reads a stored range once, from its first byte to its last, for what can be said of all of it:
// leaf hashes, and what it contributes to the digest of its tensor. Keep one for many ranges of one
// thread: it holds a buffer of some MiB. Not thread-safe. Memory: a block of 1 MiB for packed
// chunks, about 4 MiB for interleaved ones.
class StretchReader {
 public:
  // Told of bytes as they come; what is not ok ends the read.
  using Progress = std::function<Status(std::uint64_t bytes)>;

  // Where the read failed, `bytes` says how far it came, and the others mean nothing.
  struct Findings {
    std::vector<Hash128> leaves;
    Crc64 contribution = 0;   // Of the boxes.
    std::uint64_t bytes = 0;  // Read before the end, or the failure.
  };

  // Bytes [offset, offset + length) of the file. `boxes`: what stands in them, placed relative to
  // `offset` (PlaceChunk at 0); empty: no digest is wanted. `byte_shape`: the tensor's. kDataLoss
  // where a box reaches past the range, or the file ends before it; the errno of a read. Where
  // boxes are so interleaved that no buffer holds a step of them, bytes are read twice.
  Status Read(File& file, std::uint64_t offset, std::uint64_t length,
              std::span<const PlacedBox> boxes, const Dims& byte_shape, const Progress& progress,
              Findings& findings);

 private:
  // What of the range is in memory.
  class Window;
  // Kept from range to range, so that it is allocated once a thread.
  std::vector<std::byte> buffer_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_STRETCH_READ_H_
