// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <memory>
#include <signal.h>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/forked_group.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/tcp_testing.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int TcpOutcome(const Communicator& comm, const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
  return 1;
}

struct TcpRanks {
  TcpWay way;
  int ranks;
};

class CollectiveTcpTest : public testing::TestWithParam<TcpRanks> {
 protected:
  void Holds(const std::function<Status(Communicator&)>& body) {
    if (!CanUse(GetParam().way)) GTEST_SKIP() << "this machine has no ::1";
    ASSERT_OK_AND_ASSIGN(const auto group,
                         StartTcpRanks(GetParam().ranks, GetParam().way, [&](Communicator& comm) {
                           return TcpOutcome(comm, body(comm));
                         }));
    for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
  }
};

TEST_P(CollectiveTcpTest, EveryOperationWorksOnEveryRank) { Holds(ExerciseCollective); }

TEST_P(CollectiveTcpTest, JobsWorkAfterFailedJobs) {
  Holds([](Communicator& comm) { return ExerciseFailures(comm, comm.size() == 2 ? 100 : 20); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveTcpTest,
                         testing::Values(TcpRanks{TcpWay::kIpv4, 1}, TcpRanks{TcpWay::kIpv4, 2},
                                         TcpRanks{TcpWay::kIpv4, 4}, TcpRanks{TcpWay::kIpv6, 3},
                                         TcpRanks{TcpWay::kUnix, 2}, TcpRanks{TcpWay::kUnix, 8}),
                         [](const auto& one) {
                           return NameOf(one.param.way) + std::to_string(one.param.ranks);
                         });

TEST(CollectiveTcpForkTest, AHundredMegabytesAreGathered) {
  ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(2, TcpWay::kIpv4, [](Communicator& comm) {
                         return TcpOutcome(comm, ExerciseLargePayload(comm, 100'000'000));
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
}

// For each operation all survivors fail with the same code, and name the victim. All groups run at
// once. (A stopped rank is the business of Collective and of heartbeats: collective_socket_test.)
TEST(CollectiveTcpForkTest, AllRanksNameAKilledRankInEveryOperation) {
  constexpr int kRanks = 4;
  struct Victim {
    int rank;
    TcpWay way;
  };
  for (const Victim& v : {Victim{0, TcpWay::kIpv4}, Victim{2, TcpWay::kUnix},
                          Victim{2, TcpWay::kIpv4}, Victim{0, TcpWay::kUnix}}) {
    std::vector<std::unique_ptr<ForkedGroup>> groups;
    for (int op = 0; op < kOperations; ++op) {
      ASSERT_OK_AND_ASSIGN(auto group, StartTcpRanks(kRanks, v.way, [&](Communicator& comm) {
                             return WatchVictim(comm, static_cast<Operation>(op), v.rank, SIGKILL);
                           }));
      groups.push_back(std::move(group));
    }
    const auto give_up = std::chrono::steady_clock::now() + seconds(90);
    for (int op = 0; op < kOperations; ++op) {
      SCOPED_TRACE("operation " + std::to_string(op) + ", victim " + std::to_string(v.rank) + ", " +
                   NameOf(v.way));
      for (int r = 0; r < kRanks; ++r) {
        if (r == v.rank) continue;
        ForkedGroup::Exit exit;
        do {
          exit = groups[static_cast<std::size_t>(op)]->Wait(
              milliseconds(5))[static_cast<std::size_t>(r)];
        } while (!exit.exited && std::chrono::steady_clock::now() < give_up);
        EXPECT_EQ(exit.code, kSawFailure + static_cast<int>(Code::kUnavailable)) << r;
      }
    }
  }
}

// A rank that did not even begin its part is found by its address, at which nobody listens.
TEST(CollectiveTcpForkTest, RankThatDiedBeforeTheCallIsNamed) {
  for (const TcpWay way : {TcpWay::kIpv4, TcpWay::kUnix}) {
    for (const int victim : {0, 1}) {
      ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(3, way, [victim](Communicator& comm) {
                             if (comm.rank() == victim) ::raise(SIGKILL);
                             Collective c(comm, kPatient);
                             const Status status = c.Agree({}, "begin");
                             const std::string name = "rank " + std::to_string(victim) + " (host ";
                             return status.code() == Code::kUnavailable &&
                                            status.message().find(name) != std::string::npos &&
                                            status.message().find("is gone") != std::string::npos
                                        ? 0
                                        : 10 + TcpOutcome(comm, status);
                           }));
      const auto exits = group->Wait(seconds(60));
      for (int r = 0; r < 3; ++r) {
        if (r == victim) continue;
        EXPECT_EQ(exits[static_cast<std::size_t>(r)].code, 0) << r;
      }
    }
  }
}

}  // namespace
}  // namespace tensormount
