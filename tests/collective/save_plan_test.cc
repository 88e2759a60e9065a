// SPDX-License-Identifier: Apache-2.0
// Save plan and replica blocks: pure, with inputs that a reader checks by eye.
#include "collective/save/save_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "collective/save/even_shares.h"
#include "collective/save/replica_check.h"
#include "shard/coverage.h"
#include "tests/collective/plan_testing.h"
#include "tests/collective/save_plan_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/random.h"
#include "tests/support/random_layout.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

constexpr std::int64_t kMi = 1024 * 1024;

Region ChunkRegion(const GlobalLayout& layout, const PlannedChunk& c) {
  const LayoutTensor& tensor = layout.tensors[c.tensor];
  return PartOfRegion(tensor.meta, tensor.holdings[c.holding].region, c.begin, c.bytes).value();
}

// Every cell of every tensor once, by ranks that hold it.
void ExpectWritesEverythingOnce(const GlobalLayout& layout, const SavePlan& plan) {
  for (std::uint32_t t = 0; t < layout.tensors.size(); ++t) {
    RegionSet written(layout.tensors[t].meta.shape());
    std::uint64_t bytes = 0;
    for (std::size_t r = 0; r < plan.ranks.size(); ++r) {
      for (const PlannedChunk& c : plan.ranks[r].chunks) {
        if (c.tensor != t) continue;
        EXPECT_GT(c.bytes, 0u);
        const Region region = ChunkRegion(layout, c);
        EXPECT_THAT(
            RegionBytes(layout.tensors[t].meta.dtype(), layout.tensors[t].meta.shape(), region),
            IsOkAndHolds(c.bytes));
        EXPECT_TRUE(written.Add(region, static_cast<std::uint32_t>(r)));
        bytes += c.bytes;
      }
    }
    EXPECT_EQ(bytes, layout.tensors[t].meta.bytes());
    EXPECT_TRUE(CheckCoverage(written).complete());
  }
}

