// SPDX-License-Identifier: Apache-2.0
// Loads in which ranks read for each other: what is read, what is sent, and how much memory it
// takes.
#include <atomic>
#include <barrier>
#include <chrono>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "collective/save_load.h"
#include "tests/collective/disturbed_communicator.h"
#include "tests/collective/load_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

LoadSetup InGroups(const std::vector<int>& groups, LoadVerify verify = LoadVerify::kAuto) {
  LoadSetup setup;
  setup.options = [=](int rank) {
    LoadOptions options;
    options.path = LoadPath::kExchange;
    options.verify = verify;
    options.not_requested = Strict::kIgnore;
    options.exchange_group = groups[static_cast<std::size_t>(rank)];
    return options;
  };
  return setup;
}

struct Totals {
  std::uint64_t read = 0;
  std::uint64_t received = 0;
  std::uint64_t messages = 0;
};
Totals Sum(const std::vector<LoadedRank>& loaded) {
  Totals totals;
  for (const LoadedRank& rank : loaded) {
    totals.read += rank.report.bytes_read;
    totals.received += rank.report.bytes_received;
    totals.messages += rank.report.messages_sent;
  }
  return totals;
}

class ExchangeLoad : public testing::Test {
 protected:
  void SetUp() override {
    SaveOptions options;
    options.placement = PlacementRule::kTensorFile;
    ASSERT_OK(SaveByRule(path_, tensors_, "rows", 4, options));
  }
  const GlobalTensor& w() const { return tensors_[0]; }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  // Four chunks of 256 KiB; a unit each.
  const std::vector<GlobalTensor> tensors_ = {MakeGlobal("w", DType::kF32, {256, 1024})};
};

TEST_F(ExchangeLoad, BlocksWantedByOneRankAreNotSent) {
  // Rows as they were saved: every block has one reader, who is its only user.
  const auto wishes = WishesByRule(tensors_, "rows", 4);
  const auto loaded = LoadWishesWith(path_, tensors_, wishes, InGroups({0, 0, 0, 0}));
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, loaded), "");
  EXPECT_EQ(Sum(loaded).messages, 0u);
  EXPECT_EQ(Sum(loaded).received, 0u);
  EXPECT_EQ(Sum(loaded).read, w().bytes.size());
}

TEST_F(ExchangeLoad, SendsOnlyNecessaryBlocks) {
  // Blocks of 64 rows. Rank 0 wants blocks 0 and 1, rank 1 blocks 1 and 2, rank 2 block 2, rank 3
  // nothing, nobody block 3: two blocks are wanted twice, so two messages of a block.
  const auto block = [](std::int64_t first, std::int64_t count) {
    return Region(B({64 * first, 0}, {64 * count, 1024}));
  };
  const std::vector<std::vector<Wish>> wishes = {
      {{0, block(0, 2)}}, {{0, block(1, 2)}}, {{0, block(2, 1)}}, {}};
  const auto loaded =
      LoadWishesWith(path_, tensors_, wishes, InGroups({0, 0, 0, 0}, LoadVerify::kOff));
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, loaded), "");
  EXPECT_EQ(Sum(loaded).messages, 2u);
  EXPECT_EQ(Sum(loaded).received, 2u * 64 * 4096);
  EXPECT_EQ(Sum(loaded).read, 3u * 64 * 4096);
}

TEST_F(ExchangeLoad, ReplicasAreReadOnceAndSent) {
  const auto wishes = WishesByRule(tensors_, "replicate", 4);
  const auto loaded = LoadWishesWith(path_, tensors_, wishes, InGroups({0, 0, 0, 0}));
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, loaded), "");
  EXPECT_EQ(Sum(loaded).read, w().bytes.size());
  EXPECT_EQ(Sum(loaded).received, 3 * w().bytes.size());
  // Four blocks, each to three ranks, and a share of the reading for everybody.
  EXPECT_EQ(Sum(loaded).messages, 12u);
  for (const LoadedRank& rank : loaded) {
    EXPECT_EQ(rank.report.bytes_read, w().bytes.size() / 4);
    EXPECT_EQ(rank.report.bytes_by_digest + rank.report.bytes_by_leaf, w().bytes.size());
  }
}

TEST_F(ExchangeLoad, ColumnsAreReadOnceInBlocks) {
  const auto wishes = WishesByRule(tensors_, "cols", 4);
  const auto loaded = LoadWishesWith(path_, tensors_, wishes, InGroups({5, 5, 5, 5}));
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, loaded), "");
  EXPECT_EQ(Sum(loaded).read, w().bytes.size());
  EXPECT_EQ(Sum(loaded).received, w().bytes.size() * 3 / 4);
  EXPECT_EQ(Sum(loaded).messages, 12u);
}

