// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/checkpoint.h"
#include "tensormount/communicator.h"
#include "tensormount/load.h"
#include "tensormount/save.h"
#include "tensormount/state_dict.h"

#include "index/records/record_coding.h"
#include "state/common_compare.h"
#include "state/common_records.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

CommonKey Key(const char* text) { return std::string(text); }

CommonDict Dict(std::map<CommonKey, CommonValue> items) { return CommonDict{std::move(items)}; }

CommonValues StateOf(double lr, std::int64_t local_rank) {
  return {{"args", Dict({{Key("lr"), lr},
                         {Key("rank"), local_rank},
                         {Key("groups"), CommonList{{Dict({{Key("seed"), local_rank}})}}}})},
          {"iteration", 1000}};
}

using Globs = std::vector<std::string>;

TEST(CommonCompare, HashDependsOnNameAndValue) {
  const CommonValue args = StateOf(0.1, 0).at("args");
  EXPECT_EQ(CommonHash("args", args, {}), CommonHash("args", args, {}));
  EXPECT_NE(CommonHash("args", args, {}), CommonHash("argv", args, {}));
  EXPECT_NE(CommonHash("args", args, {}), CommonHash("args", args, Globs{"args.rank"}));
  EXPECT_EQ(CommonHash("args", args, Globs{"a*"}), std::nullopt);
}

TEST(CommonCompare, ReportsTheFirstDifferenceAndItsRanks) {
  const auto found = [](const CommonValues& a, const CommonValues& b, const Globs& exempt) {
    return FirstCommonDifference(a, 0, b, 3, exempt).value_or("");
  };
  EXPECT_EQ(found(StateOf(0.1, 0), StateOf(0.1, 0), {}), "");
  EXPECT_EQ(found(StateOf(0.1, 0), StateOf(0.2, 0), {}),
            "common value args.lr: 0.1 on rank 0 and 0.2 on rank 3");
  EXPECT_EQ(found(StateOf(0.1, 0), StateOf(0.1, 3), {}),
            "common value args.groups[0].seed: 0 on rank 0 and 3 on rank 3");
  EXPECT_EQ(found(StateOf(0.1, 0), StateOf(0.1, 3), {"args.groups*"}),
            "common value args.rank: 0 on rank 0 and 3 on rank 3");
  EXPECT_EQ(found(StateOf(0.1, 0), StateOf(0.1, 3), {"args.groups", "args.rank"}), "");
  EXPECT_EQ(found(StateOf(0.1, 0), StateOf(0.2, 3), {"args"}), "");
  CommonValues more = StateOf(0.1, 0);
  more.at("args").get_if<CommonDict>()->items[Key("fp8")] = true;
  EXPECT_EQ(found(StateOf(0.1, 0), more, {}), "common value args.fp8: only on rank 3");
  EXPECT_EQ(found(more, StateOf(0.1, 0), {}), "common value args.fp8: only on rank 0");
  EXPECT_EQ(found(more, StateOf(0.1, 0), {"args.fp?"}), "");
  EXPECT_EQ(found({{"n", CommonList{{1, 2}}}}, {{"n", CommonList{{1}}}}, {}),
            "common value n: has 2 items on rank 0 and 1 on rank 3");
  EXPECT_EQ(found({{"n", 1}}, {{"n", "1"}}, {}),
            "common value n: int 1 on rank 0 and string \"1\" on rank 3");
  // A rank need not set everything.
  EXPECT_EQ(found({{"a", 1}, {"b", 1}}, {{"b", 1}, {"c", 1}}, {}), "");
}

TEST(CommonRecords, ContainTheValuesOfAStateDict) {
  StateDict state;
  EXPECT_TRUE(SharedCommonRecords(state).empty());
  ASSERT_OK_AND_ASSIGN(const auto nothing, RankCommonRecord(state, 0));
  EXPECT_FALSE(nothing.has_value());
  ASSERT_OK(state.SetCommon("lr", 0.5));
  ASSERT_OK(state.SetRankCommon("seed", 7));
  ASSERT_OK(state.SetLocal("cache", "never stored"));
  ASSERT_OK(state.SetContentMetadata(Dict({{Key("model"), "tiny"}})));
  EXPECT_EQ(SharedCommonRecords(state),
            (CommonValues{{"$content", Dict({{Key("model"), "tiny"}})}, {"lr", 0.5}}));
  ASSERT_OK_AND_ASSIGN(const auto own, RankCommonRecord(state, 12));
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(own->first, "$rank.12");
  EXPECT_EQ(own->second, CommonValue(Dict({{Key("seed"), 7}})));
}

