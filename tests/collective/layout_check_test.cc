// SPDX-License-Identifier: Apache-2.0
// Verdicts about layouts: every kind of finding with its text, and what is likely behind it.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "collective/layout/layout.h"
#include "collective/layout/wire.h"
#include "tests/collective/layout_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr DType kF = DType::kF32;

Region Flat(const Dims& shape, std::int64_t first, std::int64_t count) {
  return Region::Flat(Box::Whole(shape), first, count).value();
}

TEST(RankListText, ConsecutiveRanksArePrintedAsRanges) {
  EXPECT_EQ(RankList({}), "no rank");
  EXPECT_EQ(RankList({3}), "rank 3");
  EXPECT_EQ(RankList({2, 0, 1, 1}), "ranks 0, 1, 2");
  EXPECT_EQ(RankList({8, 9, 10, 11, 12, 13, 14, 15}), "ranks 8-15");
  EXPECT_EQ(RankList({0, 2, 3, 4, 5, 9}), "ranks 0, 2-5, 9");
  std::vector<int> odd;
  for (int r = 1; r < 60; r += 2) odd.push_back(r);
  EXPECT_EQ(RankList(odd),
            "ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 and 14 more");
}

TEST(LayoutCheck, GapOfOneElementNamesTensorBoxAndRanks) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "w", kF, {8}, B({0}, {4})).Tensor(1, "w", kF, {8}, B({5}, {3}));
  const LayoutReport report = ranks.Check();
  ASSERT_EQ(report.findings.size(), 1u);
  const Finding& finding = report.findings[0];
  EXPECT_EQ(finding.kind, FindingKind::kMissing);
  EXPECT_EQ(finding.key, "w");
  EXPECT_EQ(finding.message, "tensor w: [4:5] is held by no rank; parts are held by ranks 0, 1");
  EXPECT_EQ(finding.box, B({4}, {1}));
  EXPECT_EQ(finding.elements, 1u);
  EXPECT_THAT(finding.ranks, ElementsAre(0, 1));
  EXPECT_EQ(finding.rank_count, 2u);
  EXPECT_EQ(finding.cause, "the box of rank 1 is one element short at its beginning: off by one?");
  EXPECT_THAT(report.ToStatus(), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(report.ToStatus().message(),
            "tensor w: [4:5] is held by no rank; parts are held by ranks 0, 1 (the box of rank 1 "
            "is one element short at its beginning: off by one?)");
}

TEST(LayoutCheck, RankListIsTruncatedButCounted) {
  LayoutRanks ranks(100);
  for (int r = 0; r < 100; ++r) ranks.Tensor(r, "w", kF, {101}, B({r}, {1}));
  const LayoutReport report = ranks.Check();
  ASSERT_EQ(report.findings.size(), 1u);
  const Finding& finding = report.findings[0];
  EXPECT_EQ(finding.box, B({100}, {1}));
  EXPECT_EQ(finding.rank_count, 100u);
  ASSERT_EQ(finding.ranks.size(), 64u);
  EXPECT_EQ(finding.ranks.front(), 0);
  EXPECT_EQ(finding.ranks.back(), 63);
}

TEST(LayoutCheck, AllGapsAreFoundAndCounted) {
  LayoutRanks ranks(1);
  for (int i = 0; i < 10; ++i) ranks.Tensor(0, "w", kF, {40}, B({4 * i}, {3}));
  EXPECT_EQ(ranks.Check(100).findings.size(), 10u);
  const LayoutReport some = ranks.Check(3);
  EXPECT_EQ(some.findings.size(), 3u);
  EXPECT_EQ(some.finding_count, 10u);
  EXPECT_EQ(some.findings[2].box, B({11}, {1}));
  EXPECT_EQ(some.findings[0].cause, "every box is one element short at its end: off by one?");
  EXPECT_THAT(some.ToStatus(), HasMessage("; 9 more findings"));
}

TEST(LayoutCheck, OverlapNamesTheBoxAndBothRanks) {
  LayoutRanks ranks(3);
  ranks.Tensor(0, "a", kF, {2}, Box::Whole({2}))
      .Tensor(1, "w", kF, {8, 8}, B({0, 0}, {5, 8}))
      .Tensor(2, "w", kF, {8, 8}, B({4, 0}, {4, 8}));
  EXPECT_THAT(ranks.Messages(), ElementsAre("tensor w: [4:5, 0:8] is held by rank 1 and rank 2"));
}

