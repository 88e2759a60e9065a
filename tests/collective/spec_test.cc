// SPDX-License-Identifier: Apache-2.0
#include "collective/layout/spec.h"

#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/validate.h"

#include "tests/collective/layout_testing.h"
#include "tests/support/random_layout.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LayoutReport Check(std::string_view json, std::size_t limit = 100) {
  const auto report = CheckSpec(json, limit);
  EXPECT_THAT(report, IsOk()) << json;
  return report.ok() ? report.value() : LayoutReport();
}

// As Validate has it: everything but what a spec cannot know.
void ExpectSame(const LayoutReport& a, const LayoutReport& b) { EXPECT_EQ(a.ToJson(), b.ToJson()); }

TEST(SpecTest, ShardRulesCutTensorsForTheWorld) {
  for (const char* rule : {"rows", "cols", "dim:1", "grid:2x4", "flat", "replicate"}) {
    const LayoutReport report =
        Check(R"({"world": 8, "tensors": [{"key": "w", "dtype": "f32", "shape": [9, 10],
                 "shard": ")" +
              std::string(rule) + R"("}]})");
    EXPECT_TRUE(report.ok()) << rule << report.ToText();
    EXPECT_EQ(report.tensors, 1u);
    EXPECT_EQ(report.bytes, 360u);
    EXPECT_EQ(report.world, 8);
  }
}

TEST(SpecTest, MeshesSplitByAxesAndReplicateOverOthers) {
  const LayoutReport report = Check(R"({
    "mesh": [["dp", 2], ["pp", 3], ["tp", 4]],
    "tensors": [
      {"key": "l.{i}.w", "dtype": "bf16", "shape": [10, 6], "repeat": {"i": [0, 6]},
       "split": {"0": "tp"}, "only": {"pp": "{i}/2"}},
      {"key": "e", "dtype": "bf16", "shape": [8, 8], "split": {"1": "tp"}, "only": {"pp": [0, 2]}},
      {"key": "o", "dtype": "f32", "shape": [8, 8], "split": {"0": "tp"}, "flat": "dp",
       "only": {"pp": 1}},
      {"key": "g", "dtype": "f32", "shape": [24], "split": {"0": ["dp", "pp", "tp"]}},
      {"key": "n", "dtype": "f32", "shape": [3], "split": {}}],
    "objects": [{"key": "rng", "by_rank": true}, {"key": "args"},
                {"key": "grid", "grid": [2], "parts": [{"index": [0], "ranks": "0-11"},
                                                       {"index": [1], "ranks": "12-23/1"}]}]})");
  EXPECT_TRUE(report.ok()) << report.ToText();
  EXPECT_EQ(report.tensors, 10u);
  // Replicas of data parallelism: one more holder of each l and two more places... of e three more.
  EXPECT_EQ(report.replica_bytes, 6 * 120u + 3 * 128u + 23 * 12u);
  EXPECT_EQ(report.layouts, 24u);
}

// The same mesh by hand: what rank r holds.
TEST(SpecTest, MeshCoordinatesAreRowMajor) {
  LayoutRanks ranks(4);
  for (int r = 0; r < 4; ++r) {
    const auto box = Box::Make({(r % 2) * 3, 0}, {r % 2 == 0 ? 3 : 2, 4});
    ranks.Tensor(r, "w", DType::kF32, {5, 4}, Region(box.value()));
  }
  ExpectSame(Check(R"({"mesh": [["a", 2], ["b", 2]], "tensors":
      [{"key": "w", "dtype": "f32", "shape": [5, 4], "split": {"0": "b"}}]})"),
             ranks.Check());
}

TEST(SpecTest, FaultsAreReportedWithTheirBoxes) {
  LayoutReport report = Check(R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32",
      "shape": [8, 4], "shards": [{"ranks": 0, "begin": [0, 0], "extent": [4, 4]},
                                  {"ranks": [1], "begin": [5, 0], "extent": [3, 4]}]}]})");
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kMissing);
  EXPECT_EQ(report.findings[0].box->ToString(), "[4:5, 0:4]");

  report = Check(R"({"world": 4, "tensors": [{"key": "w", "dtype": "f32", "shape": [8],
      "shards": [{"ranks": "all", "replica": "main"}]}]})");
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kSeveralMains);

  report = Check(R"({"world": 2, "objects": [{"key": "o", "grid": [2], "parts":
      [{"index": [0], "ranks": 0}]}]})");
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kObjectMissing);

  report = Check(R"({"mesh": [["pp", 2]], "layers": {"w": "l.{}.w"}, "tensors": [
      {"key": "w", "dtype": "f32", "shape": [4, 4], "split": {"0": "pp"}},
      {"key": "l.2.w", "dtype": "f32", "shape": [4], "split": {}}]})");
  ASSERT_EQ(report.findings.size(), 1u) << report.ToText();
  EXPECT_EQ(report.findings[0].kind, FindingKind::kLayerName);
}

