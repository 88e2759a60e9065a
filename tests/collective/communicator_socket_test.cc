// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <signal.h>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/forked_group.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/communicator_conformance.h"
#include "tests/collective/group_view_cases.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::seconds;

int ReportCase(const Communicator& comm, const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
  return 1;
}

class SocketConformanceTest : public testing::TestWithParam<int> {};

// One group runs all cases, as under MPI: forking is dear under sanitizers.
TEST_P(SocketConformanceTest, ConformanceCasesHold) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(GetParam(), [](Communicator& comm) {
                         Status status = Conform(comm, /*cancels=*/false);
                         if (status.ok()) status = Conform(comm, /*cancels=*/true);
                         return ReportCase(comm, status);
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) {
    EXPECT_TRUE(e.exited);
    EXPECT_EQ(e.code, 0) << "signal " << e.signal;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SocketConformanceTest, testing::Values(1, 2, 4),
                         testing::PrintToStringParamName());

TEST(SocketGroupViewTest, ChannelsAndSubgroupsConformAndWorkConcurrently) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(4, [](Communicator& comm) {
                         Status status = ExerciseChannels(comm);
                         if (status.ok()) status = ExerciseSubgroups(comm);
                         return ReportCase(comm, status);
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
}

// Rank 0 of the subgroup is another rank of the group. Who dies or stops is named as the subgroup
// counts; rank 2 of the group is not concerned.
TEST(SocketGroupViewTest, DeadOrStoppedRankOfASubgroupIsNamed) {
  const std::vector<int> ranks = {3, 1, 0};
  struct Fate {
    int victim;
    int signal;
    Code code;
    std::unique_ptr<ForkedGroup> group;
  };
  std::vector<Fate> fates;
  for (const int victim : {0, 2}) {
    fates.push_back({victim, SIGKILL, Code::kUnavailable, nullptr});
    fates.push_back({victim, SIGSTOP, Code::kDeadlineExceeded, nullptr});
  }
  // All at once: they mostly wait.
  for (Fate& fate : fates) {
    ASSERT_OK_AND_ASSIGN(fate.group, ForkedGroup::Start(4, [&](Communicator& comm) {
                           if (comm.rank() == 2) return 0;
                           const auto sub = MakeSubgroup(comm, ranks, 2);
                           if (!sub.ok()) return ReportCase(comm, sub.status());
                           return WatchVictim(*sub.value(), Operation::kAllToAll, fate.victim,
                                              fate.signal);
                         }));
  }
  const auto give_up = std::chrono::steady_clock::now() + seconds(60);
  for (const Fate& fate : fates) {
    SCOPED_TRACE("victim " + std::to_string(fate.victim) + ", signal " +
                 std::to_string(fate.signal));
    for (int r = 0; r < 4; ++r) {
      const auto it = std::find(ranks.begin(), ranks.end(), r);
      const bool concerned = it != ranks.end();
      if (concerned && it - ranks.begin() == fate.victim) continue;
      ForkedGroup::Exit exit;
      do {
        exit = fate.group->Wait(std::chrono::milliseconds(5))[static_cast<std::size_t>(r)];
      } while (!exit.exited && std::chrono::steady_clock::now() < give_up);
      EXPECT_EQ(exit.code, concerned ? kSawFailure + static_cast<int>(fate.code) : 0) << r;
    }
  }
}

TEST(ForkedGroupTest, ReportsHowEachRankEnded) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(3, [](Communicator& comm) {
                         if (comm.rank() == 1) ::raise(SIGKILL);
                         if (comm.rank() == 2) throw 1;
                         return 7;
                       }));
  const auto exits = group->Wait(seconds(60));
  EXPECT_EQ(exits[0].code, 7);
  EXPECT_EQ(exits[1].signal, SIGKILL);
  EXPECT_EQ(exits[2].code, 125);
}

TEST(ForkedGroupTest, RanksRunningAtTheDeadlineAreKilled) {
  pid_t pid = 0;
  {
    ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(1, [](Communicator&) {
                           std::this_thread::sleep_for(seconds(600));
                           return 0;
                         }));
    pid = group->pid(0);
    EXPECT_FALSE(group->Wait(std::chrono::milliseconds(20))[0].exited);
  }
  EXPECT_NE(::kill(pid, 0), 0);
}

TEST(ForkedGroupTest, RefusesImpossibleSizes) {
  const auto nothing = [](Communicator&) { return 0; };
  EXPECT_THAT(ForkedGroup::Start(0, nothing), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(ForkedGroup::Start(65, nothing), HasCode(Code::kInvalidArgument));
}

// Rank 1 dies: what it had sent arrives, then everything that waits for it fails and names it.
TEST(ForkedGroupTest, DeadRankIsNamedAndItsMessagesStillArrive) {
  const auto body = [](Communicator& comm) {
    std::string words = "last words";
    std::string large(8 << 20, 'x');
    const auto view = [](std::string& s) {
      return BufferView::Host(DType::kU8, s.data(), Dims{static_cast<std::int64_t>(s.size())});
    };
    const auto wait = [&](Communicator::Request request) -> Status {
      while (true) {
        const Result<bool> done = comm.Test(request);
        if (!done.ok() || done.value()) return done.status();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    if (comm.rank() == 1) {
      auto sent = comm.Send(0, 1, view(words));
      if (!sent.ok() || !wait(sent.value()).ok()) return 1;
      ::raise(SIGKILL);
    }
    // Sent into a full socket: fails when the other end closes.
    auto to_gone = comm.Send(1, 2, view(large));
    auto before = comm.Receive(1, 3, view(large));
    if (!to_gone.ok() || !before.ok()) return 2;
    const Status lost = wait(before.value());
    if (lost.code() != Code::kUnavailable || lost.message() != "rank 1 is gone") return 3;
    if (wait(to_gone.value()).code() != Code::kUnavailable) return 4;
    std::string got(words.size(), ' ');
    auto kept = comm.Receive(1, 1, view(got));
    if (!kept.ok() || !wait(kept.value()).ok() || got != words) return 5;
    auto after = comm.Receive(1, 1, view(got));
    if (!after.ok() || wait(after.value()).code() != Code::kUnavailable) return 6;
    auto late = comm.Send(1, 1, view(got));
    if (!late.ok() || wait(late.value()).code() != Code::kUnavailable) return 7;
    return 0;
  };
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(2, body));
  const auto exits = group->Wait(seconds(60));
  EXPECT_EQ(exits[0].code, 0);
  EXPECT_EQ(exits[1].signal, SIGKILL);
}

}  // namespace
}  // namespace tensormount