TEST(LayoutCheck, OverlapOfUnequalBoxesNamesBothAndACause) {
  LayoutRanks ranks(3);
  ranks.Tensor(0, "w", kF, {4, 8}, B({0, 0}, {2, 8}))
      .Tensor(1, "w", kF, {4, 8}, B({0, 0}, {2, 4}))
      .Tensor(2, "w", kF, {4, 8}, B({2, 0}, {2, 8}));
  LayoutReport report = ranks.Check();
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].message, "tensor w: [0:2, 0:4] is held by rank 0 and rank 1");
  EXPECT_EQ(report.findings[0].cause,
            "rank 0: [0:2, 0:8], rank 1: [0:2, 0:4]: one box contains another: not sharded on some "
            "ranks?");
  LayoutRanks cut(2);
  cut.Tensor(0, "w", kF, {6, 6}, B({0, 0}, {6, 4})).Tensor(1, "w", kF, {6, 6}, B({3, 0}, {3, 6}));
  report = cut.Check();
  bool seen = false;
  for (const auto& finding : report.findings) {
    if (finding.message.find("is held by rank 0 and rank 1") == std::string::npos) continue;
    EXPECT_EQ(finding.cause, "rank 0: [0:6, 0:4], rank 1: [3:6, 0:6]: cut in different places?");
    seen = true;
  }
  EXPECT_TRUE(seen);
}

TEST(LayoutCheck, OverlapWithinOneRankIsReported) {
  LayoutRanks ranks(1);
  ranks.Tensor(0, "w", kF, {8}, B({0}, {5})).Tensor(0, "w", kF, {8}, B({4}, {4}));
  EXPECT_THAT(ranks.Messages(), ElementsAre("tensor w: [4:5] was added twice by rank 0"));
  LayoutRanks twice(1);
  twice.Tensor(0, "w", kF, {8}, B({0}, {8})).Tensor(0, "w", kF, {8}, B({0}, {8}));
  EXPECT_THAT(twice.Messages(), ElementsAre("tensor w: [0:8] was added twice by rank 0"));
}

TEST(LayoutCheck, DtypeAndShapeMustAgree) {
  LayoutRanks dtype(3);
  dtype.Tensor(0, "w", kF, {8}, B({0}, {4}))
      .Tensor(1, "w", DType::kBF16, {8}, B({4}, {2}))
      .Tensor(2, "w", kF, {8}, B({6}, {2}));
  EXPECT_THAT(dtype.Messages(),
              ElementsAre("tensor w: dtype is f32 on ranks 0, 2 and bf16 on rank 1"));
  LayoutRanks shape(2);
  shape.Tensor(0, "w", kF, {8, 8}, B({0, 0}, {4, 8})).Tensor(1, "w", kF, {8, 9}, B({4, 0}, {4, 9}));
  EXPECT_THAT(shape.Messages(),
              ElementsAre("tensor w: shape is [8, 8] on rank 0 and [8, 9] on rank 1"));
}

TEST(LayoutCheck, CellsAreCheckedWhenDtypesDiffer) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "w", kF, {8}, B({0}, {4})).Tensor(1, "w", DType::kBF16, {8}, B({5}, {3}));
  EXPECT_THAT(ranks.Messages(),
              ElementsAre("tensor w: [4:5] is held by no rank; parts are held by ranks 0, 1",
                          "tensor w: dtype is f32 on rank 0 and bf16 on rank 1"));
}

TEST(LayoutCheck, EqualRegionsAreReplicasHoweverSpelled) {
  LayoutRanks ranks(3);
  // A flat range of whole rows is the box of these rows.
  ranks.Tensor(0, "w", kF, {4, 2}, B({0, 0}, {2, 2}))
      .Tensor(1, "w", kF, {4, 2}, Flat({4, 2}, 0, 4))
      .Tensor(2, "w", kF, {4, 2}, B({2, 0}, {2, 2}));
  const GlobalLayout layout = ranks.Layout();
  ASSERT_EQ(layout.tensors.size(), 1u);
  ASSERT_EQ(layout.tensors[0].holdings.size(), 2u);
  EXPECT_THAT(layout.tensors[0].holdings[0].holders, ElementsAre(Holder{0, 0}, Holder{1, 0}));
  EXPECT_EQ(layout.tensors[0].holdings[0].main, -1);
  EXPECT_EQ(layout.replica_bytes, 16u);
  EXPECT_EQ(layout.tensor_bytes, 32u);
  EXPECT_EQ(ranks.Check().replica_bytes, 16u);
}