TEST(SpecTest, ErrorSaysWhyTheSpecIsInvalid) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "not JSON"},
      {R"({"world": 2, "mesh": []})", "give either \"world\" or \"mesh\""},
      {R"({"world": 0})", "1 to"},
      {R"({"mesh": [["a", 4096], ["b", 8192]]})", "1 to"},
      {R"({"mesh": [["a", 2], ["a", 2]]})", "is listed twice"},
      {R"({"world": 2, "tensor": []})", "unknown field \"tensor\""},
      {R"({"world": 2, "tensors": [], "layouts": []})", "cannot be combined"},
      {R"({"world": 2, "layouts": [{"ranks": "0-1", "shards": {"a": 1}}]})",
       "\"shards\" must be a list"},
      {R"({"world": 2, "layouts": [{"ranks": "0-1", "objects": "all"}]})",
       "\"objects\" must be a list"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2]}]})",
       "tensors[0]: give exactly one of"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f33", "shape": [2], "shard": "rows"}]})",
       "f33"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [-2], "shard": "rows"}]})",
       "non-negative"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2], "shard": "grid:3"}]})",
       "for 3 ranks"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2], "split": {"0": "tp"}}]})",
       "is not an axis of the mesh"},
      {R"({"mesh": [["tp", 2]], "tensors": [{"key": "w", "dtype": "f32", "shape": [2],
          "split": {"1": "tp"}}]})",
       "is not an axis of a tensor"},
      {R"({"mesh": [["tp", 2]], "tensors": [{"key": "w", "dtype": "f32", "shape": [2],
          "split": {"0": "tp"}, "flat": "tp"}]})",
       "splits the tensor twice"},
      {R"({"mesh": [["pp", 2]], "tensors": [{"key": "w.{i}", "dtype": "f32", "shape": [2],
          "repeat": {"i": [0, 6]}, "split": {}, "only": {"pp": "{i}/2"}}]})",
       "place 2 is not on mesh axis pp, which has places 0 to 1"},
      {R"({"mesh": [["pp", 2]], "tensors": [{"key": "w", "dtype": "f32", "shape": [2],
          "split": {}, "only": {"pp": "{j}"}}]})",
       "with a name of \"repeat\""},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2], "shard": "rows"},
          {"key": "w", "dtype": "f32", "shape": [2], "shard": "rows"}]})",
       "tensors[1]: key w is used twice"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2],
          "shards": [{"ranks": "0-2"}]}]})",
       "rank 2: there are only 2 ranks"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2],
          "shards": [{"ranks": "1-0"}]}]})",
       "must be like 0-7"},
      {R"({"world": 2, "objects": [{"key": "o", "ranks": "-1"}]})", "must be like 0-7"},
      {R"({"world": 2, "objects": [{"key": "o", "ranks": "0-"}]})", "must be like 0-7"},
      {R"({"world": 2, "objects": [{"key": "o", "ranks": "0-1/"}]})", "must be like 0-7"},
      {R"({"world": 2, "tensors": [{"key": "w", "dtype": "f32", "shape": [2],
          "shards": [{"ranks": 0, "begin": [1], "extent": [2]}]}]})",
       "outside"},
  };
  for (const auto& [json, message] : cases) {
    const auto report = CheckSpec(json);
    ASSERT_THAT(report, HasCode(Code::kInvalidArgument)) << json;
    EXPECT_THAT(report.status().message(), HasSubstr(message)) << json;
  }
}

TEST(SpecTest, RankTextsRoundTrip) {
  const std::vector<SpecRanks> cases = {
      {0}, {0, 1}, {0, 1, 2, 3}, {0, 8, 16, 24}, {1, 2, 5, 9, 13, 14}, {3, 5}, {0, 2, 3, 4, 6}};
  for (const SpecRanks& ranks : cases) {
    const auto spec = JobSpec::Parse(R"({"world": 32, "objects": [{"key": "o", "ranks": ")" +
                                     SpecRanksText(ranks) + R"("}]})");
    ASSERT_THAT(spec, IsOk()) << SpecRanksText(ranks);
    EXPECT_THAT(spec.value().rank_sets, ElementsAre(ranks)) << SpecRanksText(ranks);
  }
  EXPECT_EQ(SpecRanksText({0, 1, 2, 7, 8, 12, 16, 20}), "0-2,7-8,12-20/4");
}

// DumpSpec, then CheckSpec, against Validate: sound and broken layouts.
TEST(SpecTest, DumpedJobHasTheSameReport) {
  constexpr int kRanks = 4;
  for (std::uint64_t i = 0; i < 12; ++i) {
    const std::uint64_t seed = TestSeed() + i;
    SCOPED_TRACE(testing::Message() << "TENSORMOUNT_TEST_SEED=" << seed);
    Random random(seed);
    LayoutRanks ranks(kRanks);
    for (int t = 0; t < 5; ++t) {
      const RandomTensor tensor = MakeRandomTensor(random, "t" + std::to_string(t), 500);
      const Partition partition = RandomPartition(random, tensor.shape, kRanks);
      for (int r = 0; r < kRanks; ++r) {
        for (const Region& region : partition[static_cast<std::size_t>(r)]) {
          if (i % 3 == 1 && random.OneIn(6)) continue;  // A hole.
          ranks.Tensor(r, tensor.key, tensor.dtype, tensor.shape, region);
          if (i % 3 == 2 && random.OneIn(6)) {  // Twice.
            ranks.Tensor(r, tensor.key, tensor.dtype, tensor.shape, region);
          }
        }
      }
    }
    for (int r = 0; r < kRanks; ++r) {
      ranks.Object(r, "rng", "x", {.index = {r}, .grid = {kRanks}});
      ranks.Object(r, "args", i % 4 == 3 && r == 2 ? "other" : "same");
    }
    ranks.Tensor(0, "stack", DType::kF32, {3, 2}, Region(Box::Whole({3, 2})));
    ASSERT_OK(ranks.at(0).NameLayers("stack", "s.{}"));
    if (i % 2 == 1) ranks.Tensor(3, "s.1", DType::kF32, {2}, Region(Box::Whole({2})));
    std::mutex mutex;
    std::string spec;
    LayoutReport live;
    ASSERT_OK(RunOnThreads(kRanks, [&](Communicator& comm) -> Status {
      const StateDict& mine = ranks.at(comm.rank());
      TENSORMOUNT_ASSIGN_OR_RETURN(LayoutReport report, Validate(mine, comm));
      TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, DumpSpec(mine, comm));
      const std::lock_guard lock(mutex);
      EXPECT_EQ(text.empty(), comm.rank() != 0);
      if (comm.rank() == 0) {
        spec = std::move(text);
        live = std::move(report);
      }
      return {};
    }));
    ExpectSame(Check(spec), live);
  }
}

// The whole job of a large model: little time, because ranks that hold the same are one.
TEST(SpecTest, ChecksSixteenThousandRanks) {
  constexpr int kTensors = Amount(125, 10);  // A layer; there are 80.
  const std::string spec = R"({
    "mesh": [["dp", 128], ["pp", 16], ["tp", 8]],
    "tensors": [{"key": "layers.{i}.{k}", "dtype": "bf16", "shape": [4096, 1024],
                 "repeat": {"i": [0, 80], "k": [0, )" +
                           std::to_string(kTensors) + R"(]}, "split": {"0": "tp"},
                 "only": {"pp": "{i}/5"}}]})";
  const LayoutReport report = Check(spec);
  EXPECT_TRUE(report.ok()) << report.ToText();
  EXPECT_EQ(report.tensors, std::uint64_t{80} * kTensors);
  EXPECT_EQ(report.boxes, std::uint64_t{80} * kTensors * 8 * 128);
  EXPECT_EQ(report.layouts, 128u);
}

}  // namespace
}  // namespace tensormount
