// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_LEAF_HASH_H_
#define TENSORMOUNT_SHARD_LEAF_HASH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"

namespace tensormount {

// A chunk is hashed in leaves of 64 KiB (the last may be shorter), XXH3-128 each, so that parts of
// the chunk can be verified. The chunk hash is a root over leaves and length, domain-separated:
// XXH3-128("tensormount chunk v1\0" ‖ u64 length ‖ leaves), all little-endian.
//
// Why 64 KiB: verifying a few bytes reads one leaf, and hashes take 1/4096 of the data. The root of
// a chunk of one leaf depends on the chunk's content and length only, so such a chunk is verified
// without fetching leaves from a manifest.
inline constexpr std::uint64_t kLeafBytes = 64 * 1024;

inline std::uint64_t LeafCount(std::uint64_t length) {
  return length / kLeafBytes + (length % kLeafBytes != 0);
}
Hash128 ChunkRoot(std::span<const Hash128> leaves, std::uint64_t length);

// Hashes bytes that arrive in order, in pieces of any size, by leaves of one size; only the last
// may be shorter. Stored ranges are hashed with ChunkAccumulator, which uses LeafHasher.
class LeafHasher {
 public:
  // `leaf_bytes`: kLeafBytes, or kHashPageBytes for page hashes (shard/page_hash.h).
  explicit LeafHasher(std::uint64_t leaf_bytes) : leaf_bytes_(leaf_bytes) {}
  void Update(const void* data, std::size_t size);
  std::uint64_t length() const { return length_; }  // Number of bytes so far.
  // The hashes of all leaves, the last one included. The hasher is then empty.
  std::vector<Hash128> Take();

 private:
  void CloseLeaf();

  const std::uint64_t leaf_bytes_;
  Xxh3Stream stream_;
  std::vector<Hash128> leaves_;
  std::uint64_t length_ = 0;
  std::uint64_t in_leaf_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_LEAF_HASH_H_
