// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/communicator.h"

#include "tests/collective/communicator_conformance.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

class ThreadConformanceTest : public testing::TestWithParam<std::tuple<std::size_t, int>> {};

TEST_P(ThreadConformanceTest, ConformanceCaseHolds) {
  const auto [index, ranks] = GetParam();
  const ConformanceCase& c = ConformanceCases()[index];
  if (ranks < c.min_ranks) return;
  EXPECT_OK(RunOnThreads(ranks, c.body));
}

INSTANTIATE_TEST_SUITE_P(All, ThreadConformanceTest,
                         testing::Combine(testing::Range<std::size_t>(0, ConformanceCases().size()),
                                          testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::string(ConformanceCases()[std::get<0>(param.param)].name) +
                                  "On" + std::to_string(std::get<1>(param.param));
                         });

TEST(ThreadCommunicatorTest, ReturnsTheFirstFailureByRank) {
  const Status status = RunOnThreads(3, [](Communicator& comm) {
    if (comm.rank() == 0) return Status();
    return Status(Code::kBusy, "from " + std::to_string(comm.rank()));
  });
  EXPECT_THAT(status, HasCode(Code::kBusy));
  EXPECT_THAT(status, HasMessage("from 1"));
}

TEST(ThreadCommunicatorTest, ExceptionIsAFailure) {
  const Status status = RunOnThreads(2, [](Communicator& comm) -> Status {
    if (comm.rank() == 1) throw std::runtime_error("out of luck");
    return {};
  });
  EXPECT_THAT(status, HasCode(Code::kInternal));
  EXPECT_THAT(status, HasMessage("out of luck"));
}

TEST(ThreadCommunicatorTest, GroupOfZeroRanksIsRefused) {
  EXPECT_THAT(RunOnThreads(0, [](Communicator&) { return Status(); }),
              HasCode(Code::kInvalidArgument));
  EXPECT_EQ(MakeSelfCommunicator()->size(), 1);
  EXPECT_EQ(MakeSelfCommunicator()->kind(), "self");
}

TEST(ThreadCommunicatorTest, RankThatLeftIsNamedAndItsSmallMessagesArrive) {
  auto group = MakeThreadGroup(2);
  std::string small = "last words";
  std::string large(1 << 20, 'x');
  const auto view = [](std::string& s) {
    return BufferView::Host(DType::kU8, s.data(), Dims{static_cast<std::int64_t>(s.size())});
  };
  ASSERT_OK_AND_ASSIGN(const auto sent, group[1]->Send(0, 1, view(small)));
  EXPECT_THAT(group[1]->Test(sent), IsOkAndHolds(true));
  ASSERT_OK(group[1]->Send(0, 2, view(large)));  // Never received: its memory goes with rank 1.
  std::string got_before(3, ' ');
  ASSERT_OK_AND_ASSIGN(const auto before, group[0]->Receive(1, 3, view(got_before)));
  ASSERT_OK_AND_ASSIGN(const auto to_gone, group[0]->Send(1, 4, view(large)));
  group[1].reset();

  std::string got(small.size(), ' ');
  ASSERT_OK_AND_ASSIGN(const auto received, group[0]->Receive(1, 1, view(got)));
  EXPECT_THAT(group[0]->Test(received), IsOkAndHolds(true));
  EXPECT_EQ(got, small);
  EXPECT_THAT(group[0]->Test(before), HasMessage("rank 1 is gone"));
  EXPECT_THAT(group[0]->Test(to_gone), HasCode(Code::kUnavailable));
  ASSERT_OK_AND_ASSIGN(const auto after, group[0]->Receive(1, 2, view(large)));
  EXPECT_THAT(group[0]->Test(after), HasCode(Code::kUnavailable));
}

}  // namespace
}  // namespace tensormount
