// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_LEAF_SECTION_H_
#define TENSORMOUNT_INDEX_RECORDS_LEAF_SECTION_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/hash.h"
#include "index/records/inventory.h"
#include "shard/value_counts.h"

// What the leaf section of a manifest has besides leaf hashes (docs/format.md, "Page hashes" and
// "Value counts"). Records do not point there: it is found from the leaves of a range. All
// functions accept untrusted records and hashes.

namespace tensormount {

// Which kinds a manifest has. The bits of its header say so.
struct LeafExtras {
  bool pages = false;   // Page hashes follow the leaves of some ranges.
  bool counts = false;  // A row of value counts follows the hashes of each hashed chunk.
};

// Position after the leaf hashes, and page hashes if there are any, of the range of `length` bytes
// whose leaves begin at `first`. nullopt if the section ends before its leaves do.
std::optional<std::uint64_t> EndOfHashes(std::span<const Hash128> section, LeafExtras extras,
                                         std::uint64_t first, std::uint64_t length,
                                         const Hash128& hash);

// Number of page hashes of a range of `length` bytes that has them, with mark and checks.
std::uint64_t PageHashesOf(std::uint64_t length);

// The value counts of a chunk, with a length and first leaf in this section. nullopt: not known, or
// the row is malformed, or counts more values than the chunk has.
std::optional<ValueCounts> CountsOfChunk(std::span<const Hash128> section, LeafExtras extras,
                                         const TensorMeta& meta, std::uint64_t first,
                                         std::uint64_t length, const Hash128& hash);

// Sets TensorRecord::counts of every tensor of a writer's manifest to the sum over its chunks.
void SumCounts(std::span<const Hash128> section, LeafExtras extras, Inventory& inventory);

// The sums at the end of the coordinator's manifest: appends TensorRecord::counts of all tensors.
void AppendTotals(std::span<const TensorRecord> tensors, std::vector<Hash128>& section);
// Length in hashes of the totals at the end of a section of `size` hashes, if `trailer`, its last
// two hashes, can belong to totals of that length.
inline constexpr std::uint64_t kTotalsTrailerHashes = 2;
std::optional<std::uint64_t> TotalsLength(std::span<const Hash128> trailer, std::uint64_t size);
// Decodes totals, trailer included: the counts by position of the tensor. nullopt if they are
// damaged.
std::optional<std::vector<std::optional<ValueCounts>>> DecodeTotals(
    std::span<const Hash128> totals);

// Sets TensorRecord::counts of every tensor of the coordinator's manifest, whose leaf section ends
// with the totals. Damaged totals set none.
void TakeTotals(std::span<const Hash128> section, Inventory& inventory);

// Whether counts that were read can be those of `values` values.
bool CountsFit(const ValueCounts& counts, std::uint64_t values);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_LEAF_SECTION_H_
