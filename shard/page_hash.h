// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_PAGE_HASH_H_
#define TENSORMOUNT_SHARD_PAGE_HASH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"
#include "shard/leaf_hash.h"

// Page hashes (docs/format.md): what proves 4 KiB of a leaf without the other 60. They stand behind
// the leaves of their range: a mark, and then a block for each leaf, of its page hashes and a check
// that binds them to the leaf.
namespace tensormount {

inline constexpr std::uint64_t kHashPageBytes = 4096;
// Hashes that a whole leaf takes: its pages and their check. That of a shorter last leaf has fewer.
inline constexpr std::uint64_t kPageBlockHashes = kLeafBytes / kHashPageBytes + 1;

// Of leaf number `leaf` of a range of `length` bytes: 1 to 16.
std::uint64_t PagesOfLeaf(std::uint64_t leaf, std::uint64_t length);

// What stands right behind the leaves of a range that has page hashes.
Hash128 PagesMark(const Hash128& chunk_hash);
Hash128 PageBlockCheck(const Hash128& leaf, std::span<const Hash128> pages);

// The mark and all blocks of a range behind `out`. `pages`: of all of the range, one after another.
void AppendPageHashes(std::span<const Hash128> leaves, const Hash128& chunk_hash,
                      std::span<const Hash128> pages, std::vector<Hash128>& out);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_PAGE_HASH_H_
