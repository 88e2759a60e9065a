// SPDX-License-Identifier: Apache-2.0
// The cases by which PyTorch's distributed checkpoints test resharding, and those in which they are
// silently wrong.
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "tests/collective/load_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using Shards = std::vector<std::vector<Wish>>;

// Each rank saves the regions that stand for it.
Status SaveShards(const std::string& path, const std::vector<GlobalTensor>& tensors,
                  const Shards& shards) {
  return RunOnThreads(static_cast<int>(shards.size()), [&](Communicator& comm) -> Status {
    StateDict state;
    std::vector<std::string> buffers;
    buffers.reserve(64);
    for (const Wish& shard : shards[static_cast<std::size_t>(comm.rank())]) {
      const GlobalTensor& tensor = tensors[shard.tensor];
      buffers.push_back(BytesOf(tensor, shard.region));
      const Dims extents =
          shard.region.is_flat() ? Dims{shard.region.volume()} : shard.region.box().extent();
      const void* data = buffers.back().data();
      TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
          tensor.key, {tensor.shape, shard.region, BufferView::Host(tensor.dtype, data, extents)}));
    }
    return Save(state, path, comm).status();
  });
}

Shards Of(const std::vector<std::vector<Region>>& regions) {
  Shards shards;
  for (const std::vector<Region>& of_rank : regions) {
    shards.emplace_back();
    for (const Region& region : of_rank) shards.back().push_back({0, region});
  }
  return shards;
}

TEST(Reshard, LoadsEveryPairOfShardingsOfA10By20Tensor) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {10, 20})};
  const Region whole = Box::Whole({10, 20});
  const std::vector<Shards> plans = {
      // Chunks of an axis, on one rank after the other and in another order.
      Of({{B({0, 0}, {5, 20})}, {B({5, 0}, {5, 20})}}),
      Of({{B({5, 0}, {5, 20})}, {B({0, 0}, {5, 20})}}),
      Of({{B({0, 0}, {10, 10})}, {B({0, 10}, {10, 10})}}),
      // Several of a rank.
      Of({{B({0, 0}, {3, 20}), B({6, 0}, {3, 20})}, {B({3, 0}, {3, 20}), B({9, 0}, {1, 20})}}),
      Of({{B({0, 5}, {10, 5}), B({0, 0}, {10, 5})}, {B({0, 15}, {10, 5}), B({0, 10}, {10, 5})}}),
      // Enumerated boxes, uneven.
      Of({{B({0, 0}, {8, 20})}, {B({8, 0}, {2, 20})}}),
      Of({{B({0, 0}, {7, 3}), B({7, 0}, {3, 3})}, {B({0, 3}, {10, 17})}}),
      // All on one rank, replicas, flat ranges, empty shards.
      Of({{}, {whole}}),
      Of({{whole}, {whole}}),
      Of({{Region::Flat(Box::Whole({10, 20}), 0, 77).value()},
          {Region::Flat(Box::Whole({10, 20}), 77, 123).value()}}),
      Of({{B({0, 0}, {10, 20}), B({10, 0}, {0, 20})}, {B({3, 4}, {0, 0})}}),
  };
  for (std::size_t from = 0; from < plans.size(); ++from) {
    const std::string path = dir.Join("store/plan-" + std::to_string(from));
    ASSERT_OK(SaveShards(path, tensors, plans[from]));
    for (std::size_t to = 0; to < plans.size(); ++to) {
      const auto loaded = LoadWishes(path, tensors, plans[to]);
      EXPECT_EQ(WhatIsWrong(tensors, plans[to], loaded), "") << from << " to " << to;
    }
  }
}

TEST(Reshard, Reshards128ElementsBetween8And4Ranks) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("x", DType::kF32, {128})};
  for (const auto& [from, to] : {std::pair(8, 4), std::pair(4, 8)}) {
    const std::string path = dir.Join("store/from-" + std::to_string(from));
    ASSERT_OK(SaveByRule(path, tensors, "rows", from));
    const auto wishes = WishesByRule(tensors, "rows", to);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(path, tensors, wishes)), "");
  }
}

TEST(Reshard, Reshards120ElementsFrom4To3Ranks) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("x", DType::kI64, {120})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 4));
  const auto wishes = WishesByRule(tensors, "rows", 3);
  // [40, 80) comes from [30, 60) and [60, 90).
  ASSERT_EQ(wishes[1][0].region, Region(B({40}, {40})));
  const auto loaded = LoadWishes(path, tensors, wishes);
  EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
  EXPECT_EQ(loaded[1].buffers[0], tensors[0].bytes.substr(320, 320));
}

