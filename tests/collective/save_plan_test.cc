// SPDX-License-Identifier: Apache-2.0
// Descriptors, layout check, save plan and replica plan: pure, with inputs that a reader checks by
// eye.
#include "collective/save/save_plan.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "collective/save/replica_check.h"
#include "collective/validate/descriptor.h"
#include "collective/validate/layout_check.h"
#include "shard/coverage.h"
#include "tests/support/random.h"
#include "tests/support/random_layout.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

constexpr std::int64_t kMi = 1024 * 1024;

Box B(const Dims& begin, const Dims& extent) { return Box::Make(begin, extent).value(); }

// Ranks with tensors and no memory: the pure parts never look at data.
class Ranks {
 public:
  explicit Ranks(int n) : dicts_(static_cast<std::size_t>(n)) {}

  Ranks& Tensor(int rank, const std::string& key, DType dtype, const Dims& shape,
                const Region& region) {
    const Dims extent = region.is_flat() ? Dims{region.volume()} : region.box().extent();
    const Shard shard{shape, region, BufferView::Host(dtype, static_cast<void*>(&byte_), extent)};
    EXPECT_OK(at(rank).AddTensor(key, shard));
    return *this;
  }
  Ranks& Object(int rank, const std::string& key, const std::string& bytes,
                const ObjectPlace& place = {}) {
    EXPECT_OK(at(rank).AddObject(key, bytes, place));
    return *this;
  }
  StateDict& at(int rank) { return dicts_[static_cast<std::size_t>(rank)]; }

  Result<GlobalLayout> Check(const std::vector<SaveOptions>& options = {}) {
    std::vector<RankDescriptor> ranks;
    const int n = static_cast<int>(dicts_.size());
    for (int r = 0; r < n; ++r) {
      const SaveOptions mine =
          options.empty() ? SaveOptions{} : options[static_cast<std::size_t>(r)];
      TENSORMOUNT_ASSIGN_OR_RETURN(
          RankDescriptor d, DecodeDescriptor(EncodeDescriptor(at(r), "store/a", mine, r, n), r, n));
      ranks.push_back(std::move(d));
    }
    return CheckLayout(ranks);
  }
  std::string Error() {
    const Result<GlobalLayout> layout = Check();
    EXPECT_THAT(layout, HasCode(Code::kInvalidArgument));
    return layout.status().message();
  }

 private:
  std::vector<StateDict> dicts_;
  char byte_ = 0;
};

TEST(Descriptor, ShortRecordHas96BytesAndLongOne288) {
  Ranks empty(1);
  Ranks four(1);
  four.Tensor(0, "t", DType::kF32, {2, 2, 2, 2}, Box::Whole({2, 2, 2, 2}));
  Ranks five(1);
  five.Tensor(0, "t", DType::kF32, {2, 2, 2, 2, 2}, Box::Whole({2, 2, 2, 2, 2}));
  const auto size = [](Ranks& r) { return EncodeDescriptor(r.at(0), "s/a", {}, 0, 1).size(); };
  const std::size_t entry =
      1 + 1 + 4 + 1;  // dtype, rank, key "t" with its length; without extents.
  EXPECT_EQ(size(four), size(empty) + entry + 4 * 8 + 96);
  EXPECT_EQ(size(five), size(empty) + entry + 5 * 8 + 288);
}

