// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_LEAF_HASH_H_
#define TENSORMOUNT_SHARD_LEAF_HASH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"

namespace tensormount {

// A chunk is hashed in leaves of 64 KiB (the last may be shorter), XXH3-128 each, so that parts of
// it can be verified. The chunk hash is a root over leaves and length, domain-separated:
// XXH3-128("tensormount chunk v1\0" ‖ u64 length ‖ leaves), all little-endian.
//
// 64 KiB: a read of a few bytes proves them by reading that much, and hashes take 1/4096 of the
// data. A chunk of one leaf has the same root as any other of this content and length, so that it
// is checked without fetching leaves from a manifest.
inline constexpr std::uint64_t kLeafBytes = 64 * 1024;

inline std::uint64_t LeafCount(std::uint64_t length) {
  return length / kLeafBytes + (length % kLeafBytes != 0);
}
Hash128 ChunkRoot(std::span<const Hash128> leaves, std::uint64_t length);

// Hashes a chunk whose bytes arrive in order, in pieces of any size.
class LeafHasher {
 public:
  // `leaf_bytes`: kLeafBytes, or kHashPageBytes for page hashes (shard/page_hash.h), of which
  // Root() is not a chunk hash.
  explicit LeafHasher(std::uint64_t leaf_bytes = kLeafBytes) : leaf_bytes_(leaf_bytes) {}
  void Update(const void* data, std::size_t size);
  // Closes the last leaf. Further updates are a programming error: only the last leaf of a chunk
  // may be shorter than the others, or nobody could tell from an offset which leaf it lies in.
  void Finish();
  const std::vector<Hash128>& leaves() const { return leaves_; }
  std::uint64_t length() const { return length_; }
  Hash128 Root() const { return ChunkRoot(leaves_, length_); }

 private:
  const std::uint64_t leaf_bytes_;
  Xxh3Stream stream_;
  std::vector<Hash128> leaves_;
  std::uint64_t length_ = 0;
  std::uint64_t in_leaf_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_LEAF_HASH_H_