TEST_F(ExchangeLoad, EachHostGroupReadsForItself) {
  const auto wishes = WishesByRule(tensors_, "replicate", 4);
  const auto loaded = LoadWishesWith(path_, tensors_, wishes, InGroups({7, -1, 7, -1}));
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, loaded), "");
  EXPECT_EQ(Sum(loaded).read, 2 * w().bytes.size());
  EXPECT_EQ(Sum(loaded).received, 2 * w().bytes.size());
  // A group of its own has nobody to send to.
  const auto alone = LoadWishesWith(path_, tensors_, wishes, InGroups({1, 2, 3, 4}));
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, alone), "");
  EXPECT_EQ(Sum(alone).messages, 0u);
  EXPECT_EQ(Sum(alone).read, 4 * w().bytes.size());
}

TEST_F(ExchangeLoad, LongGapsAreNotRead) {
  // The first 64 KiB of each of the chunk's rows of 256 KiB.
  const std::vector<GlobalTensor> wide = {MakeGlobal("wide", DType::kU8, {8, 256 << 10})};
  const std::string path = dir_.Join("store/wide");
  ASSERT_OK(SaveByRule(path, wide, "rows", 1));
  const std::vector<std::vector<Wish>> wishes = {{{0, B({0, 0}, {8, 32 << 10})}},
                                                 {{0, B({0, 32 << 10}, {8, 32 << 10})}}};
  const auto loaded = LoadWishesWith(path, wide, wishes, InGroups({0, 0}, LoadVerify::kOff));
  EXPECT_EQ(WhatIsWrong(wide, wishes, loaded), "");
  EXPECT_EQ(Sum(loaded).read, 8u * (64 << 10));
}

TEST_F(ExchangeLoad, MemoryDoesNotGrowWithTheModel) {
  std::map<std::int64_t, std::uint64_t> peak;
  for (const std::int64_t rows : {1024, 4096}) {  // 4 and 16 MiB.
    const std::vector<GlobalTensor> large = {MakeGlobal("w", DType::kC128, {rows, 256})};
    const std::string path = dir_.Join("store/large-" + std::to_string(rows));
    ASSERT_OK(SaveByRule(path, large, "rows", 2));
    for (const std::string rule : {"cols", "replicate"}) {
      const auto wishes = WishesByRule(large, rule, 4);
      const auto loaded = LoadWishesWith(path, large, wishes, InGroups({0, 0, 0, 0}));
      for (std::size_t r = 0; r < 4; ++r) {
        ASSERT_OK(loaded[r].status);
        EXPECT_TRUE(loaded[r].buffers[0] == BytesOf(large[0], wishes[r][0].region)) << rule;
        peak[rows] = std::max(peak[rows], loaded[r].report.peak_buffer_bytes);
      }
      EXPECT_LE(Sum(loaded).read, large[0].bytes.size() * 102 / 100);
    }
  }
  EXPECT_GT(peak[1024], 0u);
  EXPECT_LE(peak[4096], 10u << 20);
  EXPECT_LE(peak[4096], 2 * peak[1024] + (4u << 20));
}

// Columns of few bytes, buffers with strides, several wishes for the same bytes on one rank.
TEST_F(ExchangeLoad, ShortRunsOverlapsAndRepeatedRequestsAreExact) {
  Random random(TestSeed());
  const std::vector<GlobalTensor> tensors = {MakeGlobal("a", DType::kU16, {700, 90}),
                                             MakeGlobal("b", DType::kF64, {64, 33, 20}),
                                             MakeGlobal("c", DType::kU8, {200000})};
  const std::string path = dir_.Join("store/mixed");
  ASSERT_OK(SaveByRule(path, tensors, "grid:2x2", 4));
  for (int i = 0; i < TestScale(12); ++i) {
    const auto ranks = static_cast<std::size_t>(random.Int(1, 5));
    std::vector<std::vector<Wish>> wishes(ranks);
    std::vector<int> groups;
    for (std::vector<Wish>& of_rank : wishes) {
      groups.push_back(static_cast<int>(random.Int(0, 1)));
      for (std::int64_t n = random.Int(0, 4); n > 0; --n) {
        const auto t = static_cast<std::size_t>(random.Int(0, 2));
        Dims begin;
        Dims extent;
        for (const std::int64_t size : tensors[t].shape) {
          begin.push_back(random.OneIn(2) ? 0 : random.Int(0, size));
          extent.push_back(random.OneIn(2) ? size - begin[begin.rank() - 1]
                                           : random.Int(0, size - begin[begin.rank() - 1]));
        }
        Region region = B(begin, extent);
        if (random.OneIn(3)) {
          const std::int64_t first = random.Int(0, region.volume());
          region =
              Region::Flat(B(begin, extent), first, random.Int(0, region.volume() - first)).value();
        }
        of_rank.push_back({t, region});
        if (random.OneIn(4)) of_rank.push_back({t, region});
      }
    }
    const LoadVerify verifies[] = {LoadVerify::kAuto, LoadVerify::kLeaves, LoadVerify::kOff};
    const auto loaded =
        LoadWishesWith(path, tensors, wishes, InGroups(groups, verifies[random.Int(0, 2)]));
    ASSERT_EQ(WhatIsWrong(tensors, wishes, loaded), "") << "case " << i;
  }
}