TEST(Descriptor, ComesBackAsItWent) {
  Ranks ranks(1);
  const Region flat = Region::Flat(Box::Whole({3, 5}), 2, 11).value();
  ranks.Tensor(0, "a", DType::kBF16, {3, 5}, flat)
      .Tensor(0, "deep", DType::kI8, {1, 2, 1, 2, 1, 2}, Box::Whole({1, 2, 1, 2, 1, 2}))
      .Tensor(0, "b", DType::kF64, {}, Region())
      .Object(0, "rng", "xyz", {.index = {1}, .grid = {2}});
  ASSERT_OK(ranks.at(0).SetCommon("n", 7));
  SaveOptions options;
  options.producer = "p";
  options.now = -3;
  options.placement = PlacementRule::kRankShard;
  ASSERT_OK_AND_ASSIGN(const RankDescriptor d,
                       DecodeDescriptor(EncodeDescriptor(ranks.at(0), "s/a", options, 2, 4), 2, 4));
  EXPECT_OK(d.status);
  EXPECT_EQ(d.path, "s/a");
  EXPECT_EQ(d.producer, "p");
  EXPECT_EQ(d.now, -3);
  EXPECT_EQ(d.placement, PlacementRule::kRankShard);
  ASSERT_EQ(d.shards.size(), 3u);
  EXPECT_EQ(d.shards[0].region, flat);
  EXPECT_EQ(d.shards[1].item, 2u) << "short records first";
  EXPECT_EQ(d.tensors[d.shards[1].tensor].key(), "b");
  EXPECT_EQ(d.tensors[d.shards[2].tensor].shape(), (Dims{1, 2, 1, 2, 1, 2}));
  ASSERT_EQ(d.objects.size(), 1u);
  EXPECT_EQ(d.objects[0].index, (Dims{1}));
  EXPECT_EQ(d.objects[0].length, 3u);
  ASSERT_EQ(d.common.size(), 1u);
}

TEST(Descriptor, EveryTruncationIsRefused) {
  Ranks ranks(1);
  ranks.Tensor(0, "a", DType::kF32, {4}, Box::Whole({4})).Object(0, "o", "x");
  ASSERT_OK(ranks.at(0).SetCommon("n", 7));
  const std::string bytes = EncodeDescriptor(ranks.at(0), "s/a", {}, 0, 1);
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(DecodeDescriptor(std::string_view(bytes).substr(0, n), 0, 1).ok()) << n;
  }
}

TEST(Descriptor, FlippedBitsNeverCrash) {
  Ranks ranks(1);
  ranks.Tensor(0, "a", DType::kF32, {4, 4}, Region::Flat(Box::Whole({4, 4}), 1, 9).value());
  std::string bytes = EncodeDescriptor(ranks.at(0), "s/a", {}, 0, 1);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    if (Result<RankDescriptor> d = DecodeDescriptor(bytes, 0, 1); d.ok()) {
      (void)CheckLayout(std::span(&d.value(), 1));  // Only that it returns.
    }
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
}

TEST(LayoutCheck, GapOfOneElementNamesTensorBoxAndRanks) {
  Ranks ranks(2);
  ranks.Tensor(0, "w", DType::kF32, {8}, B({0}, {4})).Tensor(1, "w", DType::kF32, {8}, B({5}, {3}));
  EXPECT_EQ(ranks.Error(), "tensor w: [4:5] is held by no rank; parts are held by ranks 0, 1");
}

TEST(LayoutCheck, GapOfARowInTwoDimensions) {
  Ranks ranks(2);
  ranks.Tensor(0, "w", DType::kF32, {8, 8}, B({0, 0}, {4, 8}))
      .Tensor(1, "w", DType::kF32, {8, 8}, B({5, 0}, {3, 8}));
  EXPECT_EQ(ranks.Error(), "tensor w: [4:5, 0:8] is held by no rank; parts are held by ranks 0, 1");
}

TEST(LayoutCheck, OverlapNamesTheBoxAndBothRanks) {
  Ranks ranks(3);
  ranks.Tensor(0, "a", DType::kF32, {2}, Box::Whole({2}))
      .Tensor(1, "w", DType::kF32, {8, 8}, B({0, 0}, {5, 8}))
      .Tensor(2, "w", DType::kF32, {8, 8}, B({4, 0}, {4, 8}));
  EXPECT_EQ(ranks.Error(), "tensor w: [4:5, 0:8] is held by rank 1 and rank 2");
}