TEST(LayoutCheck, PartialOverlapIsNotTreatedAsAReplica) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "w", kF, {4, 2}, Box::Whole({4, 2}))
      .Tensor(1, "w", kF, {4, 2}, B({1, 0}, {2, 2}));
  EXPECT_THAT(ranks.Messages(), ElementsAre("tensor w: [1:3, 0:2] is held by rank 0 and rank 1"));
}

TEST(LayoutCheck, EmptyTensorsAndEmptyRegionsAreLegal) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "none", kF, {0, 4}, B({0, 0}, {0, 4}))
      .Tensor(1, "none", kF, {0, 4}, B({0, 1}, {0, 2}))
      .Tensor(0, "w", kF, {4}, B({0}, {4}))
      .Tensor(1, "w", kF, {4}, B({2}, {0}))
      .Tensor(1, "scalar", DType::kI64, {}, Region());
  const GlobalLayout layout = ranks.Layout();
  ASSERT_EQ(layout.tensors.size(), 3u);
  EXPECT_TRUE(layout.tensors[0].holdings.empty());
  EXPECT_EQ(layout.tensors[0].first_rank, 0);
  EXPECT_EQ(layout.tensors[1].holdings.size(), 1u);
  EXPECT_EQ(layout.tensors[1].first_rank, 1);
}

TEST(LayoutCheck, TensorWithOnlyEmptyRegionsIsReported) {
  LayoutRanks ranks(1);
  ranks.Tensor(0, "w", kF, {4}, B({2}, {0}));
  EXPECT_THAT(ranks.Messages(), ElementsAre("tensor w: [0:4] is held by no rank"));
}

TEST(LayoutCheck, LabelledReplicasMustHaveOneMain) {
  LayoutRanks good(3);
  good.Tensor(0, "w", kF, {8}, B({0}, {4}), Replica::kCopy)
      .Tensor(1, "w", kF, {8}, B({0}, {4}), Replica::kMain)
      .Tensor(2, "w", kF, {8}, B({4}, {4}), Replica::kMain);
  EXPECT_EQ(good.Layout().tensors[0].holdings[0].main, 1);

  LayoutRanks none(2);
  none.Tensor(0, "w", kF, {8}, B({0}, {8}), Replica::kCopy)
      .Tensor(1, "w", kF, {8}, B({0}, {8}), Replica::kCopy);
  EXPECT_THAT(none.Messages(),
              ElementsAre("tensor w: [0:8] has no main replica; copies are held by ranks 0, 1"));
  EXPECT_EQ(none.Check().findings[0].kind, FindingKind::kNoMain);

  // These two have one layout: the label counts for each of its ranks.
  LayoutRanks two(2);
  two.Tensor(0, "w", kF, {8}, B({0}, {8}), Replica::kMain)
      .Tensor(1, "w", kF, {8}, B({0}, {8}), Replica::kMain);
  EXPECT_THAT(two.Messages(), ElementsAre("tensor w: [0:8] has 2 main replicas, on ranks 0, 1"));
  EXPECT_EQ(two.Check().findings[0].kind, FindingKind::kSeveralMains);

  LayoutRanks lonely(2);
  lonely.Tensor(0, "w", kF, {8}, B({0}, {4}), Replica::kMain)
      .Tensor(1, "w", kF, {8}, B({4}, {4}), Replica::kCopy);
  EXPECT_THAT(lonely.Messages(),
              ElementsAre("tensor w: [4:8] has no main replica; copies are held by rank 1"));

  LayoutRanks mixed(3);
  mixed.Tensor(0, "w", kF, {8}, B({0}, {8}), Replica::kMain)
      .Tensor(1, "w", kF, {8}, B({0}, {8}))
      .Tensor(2, "w", kF, {8}, B({0}, {8}), Replica::kCopy);
  EXPECT_THAT(mixed.Messages(),
              ElementsAre("tensor w: replica ids are given by ranks 0, 2 and not given by rank 1"));
  EXPECT_EQ(mixed.Check().findings[0].kind, FindingKind::kMixedLabels);
}

