// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"
#include "tensormount/save.h"

#include "collective/comm/collective.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/group_view_cases.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

TEST(GroupViewTest, ChannelsConformAndWorkConcurrently) {
  EXPECT_OK(RunOnThreads(1, ExerciseChannels));
  EXPECT_OK(RunOnThreads(3, ExerciseChannels));
}
// Halves of three and two ranks.
TEST(GroupViewTest, SubgroupsConformAndWorkConcurrently) {
  EXPECT_OK(RunOnThreads(5, ExerciseSubgroups));
}

TEST(GroupViewTest, InvalidChannelsAndSubgroupsAreRefused) {
  const auto group = MakeThreadGroup(3);
  Communicator& comm = *group[1];
  const auto channel = [&](Communicator& parent, std::uint32_t number) {
    return MakeChannel(parent, number).status();
  };
  EXPECT_THAT(channel(comm, 0), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(channel(comm, Communicator::kChannels), HasMessage("channel number 8"));
  ASSERT_OK_AND_ASSIGN(const auto one, MakeChannel(comm, 1));
  EXPECT_THAT(channel(*one, 2), HasMessage("channel itself"));

  const auto subgroup = [&](Communicator& parent, const std::vector<int>& ranks,
                            std::uint32_t number) {
    return MakeSubgroup(parent, ranks, number).status();
  };
  EXPECT_THAT(subgroup(comm, {1, 0}, 0), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(subgroup(comm, {0, 2}, 1),
              testing::AllOf(HasCode(Code::kInvalidArgument),
                             HasMessage("this rank (1) is not in the list of ranks")));
  EXPECT_THAT(subgroup(comm, {}, 1), HasMessage("this rank (1) is not in the list of ranks"));
  EXPECT_THAT(subgroup(comm, {1, 3}, 1),
              testing::AllOf(HasCode(Code::kInvalidArgument), HasMessage("rank 3")));
  EXPECT_THAT(subgroup(comm, {-1, 1}, 1), HasMessage("rank -1"));
  EXPECT_THAT(subgroup(comm, {1, 2, 1}, 1),
              testing::AllOf(HasCode(Code::kInvalidArgument), HasMessage("twice")));
  ASSERT_OK_AND_ASSIGN(const auto two, MakeSubgroup(comm, {2, 1}, 3));
  EXPECT_THAT(subgroup(*two, {1}, 3),
              testing::AllOf(HasCode(Code::kInvalidArgument), HasMessage("channel 3")));
  EXPECT_OK(subgroup(*two, {1}, 4));
}

// Every pair of jobs that can be under way at once has tags of its own, and a name of its own.
TEST(GroupViewTest, JobNumbersOfDifferentChannelsDiffer) {
  const auto group = MakeThreadGroup(1);
  std::vector<std::uint32_t> first;
  std::set<std::uint64_t> groups;
  const auto begin = [&](Communicator& comm) {
    const Communicator::Job job = comm.BeginJob();
    EXPECT_EQ(comm.BeginJob(), (Communicator::Job{job.number + 1, job.group}));
    EXPECT_TRUE(groups.insert(job.group).second);
    EXPECT_LT(comm.channel(), 64u);
    first.push_back(comm.channel());
  };
  begin(*group[0]);
  for (std::uint32_t c = 1; c < Communicator::kChannels; ++c) {
    ASSERT_OK_AND_ASSIGN(const auto channel, MakeChannel(*group[0], c));
    begin(*channel);
    ASSERT_OK_AND_ASSIGN(const auto subgroup, MakeSubgroup(*group[0], {0}, c));
    begin(*subgroup);
    for (std::uint32_t d = 1; d < Communicator::kChannels; ++d) {
      ASSERT_OK_AND_ASSIGN(const auto of_subgroup, MakeChannel(*subgroup, d));
      begin(*of_subgroup);
    }
  }
  std::sort(first.begin(), first.end());
  EXPECT_EQ(first.size(), 64u);
  EXPECT_EQ(std::unique(first.begin(), first.end()), first.end());
}

// What is of the ranks is shared by a group and all its channels, and by no other group; jobs are
// not.
TEST(GroupViewTest, ChannelsShareStateOfTheirRanks) {
  const auto group = MakeThreadGroup(3);
  Communicator& all = *group[0];
  ASSERT_OK_AND_ASSIGN(const auto channel, MakeChannel(all, 1));
  ASSERT_OK_AND_ASSIGN(const auto other, MakeChannel(all, 2));
  ASSERT_OK_AND_ASSIGN(const auto pair, MakeSubgroup(all, {0, 2}, 3));
  ASSERT_OK_AND_ASSIGN(const auto channel_of_pair, MakeChannel(*pair, 1));
  ASSERT_OK_AND_ASSIGN(const auto pair_of_channel, MakeSubgroup(*channel, {0, 2}, 3));
  ASSERT_OK_AND_ASSIGN(const auto other_pair, MakeSubgroup(all, {0, 1}, 4));
  const auto kept = [](Communicator& comm) {
    return comm.KeptByRanks("test", [] { return std::make_shared<int>(); });
  };
  EXPECT_EQ(kept(all), kept(*channel));
  EXPECT_EQ(kept(all), kept(*other));
  EXPECT_EQ(kept(*pair), kept(*channel_of_pair));
  EXPECT_EQ(kept(*pair), kept(*pair_of_channel));
  EXPECT_NE(kept(*pair), kept(all));
  EXPECT_NE(kept(*pair), kept(*other_pair));
  std::set<std::uint64_t> groups;
  for (Communicator* comm : {&all, channel.get(), other.get(), pair.get(), channel_of_pair.get(),
                             pair_of_channel.get(), other_pair.get()}) {
    groups.insert(comm->BeginJob().group);
  }
  EXPECT_EQ(groups.size(), 7u);
}

TEST(GroupViewTest, DeadRankIsNamedByItsSubgroupNumber) {
  auto group = MakeThreadGroup(13);
  ASSERT_OK_AND_ASSIGN(const auto sub, MakeSubgroup(*group[2], {12, 2, 1}, 1));
  std::uint8_t byte = 0;
  ASSERT_OK_AND_ASSIGN(const auto from_12,
                       sub->Receive(0, 5, BufferView::Host(DType::kU8, &byte, Dims{1})));
  ASSERT_OK_AND_ASSIGN(const auto from_1,
                       sub->Receive(2, 5, BufferView::Host(DType::kU8, &byte, Dims{1})));
  group[12].reset();
  group[1].reset();
  EXPECT_EQ(sub->Test(from_12).status().message(), "rank 0 is gone");
  EXPECT_EQ(sub->Test(from_1).status().message(), "rank 2 is gone");
  EXPECT_THAT(sub->Test(from_1), HasCode(Code::kInvalidArgument));
}

TEST(GroupViewTest, PendingRequestsEndWithTheChannel) {
  const auto group = MakeThreadGroup(2);
  ASSERT_OK_AND_ASSIGN(auto channel, MakeChannel(*group[0], 1));
  std::vector<std::uint8_t> bytes(1 << 20);
  const auto view = BufferView::Host(DType::kU8, bytes.data(), Dims{1 << 20});
  ASSERT_OK_AND_ASSIGN(const auto request, channel->Receive(1, 5, view));
  channel.reset();
  EXPECT_THAT(group[0]->Test(request), HasCode(Code::kInvalidArgument));
}

// Plans are kept for ranks, and not for places in a group: of rows and columns of a grid, whose
// channels all have ranks 0 and 1, each makes its own.
TEST(GroupViewTest, SubgroupsOfAGridKeepTheirOwnPlans) {
  TempDir dir;
  EXPECT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
    const int row = comm.rank() / 2;
    const int column = comm.rank() % 2;
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto rows, MakeSubgroup(comm, {2 * row, 2 * row + 1}, 1));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto columns, MakeSubgroup(comm, {column, column + 2}, 2));
    std::vector<float> mine(4096);
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<float>(i);
    StateDict state;
    state.AddTensor("w", {.global_shape = {4096},
                          .region = Box::Whole({4096}),
                          .data = BufferView::Host(DType::kF32, mine.data(), {4096})});
    SaveOptions options;
    options.timeouts = kPatient;
    for (int round = 0; round < 2; ++round) {
      for (const bool by_row : {true, false}) {
        Communicator& group = by_row ? *rows : *columns;
        const std::string path = dir.path() + "/store/" + (by_row ? "row-" : "column-") +
                                 std::to_string(by_row ? row : column) + "-" +
                                 std::to_string(round);
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto channel, MakeChannel(group, 1));
        TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport saved, Save(state, path, *channel, options));
        EXPECT_EQ(saved.plan_reused, round == 1);
        std::vector<float> got(4096);
        StateDict request;
        request.AddTensor("w", {.global_shape = {4096},
                                .region = Box::Whole({4096}),
                                .data = BufferView::Host(DType::kF32, got.data(), {4096})});
        TENSORMOUNT_RETURN_IF_ERROR(Load(request, path, *channel).status());
        EXPECT_EQ(got, mine);
      }
    }
    return {};
  }));
}

