// SPDX-License-Identifier: Apache-2.0
#include "index/records/leaf_section.h"

#include <vector>

#include "base/file_system.h"
#include "index/records/manifest.h"
#include "shard/chunk_accumulator.h"
#include "shard/page_hash.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// A manifest of one tensor w of u8, in chunks that are hashed with and without pages.
struct Written {
  Inventory inventory;
  std::vector<Hash128> leaves;
  std::vector<ChunkRecord> chunks;
};
Written WriteChunks(Random& rnd, const std::vector<std::size_t>& sizes) {
  Written out;
  out.inventory.files.push_back({"data/a.bin", Placement::kPack, 0, {}});
  std::int64_t elements = 0;
  for (const std::size_t size : sizes) elements += static_cast<std::int64_t>(size);
  TensorRecord& tensor =
      out.inventory.tensors.emplace_back(TensorMeta::Make("w", DType::kU8, Dims{elements}).value());
  std::int64_t at = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::string bytes = rnd.Bytes(sizes[i]);
    bytes[0] = 0;
    const bool pages = sizes[i] > kLeafBytes && i % 2 == 0;
    ChunkAccumulator accumulator(
        pages ? ChunkAccumulator::Pages::kHashed : ChunkAccumulator::Pages::kNone, DType::kU8);
    accumulator.Update(bytes.data(), bytes.size());
    const ChunkHashes hashes = accumulator.Finish();
    ChunkRecord chunk;
    chunk.region = Region(Box::Make({at}, {static_cast<std::int64_t>(sizes[i])}).value());
    chunk.offset = static_cast<std::uint64_t>(at);
    chunk.length = sizes[i];
    chunk.hash = hashes.root;
    chunk.first_leaf = out.leaves.size();
    hashes.AppendTo(out.leaves);
    // Every third chunk is of unknown values.
    AppendCountsRow(i % 3 == 2 ? std::nullopt : hashes.counts, out.leaves);
    tensor.extents.Append(chunk);
    out.chunks.push_back(chunk);
    at += static_cast<std::int64_t>(sizes[i]);
  }
  out.inventory.files[0].length = static_cast<std::uint64_t>(at);
  return out;
}

TEST(LeafSection, CountsOfChunksAreFoundAndSummed) {
  Random rnd(TestSeed());
  TempDir dir;
  const Written two = WriteChunks(rnd, {200'000, 70'000});
  ASSERT_OK_AND_ASSIGN(const std::string bytes,
                       EncodeManifest(two.inventory, two.leaves, {.pages = true, .counts = true}));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, DecodeManifest(bytes, "m"));
  ASSERT_TRUE(manifest.inventory.tensors[0].counts.has_value());
  std::uint64_t zeros = 0;
  WriteWholeFile(dir.Join("m.tmm"), bytes);
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().OpenRead(dir.Join("m.tmm")));
  for (const ChunkRecord& chunk : two.chunks) {
    ASSERT_OK_AND_ASSIGN(const auto counts,
                         ReadManifestCounts(*file, manifest.inventory.tensors[0].meta, chunk));
    ASSERT_TRUE(counts.has_value());
    EXPECT_GT(counts->zeros, 0u);
    zeros += counts->zeros;
  }
  EXPECT_EQ(manifest.inventory.tensors[0].counts->zeros, zeros);
}

TEST(LeafSection, CountsOfATensorAreUnknownIfThoseOfAChunkAre) {
  Random rnd(TestSeed());
  const Written three = WriteChunks(rnd, {100'000, 10, 30});
  for (const bool counts : {true, false}) {
    ASSERT_OK_AND_ASSIGN(
        const std::string bytes,
        EncodeManifest(three.inventory, three.leaves, {.pages = true, .counts = counts}));
    ASSERT_OK_AND_ASSIGN(const Manifest manifest, DecodeManifest(bytes, "m"));
    EXPECT_FALSE(manifest.inventory.tensors[0].counts.has_value());
  }
}

TEST(LeafSection, RowsThatCannotBeAreUnknown) {
  const TensorMeta meta = TensorMeta::Make("w", DType::kF32, Dims{4}).value();
  const Hash128 hash = {1, 2};
  const auto read = [&](std::vector<Hash128> row) {
    row.insert(row.begin(), Hash128{});  // The leaf.
    return CountsOfChunk(row, {.counts = true}, meta, 0, 16, hash);
  };
  EXPECT_TRUE(read({{4, 0}}).has_value());
  EXPECT_FALSE(read({{5, 0}}).has_value());  // More zeros than values.
  EXPECT_FALSE(read({}).has_value());
  const std::uint64_t is_long = std::uint64_t{1} << 63;
  EXPECT_TRUE(read({{is_long | 1, 0}, {1, 1}, {1, 0}}).has_value());
  EXPECT_FALSE(read({{is_long | 1, 0}, {1, 1}, {2, 0}}).has_value());
  EXPECT_FALSE(read({{is_long | 1, 0}, {~std::uint64_t{0}, 1}, {2, 0}}).has_value());
  EXPECT_FALSE(read({{is_long | 1, 0}, {1, 1}}).has_value());
  EXPECT_FALSE(CountsOfChunk({}, {.counts = true}, meta, ~std::uint64_t{0}, 16, hash).has_value());
}

TEST(LeafSection, DamagedTotalsAreNotRead) {
  std::vector<TensorRecord> tensors;
  for (int i = 0; i < 3; ++i) {
    TensorRecord& tensor = tensors.emplace_back(
        TensorMeta::Make("w" + std::to_string(i), DType::kF32, Dims{4}).value());
    if (i != 1) tensor.counts = ValueCounts{.zeros = 1, .nan = i == 2 ? 1u : 0u};
  }
  std::vector<Hash128> section = {{7, 7}};  // A leaf.
  AppendTotals(tensors, section);
  EXPECT_EQ(section.size(), 1u + 1 + 1 + 3 + kTotalsTrailerHashes);
  const auto length = TotalsLength(std::span(section).last(kTotalsTrailerHashes), section.size());
  ASSERT_EQ(length, section.size() - 1);
  const std::vector<Hash128> totals(section.begin() + 1, section.end());
  const auto read = DecodeTotals(totals);
  ASSERT_TRUE(read.has_value());
  for (std::size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ((*read)[i], tensors[i].counts);
  for (std::size_t i = 0; i < totals.size(); ++i) {
    for (const bool high : {false, true}) {
      std::vector<Hash128> bad = totals;
      (high ? bad[i].high : bad[i].low) ^= 1;
      EXPECT_FALSE(DecodeTotals(bad).has_value()) << i;
    }
  }
  for (const std::uint64_t rows : {std::uint64_t{9}, ~std::uint64_t{0}}) {
    EXPECT_FALSE(TotalsLength(std::vector<Hash128>{{rows, 0}, {}}, 8).has_value());
  }
}

}  // namespace
}  // namespace tensormount