TEST(LayoutCheck, OverlapOnOneRankIsSaidSo) {
  Ranks ranks(1);
  ranks.Tensor(0, "w", DType::kF32, {8}, B({0}, {5})).Tensor(0, "w", DType::kF32, {8}, B({4}, {4}));
  EXPECT_EQ(ranks.Error(), "tensor w: [4:5] is held twice by rank 0");
  Ranks twice(1);
  twice.Tensor(0, "w", DType::kF32, {8}, B({0}, {8})).Tensor(0, "w", DType::kF32, {8}, B({0}, {8}));
  EXPECT_EQ(twice.Error(), "tensor w: [0:8] is held twice by rank 0");
}

TEST(LayoutCheck, DtypeAndShapeMustAgree) {
  Ranks dtype(2);
  dtype.Tensor(0, "w", DType::kF32, {8}, B({0}, {4}))
      .Tensor(1, "w", DType::kBF16, {8}, B({4}, {4}));
  EXPECT_EQ(dtype.Error(), "tensor w: dtype is f32 on rank 0 and bf16 on rank 1");
  Ranks shape(2);
  shape.Tensor(0, "w", DType::kF32, {8, 8}, B({0, 0}, {4, 8}))
      .Tensor(1, "w", DType::kF32, {8, 9}, B({4, 0}, {4, 9}));
  EXPECT_EQ(shape.Error(), "tensor w: shape is [8, 8] on rank 0 and [8, 9] on rank 1");
}

