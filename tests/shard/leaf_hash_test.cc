// SPDX-License-Identifier: Apache-2.0
#include "shard/leaf_hash.h"

#include <cstring>

#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

TEST(LeafHashTest, RootIsAsTheFormatSays) {
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
    for (int round = 0; round < 4; ++round) {
      LeafHasher hasher;
      std::size_t at = 0;
      while (at < size) {
        const auto n = static_cast<std::size_t>(
            rnd.Int(0, std::min<std::int64_t>(static_cast<std::int64_t>(size - at),
                                              round == 0 ? 400'000 : 90'000)));
        hasher.Update(data.data() + at, n);
        at += n;
      }
      hasher.Finish();
      EXPECT_EQ(hasher.leaves(), expected) << size;
      EXPECT_EQ(hasher.length(), size);
      EXPECT_EQ(hasher.Root(), ChunkRoot(expected, size));
    }
  }
}

}  // namespace
}  // namespace tensormount
