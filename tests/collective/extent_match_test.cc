// SPDX-License-Identifier: Apache-2.0
// Chunks against extents of a base, compared with the obvious way: each chunk with each extent.
#include "collective/save/extent_match.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "collective/save/save_plan.h"
#include "shard/leaf_hash.h"
#include "tests/shard/boxes.h"
#include "tests/support/random_layout.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using ExtentPart = ExtentMatch::ExtentPart;

std::string PartText(const ExtentPart& p) {
  std::string text = "chunk " + std::to_string(p.chunk) + ": " + std::to_string(p.bytes) +
                     " from " + std::to_string(p.begin);
  if (p.row) text += ", row " + std::to_string(*p.row) + " leaf " + std::to_string(p.leaf);
  return text;
}

std::vector<std::string> Texts(const std::vector<ExtentPart>& pieces) {
  std::vector<std::string> texts;
  for (const ExtentPart& p : pieces) texts.push_back(PartText(p));
  return texts;
}

class ExtentMatchTest : public testing::Test {
 protected:
  void SetTensor(DType dtype, const Dims& shape) {
    meta_ = TensorMeta::Make("w", dtype, shape).value();
    chunks_.clear();
    stored_.clear();
  }
  std::uint64_t BytesOf(const Region& region) const {
    return RegionBytes(meta_->dtype(), meta_->shape(), region).value();
  }
  void AddChunk(const Region& region, std::uint64_t begin = 0) {
    RankTask::Chunk& chunk = chunks_.emplace_back();
    chunk.region = region;
    chunk.begin = begin;
    chunk.bytes = BytesOf(region);
  }
  ChunkRecord& AddStored(const Region& region) {
    ChunkRecord& stored = stored_.emplace_back();
    stored.region = region;
    stored.length = BytesOf(region);
    return stored;
  }
  template <typename List>
  static void Shuffle(List& list, Random& random) {
    for (std::size_t i = list.size(); i > 1; --i) {
      std::swap(list[i - 1], list[static_cast<std::size_t>(random.Next() % i)]);
    }
  }

  std::vector<ExtentPart> Cut() {
    ExtentMatch match(*meta_, chunks_);
    for (std::uint32_t row = 0; row < stored_.size(); ++row) {
      EXPECT_OK(match.Add(row, stored_[row]));
    }
    return match.Cut();
  }

  std::optional<GlobalRun> RunOf(const Region& region) const {
    const auto runs = GlobalRuns(*meta_, region, 1);
    if (!runs.ok() || runs.value().size() != 1) return std::nullopt;
    return runs.value().front();
  }
  void SlowCut(std::uint32_t c, std::vector<ExtentPart>& pieces) const {
    const RankTask::Chunk& chunk = chunks_[c];
    if (chunk.region.empty()) return;
    const auto run = RunOf(chunk.region);
    std::map<std::uint64_t, ExtentPart> by_leaf;
    for (std::uint32_t row = 0; row < stored_.size(); ++row) {
      const ChunkRecord& stored = stored_[row];
      if (!stored.has_hash || stored.strides.rank() > 0) continue;
      if (stored.region == chunk.region && stored.length == chunk.bytes) {
        pieces.push_back({.chunk = c, .begin = chunk.begin, .bytes = chunk.bytes, .row = row});
        return;
      }
      if (!run) continue;
      const auto there = RunOf(stored.region);
      if (!there || there->bytes != stored.length) continue;
      // Leaf by leaf.
      for (std::uint64_t leaf = 0; leaf < LeafCount(there->bytes); ++leaf) {
        const std::uint64_t begin = there->offset + leaf * kLeafBytes;
        const std::uint64_t end = std::min(begin + kLeafBytes, there->offset + there->bytes);
        if (begin < run->offset || end > run->offset + run->bytes) continue;
        const std::uint64_t at = chunk.begin + (begin - run->offset);
        by_leaf[at] = {.chunk = c, .begin = at, .bytes = end - begin, .row = row, .leaf = leaf};
      }
    }
    std::vector<ExtentPart> mine;
    std::uint64_t at = chunk.begin;
    for (const auto& [begin, leaf] : by_leaf) {
      if (begin > at) mine.push_back({.chunk = c, .begin = at, .bytes = begin - at});
      if (!mine.empty() && mine.back().row == leaf.row) {
        mine.back().bytes += leaf.bytes;
      } else {
        mine.push_back(leaf);
      }
      at = begin + leaf.bytes;
    }
    const std::uint64_t end = chunk.begin + chunk.bytes;
    if (end > at) mine.push_back({.chunk = c, .begin = at, .bytes = end - at});
    pieces.insert(pieces.end(), mine.begin(), mine.end());
  }
  void ExpectAsSlow() {
    std::vector<ExtentPart> slow;
    for (std::uint32_t c = 0; c < chunks_.size(); ++c) SlowCut(c, slow);
    ASSERT_EQ(Texts(Cut()), Texts(slow));
  }