TEST(SavePlan, AutoPlacesBySizeAndRuns) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) {
    ranks.Tensor(r, "cols", DType::kF32, {1024, 2048}, B({0, r * 1024}, {1024, 1024}))
        .Tensor(r, "rows", DType::kF32, {1024, 1024}, B({r * 512, 0}, {512, 1024}))
        .Tensor(r, "small", DType::kF32, {128}, B({r * 64}, {64}))
        .Tensor(r, "under", DType::kF32, {1000, 1024}, B({r * 500, 0}, {500, 1024}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  EXPECT_THAT(plan.placement, ElementsAre(Placement::kRankShard, Placement::kTensorFile,
                                          Placement::kPack, Placement::kRankShard));
  ExpectWritesEverythingOnce(layout, plan);
  EXPECT_THAT(plan.sealers, ElementsAre(-1, 0, -1, -1));
  // Rank 1 writes its rows where they belong in the tensor.
  EXPECT_EQ(plan.ranks[1].chunks[1].tensor, 1u);
  EXPECT_EQ(plan.ranks[1].chunks[1].offset, 512u * 1024 * 4);
}

TEST(SavePlan, ReplicasAreSplitByBytesInsideATensorAtPages) {
  Ranks ranks(4);
  for (int r = 0; r < 4; ++r) {
    ranks.Tensor(r, "w", DType::kF32, {1003, 4099}, Box::Whole({1003, 4099}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  ExpectWritesEverythingOnce(layout, plan);
  const std::uint64_t quarter = layout.tensors[0].meta.bytes() / 4;
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_NEAR(static_cast<double>(rank.bytes), static_cast<double>(quarter), 2 * 4096);
    ASSERT_EQ(rank.chunks.size(), 1u);
    EXPECT_EQ(rank.chunks[0].offset % 4096, 0u);
    EXPECT_EQ(rank.chunks[0].offset, rank.chunks[0].begin);
  }
}

TEST(SavePlan, CutsFallOnPagesOfTheFile) {
  Ranks ranks(4);
  // Ranks 0 and 1 hold what comes before byte 3,000,001 of the file, ranks 2 and 3 the rest.
  const Dims shape = {6 * kMi};
  for (int r = 0; r < 4; ++r) {
    ranks.Tensor(r, "w", DType::kU8, shape,
                 r < 2 ? B({0}, {3'000'001}) : B({3'000'001}, {6 * kMi - 3'000'001}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  ExpectWritesEverythingOnce(layout, plan);
  EXPECT_EQ(plan.ranks[1].chunks[0].offset % 4096, 0u);
  EXPECT_EQ(plan.ranks[2].chunks[0].offset, 3'000'001u);
  EXPECT_EQ(plan.ranks[3].chunks[0].offset % 4096, 0u);
  EXPECT_EQ(plan.ranks[3].chunks[0].offset, 3'000'001u + plan.ranks[3].chunks[0].begin);
}

TEST(SavePlan, ReplicasBalanceBytesBetweenRanks) {
  Ranks ranks(2);
  // Rank 0 alone has 6 MiB; of the 10 MiB that both have it gets 2, rank 1 gets 8.
  ranks.Tensor(0, "own", DType::kU8, {6 * kMi}, Box::Whole({6 * kMi}));
  for (int r = 0; r < 2; ++r) ranks.Tensor(r, "w", DType::kU8, {10 * kMi}, Box::Whole({10 * kMi}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  EXPECT_EQ(plan.ranks[0].bytes, static_cast<std::uint64_t>(8 * kMi));
  EXPECT_EQ(plan.ranks[1].bytes, static_cast<std::uint64_t>(8 * kMi));
  ExpectWritesEverythingOnce(layout, plan);
}

TEST(SavePlan, RankShardsAreCutAtRows) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) {
    ranks.Tensor(r, "w", DType::kF32, {1000, 1000}, B({0, 0}, {1000, 1000}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kRankShard));
  ASSERT_EQ(plan.ranks[1].chunks.size(), 1u);
  EXPECT_EQ(ChunkRegion(layout, plan.ranks[0].chunks[0]), Region(B({0, 0}, {500, 1000})));
  EXPECT_EQ(ChunkRegion(layout, plan.ranks[1].chunks[0]), Region(B({500, 0}, {500, 1000})));
  EXPECT_EQ(plan.ranks[1].chunks[0].begin, 2000000u);
  EXPECT_EQ(plan.ranks[1].chunks[0].part, 1u);
}

TEST(SavePlan, ForcedTensorFileWritesOneChunkPerRun) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) ranks.Tensor(r, "w", DType::kF32, {3, 4}, B({0, 2 * r}, {3, 2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kTensorFile));
  ExpectWritesEverythingOnce(layout, plan);
  ASSERT_EQ(plan.ranks[1].chunks.size(), 3u);
  EXPECT_EQ(ChunkRegion(layout, plan.ranks[1].chunks[2]), Region(B({2, 2}, {1, 2})));
  EXPECT_EQ(plan.ranks[1].chunks[2].offset, 40u);
  EXPECT_EQ(plan.ranks[1].chunks[2].begin, 16u);
}

TEST(SavePlan, ForcedTensorFileRefusesShortRuns) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) {
    ranks.Tensor(r, "w", DType::kU8, {10000, 4}, B({0, 2 * r}, {10000, 2}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  const Result<SavePlan> plan = PlanSave(layout, PlacementRule::kTensorFile);
  EXPECT_THAT(plan, HasCode(Code::kUnsupported));
  EXPECT_THAT(plan, HasMessage("tensor w: shard [0:10000, 0:2] of rank 0 consists of 10000 runs"));
}

TEST(SavePlan, SafetensorsPlacementNeedsOneRankWithAllTensors) {
  Ranks cut(2);
  for (int r = 0; r < 2; ++r) cut.Tensor(r, "w", DType::kF32, {4}, B({2 * r}, {2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout cut_layout, cut.Layout());
  EXPECT_THAT(PlanSave(cut_layout, PlacementRule::kSafetensors), HasCode(Code::kUnsupported));
  Ranks spread(2);
  spread.Tensor(0, "a", DType::kF32, {4}, Box::Whole({4}))
      .Tensor(1, "b", DType::kF32, {4}, Box::Whole({4}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout spread_layout, spread.Layout());
  EXPECT_THAT(PlanSave(spread_layout, PlacementRule::kSafetensors),
              HasMessage("no rank holds all tensors whole"));
  Ranks complex_numbers(1);
  complex_numbers.Tensor(0, "c", DType::kC128, {4}, Box::Whole({4}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout complex_layout, complex_numbers.Layout());
  EXPECT_THAT(PlanSave(complex_layout, PlacementRule::kSafetensors),
              HasMessage("the format has no c128"));
  Ranks good(2);
  good.Tensor(0, "a", DType::kF32, {4}, Box::Whole({4}))
      .Tensor(1, "a", DType::kF32, {4}, Box::Whole({4}))
      .Tensor(1, "b", DType::kF32, {4}, Box::Whole({4}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, good.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kSafetensors));
  EXPECT_TRUE(plan.ranks[0].chunks.empty());
  EXPECT_EQ(plan.ranks[1].chunks.size(), 2u);
}

TEST(SavePlan, RunsOfFlatRangesAreMerged) {
  ASSERT_OK_AND_ASSIGN(const TensorMeta meta, TensorMeta::Make("w", DType::kF32, {4, 5, 6}));
  const Region flat = Region::Flat(Box::Whole({4, 5, 6}), 7, 100).value();
  EXPECT_THAT(GlobalRuns(meta, flat, 1), IsOkAndHolds(ElementsAre(GlobalRun{0, 28, 400})));
  const Region column = B({0, 0, 2}, {1, 3, 2});
  EXPECT_THAT(
      GlobalRuns(meta, column, 3),
      IsOkAndHolds(ElementsAre(GlobalRun{0, 8, 8}, GlobalRun{8, 32, 8}, GlobalRun{16, 56, 8})));
  EXPECT_FALSE(GlobalRuns(meta, column, 2).ok());
}

TEST(SavePlan, RandomPartitionsAreWrittenOnceByTheirHolders) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(60); ++i) {
    const int n = static_cast<int>(random.Int(1, 5));
    Ranks ranks(n);
    for (int t = 0; t < 3; ++t) {
      const std::uint64_t size = random.OneIn(4) ? 6 * kMi : 5000;
      const RandomTensor tensor = MakeRandomTensor(random, "t" + std::to_string(t), size);
      const Partition partition = RandomPartition(random, tensor.shape, n);
      for (int r = 0; r < n; ++r) {
        for (const Region& region : partition[static_cast<std::size_t>(r)]) {
          ranks.Tensor(r, tensor.key, tensor.dtype, tensor.shape, region);
        }
      }
    }
    ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
    const auto rule = random.OneIn(2) ? PlacementRule::kAuto : PlacementRule::kRankShard;
    ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, rule));
    ExpectWritesEverythingOnce(layout, plan);
  }
}

TEST(SavePlan, MainStrategyWritesOnlyTheMainReplica) {
  Ranks ranks(3);
  const Dims shape = {2 * kMi};
  ranks.Tensor(0, "labelled", DType::kU8, shape, Box::Whole(shape), Replica::kCopy)
      .Tensor(1, "labelled", DType::kU8, shape, Box::Whole(shape), Replica::kMain)
      .Tensor(2, "labelled", DType::kU8, shape, Box::Whole(shape), Replica::kCopy)
      .Tensor(1, "plain", DType::kU8, shape, Box::Whole(shape))
      .Tensor(2, "plain", DType::kU8, shape, Box::Whole(shape));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan,
                       PlanSave(layout, PlacementRule::kAuto, SaveStrategy::kMain));
  ExpectWritesEverythingOnce(layout, plan);
  EXPECT_EQ(plan.ranks[0].bytes, 0u);
  EXPECT_EQ(plan.ranks[1].bytes, static_cast<std::uint64_t>(4 * kMi));
  EXPECT_EQ(plan.ranks[2].bytes, 0u);
  ASSERT_OK_AND_ASSIGN(const SavePlan parallel, PlanSave(layout, PlacementRule::kAuto));
  for (const RankPlan& rank : parallel.ranks) EXPECT_GT(rank.bytes, 0u);
}

// The plans of all owners of a job, each with its keys.
struct OwnedPlans {
  std::vector<GlobalLayout> layouts;
  std::vector<SavePlan> plans;
};
Result<OwnedPlans> PlanWithOwners(Ranks& ranks, PlanRules rules) {
  OwnedPlans owned;
  std::vector<std::unique_ptr<SavePlanner>> planners;
  std::vector<std::string> surveys;
  for (std::uint32_t owner = 0; owner < rules.owners; ++owner) {
    TENSORMOUNT_ASSIGN_OR_RETURN(GlobalLayout layout, ranks.Layout(owner, rules.owners));
    owned.layouts.push_back(std::move(layout));
  }
  for (const GlobalLayout& layout : owned.layouts) {
    planners.push_back(std::make_unique<SavePlanner>(layout, rules));
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string survey, planners.back()->Survey());
    surveys.push_back(std::move(survey));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string decision,
                               SavePlanner::Decide(surveys, rules, ranks.size()));
  for (std::uint32_t owner = 0; owner < rules.owners; ++owner) {
    TENSORMOUNT_ASSIGN_OR_RETURN(SavePlan plan, planners[owner]->Plan(decision, owner));
    owned.plans.push_back(std::move(plan));
  }
  return owned;
}

TEST(SavePlan, ReplicasAreBalancedWithAnyNumberOfOwners) {
  constexpr int kRanks = 8;
  Ranks ranks(kRanks);
  Random random(TestSeed());
  std::uint64_t total = 0;
  for (int t = 0; t < 400; ++t) {
    // Most too small to be cut, some cut, none so large that it would even out the rest alone.
    const std::int64_t size = random.OneIn(8) ? random.Int(kMi, 2 * kMi) : random.Int(100, 400'000);
    total += static_cast<std::uint64_t>(size);
    for (int r = 0; r < kRanks; ++r) {
      ranks.Tensor(r, "layer." + std::to_string(t), DType::kU8, {size}, Box::Whole({size}));
    }
  }
  for (const std::uint32_t owners : {1u, 4u, 8u}) {
    PlanRules rules;
    rules.owners = owners;
    ASSERT_OK_AND_ASSIGN(const OwnedPlans owned, PlanWithOwners(ranks, rules));
    std::vector<std::uint64_t> bytes(kRanks, 0);
    for (std::uint32_t owner = 0; owner < owners; ++owner) {
      ExpectWritesEverythingOnce(owned.layouts[owner], owned.plans[owner]);
      for (int r = 0; r < kRanks; ++r) {
        bytes[static_cast<std::size_t>(r)] +=
            owned.plans[owner].ranks[static_cast<std::size_t>(r)].bytes;
      }
    }
    std::uint64_t sum = 0;
    const double even = static_cast<double>(total) / kRanks;
    for (const std::uint64_t b : bytes) {
      EXPECT_NEAR(static_cast<double>(b), even, 0.03 * even) << owners << " owners";
      sum += b;
    }
    EXPECT_EQ(sum, total);
  }
}

// The least that the busiest rank can write: no set of ranks can give away what only they hold.
double LeastPossible(std::span<const SharedBytes> groups, std::span<const std::uint64_t> loads) {
  double least = 0;
  for (std::uint32_t set = 1; set < 1u << loads.size(); ++set) {
    std::uint64_t bytes = 0;
    for (std::size_t r = 0; r < loads.size(); ++r) bytes += (set >> r & 1) != 0 ? loads[r] : 0;
    for (const SharedBytes& group : groups) {
      const bool inside = std::all_of(group.ranks.begin(), group.ranks.end(),
                                      [&](int r) { return (set >> r & 1) != 0; });
      bytes += inside ? group.bytes : 0;
    }
    least = std::max(least, static_cast<double>(bytes) / std::popcount(set));
  }
  return least;
}

std::vector<SharedBytes> RandomGroups(Random& random, int ranks, std::uint64_t most) {
  std::vector<SharedBytes> groups(static_cast<std::size_t>(random.Int(1, 7)));
  for (SharedBytes& group : groups) {
    while (group.ranks.empty()) {
      for (int r = 0; r < ranks; ++r) {
        if (random.OneIn(2)) group.ranks.push_back(r);
      }
    }
    group.bytes = static_cast<std::uint64_t>(random.Int(0, static_cast<std::int64_t>(most)));
  }
  return groups;
}

TEST(EvenSharesTest, BusiestRankIsNearTheOptimum) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(400); ++i) {
    const int ranks = static_cast<int>(random.Int(1, 8));
    std::vector<std::uint64_t> loads(static_cast<std::size_t>(ranks));
    for (std::uint64_t& load : loads) load = static_cast<std::uint64_t>(random.Int(0, 50'000));
    const std::vector<SharedBytes> groups = RandomGroups(random, ranks, 200'000);
    const auto shares = EvenShares(groups, loads);
    std::vector<std::uint64_t> all = loads;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (shares[g].empty()) {  // It meets no other.
        for (const int r : groups[g].ranks) {
          for (std::size_t other = 0; other < groups.size(); ++other) {
            if (other == g || groups[other].bytes == 0 || groups[g].bytes == 0) continue;
            ASSERT_THAT(groups[other].ranks, testing::Not(testing::Contains(r)));
          }
        }
        all.clear();
        break;
      }
      ASSERT_EQ(std::accumulate(shares[g].begin(), shares[g].end(), std::uint64_t{0}),
                groups[g].bytes);
      for (std::size_t k = 0; k < shares[g].size(); ++k) {
        all[static_cast<std::size_t>(groups[g].ranks[k])] += shares[g][k];
      }
    }
    if (all.empty()) continue;
    const double least = LeastPossible(groups, loads);
    ASSERT_LE(static_cast<double>(*std::max_element(all.begin(), all.end())), 1.02 * least + 8);
  }
}

// Ranks 0 to 4 hold w, 3 to 7 hold v.
TEST(SavePlan, OverlappingGroupsAreBalanced) {
  constexpr int kRanks = 8;
  for (const bool v_first : {false, true}) {
    Ranks ranks(kRanks);
    for (int r = 0; r < kRanks; ++r) {
      const Box whole = Box::Whole({64 * kMi});
      if (r < 5) ranks.Tensor(r, v_first ? "z" : "a", DType::kU8, {64 * kMi}, whole);
      if (r >= 3) ranks.Tensor(r, "m", DType::kU8, {64 * kMi}, whole);
    }
    ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
    ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
    ExpectWritesEverythingOnce(layout, plan);
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_NEAR(static_cast<double>(rank.bytes), 16.0 * kMi, 0.01 * 16 * kMi);
    }
  }
}

// Tensors of all sizes: what cannot be cut is evened out by what can.
TEST(SavePlan, RandomOverlappingGroupsAreNearlyBalanced) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(20); ++i) {
    const int world = static_cast<int>(random.Int(2, 8));
    Ranks ranks(world);
    const std::vector<SharedBytes> groups = RandomGroups(random, world, 1);
    std::vector<SharedBytes> all;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (int t = 0; t < 40; ++t) {
        const std::int64_t size =
            random.OneIn(4) ? random.Int(kMi, 6 * kMi) : random.Int(100, 600'000);
        for (const int r : groups[g].ranks) {
          ranks.Tensor(r, "g" + std::to_string(g) + "." + std::to_string(t), DType::kU8, {size},
                       Box::Whole({size}));
        }
        all.push_back({groups[g].ranks, static_cast<std::uint64_t>(size)});
      }
    }
    ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
    ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
    ExpectWritesEverythingOnce(layout, plan);
    const std::vector<std::uint64_t> none(static_cast<std::size_t>(world), 0);
    const double least = LeastPossible(all, none);
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_LE(static_cast<double>(rank.bytes), 1.03 * least + 2.0 * kMinPartBytes);
    }
  }
}

TEST(SavePlan, OwnersStartWithDifferentRanks) {
  // Too small to be cut: each owner has a few more than would come out even.
  constexpr int kRanks = 8;
  constexpr int kTensors = 640;
  Ranks ranks(kRanks);
  for (int t = 0; t < kTensors; ++t) {
    for (int r = 0; r < kRanks; ++r) {
      ranks.Tensor(r, "bias." + std::to_string(t), DType::kU8, {1000}, Box::Whole({1000}));
    }
  }
  PlanRules rules;
  rules.owners = 64;
  ASSERT_OK_AND_ASSIGN(const OwnedPlans owned, PlanWithOwners(ranks, rules));
  std::vector<std::size_t> chunks(kRanks, 0);
  for (const SavePlan& plan : owned.plans) {
    for (std::size_t r = 0; r < kRanks; ++r) chunks[r] += plan.ranks[r].chunks.size();
  }
  for (const std::size_t n : chunks) {
    EXPECT_NEAR(static_cast<double>(n), kTensors / kRanks, 0.2 * kTensors / kRanks);
  }
}

TEST(SavePlan, LargestTensorsOfAllOwnersGetTensorFiles) {
  Ranks ranks(1);
  for (int t = 0; t < 40; ++t) {
    const std::int64_t size = (t < 10 ? 64 : 8) * kMi + t;
    ranks.Tensor(0, "t" + std::to_string(t), DType::kU8, {size}, Box::Whole({size}));
  }
  for (const std::uint32_t owners : {1u, 3u}) {
    PlanRules rules;
    rules.owners = owners;
    rules.max_tensor_files = 25;
    ASSERT_OK_AND_ASSIGN(const OwnedPlans owned, PlanWithOwners(ranks, rules));
    int files = 0;
    int large = 0;
    for (std::uint32_t owner = 0; owner < owners; ++owner) {
      for (std::size_t t = 0; t < owned.layouts[owner].tensors.size(); ++t) {
        if (owned.plans[owner].placement[t] != Placement::kTensorFile) continue;
        ++files;
        large += owned.layouts[owner].tensors[t].meta.bytes() >= 64u * kMi ? 1 : 0;
      }
    }
    EXPECT_EQ(files, 25) << owners;
    EXPECT_EQ(large, 10) << owners;
  }
}

TEST(SavePlan, RankWithAllTensorsIsFoundAcrossOwners) {
  Ranks ranks(3);
  for (int t = 0; t < 20; ++t) {
    const std::string key = "t" + std::to_string(t);
    for (int r = t % 2; r < 3; ++r) ranks.Tensor(r, key, DType::kF32, {4}, Box::Whole({4}));
  }
  PlanRules rules;
  rules.owners = 3;
  rules.placement = PlacementRule::kSafetensors;
  ASSERT_OK_AND_ASSIGN(const OwnedPlans owned, PlanWithOwners(ranks, rules));
  std::size_t chunks = 0;
  for (const SavePlan& plan : owned.plans) {
    EXPECT_TRUE(plan.ranks[0].chunks.empty());
    EXPECT_TRUE(plan.ranks[2].chunks.empty());
    chunks += plan.ranks[1].chunks.size();
  }
  EXPECT_EQ(chunks, 20u);
  ranks.Tensor(0, "only on rank 0", DType::kF32, {4}, Box::Whole({4}));
  EXPECT_THAT(PlanWithOwners(ranks, rules), HasMessage("no rank holds all tensors whole"));
}

TEST(ReplicaPlan, RotatingComparesAllReplicasOverSeveralSaves) {
  std::set<std::pair<std::uint64_t, std::uint32_t>> seen;  // (share, other holder)
  for (std::uint64_t generation = 1; generation <= 3; ++generation) {
    const std::vector<ReplicaBlock> plan =
        PlanReplicaBlocks(400, 4, ReplicaCheck::kRotating, generation);
    ASSERT_EQ(plan.size(), 4u);
    std::map<std::uint32_t, std::uint64_t> hashed;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      EXPECT_EQ(plan[i].begin, i * 100);
      EXPECT_FALSE(plan[i].all);
      EXPECT_LT(plan[i].first, plan[i].second);
      for (std::uint32_t h = 0; h < 4; ++h) {
        if (!plan[i].IsHashedBy(h)) continue;
        hashed[h] += plan[i].bytes;
        if (h != i) seen.insert({i, h});
      }
    }
    for (const auto& [holder, bytes] : hashed) EXPECT_EQ(bytes, 200u) << "2/R of the bytes each";
  }
  EXPECT_EQ(seen.size(), 12u);
  std::uint64_t full = 0;
  for (const ReplicaBlock& b : PlanReplicaBlocks(5 * kMi, 4, ReplicaCheck::kFull, 1)) {
    EXPECT_TRUE(b.all);
    EXPECT_EQ(b.begin, full);
    EXPECT_LE(b.bytes, kReplicaBlockBytes);
    full += b.bytes;
  }
  EXPECT_EQ(full, static_cast<std::uint64_t>(5 * kMi));
  EXPECT_TRUE(PlanReplicaBlocks(400, 4, ReplicaCheck::kOff, 1).empty());
  EXPECT_EQ(PlanReplicaBlocks(2, 5, ReplicaCheck::kRotating, 1).size(), 2u) << "less than a byte";
}

TEST(ReplicaPlan, DifferenceNamesTensorBoxAndRanks) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) ranks.Tensor(r, "w", DType::kF32, {4, 2}, Box::Whole({4, 2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  const Hash128 a{1, 1};
  const Hash128 b{2, 2};
  std::vector<std::vector<Hash128>> hashes = {{a, b}, {a, b}};
  const auto compare = [&] { return CompareReplicas(layout, ReplicaCheck::kRotating, 1, hashes); };
  ASSERT_OK_AND_ASSIGN(ReplicaFindings found, compare());
  EXPECT_OK(found.ToStatus());
  EXPECT_EQ(found.compared_bytes, 32u);
  hashes[1][1] = a;
  ASSERT_OK_AND_ASSIGN(found, compare());
  EXPECT_THAT(found.ToStatus(), HasCode(Code::kDataLoss));
  EXPECT_EQ(found.ToStatus().message(),
            "tensor w: [2:4, 0:2] differs between the replicas on rank 0 and rank 1");
  hashes[1].push_back(a);
  EXPECT_THAT(compare(), HasMessage("more hashes of replicas than requested"));
  hashes[1] = {a};
  EXPECT_THAT(compare(), HasCode(Code::kInternal));
}

TEST(ReplicaPlan, DifferencesAreListedUpToALimitAndCounted) {
  Ranks ranks(3);
  const Dims shape = {30 * kMi};
  for (int r = 0; r < 3; ++r) ranks.Tensor(r, "w", DType::kU8, shape, Box::Whole(shape));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Layout());
  std::vector<std::vector<Hash128>> hashes(3, std::vector<Hash128>(30, Hash128{1, 1}));
  hashes[2].assign(30, Hash128{2, 2});
  ASSERT_OK_AND_ASSIGN(const ReplicaFindings found,
                       CompareReplicas(layout, ReplicaCheck::kFull, 1, hashes));
  EXPECT_EQ(found.differing, 30u);
  EXPECT_EQ(found.listed.size(), ReplicaFindings::kMaxListed);
  EXPECT_THAT(found.ToStatus(), HasMessage("rank 0 and rank 2"));
  EXPECT_THAT(found.ToStatus(), HasMessage("(and 14 more blocks differ)"));
  ReplicaFindings both;
  both.Add(ReplicaFindings(found));
  both.Add(ReplicaFindings(found));
  EXPECT_EQ(both.differing, 60u);
  EXPECT_EQ(both.listed.size(), ReplicaFindings::kMaxListed);
  EXPECT_EQ(both.compared_bytes, 2 * layout.replica_bytes);
}

}  // namespace
}  // namespace tensormount
