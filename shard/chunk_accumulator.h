// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_CHUNK_ACCUMULATOR_H_
#define TENSORMOUNT_SHARD_CHUNK_ACCUMULATOR_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tensormount/status.h"

#include "base/hash.h"
#include "shard/leaf_hash.h"
#include "shard/value_counts.h"

namespace tensormount {

// Length and hashes of a stored range: a chunk of a tensor, a part of an object, a header. The code
// that writes, copies or verifies whole ranges computes them with the functions of this file.
struct ChunkHashes {
  std::uint64_t length = 0;
  Hash128 root;  // The root over leaves and length (ChunkRoot).
  std::vector<Hash128> leaves;
  std::vector<Hash128> pages;  // One per 4 KiB (shard/page_hash.h); empty if not requested.
  std::optional<ValueCounts> counts;  // If requested, and the values of the dtype can be counted.

  // Appends the hashes to those of a manifest, in the order of docs/format.md: the leaves, and, if
  // there are page hashes, the mark and the blocks of shard/page_hash.h. The row of the counts is
  // not appended.
  void AppendTo(std::vector<Hash128>& manifest) const;
};

// Computes ChunkHashes of bytes that arrive in order, in pieces of any size. Not thread-safe.
class ChunkAccumulator {
 public:
  enum class Pages { kNone, kHashed };
  // `values`: the dtype of the elements, whose values are counted, too.
  explicit ChunkAccumulator(Pages pages = Pages::kNone, std::optional<DType> values = std::nullopt);

  void Update(const void* data, std::size_t size);
  // Ends the range and returns its hashes. The accumulator is then empty, for the next range.
  ChunkHashes Finish();

 private:
  LeafHasher leaves_;
  std::optional<LeafHasher> pages_;
  std::optional<ValueCounter> values_;
};

// The hashes of a range that is completely in memory.
ChunkHashes HashChunk(const void* data, std::size_t size);

// Passes `length` bytes through `buffer` (not empty), block by block: read(at, block) fills a block
// with the bytes from `at` on, then use(at, block) is called. Both return Status; the first failure
// ends the pass.
template <typename Read, typename Use>
Status PassBytes(std::uint64_t length, std::span<std::byte> buffer, const Read& read,
                 const Use& use) {
  for (std::uint64_t at = 0; at < length;) {
    const std::span<std::byte> block =
        buffer.first(static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), length - at)));
    TENSORMOUNT_RETURN_IF_ERROR(read(at, block));
    TENSORMOUNT_RETURN_IF_ERROR(use(at, block));
    at += block.size();
  }
  return Status();
}

// Like PassBytes for one stored range, and returns its hashes: each block is hashed after it was
// read and before it is used.
template <typename Read, typename Use>
Result<ChunkHashes> PassChunk(std::uint64_t length, std::span<std::byte> buffer, const Read& read,
                              const Use& use) {
  ChunkAccumulator hashes;
  TENSORMOUNT_RETURN_IF_ERROR(
      PassBytes(length, buffer, read, [&](std::uint64_t at, std::span<const std::byte> block) {
        hashes.Update(block.data(), block.size());
        return use(at, block);
      }));
  return hashes.Finish();
}

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_CHUNK_ACCUMULATOR_H_
