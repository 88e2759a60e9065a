// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_PAGE_HASH_H_
#define TENSORMOUNT_SHARD_PAGE_HASH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"
#include "shard/leaf_hash.h"

// Page hashes (docs/format.md) verify 4 KiB of a leaf without the other 60 KiB. In a manifest they
// follow the leaves of their range: a mark, then for each leaf a block of its page hashes and a
// check that binds them to the leaf.
namespace tensormount {

inline constexpr std::uint64_t kHashPageBytes = 4096;
// Number of hashes in the block of a whole leaf: its pages and the check. The block of a shorter
// last leaf has fewer.
inline constexpr std::uint64_t kPageBlockHashes = kLeafBytes / kHashPageBytes + 1;

// Number of pages of leaf `leaf` in a range of `length` bytes: 1 to 16.
std::uint64_t PagesOfLeaf(std::uint64_t leaf, std::uint64_t length);

// The mark that directly follows the leaves of a range with page hashes.
Hash128 PagesMark(const Hash128& chunk_hash);
Hash128 PageBlockCheck(const Hash128& leaf, std::span<const Hash128> pages);

// Appends the mark and all blocks of a range to `out`. `pages`: the page hashes of the whole range,
// in order.
void AppendPageHashes(std::span<const Hash128> leaves, const Hash128& chunk_hash,
                      std::span<const Hash128> pages, std::vector<Hash128>& out);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_PAGE_HASH_H_