TEST(LayoutCheck, ReplicasAreEqualRegionsHoweverSpelled) {
  Ranks ranks(3);
  // A flat range of whole rows is the box of these rows.
  ranks.Tensor(0, "w", DType::kF32, {4, 2}, B({0, 0}, {2, 2}))
      .Tensor(1, "w", DType::kF32, {4, 2}, Region::Flat(Box::Whole({4, 2}), 0, 4).value())
      .Tensor(2, "w", DType::kF32, {4, 2}, B({2, 0}, {2, 2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  ASSERT_EQ(layout.tensors.size(), 1u);
  ASSERT_EQ(layout.tensors[0].holdings.size(), 2u);
  EXPECT_THAT(layout.tensors[0].holdings[0].holders, ElementsAre(Holder{0, 0}, Holder{1, 0}));
  EXPECT_EQ(layout.replica_bytes, 16u);
  EXPECT_EQ(layout.tensor_bytes, 32u);
}

TEST(LayoutCheck, EmptyTensorsAndEmptyRegionsAreLegal) {
  Ranks ranks(2);
  ranks.Tensor(0, "none", DType::kF32, {0, 4}, B({0, 0}, {0, 4}))
      .Tensor(1, "none", DType::kF32, {0, 4}, B({0, 1}, {0, 2}))
      .Tensor(0, "w", DType::kF32, {4}, B({0}, {4}))
      .Tensor(1, "w", DType::kF32, {4}, B({2}, {0}))
      .Tensor(1, "scalar", DType::kI64, {}, Region());
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  ASSERT_EQ(layout.tensors.size(), 3u);
  EXPECT_TRUE(layout.tensors[0].holdings.empty());
  EXPECT_EQ(layout.tensors[1].holdings.size(), 1u);
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  EXPECT_THAT(plan.ranks[0].recorded, ElementsAre(0u));
}

TEST(LayoutCheck, ObjectsAgreeAndGridsAreComplete) {
  Ranks differ(2);
  differ.Object(0, "rng", "a").Object(1, "rng", "b");
  EXPECT_EQ(differ.Error(), "object rng: contents differ between rank 0 and rank 1");
  Ranks hole(2);
  hole.Object(0, "rng", "a", {.index = {0}, .grid = {3}})
      .Object(1, "rng", "b", {.index = {2}, .grid = {3}});
  EXPECT_EQ(hole.Error(), "object rng: part [1] of grid [3] is held by no rank");
  Ranks grids(2);
  grids.Object(0, "rng", "a", {.index = {0}, .grid = {1}})
      .Object(1, "rng", "b", {.index = {1}, .grid = {2}});
  EXPECT_EQ(grids.Error(), "object rng: grids [1] and [2] on rank 0 and rank 1");
  Ranks kinds(2);
  kinds.Tensor(0, "x", DType::kF32, {1}, B({0}, {1})).Object(1, "x", "b");
  EXPECT_EQ(kinds.Error(), "key x is a tensor on rank 0 and an object on rank 1");
  Ranks good(2);
  good.Object(0, "rng", "a", {.index = {0}, .grid = {2}})
      .Object(1, "rng", "b", {.index = {1}, .grid = {2}})
      .Object(0, "same", "s")
      .Object(1, "same", "s");
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, good.Check());
  EXPECT_EQ(layout.objects.size(), 3u);
}

TEST(LayoutCheck, CommonValuesMustBeEqual) {
  Ranks ranks(3);
  ASSERT_OK(ranks.at(0).SetCommon("a", 1));
  ASSERT_OK(ranks.at(1).SetCommon("n", 1));
  ASSERT_OK(ranks.at(2).SetCommon("n", 2));
  EXPECT_EQ(ranks.Error(), "common value n: differs between rank 1 and rank 2");
}

TEST(LayoutCheck, OptionsMustBeEqual) {
  Ranks ranks(2);
  SaveOptions other;
  other.if_exists = IfExists::kReplace;
  EXPECT_THAT(ranks.Check({SaveOptions{}, other}),
              HasMessage("option if_exists differs on rank 0 and rank 1"));
}

TEST(LayoutCheck, FailedAddsTravelAsData) {
  Ranks ranks(3);
  EXPECT_FALSE(ranks.at(1).AddTensor("bad", Shard{{4}, B({2}, {4}), {}}).ok());
  EXPECT_FALSE(ranks.at(2).AddObject("", "x").ok());
  const Status status = ranks.Check().status();
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status, HasMessage("rank 1: tensor bad: "));
  EXPECT_THAT(status, HasMessage("(and 1 more ranks failed)"));
}

// Every cell of every tensor once, by ranks that hold it.
void ExpectWritesEverythingOnce(const GlobalLayout& layout, const SavePlan& plan) {
  for (std::uint32_t t = 0; t < layout.tensors.size(); ++t) {
    std::vector<OwnedRegion> written;
    std::uint64_t bytes = 0;
    for (std::size_t r = 0; r < plan.ranks.size(); ++r) {
      for (const PlannedChunk& c : plan.ranks[r].chunks) {
        if (c.tensor != t) continue;
        EXPECT_GT(c.bytes, 0u);
        EXPECT_THAT(
            RegionBytes(layout.tensors[t].meta.dtype(), layout.tensors[t].meta.shape(), c.region),
            IsOkAndHolds(c.bytes));
        written.push_back({c.region, static_cast<std::uint32_t>(r)});
        bytes += c.bytes;
      }
    }
    EXPECT_EQ(bytes, layout.tensors[t].meta.bytes());
    EXPECT_TRUE(CheckCoverage(layout.tensors[t].meta.shape(), written).complete());
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
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  EXPECT_THAT(plan.placement, ElementsAre(Placement::kRankShard, Placement::kTensorFile,
                                          Placement::kPack, Placement::kRankShard));
  ExpectWritesEverythingOnce(layout, plan);
  ASSERT_EQ(plan.shared.size(), 1u);
  EXPECT_EQ(plan.shared[0].tensor, 1u);
  EXPECT_EQ(plan.shared[0].owner, 0);
  // Rank 1 writes its rows where they belong in the tensor.
  EXPECT_EQ(plan.ranks[1].chunks[0].placement, Placement::kTensorFile);
  EXPECT_EQ(plan.ranks[1].chunks[0].offset, 512u * 1024 * 4);
}

TEST(SavePlan, ReplicasAreSplitByBytesInsideATensorAtPages) {
  Ranks ranks(4);
  for (int r = 0; r < 4; ++r) {
    ranks.Tensor(r, "w", DType::kF32, {1003, 4099}, Box::Whole({1003, 4099}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
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

TEST(SavePlan, PagesAreThoseOfTheFileNotOfTheShard) {
  Ranks ranks(4);
  // Ranks 0 and 1 hold what comes before byte 3,000,001 of the file, ranks 2 and 3 the rest.
  const Dims shape = {6 * kMi};
  for (int r = 0; r < 4; ++r) {
    ranks.Tensor(r, "w", DType::kU8, shape,
                 r < 2 ? B({0}, {3'000'001}) : B({3'000'001}, {6 * kMi - 3'000'001}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kAuto));
  ExpectWritesEverythingOnce(layout, plan);
  EXPECT_EQ(plan.ranks[1].chunks[0].offset % 4096, 0u);
  EXPECT_EQ(plan.ranks[2].chunks[0].offset, 3'000'001u);
  EXPECT_EQ(plan.ranks[3].chunks[0].offset % 4096, 0u);
  EXPECT_EQ(plan.ranks[3].chunks[0].offset, 3'000'001u + plan.ranks[3].chunks[0].begin);
}

TEST(SavePlan, ReplicasFillUpThoseWhoHaveLess) {
  Ranks ranks(2);
  // Rank 0 alone has 6 MiB; of the 10 MiB that both have it gets 2, rank 1 gets 8.
  ranks.Tensor(0, "own", DType::kU8, {6 * kMi}, Box::Whole({6 * kMi}));
  for (int r = 0; r < 2; ++r) ranks.Tensor(r, "w", DType::kU8, {10 * kMi}, Box::Whole({10 * kMi}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
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
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kRankShard));
  ASSERT_EQ(plan.ranks[1].chunks.size(), 1u);
  EXPECT_EQ(plan.ranks[0].chunks[0].region, Region(B({0, 0}, {500, 1000})));
  EXPECT_EQ(plan.ranks[1].chunks[0].region, Region(B({500, 0}, {500, 1000})));
  EXPECT_EQ(plan.ranks[1].chunks[0].begin, 2000000u);
  EXPECT_EQ(plan.ranks[1].chunks[0].part, 1u);
}

TEST(SavePlan, ForcedTensorFileMakesAChunkOfEachRun) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) ranks.Tensor(r, "w", DType::kF32, {3, 4}, B({0, 2 * r}, {3, 2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, PlacementRule::kTensorFile));
  ExpectWritesEverythingOnce(layout, plan);
  ASSERT_EQ(plan.ranks[1].chunks.size(), 3u);
  EXPECT_EQ(plan.ranks[1].chunks[2].region, Region(B({2, 2}, {1, 2})));
  EXPECT_EQ(plan.ranks[1].chunks[2].offset, 40u);
  EXPECT_EQ(plan.ranks[1].chunks[2].begin, 16u);
}

TEST(SavePlan, ForcedTensorFileRefusesShortRuns) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) {
    ranks.Tensor(r, "w", DType::kU8, {10000, 4}, B({0, 2 * r}, {10000, 2}));
  }
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  const Result<SavePlan> plan = PlanSave(layout, PlacementRule::kTensorFile);
  EXPECT_THAT(plan, HasCode(Code::kUnsupported));
  EXPECT_THAT(plan, HasMessage("tensor w: shard [0:10000, 0:2] of rank 0 consists of 10000 runs"));
}

TEST(SavePlan, SafetensorsNeedsOneRankWithEverything) {
  Ranks cut(2);
  for (int r = 0; r < 2; ++r) cut.Tensor(r, "w", DType::kF32, {4}, B({2 * r}, {2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout cut_layout, cut.Check());
  EXPECT_THAT(PlanSave(cut_layout, PlacementRule::kSafetensors), HasCode(Code::kUnsupported));
  Ranks spread(2);
  spread.Tensor(0, "a", DType::kF32, {4}, Box::Whole({4}))
      .Tensor(1, "b", DType::kF32, {4}, Box::Whole({4}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout spread_layout, spread.Check());
  EXPECT_THAT(PlanSave(spread_layout, PlacementRule::kSafetensors),
              HasMessage("no rank holds all tensors whole"));
  Ranks complex_numbers(1);
  complex_numbers.Tensor(0, "c", DType::kC128, {4}, Box::Whole({4}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout complex_layout, complex_numbers.Check());
  EXPECT_THAT(PlanSave(complex_layout, PlacementRule::kSafetensors),
              HasMessage("the format has no c128"));
  Ranks good(2);
  good.Tensor(0, "a", DType::kF32, {4}, Box::Whole({4}))
      .Tensor(1, "a", DType::kF32, {4}, Box::Whole({4}))
      .Tensor(1, "b", DType::kF32, {4}, Box::Whole({4}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, good.Check());
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

TEST(SavePlan, RandomPartitionsAreWrittenOnceByThoseWhoHoldThem) {
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
    ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
    const auto rule = random.OneIn(2) ? PlacementRule::kAuto : PlacementRule::kRankShard;
    ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanSave(layout, rule));
    ExpectWritesEverythingOnce(layout, plan);
  }
}

TEST(ReplicaPlan, RotatingComparesEachShareWithOneMoreAndAllOverTime) {
  Ranks ranks(4);
  for (int r = 0; r < 4; ++r) ranks.Tensor(r, "w", DType::kU8, {400}, Box::Whole({400}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  std::set<std::pair<std::uint64_t, std::uint32_t>> seen;  // (share, other holder)
  for (std::uint64_t generation = 1; generation <= 3; ++generation) {
    const std::vector<ReplicaBlock> plan =
        PlanReplicaCheck(layout, ReplicaCheck::kRotating, generation);
    ASSERT_EQ(plan.size(), 4u);
    EXPECT_EQ(ComparedBytes(plan), 400u);
    std::map<std::uint32_t, std::uint64_t> hashed;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      EXPECT_EQ(plan[i].begin, i * 100);
      ASSERT_EQ(plan[i].holders.size(), 2u);
      for (const std::uint32_t h : plan[i].holders) {
        hashed[h] += plan[i].bytes;
        if (h != i) seen.insert({i, h});
      }
    }
    for (const auto& [holder, bytes] : hashed) EXPECT_EQ(bytes, 200u) << "2/R of the bytes each";
  }
  EXPECT_EQ(seen.size(), 12u);
  EXPECT_EQ(ComparedBytes(PlanReplicaCheck(layout, ReplicaCheck::kFull, 1)), 1200u);
  EXPECT_TRUE(PlanReplicaCheck(layout, ReplicaCheck::kOff, 1).empty());
}

TEST(ReplicaPlan, DifferenceNamesTensorBoxAndRanks) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) ranks.Tensor(r, "w", DType::kF32, {4, 2}, Box::Whole({4, 2}));
  ASSERT_OK_AND_ASSIGN(const GlobalLayout layout, ranks.Check());
  const std::vector<ReplicaBlock> plan = PlanReplicaCheck(layout, ReplicaCheck::kRotating, 1);
  ASSERT_EQ(plan.size(), 2u);
  const Hash128 a{1, 1};
  const Hash128 b{2, 2};
  std::vector<std::vector<Hash128>> hashes = {{a, b}, {a, b}};
  EXPECT_OK(CompareReplicas(layout, plan, hashes));
  hashes[1][1] = a;
  const Status status = CompareReplicas(layout, plan, hashes);
  EXPECT_THAT(status, HasCode(Code::kDataLoss));
  EXPECT_EQ(status.message(),
            "tensor w: [2:4, 0:2] differs between the replicas on rank 0 and rank 1");
  hashes[1].pop_back();
  EXPECT_THAT(CompareReplicas(layout, plan, hashes), HasCode(Code::kInternal));
}

}  // namespace
}  // namespace tensormount
