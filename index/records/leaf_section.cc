// SPDX-License-Identifier: Apache-2.0
// Page hashes and value counts in the leaf section of a manifest. Readers that do not know them
// skip them, because no record points there.
#include "index/records/leaf_section.h"

#include <string_view>

#include "base/checked.h"
#include "index/records/extent_row.h"
#include "shard/page_hash.h"

namespace tensormount {
namespace {

// The terminating NUL is hashed, too.
constexpr std::string_view kTotalsDomain{"tensormount counts v1\0", 22};

Hash128 HashOfTotals(std::span<const Hash128> rows_and_sizes) {
  Xxh3Stream stream;
  stream.Update(kTotalsDomain.data(), kTotalsDomain.size());
  stream.Update(rows_and_sizes.data(), rows_and_sizes.size_bytes());
  return stream.Value();
}

}  // namespace

std::optional<std::uint64_t> EndOfHashes(std::span<const Hash128> section, LeafExtras extras,
                                         std::uint64_t first, std::uint64_t length,
                                         const Hash128& hash) {
  const std::uint64_t leaves = LeafCount(length);
  if (!RangeWithin(first, leaves, section.size())) return std::nullopt;
  const std::uint64_t end = first + leaves;
  if (!extras.pages || length <= kLeafBytes || end >= section.size() ||
      section[end] != PagesMark(hash)) {
    return end;
  }
  const std::uint64_t pages = PageHashesOf(length);
  return RangeWithin(end, pages, section.size()) ? end + pages : end;
}

std::uint64_t PageHashesOf(std::uint64_t length) {
  const std::uint64_t leaves = LeafCount(length);
  if (leaves == 0) return 0;
  return 1 + (leaves - 1) * kPageBlockHashes + PagesOfLeaf(leaves - 1, length) + 1;
}

bool CountsFit(const ValueCounts& counts, std::uint64_t values) {
  // Each number is compared before it is subtracted, so nothing overflows.
  for (const std::uint64_t some : {counts.zeros, counts.nan, counts.posinf, counts.neginf}) {
    if (some > values) return false;
    values -= some;
  }
  return true;
}

std::optional<ValueCounts> CountsOfChunk(std::span<const Hash128> section, LeafExtras extras,
                                         const TensorMeta& meta, std::uint64_t first,
                                         std::uint64_t length, const Hash128& hash) {
  if (!extras.counts) return std::nullopt;
  const std::optional<std::uint64_t> end = EndOfHashes(section, extras, first, length, hash);
  if (!end) return std::nullopt;
  const std::optional<CountsRow> row =
      DecodeCountsRow(section.subspan(static_cast<std::size_t>(*end)));
  if (!row || !row->counts) return std::nullopt;
  // Elements have 4 bits or whole bytes; a tensor has at most 2^63 - 1 bits.
  const std::uint64_t bits = meta.bits();
  const std::uint64_t elements = bits < 8 ? length * 2 : length / (bits / 8);
  return CountsFit(*row->counts, ValuesIn(meta.dtype(), elements)) ? row->counts : std::nullopt;
}

void SumCounts(std::span<const Hash128> section, LeafExtras extras, Inventory& inventory) {
  for (TensorRecord& tensor : inventory.tensors) {
    tensor.counts.reset();
    if (!extras.counts || !CanCount(tensor.meta.dtype())) continue;
    std::optional<ValueCounts> sum(std::in_place);
    for (std::size_t i = 0; i < tensor.extents.size() && sum; ++i) {
      const char* row = tensor.extents.Row(i).data();
      const bool hashed = (extent_row::Flags(row) & extent_row::kHasHash) != 0;
      const bool strided = (extent_row::Flags(row) & extent_row::kStrided) != 0;
      const Hash128 hash = {LoadLittle<std::uint64_t>(row + extent_row::kHash),
                            LoadLittle<std::uint64_t>(row + extent_row::kHash + 8)};
      const std::optional<ValueCounts> some =
          hashed && !strided
              ? CountsOfChunk(section, extras, tensor.meta,
                              LoadLittle<std::uint64_t>(row + extent_row::kFirstLeaf),
                              LoadLittle<std::uint64_t>(row + extent_row::kLength), hash)
              : std::nullopt;
      if (!some) {
        sum.reset();
      } else {
        sum->Add(*some);
      }
    }
    tensor.counts = sum;
  }
}

void AppendTotals(std::span<const TensorRecord> tensors, std::vector<Hash128>& section) {
  const std::size_t begin = section.size();
  for (const TensorRecord& tensor : tensors) AppendCountsRow(tensor.counts, section);
  section.push_back({section.size() - begin, tensors.size()});
  section.push_back(HashOfTotals(std::span(section).subspan(begin)));
}

void TakeTotals(std::span<const Hash128> section, Inventory& inventory) {
  for (TensorRecord& tensor : inventory.tensors) tensor.counts.reset();
  if (section.size() < kTotalsTrailerHashes) return;
  const std::optional<std::uint64_t> length =
      TotalsLength(section.last(kTotalsTrailerHashes), section.size());
  if (!length) return;
  const auto totals = DecodeTotals(section.last(static_cast<std::size_t>(*length)));
  if (!totals || totals->size() != inventory.tensors.size()) return;
  for (std::size_t i = 0; i < totals->size(); ++i) inventory.tensors[i].counts = (*totals)[i];
}

std::optional<std::uint64_t> TotalsLength(std::span<const Hash128> trailer, std::uint64_t size) {
  if (trailer.size() != kTotalsTrailerHashes || size < kTotalsTrailerHashes) return std::nullopt;
  const std::uint64_t rows = trailer[0].low;
  const std::uint64_t tensors = trailer[0].high;
  // A row takes one or three hashes.
  if (rows > size - kTotalsTrailerHashes || rows < tensors) return std::nullopt;
  return rows + kTotalsTrailerHashes;
}

std::optional<std::vector<std::optional<ValueCounts>>> DecodeTotals(
    std::span<const Hash128> totals) {
  if (totals.size() < kTotalsTrailerHashes) return std::nullopt;
  const std::uint64_t tensors = totals[totals.size() - 2].high;
  if (TotalsLength(totals.last(kTotalsTrailerHashes), totals.size()) != totals.size() ||
      HashOfTotals(totals.first(totals.size() - 1)) != totals.back()) {
    return std::nullopt;
  }
  std::span<const Hash128> rows = totals.first(totals.size() - kTotalsTrailerHashes);
  std::vector<std::optional<ValueCounts>> all;
  all.reserve(static_cast<std::size_t>(tensors));
  while (!rows.empty()) {
    const std::optional<CountsRow> row = DecodeCountsRow(rows);
    if (!row) return std::nullopt;
    all.push_back(row->counts);
    rows = rows.subspan(row->hashes);
  }
  if (all.size() != tensors) return std::nullopt;
  return all;
}

}  // namespace tensormount
