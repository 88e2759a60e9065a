// SPDX-License-Identifier: Apache-2.0
// Page hashes of a stored range in manifests (docs/format.md, "Page hashes").
#include "shard/page_hash.h"

#include <algorithm>
#include <string_view>

namespace tensormount {
namespace {

// The terminating NUL of both strings is hashed, too.
constexpr std::string_view kMarkDomain{"tensormount pages v1\0", 21};
constexpr std::string_view kBlockDomain{"tensormount page block v1\0", 26};

// Hashes the domain and the hashes in their form on disk: low half, high half, little-endian.
Hash128 HashOfHashes(std::string_view domain, const Hash128& first,
                     std::span<const Hash128> others) {
  Xxh3Stream stream;
  stream.Update(domain.data(), domain.size());
  stream.Update(&first, sizeof(first));
  stream.Update(others.data(), others.size_bytes());
  return stream.Value();
}

}  // namespace

std::uint64_t PagesOfLeaf(std::uint64_t leaf, std::uint64_t length) {
  const std::uint64_t bytes = std::min(kLeafBytes, length - leaf * kLeafBytes);
  return (bytes + kHashPageBytes - 1) / kHashPageBytes;
}

Hash128 PagesMark(const Hash128& chunk_hash) { return HashOfHashes(kMarkDomain, chunk_hash, {}); }

Hash128 PageBlockCheck(const Hash128& leaf, std::span<const Hash128> pages) {
  return HashOfHashes(kBlockDomain, leaf, pages);
}

void AppendPageHashes(std::span<const Hash128> leaves, const Hash128& chunk_hash,
                      std::span<const Hash128> pages, std::vector<Hash128>& out) {
  out.push_back(PagesMark(chunk_hash));
  for (const Hash128& leaf : leaves) {
    const auto block = pages.first(std::min<std::size_t>(pages.size(), kPageBlockHashes - 1));
    out.insert(out.end(), block.begin(), block.end());
    out.push_back(PageBlockCheck(leaf, block));
    pages = pages.subspan(block.size());
  }
}

}  // namespace tensormount
