// SPDX-License-Identifier: Apache-2.0
#include "shard/leaf_hash.h"

#include <cstring>
#include <span>
#include <string_view>

#include "shard/chunk_accumulator.h"
#include "shard/page_hash.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

TEST(LeafHashTest, RootMatchesTheFormatSpecification) {
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}};
  std::string bytes("tensormount chunk v1\0", 21);
  const std::uint64_t words[] = {70'000, 1, 2, 3, 4};
  bytes.append(reinterpret_cast<const char*>(words), sizeof(words));
  EXPECT_EQ(ChunkRoot(leaves, 70'000), Xxh3(bytes));
  EXPECT_NE(ChunkRoot(leaves, 70'000), ChunkRoot(leaves, 70'001));
  EXPECT_NE(ChunkRoot({}, 0), ChunkRoot(leaves, 0));
}

TEST(LeafHashTest, CountsLeaves) {
  EXPECT_EQ(LeafCount(0), 0u);
  EXPECT_EQ(LeafCount(1), 1u);
  EXPECT_EQ(LeafCount(65'536), 1u);
  EXPECT_EQ(LeafCount(65'537), 2u);
  EXPECT_EQ(LeafCount(~std::uint64_t{0}), std::uint64_t{1} << 48);
}

TEST(LeafHashTest, PiecesOfAnySizeGiveTheSameLeaves) {
  Random rnd(TestSeed());
  for (const std::size_t size : {0u, 1u, 65'535u, 65'536u, 65'537u, 131'072u, 300'000u}) {
    const std::string data = rnd.Bytes(size);
    std::vector<Hash128> expected;
    for (std::size_t at = 0; at < size; at += kLeafBytes) {
      expected.push_back(Xxh3(std::string_view(data).substr(at, kLeafBytes)));
    }
    std::vector<Hash128> pages;
    for (std::size_t at = 0; at < size; at += kHashPageBytes) {
      pages.push_back(Xxh3(std::string_view(data).substr(at, kHashPageBytes)));
    }
    for (int round = 0; round < 4; ++round) {
      ChunkAccumulator accumulator(round % 2 == 0 ? ChunkAccumulator::Pages::kNone
                                                  : ChunkAccumulator::Pages::kHashed);
      std::size_t at = 0;
      while (at < size) {
        const auto n = static_cast<std::size_t>(
            rnd.Int(0, std::min<std::int64_t>(static_cast<std::int64_t>(size - at),
                                              round == 0 ? 400'000 : 90'000)));
        accumulator.Update(data.data() + at, n);
        at += n;
      }
      const ChunkHashes hashes = accumulator.Finish();
      EXPECT_EQ(hashes.leaves, expected) << size;
      EXPECT_EQ(hashes.length, size);
      EXPECT_EQ(hashes.root, ChunkRoot(expected, size));
      EXPECT_EQ(hashes.pages, round % 2 == 0 ? std::vector<Hash128>() : pages) << size;
      // The accumulator is empty again.
      accumulator.Update("abc", 3);
      const ChunkHashes next = accumulator.Finish();
      EXPECT_EQ(next.leaves, std::vector<Hash128>{Xxh3("abc")});
      EXPECT_EQ(next.length, 3u);
    }
    EXPECT_EQ(HashChunk(data.data(), data.size()).root, ChunkRoot(expected, size));
  }
}

// Leaves, mark, then a block for each leaf, as docs/format.md has them.
TEST(LeafHashTest, ManifestHashesAreLeavesThenPages) {
  const std::string data = Random(TestSeed()).Bytes(kLeafBytes + kHashPageBytes + 1);
  ChunkAccumulator accumulator(ChunkAccumulator::Pages::kHashed);
  accumulator.Update(data.data(), data.size());
  const ChunkHashes hashes = accumulator.Finish();
  std::vector<Hash128> manifest{{7, 7}};
  hashes.AppendTo(manifest);
  ASSERT_EQ(manifest.size(), 1 + 2 + 1 + kPageBlockHashes + 3);
  EXPECT_EQ(manifest[1], hashes.leaves[0]);
  EXPECT_EQ(manifest[2], hashes.leaves[1]);
  EXPECT_EQ(manifest[3], PagesMark(hashes.root));
  EXPECT_EQ(manifest[4], Xxh3(std::string_view(data).substr(0, kHashPageBytes)));
  EXPECT_EQ(manifest.back(), PageBlockCheck(hashes.leaves[1], std::span(hashes.pages).last(2)));
  manifest.resize(1);
  HashChunk(data.data(), data.size()).AppendTo(manifest);
  EXPECT_EQ(manifest.size(), 3u);
}

// A block that cannot be read, or not be written, ends the pass with that error and no hashes.
TEST(LeafHashTest, FirstFailureEndsThePass) {
  const std::string data = Random(TestSeed()).Bytes(10'000);
  std::vector<std::byte> buffer(4096);
  const Status broken(Code::kDataLoss, "broken");
  for (const std::uint64_t bad : {std::uint64_t{0}, std::uint64_t{4096}, std::uint64_t{8192}}) {
    for (const bool reading : {true, false}) {
      std::string passed;
      const auto read = [&](std::uint64_t at, std::span<std::byte> block) {
        std::memcpy(block.data(), data.data() + at, block.size());
        return reading && at == bad ? broken : Status();
      };
      const auto use = [&](std::uint64_t at, std::span<const std::byte> block) {
        if (!reading && at == bad) return broken;
        passed.append(reinterpret_cast<const char*>(block.data()), block.size());
        return Status();
      };
      EXPECT_THAT(PassChunk(data.size(), buffer, read, use), HasCode(Code::kDataLoss));
      EXPECT_EQ(passed, data.substr(0, bad));
    }
  }
}

}  // namespace
}  // namespace tensormount