TEST(LayoutCheck, ObjectsAgreeAndGridsAreComplete) {
  LayoutRanks differ(2);
  differ.Object(0, "rng", "a").Object(1, "rng", "b");
  EXPECT_THAT(differ.Messages(),
              ElementsAre("object rng: contents differ between rank 0 and rank 1"));
  LayoutRanks hole(2);
  hole.Object(0, "rng", "a", {.index = {0}, .grid = {3}})
      .Object(1, "rng", "b", {.index = {2}, .grid = {3}});
  EXPECT_THAT(hole.Messages(), ElementsAre("object rng: part [1] of grid [3] is held by no rank"));
  LayoutRanks holes(1);
  holes.Object(0, "rng", "a", {.index = {0, 0}, .grid = {2, 3}});
  EXPECT_THAT(
      holes.Messages(),
      ElementsAre("object rng: part [0, 1] of grid [2, 3] is held by no rank, nor are 4 others"));
  LayoutRanks grids(2);
  grids.Object(0, "rng", "a", {.index = {0}, .grid = {1}})
      .Object(1, "rng", "b", {.index = {1}, .grid = {2}});
  EXPECT_THAT(grids.Messages(), ElementsAre("object rng: grid is [1] on rank 0 and [2] on rank 1"));
  LayoutRanks kinds(2);
  kinds.Tensor(0, "x", kF, {1}, B({0}, {1})).Object(1, "x", "b");
  EXPECT_THAT(kinds.Messages(), ElementsAre("key x is a tensor on rank 0 and an object on rank 1"));
  LayoutRanks good(2);
  good.Object(0, "rng", "a", {.index = {0}, .grid = {2}})
      .Object(1, "rng", "b", {.index = {1}, .grid = {2}})
      .Object(0, "same", "s")
      .Object(1, "same", "s");
  const GlobalLayout layout = good.Layout();
  ASSERT_EQ(layout.objects.size(), 3u);
  EXPECT_THAT(layout.objects[2].holders, ElementsAre(Holder{0, 1}, Holder{1, 1}));
  EXPECT_EQ(good.Check().objects, 3u);
}

TEST(LayoutCheck, RankWithTheDifferingObjectIsNamed) {
  LayoutRanks ranks(5);
  for (int r = 0; r < 5; ++r) ranks.Object(r, "rng", r == 3 ? "b" : "a");
  EXPECT_THAT(ranks.Messages(),
              ElementsAre("object rng: contents differ between rank 0 and rank 3"));
  EXPECT_EQ(ranks.Cause(), "only rank 3 differs from the 4 others");
}

TEST(LayoutCheck, DuplicateObjectPartOnOneRankIsReported) {
  // A state dict refuses this; what comes from elsewhere may have it.
  LayoutRanks once(1);
  once.Object(0, "rng", "a");
  std::string encoded = EncodeLayout(once.at(0), 0, 1);
  const std::string record = encoded.substr(24);
  encoded[20] = 2;
  encoded += record;
  LayoutTable table;
  ASSERT_OK(table.Add(encoded, std::vector<int>{0}));
  const LayoutReport report = CheckLayout(table, {1, 100, nullptr});
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].message, "object rng: added twice by rank 0");
}

TEST(LayoutCheck, KeyThatEqualsALayerNameIsReported) {
  LayoutRanks ranks(1);
  ranks.Tensor(0, "layers.w", kF, {4, 2}, Box::Whole({4, 2}))
      .Tensor(0, "layers.3.w", kF, {2}, Box::Whole({2}))
      .Tensor(0, "layers.x.w", kF, {2}, Box::Whole({2}));
  const std::map<std::string, std::string> names = {{"layers.w", "layers.{}.w"}};
  const LayoutReport report = ranks.Check(100, &names);
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kLayerName);
  EXPECT_EQ(report.findings[0].message,
            "tensor layers.3.w: this is also the name of layer 3 of tensor layers.w");
}