// Two halves of four ranks save different checkpoints at the same time, and load each other's.
TEST(GroupViewTest, SubgroupsSaveAndLoadConcurrently) {
  TempDir dir;
  const auto path = [&](int half) { return dir.path() + "/store/step-" + std::to_string(half); };
  EXPECT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
    const int half = comm.rank() / 2;
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto sub, MakeSubgroup(comm, {half * 2 + 1, half * 2}, 1));
    const auto value = [](int of_half, int rank, int i) {
      return static_cast<float>(of_half * 1000 + rank * 100 + i);
    };
    for (int round = 0; round < 2; ++round) {
      std::vector<float> mine;
      for (int i = 0; i < 8; ++i) mine.push_back(value(half, sub->rank(), i));
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make({4 * sub->rank(), 0}, {4, 2}));
      StateDict state;
      state.AddTensor("w", {.global_shape = {8, 2},
                            .region = box,
                            .data = BufferView::Host(DType::kF32, mine.data(), {4, 2})});
      SaveOptions options;
      options.if_exists = IfExists::kReplace;
      options.timeouts = kPatient;
      TENSORMOUNT_RETURN_IF_ERROR(Save(state, path(half), *sub, options).status());
    }
    Collective all(comm, kPatient);
    TENSORMOUNT_RETURN_IF_ERROR(all.Agree({}, "both are saved"));
    std::vector<float> got(16);
    StateDict request;
    request.AddTensor("w", {.global_shape = {8, 2},
                            .region = Box::Whole({8, 2}),
                            .data = BufferView::Host(DType::kF32, got.data(), {8, 2})});
    TENSORMOUNT_RETURN_IF_ERROR(Load(request, path(1 - half), *sub).status());
    for (int i = 0; i < 16; ++i) {
      if (got[static_cast<std::size_t>(i)] != value(1 - half, i / 8, i % 8)) {
        return {Code::kInternal, "element " + std::to_string(i) + " differs"};
      }
    }
    return {};
  }));
}

}  // namespace
}  // namespace tensormount
