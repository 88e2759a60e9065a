// SPDX-License-Identifier: Apache-2.0
// Hashes of a stored range by leaves of 64 KiB, and the root over them (docs/format.md, "Hashes").
#include "shard/leaf_hash.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/coding.h"

namespace tensormount {

Hash128 ChunkRoot(std::span<const Hash128> leaves, std::uint64_t length) {
  using namespace std::string_view_literals;
  ByteWriter head;
  head.Raw("tensormount chunk v1\0"sv.data(), 21);
  head.U64(length);
  Xxh3Stream stream;
  stream.Update(head.bytes().data(), head.size());
  // A Hash128 in memory has the form on disk (low half, high half, little-endian), so the leaves
  // are hashed as they are.
  static_assert(sizeof(Hash128) == 16);
  stream.Update(leaves.data(), leaves.size_bytes());
  return stream.Value();
}

void LeafHasher::Update(const void* data, std::size_t size) {
  const auto* at = static_cast<const std::byte*>(data);
  length_ += size;
  while (size > 0) {
    // A whole leaf in one call, which is faster than the stream and copies nothing.
    if (in_leaf_ == 0 && size >= leaf_bytes_) {
      leaves_.push_back(Xxh3(at, leaf_bytes_));
      at += leaf_bytes_;
      size -= leaf_bytes_;
      continue;
    }
    const std::size_t n = std::min<std::size_t>(size, leaf_bytes_ - in_leaf_);
    stream_.Update(at, n);
    in_leaf_ += n;
    at += n;
    size -= n;
    if (in_leaf_ == leaf_bytes_) CloseLeaf();
  }
}

void LeafHasher::CloseLeaf() {
  if (in_leaf_ == 0) return;
  leaves_.push_back(stream_.Value());
  stream_.Reset();
  in_leaf_ = 0;
}

std::vector<Hash128> LeafHasher::Take() {
  CloseLeaf();
  length_ = 0;
  return std::exchange(leaves_, {});
}

}  // namespace tensormount