TEST(LayoutCheck, FindingsAreSortedByKeyKindAndPlace) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "b", kF, {8}, B({1}, {3}))
      .Tensor(1, "b", kF, {8}, B({3}, {4}))
      .Tensor(0, "a", kF, {4}, B({0}, {3}))
      .Tensor(1, "a", kF, {4}, B({2}, {2}));
  EXPECT_THAT(ranks.Messages(),
              ElementsAre("tensor a: [2:3] is held by rank 0 and rank 1",
                          "tensor b: [0:1] is held by no rank; parts are held by ranks 0, 1",
                          "tensor b: [7:8] is held by no rank; parts are held by ranks 0, 1",
                          "tensor b: [3:4] is held by rank 0 and rank 1"));
}

TEST(LayoutCheck, OverlapOfSeveralRanksIsOneFinding) {
  LayoutRanks ranks(3);
  ranks.Tensor(0, "w", kF, {8}, B({0}, {5}))
      .Tensor(1, "w", kF, {8}, B({4}, {4}))
      .Tensor(2, "w", kF, {8}, B({4}, {1}));
  EXPECT_THAT(ranks.Messages(), ElementsAre("tensor w: [4:5] is held by ranks 0, 1, 2"));
}

TEST(LayoutCheck, ReportCountsTensorsBytesAndReplicas) {
  LayoutRanks ranks(4);
  for (int r = 0; r < 4; ++r) {
    ranks.Tensor(r, "w", kF, {8}, B({4 * (r % 2)}, {4}))
        .Tensor(r, "x", DType::kU8, {2}, B({0}, {2}));
  }
  const LayoutReport report = ranks.Check();
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.world, 4);
  EXPECT_EQ(report.tensors, 2u);
  EXPECT_EQ(report.boxes, 8u);
  EXPECT_EQ(report.bytes, 34u);
  EXPECT_EQ(report.replica_bytes, 32u + 6u);
  EXPECT_EQ(report.layouts, 2u);
  EXPECT_EQ(
      report.ToText(),
      "2 tensors of 34 bytes and 0 objects on 4 ranks: 8 shards in 2 different layouts, 38 "
      "bytes of replicas\nsound: every element is held exactly once, not counting replicas\n");
}

// ---- Causes ---------------------------------------------------------------------------------

TEST(LayoutCause, NamesRanksThatReportAnotherRanksBoxes) {
  LayoutRanks ranks(16);
  for (int r = 0; r < 16; ++r) ranks.Tensor(r, "w", kF, {32, 4}, B({2 * (r % 8), 0}, {2, 4}));
  EXPECT_EQ(ranks.Cause(), "ranks 8-15 report the boxes of ranks 0-7: wrong tensor-parallel rank?");
  LayoutRanks one(4);
  for (int r = 0; r < 4; ++r) one.Tensor(r, "w", kF, {8}, B({2 * (r == 3 ? 2 : r)}, {2}));
  EXPECT_EQ(one.Cause(), "rank 3 reports the box of rank 2: wrong tensor-parallel rank?");
}

TEST(LayoutCause, NamesRankThatHoldsNothing) {
  LayoutRanks ranks(8);
  for (int r = 0; r < 8; ++r) {
    if (r != 5) ranks.Tensor(r, "w", kF, {16}, B({2 * r}, {2}));
  }
  EXPECT_EQ(ranks.Cause(), "rank 5 holds nothing of this tensor: missing rank or missing state?");
  LayoutRanks last(8);
  for (int r = 0; r < 3; ++r) last.Tensor(2 * r, "w", kF, {8}, B({2 * r}, {2}));
  EXPECT_EQ(last.Cause(), "rank 6 holds nothing of this tensor: missing rank or missing state?");
}