TEST(Reshard, ReshardsToOneAndEightRanksFromAnyNumber) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {
      MakeGlobal("a", DType::kBF16, {24, 10}), MakeGlobal("flag", DType::kBool, {5}),
      MakeGlobal("step", DType::kI64, {}), MakeGlobal("none", DType::kF32, {3, 0})};
  for (const int from : {1, 2, 3, 8}) {
    const std::string path = dir.Join("store/from-" + std::to_string(from));
    ASSERT_OK(SaveByRule(path, tensors, from == 3 ? "flat" : "rows", from));
    for (const int to : {1, 2, 4, 8}) {
      LoadOptions options;
      options.validate = true;
      const auto wishes = WishesByRule(tensors, to == 4 ? "cols" : "flat", to);
      EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(path, tensors, wishes, options)), "")
          << from << " to " << to;
    }
  }
}

// ---- Where DCP says nothing ----

TEST(Reshard, TensorWithAHoleCannotBeLoaded) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {8, 4})};
  // Not of what is stored: a save with a hole is no checkpoint, for any number of ranks.
  for (const Shards& holes :
       {Of({{B({0, 0}, {4, 4})}, {B({5, 0}, {3, 4})}}), Of({{B({0, 0}, {7, 4})}})}) {
    const std::string path = dir.Join("store/hole");
    EXPECT_THAT(SaveShards(path, tensors, holes), HasCode(Code::kInvalidArgument));
    const auto loaded = LoadWishes(path, tensors, WishesByRule(tensors, "rows", 2));
    EXPECT_THAT(loaded[1].status, HasCode(Code::kNotFound));
    EXPECT_EQ(loaded[1].buffers[0].find_first_not_of('\xEE'), std::string::npos);
  }
  // Nor, with `validate`, of what is asked for.
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  LoadOptions options;
  options.validate = true;
  const Shards hole = Of({{B({0, 0}, {4, 4})}, {B({5, 0}, {3, 4})}});
  for (const LoadedRank& rank : LoadWishes(path, tensors, hole, options)) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(rank.status, HasMessage("tensor w: [4:5, 0:4] is held by no rank"));
    EXPECT_EQ(rank.buffers[0].find_first_not_of('\xEE'), std::string::npos);
  }
  EXPECT_EQ(WhatIsWrong(tensors, hole, LoadWishes(path, tensors, hole)), "");
}

TEST(Reshard, SmallerChunkAtTheSameOffsetIsLoadedWhole) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {8, 4})};
  const Shards shards = Of({{B({0, 0}, {4, 4}), B({4, 0}, {4, 4})}, {B({0, 0}, {2, 4})}});
  EXPECT_THAT(SaveShards(dir.Join("store/twice"), tensors, shards),
              HasCode(Code::kInvalidArgument));
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    LoadOptions options;
    options.path = way;
    EXPECT_EQ(WhatIsWrong(tensors, shards, LoadWishes(path, tensors, shards, options)), "");
  }
  LoadOptions options;
  options.validate = true;
  EXPECT_THAT(LoadWishes(path, tensors, shards, options)[0].status,
              HasMessage("tensor w: [0:2, 0:4] is held by rank 0 and rank 1"));
}

TEST(Reshard, EmptyChunksAreNotAnOverlap) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {3, 4})};
  // Three rows over four ranks: torch.chunk leaves the last one nothing.
  const Shards shards = Of({{B({0, 0}, {1, 4})},
                            {B({1, 0}, {1, 4})},
                            {B({2, 0}, {1, 4})},
                            {B({1, 0}, {0, 4}), B({3, 0}, {0, 4})}});
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveShards(path, tensors, shards));
  LoadOptions options;
  options.validate = true;
  EXPECT_EQ(WhatIsWrong(tensors, shards, LoadWishes(path, tensors, shards, options)), "");
}

TEST(Reshard, KeysOfSomeRanksLoadInAnyOrder) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("a", DType::kF32, {6, 4}),
                                             MakeGlobal("b", DType::kF32, {5}),
                                             MakeGlobal("only", DType::kU8, {7})};
  const Region a = Box::Whole({6, 4});
  const Region b = Box::Whole({5});
  const Region only = Box::Whole({7});
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveShards(path, tensors, {{{0, a}, {1, b}}, {{1, b}, {0, a}}, {{2, only}}}));
  LoadOptions options;
  options.not_requested = Strict::kRaise;
  const Shards wishes = {{{2, only}, {0, a}}, {{1, b}}, {{0, a}, {1, b}}, {}};
  EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(path, tensors, wishes, options)), "");
}

}  // namespace
}  // namespace tensormount