TEST(CommonRecords, UnstorableValuesAreRefusedWhenSet) {
  CommonValue deepest = 1;
  for (int i = 0; i < kMaxCommonDepth; ++i) deepest = CommonList{{std::move(deepest)}};
  const auto refused = [](const std::string& message) {
    return testing::AllOf(HasCode(Code::kInvalidArgument), HasMessage(message));
  };
  StateDict state;
  EXPECT_OK(state.SetCommon("deep", deepest));
  EXPECT_THAT(state.SetCommon("deeper", CommonList{{deepest}}), refused("more than 64 levels deep"));
  EXPECT_THAT(state.SetRankCommon("deep", deepest), refused("common value deep: is nested"));
  EXPECT_THAT(state.SetContentMetadata(Dict({{Key("deep"), deepest}})),
              refused("content metadata: is nested"));
  EXPECT_THAT(state.SetCommon("$rank.0", Dict({})), refused("reserved"));
  EXPECT_THAT(state.SetRankCommon("$x", 1), refused("reserved"));
  EXPECT_THAT(state.SetLocal("$x", 1), refused("reserved"));
  EXPECT_THAT(state.SetCommon("", 1), refused("is empty"));
  EXPECT_THAT(state.status(), refused("more than 64 levels deep"));  // The first.

  // Each is small enough, together they are not.
  StateDict large;
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_OK(large.SetRankCommon(name, std::string(kMaxCommonBytes / 2, 'x')));
  }
  EXPECT_THAT(RankCommonRecord(large, 0), refused("per-rank common values: has"));
}

TEST(CommonState, EverySavedValueCanBeReadBack) {
  const TempDir dir;
  const std::string path = dir.Join("store/step");
  const CommonValue args = Dict({{Key("betas"), CommonTuple{{0.9, 0.999}}},
                                 {CommonKey(std::int64_t{3}), CommonNone()},
                                 {Key("big"), std::uint64_t{1} << 63}});
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    StateDict state;
    (void)state.SetCommon("args", args);
    (void)state.SetContentMetadata(Dict({{Key("sharding"), "dp"}, {Key("world"), 3}}));
    (void)state.SetLocal("cache", "rank " + std::to_string(comm.rank()));
    if (comm.rank() != 1) {
      (void)state.SetRankCommon("rng", CommonBytes{"state " + std::to_string(comm.rank())});
    }
    if (comm.rank() == 2) (void)state.SetRankCommon("only", 2);
    return Save(state, path, comm).status();
  }));

  ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(path));
  EXPECT_THAT(checkpoint.common(), IsOkAndHolds(CommonValues{{"args", args}}));
  EXPECT_THAT(checkpoint.common("args"), IsOkAndHolds(args));
  EXPECT_THAT(checkpoint.common("rng"), HasCode(Code::kNotFound));
  EXPECT_THAT(checkpoint.common("$content"), HasCode(Code::kNotFound));
  EXPECT_THAT(checkpoint.rank_common(0, "rng"), IsOkAndHolds(CommonValue(CommonBytes{"state 0"})));
  EXPECT_THAT(checkpoint.rank_common(2, "only"), IsOkAndHolds(CommonValue(2)));
  EXPECT_THAT(checkpoint.rank_common(0, "only"), HasCode(Code::kNotFound));
  EXPECT_THAT(checkpoint.rank_common(1, "rng"), HasCode(Code::kNotFound));
  EXPECT_THAT(checkpoint.rank_common(-1, "rng"), HasCode(Code::kNotFound));
  const std::map<int, CommonValues> ranks = {{0, {{"rng", CommonBytes{"state 0"}}}},
                                             {2, {{"only", 2}, {"rng", CommonBytes{"state 2"}}}}};
  EXPECT_THAT(checkpoint.rank_common(), IsOkAndHolds(ranks));
  ASSERT_OK_AND_ASSIGN(const CommonDict content, checkpoint.content_metadata());
  EXPECT_EQ(CommonValue(content), CommonValue(Dict({{Key("sharding"), "dp"}, {Key("world"), 3}})));

  // On another number of ranks.
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    StateDict request;
    (void)request.SetLocal("cache", "mine " + std::to_string(comm.rank()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const LoadReport report, Load(request, path, comm));
    EXPECT_THAT(report.common("args"), IsOkAndHolds(args));
    EXPECT_EQ(report.common_values.size(), 1u);
    EXPECT_THAT(report.rank_common(2, "rng"), IsOkAndHolds(CommonValue(CommonBytes{"state 2"})));
    EXPECT_THAT(report.rank_common(1, "rng"), HasCode(Code::kNotFound));
    EXPECT_THAT(report.rank_common(2, "cache"), HasCode(Code::kNotFound));
    EXPECT_EQ(report.rank_common_values, ranks);
    EXPECT_EQ(CommonValue(report.content_metadata), CommonValue(content));
    EXPECT_THAT(report.local("cache"),
                IsOkAndHolds(CommonValue("mine " + std::to_string(comm.rank()))));
    EXPECT_THAT(report.local("other"), HasCode(Code::kNotFound));
    EXPECT_THAT(report.common("cache"), HasCode(Code::kNotFound));
    return {};
  }));
}

TEST(CommonState, ContentMetadataMustBeEqualOnEveryRank) {
  const TempDir dir;
  const Status status = RunOnThreads(2, [&](Communicator& comm) -> Status {
    StateDict state;
    (void)state.SetContentMetadata(Dict({{Key("step"), comm.rank()}}));
    return Save(state, dir.Join("store/step"), comm).status();
  });
  EXPECT_THAT(status, testing::AllOf(HasCode(Code::kInvalidArgument), HasMessage("$content")));
}

}  // namespace
}  // namespace tensormount