TEST(LayoutCause, NamesTransposedRankInAGrid) {
  // Rank r of 2 x 3 should hold cell (r / 3, r % 3); rank 1 has taken (j, i) for (i, j).
  LayoutRanks ranks(6);
  for (int r = 0; r < 6; ++r) {
    const int i = r == 1 ? 1 : r / 3;
    const int j = r == 1 ? 0 : r % 3;
    ranks.Tensor(r, "w", kF, {4, 6}, B({2 * i, 2 * j}, {2, 2}));
  }
  EXPECT_EQ(ranks.Cause(),
            "the grid is transposed: rank 1 holds the cell of (1, 0) instead of (0, 1)");
  // Rows, but rank 2 has its axes the other way round.
  LayoutRanks swapped(4);
  for (int r = 0; r < 4; ++r) {
    swapped.Tensor(r, "w", kF, {8, 8}, r == 2 ? B({0, 4}, {8, 2}) : B({2 * r, 0}, {2, 8}));
  }
  EXPECT_EQ(swapped.Cause(),
            "the grid is transposed: [4:6, 0:8] is missing, and rank 2 holds [0:8, 4:6]");
  // Of two ranks it could be either.
  LayoutRanks either(2);
  either.Tensor(0, "w", kF, {4, 4}, B({0, 0}, {2, 4}))
      .Tensor(1, "w", kF, {4, 4}, B({0, 2}, {4, 2}));
  EXPECT_EQ(either.Cause(), "");
}

TEST(LayoutCause, NamesShardThatBeginsLate) {
  LayoutRanks ranks(5);
  for (int r = 0; r < 5; ++r) {
    ranks.Tensor(r, "w", kF, {20, 3}, B({4 * r + (r == 3 ? 1 : 0), 0}, {4, 3}));
  }
  const LayoutReport report = ranks.Check();
  ASSERT_EQ(report.findings.size(), 2u);
  EXPECT_EQ(report.findings[0].message,
            "tensor w: [12:13, 0:3] is held by no rank; parts are held by ranks 0-4");
  EXPECT_EQ(report.findings[0].cause, "the shard of rank 3 begins one row late");
  EXPECT_EQ(report.findings[1].message, "tensor w: [16:17, 0:3] is held by rank 3 and rank 4");
  EXPECT_EQ(report.findings[1].cause, "the shard of rank 3 begins one row late");
}

TEST(LayoutCause, NamesBoxThatIsTooShortOrTooLong) {
  LayoutRanks shorter(4);
  for (int r = 0; r < 4; ++r) {
    shorter.Tensor(r, "w", kF, {3, 20}, B({0, 5 * r}, {3, r == 1 ? 4 : 5}));
  }
  EXPECT_EQ(shorter.Cause(), "the box of rank 1 is one column short at its end: off by one?");
  LayoutRanks longer(4);
  for (int r = 0; r < 4; ++r) longer.Tensor(r, "w", kF, {20}, B({5 * r}, {r == 1 ? 7 : 5}));
  EXPECT_EQ(longer.Cause(), "the box of rank 1 is 2 elements too long at its end");
}

TEST(LayoutCause, NamesPaddedAndTransposedShapes) {
  LayoutRanks padding(2);
  padding.Tensor(0, "w", kF, {50304, 8}, B({0, 0}, {25152, 8}))
      .Tensor(1, "w", kF, {50432, 8}, B({25216, 0}, {25216, 8}));
  EXPECT_EQ(padding.Cause(), "shape differs only in axis 0: different vocabulary padding?");
  LayoutRanks local(2);
  local.Tensor(0, "w", kF, {8, 8}, B({0, 0}, {4, 8})).Tensor(1, "w", kF, {4, 8}, B({0, 0}, {4, 8}));
  EXPECT_EQ(local.Cause(),
            "shape differs only in axis 0, by a factor of 2: the shape of a shard instead of the "
            "whole?");
  LayoutRanks turned(2);
  turned.Tensor(0, "w", kF, {8, 4}, B({0, 0}, {4, 4}))
      .Tensor(1, "w", kF, {4, 8}, B({2, 0}, {2, 8}));
  EXPECT_EQ(turned.Cause(), "the shapes are each other's transposes");
}

TEST(LayoutCause, GivesNoCauseWhenNothingFits) {
  LayoutRanks ranks(3);
  ranks.Tensor(0, "w", kF, {100}, B({0}, {13}))
      .Tensor(1, "w", kF, {100}, B({31}, {17}))
      .Tensor(2, "w", kF, {100}, B({60}, {40}));
  EXPECT_EQ(ranks.Cause(), "");
}

// ---- Cases of other systems ------------------------------------------------------------------