  std::optional<TensorMeta> meta_;
  std::vector<RankTask::Chunk> chunks_;
  std::vector<ChunkRecord> stored_;
};

// As many parts as would take minutes if each were compared with each.
TEST_F(ExtentMatchTest, MatchesManyPartsOfTheSameCut) {
  constexpr std::int64_t kParts = Amount(100'000, 20'000);
  Random random(TestSeed());
  SetTensor(DType::kF32, {kParts, 16});
  for (std::int64_t i = 0; i < kParts; ++i) {
    AddChunk(B({i, 0}, {1, 16}), static_cast<std::uint64_t>(i) * 64);
    AddStored(B({i, 0}, {1, 16}));
  }
  Shuffle(stored_, random);
  const std::vector<ExtentPart> pieces = Cut();
  ASSERT_EQ(pieces.size(), chunks_.size());
  for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
    ASSERT_EQ(pieces[c].chunk, c);
    ASSERT_EQ(pieces[c].begin, chunks_[c].begin);
    ASSERT_EQ(pieces[c].bytes, 64u);
    ASSERT_TRUE(pieces[c].row);
    ASSERT_EQ(stored_[*pieces[c].row].region, chunks_[c].region);
  }
}

// Rows of 25,000 bytes, three of which are more than a leaf: parts of three of them here, of two
// there, every second one another rank's.
TEST_F(ExtentMatchTest, MatchesManyPartsOfAnotherCut) {
  Random random(TestSeed());
  SetTensor(DType::kU8, {6000, 25'000});
  for (std::int64_t i = 0; i < 6000; i += 6) AddChunk(B({i, 0}, {3, 25'000}), 7);
  for (std::int64_t i = 0; i < 6000; i += 2) AddStored(B({i, 0}, {2, 25'000}));
  Shuffle(stored_, random);
  const std::vector<ExtentPart> pieces = Cut();
  // [0:2] is one leaf, which is here, of [2:4] the half.
  ASSERT_EQ(pieces.size(), 2 * chunks_.size());
  for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
    const ExtentPart& leaf = pieces[2 * c];
    ASSERT_EQ(PartText(pieces[2 * c + 1]), "chunk " + std::to_string(c) + ": 25000 from 50007");
    ASSERT_TRUE(leaf.row);
    ASSERT_EQ(stored_[*leaf.row].region.box().begin(0), 6 * c);
    ASSERT_EQ(leaf.begin, 7u);
    ASSERT_EQ(leaf.bytes, 50'000u);
  }
}

TEST_F(ExtentMatchTest, MatchesLikeComparingEveryPair) {
  Random random(TestSeed());
  int by_leaf = 0;
  int exact = 0;
  for (int round = 0; round < TestScale(300); ++round) {
    SCOPED_TRACE(round);
    const DType dtype = random.OneIn(2) ? DType::kU8 : DType::kF32;
    const Dims shape = random.OneIn(4)   ? Dims{random.Int(1, 400'000)}
                       : random.OneIn(3) ? Dims{random.Int(1, 8), 3, random.Int(1, 40'000)}
                                         : Dims{random.Int(1, 40), random.Int(1, 30'000)};
    SetTensor(dtype, shape);
    // Of one of several ranks, so that some of the extents are none of its business.
    const int ranks = static_cast<int>(random.Int(1, 4));
    const Partition here = RandomPartition(random, shape, ranks);
    for (const Region& region : here[0]) AddChunk(region, static_cast<std::uint64_t>(ranks));
    std::vector<Region> there;
    for (const auto& regions : random.OneIn(3) ? here : RandomPartition(random, shape, 3)) {
      there.insert(there.end(), regions.begin(), regions.end());
    }
    for (const Region& region : there) {
      const auto known = [&](const ChunkRecord& stored) { return stored.region == region; };
      if (std::any_of(stored_.begin(), stored_.end(), known)) continue;
      ChunkRecord& stored = AddStored(region);
      stored.has_hash = !random.OneIn(8);
      if (random.OneIn(8)) stored.strides = Dims::Filled(shape.rank(), 1);
    }
    Shuffle(chunks_, random);
    Shuffle(stored_, random);
    ExpectAsSlow();
    for (const ExtentPart& piece : Cut()) {
      if (!piece.row) continue;
      ++(stored_[*piece.row].region == chunks_[piece.chunk].region ? exact : by_leaf);
    }
    const ExtentMatch match(*meta_, chunks_);
    for (const ChunkRecord& stored : stored_) {
      bool touches = false;
      for (const RankTask::Chunk& chunk : chunks_) {
        for (const Box& a : chunk.region.Boxes()) {
          for (const Box& b : stored.region.Boxes()) touches |= !Intersect(a, b).empty();
        }
      }
      if (touches) {
        EXPECT_TRUE(match.Touches(stored)) << stored.region.ToString();
      }
    }
  }
  EXPECT_GT(by_leaf, TestScale(30));
  EXPECT_GT(exact, TestScale(30));
}

// Boxes and runs are told apart exactly: whose extents are others' is not asked for page hashes.
TEST_F(ExtentMatchTest, TouchesOnlyExtentsThatShareCells) {
  SetTensor(DType::kF32, {10, 100});
  AddChunk(B({0, 0}, {4, 50}));
  AddChunk(F(Box::Whole({10, 100}), 650, 200));
  const ExtentMatch match(*meta_, chunks_);
  const auto touches = [&](const Region& region) { return match.Touches(AddStored(region)); };
  EXPECT_TRUE(touches(B({0, 0}, {4, 50})));
  EXPECT_TRUE(touches(B({3, 49}, {1, 1})));
  EXPECT_FALSE(touches(B({0, 50}, {4, 50})));
  EXPECT_FALSE(touches(B({4, 0}, {2, 100})));
  EXPECT_TRUE(touches(B({4, 0}, {3, 100})));
  EXPECT_TRUE(touches(F(Box::Whole({10, 100}), 500, 151)));
  EXPECT_FALSE(touches(F(Box::Whole({10, 100}), 500, 150)));
  EXPECT_FALSE(touches(F(Box::Whole({10, 100}), 850, 150)));
  EXPECT_FALSE(touches(B({0, 0}, {0, 100})));
  ChunkRecord outside;
  outside.region = B({0, 0}, {11, 100});
  EXPECT_FALSE(match.Touches(outside));
}

TEST_F(ExtentMatchTest, ExtentsThatOverlapDoNotFillMemory) {
  SetTensor(DType::kU8, {100 * 65536});
  for (std::int64_t i = 0; i < 100; ++i) AddChunk(B({i * 65536}, {65536}));
  const ChunkRecord& whole = AddStored(Box::Whole({100 * 65536}));
  ExtentMatch match(*meta_, chunks_);
  EXPECT_OK(match.Add(0, whole));
  EXPECT_THAT(match.Add(1, whole), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount
