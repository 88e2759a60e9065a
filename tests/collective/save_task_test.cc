// SPDX-License-Identifier: Apache-2.0
// Tasks as they travel from owners to ranks.
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/hash.h"
#include "collective/comm/agreement.h"
#include "collective/save/part_writer.h"
#include "collective/save/plan_exchange.h"
#include "collective/save/rank_task.h"
#include "tests/collective/plan_testing.h"
#include "tests/collective/save_plan_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

constexpr std::int64_t kMebi = 1024 * 1024;

// A shared tensor file, a pack, replicas, a tensor without cells, objects.
Ranks SomeRanks() {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) {
    ranks.Tensor(r, "small", DType::kF32, {8}, B({4 * r}, {4}))
        .Tensor(r, "big", DType::kF32, {2 * kMebi}, B({r * kMebi}, {kMebi}))
        .Tensor(r, "same", DType::kBF16, {600'000}, Box::Whole({600'000}))
        .Tensor(r, "none", DType::kF32, {0, 3}, Box::Whole({0, 3}))
        .Object(r, "rng", "x", {.index = {r}, .grid = {2}})
        .Object(r, "args", "y");
  }
  return ranks;
}

std::vector<std::string> TasksOf(Ranks& ranks) {
  const GlobalLayout layout = ranks.Layout().value();
  return EncodeTasks(layout, PlanSave(layout, PlacementRule::kAuto).value());
}

TEST(RankTask, TaskDescribesAllWorkOfARank) {
  Ranks ranks = SomeRanks();
  const std::vector<std::string> parts = TasksOf(ranks);
  ASSERT_OK_AND_ASSIGN(const RankTask task, DecodeTasks(std::span(&parts[1], 1), ranks.at(1), 2));
  std::vector<std::string> keys;
  for (const RankTask::Tensor& t : task.tensors) keys.push_back(t.meta.key());
  EXPECT_THAT(keys, ElementsAre("big", "same", "small")) << "rank 0 records what is empty";
  EXPECT_EQ(task.tensors[0].placement, Placement::kTensorFile);
  EXPECT_TRUE(task.tensors[0].shared);
  EXPECT_FALSE(task.tensors[0].seals);
  EXPECT_EQ(task.tensors[0].file.size(), 17u);
  EXPECT_EQ(task.tensors[2].placement, Placement::kPack);
  ASSERT_EQ(task.chunks.size(), 3u);
  EXPECT_EQ(task.chunks[0].item, 1u);
  EXPECT_EQ(task.chunks[0].offset, static_cast<std::uint64_t>(4 * kMebi));
  EXPECT_EQ(task.chunks[0].region, Region(B({kMebi}, {kMebi})));
  EXPECT_EQ(task.chunks[1].begin + task.chunks[1].bytes, 1'200'000u) << "the second half";
  EXPECT_EQ(task.chunks[2].region, Region(B({4}, {4})));
  EXPECT_THAT(task.objects, ElementsAre(0u)) << "its part of rng; rank 0 has args";
  ASSERT_EQ(task.replicas.size(), 1u);
  ASSERT_EQ(task.replicas[0].size(), 1u);
  EXPECT_EQ(task.replicas[0][0].item, 2u);
  EXPECT_EQ(task.replicas[0][0].holders, 2u);
  EXPECT_EQ(task.replicas[0][0].replica_index, 1u);
  EXPECT_EQ(task.replicas[0][0].bytes, 1'200'000u);

  ASSERT_OK_AND_ASSIGN(const RankTask zero, DecodeTasks(std::span(&parts[0], 1), ranks.at(0), 2));
  ASSERT_EQ(zero.tensors.size(), 4u);
  EXPECT_TRUE(zero.tensors[0].seals);
  EXPECT_EQ(zero.tensors[0].file, task.tensors[0].file);
  EXPECT_TRUE(zero.tensors[1].empty);
  EXPECT_EQ(zero.tensors[1].meta.shape(), (Dims{0, 3}));
  EXPECT_THAT(zero.objects, ElementsAre(1u, 0u)) << "args before rng";
}

TEST(RankTask, PartsOfSeveralOwnersAreMerged) {
  Ranks ranks = SomeRanks();
  const std::vector<std::string> whole = TasksOf(ranks);
  ASSERT_OK_AND_ASSIGN(const RankTask one, DecodeTasks(std::span(&whole[1], 1), ranks.at(1), 2));
  constexpr std::uint32_t kOwners = 3;
  PlanRules rules;
  rules.owners = kOwners;
  std::vector<std::string> parts;
  std::vector<GlobalLayout> layouts;
  std::vector<std::string> surveys;
  for (std::uint32_t owner = 0; owner < kOwners; ++owner) {
    ASSERT_OK_AND_ASSIGN(GlobalLayout layout, ranks.Layout(owner, kOwners));
    layouts.push_back(std::move(layout));
    ASSERT_OK_AND_ASSIGN(std::string survey, SavePlanner(layouts.back(), rules).Survey());
    surveys.push_back(std::move(survey));
  }
  ASSERT_OK_AND_ASSIGN(const std::string decision, SavePlanner::Decide(surveys, rules, 2));
  for (std::uint32_t owner = 0; owner < kOwners; ++owner) {
    SavePlanner planner(layouts[owner], rules);
    ASSERT_OK(planner.Survey());
    ASSERT_OK_AND_ASSIGN(const SavePlan plan, planner.Plan(decision, owner));
    parts.push_back(EncodeTasks(layouts[owner], plan)[1]);
  }
  ASSERT_OK_AND_ASSIGN(const RankTask merged, DecodeTasks(parts, ranks.at(1), 2));
  std::map<std::string, std::string> files;
  for (const RankTask::Tensor& t : one.tensors) files[t.meta.key()] = t.file;
  for (const RankTask::Tensor& t : merged.tensors) EXPECT_EQ(t.file, files[t.meta.key()]);
  EXPECT_EQ(merged.replicas.size(), kOwners);
  for (std::size_t i = 0; i + 1 < merged.tensors.size(); ++i) {
    EXPECT_LT(merged.tensors[i].meta.key(), merged.tensors[i + 1].meta.key());
  }
  for (const RankTask::Chunk& c : merged.chunks) {
    EXPECT_EQ(ranks.at(1).tensors()[c.item].key, merged.tensors[c.tensor].meta.key());
  }
}

TEST(RankTask, FailureOfAnOwnerReachesEveryRank) {
  Ranks ranks = SomeRanks();
  std::vector<std::string> parts = {
      TasksOf(ranks)[0], EncodeTaskFailure(Status(Code::kResourceExhausted, "no memory"))};
  EXPECT_OK(FailureOfOwners(std::span(&parts[0], 1)));
  EXPECT_THAT(FailureOfOwners(parts), HasCode(Code::kResourceExhausted));
  EXPECT_THAT(FailureOfOwners(parts), HasMessage("no memory"));
  parts[1].clear();
  EXPECT_THAT(FailureOfOwners(parts), HasCode(Code::kDataLoss));
}

TEST(RankTask, TaskForAnotherStateDictIsRefused) {
  Ranks ranks = SomeRanks();
  const std::vector<std::string> parts = TasksOf(ranks);
  const auto decode = [&](const StateDict& state) {
    return DecodeTasks(std::span(&parts[0], 1), state, 2).status();
  };
  Ranks fewer(1);
  fewer.Tensor(0, "small", DType::kF32, {8}, B({0}, {4}));
  EXPECT_THAT(decode(fewer.at(0)), HasCode(Code::kDataLoss));
  // The same items in another order.
  Ranks other(1);
  other.Tensor(0, "big", DType::kF32, {2 * kMebi}, B({0}, {kMebi}))
      .Tensor(0, "small", DType::kF32, {8}, B({0}, {4}))
      .Tensor(0, "same", DType::kBF16, {600'000}, Box::Whole({600'000}))
      .Tensor(0, "none", DType::kF32, {0, 3}, Box::Whole({0, 3}));
  EXPECT_FALSE(decode(other.at(0)).ok());
}

TEST(RankTask, TruncatedOrDamagedPartsNeverCrash) {
  Ranks ranks = SomeRanks();
  const std::string part = TasksOf(ranks)[0];
  for (std::size_t n = 0; n < part.size(); ++n) {
    const std::string cut = part.substr(0, n);
    EXPECT_FALSE(DecodeTasks(std::span(&cut, 1), ranks.at(0), 2).ok()) << n;
  }
  Random random(TestSeed());
  for (std::size_t bit = 0; bit < part.size() * 8; ++bit) {
    std::string damaged = part;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    if (random.OneIn(4)) damaged[random.Int(0, static_cast<int>(part.size()) - 1)] = '\xff';
    const Result<RankTask> task = DecodeTasks(std::span(&damaged, 1), ranks.at(0), 2);
    if (!task.ok()) continue;
    // What is accepted lies within the state dict.
    for (const RankTask::Chunk& c : task.value().chunks) {
      ASSERT_LT(c.tensor, task.value().tensors.size());
      ASSERT_LT(c.item, ranks.at(0).tensors().size());
      ASSERT_EQ(RegionBytes(task.value().tensors[c.tensor].meta.dtype(),
                            task.value().tensors[c.tensor].meta.shape(), c.region)
                    .value(),
                c.bytes);
    }
  }
}

TEST(RankTask, FilesOfKeysWithEqualHashesHaveDifferentNames) {
  const std::vector<std::uint64_t> hashes = {5, 0x1234, 5, 5};
  EXPECT_THAT(TensorFileStems(hashes), ElementsAre("t0000000000000005", "t0000000000001234",
                                                   "t0000000000000005-1", "t0000000000000005-2"));
}

TEST(RankTask, FingerprintCoversLayoutAndOptionsNotContents) {
  const auto of = [](const std::string& first, const Region& region, const std::string& bytes,
                     PlacementRule placement = PlacementRule::kAuto,
                     SaveStrategy strategy = SaveStrategy::kParallel) {
    Ranks ranks(1);
    ranks.Tensor(0, first, DType::kF32, {8}, region).Tensor(0, "z", DType::kF32, {8}, B({0}, {8}));
    ranks.Object(0, "o", bytes);
    return TaskFingerprint(ranks.at(0), placement, strategy);
  };
  const Hash128 a = of("a", B({0}, {4}), "1");
  EXPECT_EQ(a, of("a", B({0}, {4}), "changed"));
  EXPECT_NE(a, of("b", B({0}, {4}), "1"));
  EXPECT_NE(a, of("a", B({4}, {4}), "1"));
  EXPECT_NE(a, of("a", B({0}, {4}), "1", PlacementRule::kTensorFile));
  EXPECT_NE(a, of("a", B({0}, {4}), "1", PlacementRule::kAuto, SaveStrategy::kMain));
}

// Tensors of one file each and a rank shard of columns, with these numbers of MiB.
RankTask TaskOf(const std::vector<std::int64_t>& files, const std::vector<std::int64_t>& columns) {
  RankTask task;
  for (const auto* sizes : {&files, &columns}) {
    for (const std::int64_t size : *sizes) {
      const auto t = static_cast<std::uint32_t>(task.tensors.size());
      RankTask::Tensor tensor{
          TensorMeta::Make("t" + std::to_string(t), DType::kU8, {size * kMebi}).value()};
      tensor.placement = sizes == &files ? Placement::kTensorFile : Placement::kRankShard;
      task.tensors.push_back(std::move(tensor));
      RankTask::Chunk chunk;
      chunk.tensor = chunk.item = t;
      chunk.bytes = static_cast<std::uint64_t>(size * kMebi);
      chunk.region = Box::Whole({size * kMebi});
      task.chunks.push_back(std::move(chunk));
    }
  }
  return task;
}

// MiB of each part; each chunk is in one, and the chunks of a part are in the order of the task.
std::vector<std::int64_t> BytesOfParts(const RankTask& task, int writers, bool asked = false) {
  std::vector<std::int64_t> found;
  std::set<std::uint32_t> seen;
  for (const WriterPart& part : DivideTask(task, StateDict(), writers, asked)) {
    found.push_back(0);
    std::uint32_t last = 0;
    for (const std::uint32_t i : part.chunks) {
      const RankTask::Chunk& chunk = task.chunks[i];
      found.back() += static_cast<std::int64_t>(chunk.bytes) / kMebi;
      EXPECT_TRUE(seen.insert(chunk.tensor).second);
      EXPECT_LE(last, chunk.tensor);
      last = chunk.tensor;
    }
  }
  EXPECT_EQ(seen.size(), task.chunks.size());
  return found;
}

TEST(DivideTask, WritersHaveAboutAsManyBytes) {
  EXPECT_THAT(BytesOfParts(TaskOf({20, 90, 40, 50, 60, 30, 10}, {}), 3), ElementsAre(110, 100, 90));
  EXPECT_THAT(BytesOfParts(TaskOf({500, 10, 20, 30}, {}), 4), ElementsAre(500, 30, 20, 10));
  // The rank shard is divided, too, into parts of at least 64 MiB.
  EXPECT_THAT(BytesOfParts(TaskOf({100, 100}, {50, 50, 50, 50}), 4),
              ElementsAre(100, 100, 100, 100));
  EXPECT_THAT(BytesOfParts(TaskOf({100}, {30, 30, 30, 30}), 4), ElementsAre(120, 100));
  EXPECT_THAT(BytesOfParts(TaskOf({100}, {30, 30, 30, 30}), 4, true), ElementsAre(130, 30, 30, 30));
  // A writer has at least 16 MiB, unless the caller asked for a number.
  EXPECT_THAT(BytesOfParts(TaskOf({8, 8, 8, 8}, {}), 4), ElementsAre(16, 16));
  EXPECT_THAT(BytesOfParts(TaskOf({8, 8, 8, 8}, {}), 4, true), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(BytesOfParts(TaskOf({31}, {}), 8), ElementsAre(31));
  EXPECT_THAT(BytesOfParts(TaskOf({}, {}), 8, true), ElementsAre());
}

TEST(KeptPlans, KeepsLastTwoPlansAndNeverReusesUnvalidated) {
  KeptPlans<KeptPlan> plans(2);
  const auto key = [](std::uint64_t n) { return Hash128{n, n}; };
  const auto keep = [&](std::uint64_t n, bool validated) {
    plans.Keep(std::make_shared<KeptPlan>(KeptPlan{Hash128{n, 0}, key(n), validated, {}, {}}));
  };
  const auto find = [&](const Hash128& wanted, bool validate) {
    return plans.Find([&](const KeptPlan& plan) { return plan.Fits(wanted, validate); });
  };
  keep(1, false);
  EXPECT_FALSE(find(key(1), true));
  ASSERT_TRUE(find(key(1), false));
  keep(2, true);
  ASSERT_TRUE(find(key(2), true));
  EXPECT_FALSE(find(key(4), false));
  ASSERT_TRUE(find(key(1), false));
  keep(3, true);  // In the place of 2: 1 was used since.
  EXPECT_FALSE(find(key(2), true));
  EXPECT_EQ(find(key(1), false)->job, (Hash128{1, 0}));
  plans.Forget([](const KeptPlan& plan) { return plan.job == Hash128{1, 0}; });
  EXPECT_FALSE(find(key(1), false));
  EXPECT_TRUE(find(key(3), true));
}

TEST(Agreement, UnchangedOnlyWhenAllRanksKeptTheAgreement) {
  using Words = std::vector<std::uint64_t>;
  const auto agree = [](std::string_view domain, const std::vector<Words>& brought,
                        const Words& kept) {
    AgreementMaker maker(domain);
    for (std::size_t r = 0; r < brought.size(); ++r) maker.Add(brought[r], kept[r]);
    return maker.Finish();
  };
  const std::vector<Words> words = {{1, 2}, {3, 4}, {1, 2}, {3, 4}};
  const Words none(4, 0);
  const Agreement first = agree("a", words, none);
  EXPECT_FALSE(first.unchanged);
  for (std::size_t lacks = 0; lacks <= 4; ++lacks) {  // 4: nobody.
    Words kept(4, first.job.low);
    if (lacks < 4) kept[lacks] = 0;
    EXPECT_EQ(agree("a", words, kept).unchanged, lacks == 4);
    if (lacks < 4) kept[lacks] = 7;
    EXPECT_EQ(agree("a", words, kept).unchanged, lacks == 4);
    EXPECT_FALSE(agree("b", words, kept).unchanged);
  }
  EXPECT_FALSE(agree("a", words, Words(4, 7)).unchanged);
  EXPECT_NE(agree("a", {{1, 2}, {3, 4}, {3, 4}, {1, 2}}, none).job, first.job);
  const std::vector<Hash128> brought = {{1, 2}, {3, 4}, {1, 2}, {3, 4}};
  EXPECT_EQ(ClassesOf(brought.size(), [&](std::size_t r) { return brought[r]; }),
            (RankClasses{0, 1, 0, 1}));
  EXPECT_EQ(RanksByClass({0, 1, 0, 1}), (std::vector<std::vector<int>>{{0, 2}, {1, 3}, {}, {}}));
  EXPECT_TRUE(SendsForClass({0, 1, 0, 1}, 1));
  EXPECT_FALSE(SendsForClass({0, 1, 0, 1}, 2));
  EXPECT_FALSE(SendsForClass({}, 0));
}

TEST(Agreement, InvalidClassesAreRefused) {
  const auto read = [](const RankClasses& classes, std::uint32_t world) {
    ByteWriter out;
    WriteClasses(out, classes);
    ByteReader in(out.bytes(), "test");
    RankClasses got;
    const Status status = ReadClasses(in, world, got);
    if (status.ok()) {
      EXPECT_EQ(got, classes);
    }
    return status;
  };
  EXPECT_OK(read({0, 1, 0, 1}, 4));
  EXPECT_OK(read({}, 4));
  EXPECT_THAT(read({0, 1, 0}, 4), HasCode(Code::kDataLoss));
  EXPECT_THAT(read({0, 2, 2, 0}, 4), HasCode(Code::kDataLoss));  // Of a rank behind it.
  EXPECT_THAT(read({0, 0, 1, 0}, 4), HasCode(Code::kDataLoss));  // Of one that does not speak.
}

}  // namespace
}  // namespace tensormount