// Megatron: data-parallel slices of the cells of a grid, with a hole and with an overlap.
TEST(MegatronValidation, FlattenedTensorsAreProperlyValidated) {
  const auto job = [](std::int64_t first, std::int64_t count) {
    LayoutRanks ranks(4);
    for (int r = 0; r < 4; ++r) {
      const Box cell = B({0, 5 * (r / 2)}, {4, 5});
      const Region half = r == 1
                              ? Region::Flat(cell, first, count).value()
                              : Region::Flat(cell, r % 2 == 0 ? 0 : 7, r % 2 == 0 ? 7 : 13).value();
      ranks.Tensor(r, "w", kF, {4, 10}, half);
    }
    return ranks.Messages();
  };
  EXPECT_THAT(job(7, 13), IsEmpty());
  EXPECT_THAT(job(8, 12), ElementsAre("tensor w: [1:2, 2:3] is held by no rank; parts are held by "
                                      "ranks 0-3"));
  EXPECT_THAT(job(6, 14), ElementsAre("tensor w: [1:2, 1:2] is held by rank 0 and rank 1"));
}

// DCP, TestValidateGlobalPlan and what it lets pass.
TEST(DcpValidation, CutsAlongEveryAxisAreSound) {
  for (int axis = 0; axis < 3; ++axis) {
    LayoutRanks ranks(4);
    for (int r = 0; r < 4; ++r) {
      Dims begin = {0, 0, 0};
      Dims extent = {8, 8, 8};
      begin[axis] = 2 * r;
      extent[axis] = 2;
      ranks.Tensor(r, "w", kF, {8, 8, 8}, B(begin, extent));
    }
    EXPECT_THAT(ranks.Messages(), IsEmpty());
  }
}

TEST(DcpValidation, EmptyChunkInsideAnotherIsNotAnOverlap) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "w", kF, {4, 4}, Box::Whole({4, 4}))
      .Tensor(1, "w", kF, {4, 4}, B({2, 1}, {0, 2}));
  EXPECT_THAT(ranks.Messages(), IsEmpty());
}

TEST(DcpValidation, SmallerChunkAtTheSameOffsetIsAnOverlap) {
  LayoutRanks ranks(2);
  ranks.Tensor(0, "w", kF, {4}, B({0}, {4})).Tensor(1, "w", kF, {4}, B({0}, {2}));
  EXPECT_THAT(ranks.Messages(), ElementsAre("tensor w: [0:2] is held by rank 0 and rank 1"));
}

TEST(DcpValidation, HoleInASingleRankIsFound) {
  LayoutRanks ranks(1);
  ranks.Tensor(0, "w", kF, {4}, B({0}, {3}));
  EXPECT_THAT(ranks.Messages(),
              ElementsAre("tensor w: [3:4] is held by no rank; parts are held by rank 0"));
}

// ---- The wire -------------------------------------------------------------------------------

TEST(LayoutWire, ShortRecordHas96BytesAndLongOne288) {
  const auto size = [](const Dims& shape) {
    LayoutRanks ranks(1);
    ranks.Tensor(0, "t", kF, shape, Box::Whole(shape));
    return EncodeLayout(ranks.at(0), 0, 1).size();
  };
  const std::size_t head = 24;
  const std::size_t entry = 4 + 1 + 1 + 1;  // Key "t" with its length, dtype, rank.
  EXPECT_EQ(size({2, 2, 2, 2}), head + entry + 4 * 8 + 96);
  EXPECT_EQ(size({2, 2, 2, 2, 2}), head + entry + 5 * 8 + 288);
}

LayoutRanks OneOfEach() {
  LayoutRanks ranks(1);
  ranks.Tensor(0, "a", DType::kBF16, {3, 5}, Flat({3, 5}, 2, 11), Replica::kMain)
      .Tensor(0, "deep", DType::kI8, {1, 2, 1, 2, 1, 2}, Box::Whole({1, 2, 1, 2, 1, 2}))
      .Tensor(0, "b", DType::kF64, {}, Region())
      .Object(0, "rng", "xyz", {.index = {1}, .grid = {2}});
  return ranks;
}