// Only what is said beside the rounds: pieces, and the letters that announce them.
bool IsData(std::uint32_t tag) { return tag % 4 == 2; }

// One bit of one message of one rank changes: never OK with other bytes, whatever is verified.
TEST_F(ExchangeLoad, BitFlippedInTransitIsDetected) {
  int damaged = 0;
  for (const LoadVerify verify : {LoadVerify::kOff, LoadVerify::kAuto, LoadVerify::kLeaves}) {
    for (const std::string rule : {"cols", "replicate"}) {
      for (int message = 0; message < 6; ++message) {
        const auto wishes = WishesByRule(tensors_, rule, 4);
        LoadSetup setup = InGroups({0, 0, 0, 0}, verify);
        std::atomic<bool> flipped{false};
        setup.load = [&](FileSystem& fs, const StateDict& request, Communicator& comm,
                         const LoadOptions& options) {
          DisturbedCommunicator disturbed(comm);
          int seen = 0;
          disturbed.SetFaults([&](int, std::uint32_t tag, std::size_t) {
            const bool flip = comm.rank() == 1 && IsData(tag) && seen++ == message;
            if (flip) flipped = true;
            return flip ? DisturbedCommunicator::Fault::kFlip : DisturbedCommunicator::Fault::kNone;
          });
          return LoadOn(fs, request, path_, disturbed, options);
        };
        const auto loaded = LoadWishesWith(path_, tensors_, wishes, setup);
        if (!flipped) continue;  // So many messages it did not send.
        ++damaged;
        for (const LoadedRank& rank : loaded) {
          EXPECT_THAT(rank.status, HasCode(Code::kDataLoss)) << rule << " " << message;
        }
      }
    }
  }
  EXPECT_GE(damaged, 24);
}

// Pieces of a load that failed come when a load of another checkpoint has the same tags.
TEST_F(ExchangeLoad, PiecesOfAFailedLoadDoNotEnterALaterLoad) {
  std::vector<GlobalTensor> others = tensors_;
  for (char& c : others[0].bytes) c = static_cast<char>(c ^ 0x5a);
  const std::string other_path = dir_.Join("store/other");
  SaveOptions options;
  options.placement = PlacementRule::kTensorFile;
  ASSERT_OK(SaveByRule(other_path, others, "rows", 4, options));
  for (const std::string rule : {"cols", "replicate"}) {
    const auto wishes = WishesByRule(others, rule, 4);
    LoadSetup setup = InGroups({0, 0, 0, 0}, LoadVerify::kLeaves);
    std::barrier all_failed(4);
    std::atomic<int> failed{0};
    setup.load = [&](FileSystem& fs, const StateDict& request, Communicator& comm,
                     LoadOptions load_options) {
      DisturbedCommunicator disturbed(comm);
      disturbed.SetFaults([&](int, std::uint32_t tag, std::size_t) {
        return comm.rank() != 0 && IsData(tag) ? DisturbedCommunicator::Fault::kHold
                                               : DisturbedCommunicator::Fault::kNone;
      });
      load_options.timeouts.arrival = std::chrono::milliseconds(100);
      const std::uint64_t first = disturbed.BeginJob().number;
      if (!LoadOn(fs, request, path_, disturbed, load_options).ok()) ++failed;
      disturbed.SetFaults(nullptr);
      all_failed.arrive_and_wait();
      while (disturbed.BeginJob().number < first + 64) {
      }
      disturbed.Release();
      load_options.timeouts = {};
      return LoadOn(fs, request, other_path, disturbed, load_options);
    };
    const auto loaded = LoadWishesWith(path_, others, wishes, setup);
    EXPECT_EQ(failed, 4);
    EXPECT_EQ(WhatIsWrong(others, wishes, loaded), "") << rule;
  }
}

}  // namespace
}  // namespace tensormount