TEST(LayoutWire, LayoutRoundTrips) {
  LayoutRanks ranks = OneOfEach();
  ASSERT_OK_AND_ASSIGN(const DecodedLayout d, DecodeLayout(EncodeLayout(ranks.at(0), 0, 1), "l"));
  ASSERT_EQ(d.tensors.size(), 3u);
  EXPECT_EQ(d.tensors[1].shape(), (Dims{1, 2, 1, 2, 1, 2}));
  ASSERT_EQ(d.shards.size(), 3u);
  EXPECT_EQ(d.shards[0].region, Flat({3, 5}, 2, 11));
  EXPECT_EQ(d.shards[0].replica, Replica::kMain);
  EXPECT_EQ(d.shards[1].item, 2u) << "short records first";
  EXPECT_EQ(d.tensors[d.shards[2].tensor].key(), "deep");
  ASSERT_EQ(d.objects.size(), 1u);
  EXPECT_EQ(d.objects[0].index, (Dims{1}));
  EXPECT_EQ(d.objects[0].length, 3u);
}

TEST(LayoutWire, KeysAreDistributedOverOwners) {
  LayoutRanks ranks(1);
  for (int t = 0; t < 50; ++t) {
    ranks.Tensor(0, "t" + std::to_string(t), kF, {2}, Box::Whole({2}));
    ranks.Object(0, "o" + std::to_string(t), "x");
  }
  std::size_t tensors = 0;
  std::size_t objects = 0;
  for (std::uint32_t owner = 0; owner < 4; ++owner) {
    ASSERT_OK_AND_ASSIGN(const DecodedLayout d,
                         DecodeLayout(EncodeLayout(ranks.at(0), owner, 4), "l"));
    EXPECT_GT(d.tensors.size(), 3u);
    for (const TensorMeta& meta : d.tensors) EXPECT_EQ(OwnerOf(meta.key(), 4), owner);
    tensors += d.tensors.size();
    objects += d.objects.size();
  }
  EXPECT_EQ(tensors, 50u);
  EXPECT_EQ(objects, 50u);
}

TEST(LayoutWire, HashCoversLayoutAndNotContents) {
  LayoutRanks a = OneOfEach();
  LayoutRanks b(1);
  b.Tensor(0, "a", DType::kBF16, {3, 5}, Flat({3, 5}, 2, 11), Replica::kMain)
      .Tensor(0, "deep", DType::kI8, {1, 2, 1, 2, 1, 2}, Box::Whole({1, 2, 1, 2, 1, 2}))
      .Tensor(0, "b", DType::kF64, {}, Region())
      .Object(0, "rng", "other bytes", {.index = {1}, .grid = {2}});
  const LayoutHashes of_a = LayoutEncoder(a.at(0)).Hashes();
  const LayoutHashes of_b = LayoutEncoder(b.at(0)).Hashes();
  EXPECT_EQ(of_a.tensors, of_b.tensors);
  EXPECT_EQ(of_a.objects, of_b.objects);
  EXPECT_NE(of_a.contents, of_b.contents);
  b.Tensor(0, "c", DType::kF64, {}, Region());
  EXPECT_NE(of_a.tensors, LayoutEncoder(b.at(0)).Hashes().tensors);
}

TEST(LayoutWire, EveryTruncationIsRefused) {
  LayoutRanks ranks = OneOfEach();
  const std::string bytes = EncodeLayout(ranks.at(0), 0, 1);
  for (std::size_t n = 1; n < bytes.size(); ++n) {
    LayoutTable table;
    const Status status = table.Add(bytes.substr(0, n), std::vector<int>{7});
    EXPECT_THAT(status, HasCode(Code::kDataLoss)) << n;
    EXPECT_THAT(status, HasMessage("layout of rank 7: ")) << n;
    EXPECT_FALSE(DecodeLayout(std::string_view(bytes).substr(0, n), "l").ok()) << n;
  }
}

TEST(LayoutWire, FlippedBitsAreRefusedOrChecked) {
  LayoutRanks ranks = OneOfEach();
  std::string bytes = EncodeLayout(ranks.at(0), 0, 1);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    LayoutTable table;
    const Status status = table.Add(bytes, std::vector<int>{0});
    const Result<DecodedLayout> decoded = DecodeLayout(bytes, "l");
    EXPECT_EQ(status.ok(), decoded.ok())
        << bit << ": " << status.ToString() << " but " << decoded.status().ToString();
    if (status.ok()) {
      (void)CheckLayout(table, {1, 100, nullptr});  // Only that they return.
      (void)MakeLayout(table, 1);
    } else {
      EXPECT_THAT(status, HasCode(Code::kDataLoss)) << bit;
    }
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
}

}  // namespace
}  // namespace tensormount
