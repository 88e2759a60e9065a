// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <signal.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/forked_group.h"
#include "bench/tcp_ranks.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/communicator_conformance.h"
#include "tests/collective/group_view_cases.h"
#include "tests/collective/tcp_testing.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::seconds;

int TcpReport(const Communicator& comm, const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
  return 1;
}

struct Variant {
  TcpWay way;
  int ranks;
};

class TcpConformanceTest : public testing::TestWithParam<Variant> {};

TEST_P(TcpConformanceTest, ConformanceCasesHold) {
  if (!CanUse(GetParam().way)) GTEST_SKIP() << "this machine has no ::1";
  ASSERT_OK_AND_ASSIGN(const auto group,
                       StartTcpRanks(GetParam().ranks, GetParam().way, [](Communicator& comm) {
                         Status status = Conform(comm, /*cancels=*/false);
                         if (status.ok()) status = Conform(comm, /*cancels=*/true);
                         return TcpReport(comm, status);
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) {
    EXPECT_TRUE(e.exited);
    EXPECT_EQ(e.code, 0) << "signal " << e.signal;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TcpConformanceTest,
                         testing::Values(Variant{TcpWay::kIpv4, 1}, Variant{TcpWay::kIpv4, 2},
                                         Variant{TcpWay::kIpv4, 4}, Variant{TcpWay::kUnix, 2},
                                         Variant{TcpWay::kUnix, 4}, Variant{TcpWay::kIpv6, 2},
                                         Variant{TcpWay::kIpv6, 4}),
                         [](const auto& one) {
                           return NameOf(one.param.way) + std::to_string(one.param.ranks);
                         });

TEST(TcpGroupViewTest, ChannelsAndSubgroupsConformAndWorkConcurrently) {
  for (const TcpWay way : {TcpWay::kIpv4, TcpWay::kUnix}) {
    ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(4, way, [](Communicator& comm) {
                           Status status = ExerciseChannels(comm);
                           if (status.ok()) status = ExerciseSubgroups(comm);
                           return TcpReport(comm, status);
                         }));
    for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
  }
}

// Rank 1 dies: what it had sent arrives, then everything that waits for it fails and names it with
// its host and its process.
TEST(TcpForkTest, DeadRankIsNamedAndItsMessagesStillArrive) {
  for (const TcpWay way : {TcpWay::kIpv4, TcpWay::kUnix}) {
    const auto body = [](Communicator& comm) {
      std::string words = "last words of " + std::to_string(::getpid()) + std::string(20, ' ');
      words.resize(40);
      std::string large(8 << 20, 'x');
      if (comm.rank() == 1) {
        const auto sent = comm.Send(0, 1, TcpView(words));
        if (!sent.ok() || !TcpWait(comm, sent.value()).ok()) return 1;
        // Taken over; now it must have left this process, too.
        std::string ping(1, ' ');
        const auto heard = comm.Receive(0, 9, TcpView(ping));
        if (!heard.ok() || !TcpWait(comm, heard.value()).ok()) return 1;
        ::raise(SIGKILL);
      }
      std::string ping(1, 'p');
      const auto pinged = comm.Send(1, 9, TcpView(ping));
      const auto to_gone = comm.Send(1, 2, TcpView(large));
      const auto before = comm.Receive(1, 3, TcpView(large));
      if (!pinged.ok() || !to_gone.ok() || !before.ok()) return 2;
      const Status lost = TcpWait(comm, before.value());
      if (lost.code() != Code::kUnavailable) return 3;
      if (TcpWait(comm, to_gone.value()).code() != Code::kUnavailable) return 4;
      std::string got(words.size(), ' ');
      const auto kept = comm.Receive(1, 1, TcpView(got));
      if (!kept.ok() || !TcpWait(comm, kept.value()).ok()) return 5;
      const std::string pid = got.substr(14, got.find(' ', 14) - 14);
      char host[256] = "";
      ::gethostname(host, sizeof(host) - 1);
      const std::string expected =
          "rank 1 (host " + std::string(host) + ", pid " + pid + ") is gone";
      if (lost.message() != expected) return TcpReport(comm, lost) + 10;
      const auto late = comm.Send(1, 1, TcpView(got));
      const Status too_late = late.ok() ? TcpWait(comm, late.value()) : late.status();
      return too_late.code() == Code::kUnavailable && too_late.message() == expected ? 0 : 7;
    };
    ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(2, way, body));
    const auto exits = group->Wait(seconds(60));
    EXPECT_EQ(exits[0].code, 0);
    EXPECT_EQ(exits[1].signal, SIGKILL);
  }
}

// A small message is taken over before there is a connection, and comes although its sender has
// left before its receiver asked for anything.
TEST(TcpForkTest, MessagesOfARankThatLeftStillArrive) {
  for (const TcpWay way : {TcpWay::kIpv4, TcpWay::kUnix, TcpWay::kIpv6}) {
    if (!CanUse(way)) continue;
    // Ranks 1 and 2: neither is rank 0, with which all are connected. Both directions of a dial.
    for (const int sender : {1, 2}) {
      const auto body = [sender](Communicator& comm) {
        std::string text = "farewell";
        if (comm.rank() == sender) {
          const auto sent = comm.Send(3 - sender, 1, TcpView(text));
          if (!sent.ok()) return 1;
          const Result<bool> taken = comm.Test(sent.value());
          return taken.ok() && taken.value() ? 0 : 2;
        }
        if (comm.rank() == 0) return 0;
        const auto until = std::chrono::steady_clock::now() + seconds(60);
        while (comm.SilentFor(sender) > std::chrono::milliseconds(50)) {
          if (!comm.Progress().ok() || std::chrono::steady_clock::now() > until) return 3;
        }
        std::string got(text.size(), ' ');
        const auto asked = comm.Receive(sender, 1, TcpView(got));
        if (!asked.ok() || !TcpWait(comm, asked.value()).ok() || got != text) return 4;
        return 0;
      };
      ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(3, way, body));
      for (const ForkedGroup::Exit& e : group->Wait(seconds(60))) EXPECT_EQ(e.code, 0) << sender;
    }
  }
}

// All dial each other at the same moment, again and again: nothing is lost and nothing comes twice.
TEST(TcpForkTest, SimultaneousDialsLoseAndDuplicateNoByte) {
  constexpr int kRanks = 6;
  for (int turn = 0; turn < 12; ++turn) {
    const TcpWay way = turn % 2 == 0 ? TcpWay::kIpv4 : TcpWay::kUnix;
    const auto body = [](Communicator& comm) {
      std::vector<std::string> out;
      std::vector<std::string> in(kRanks * 8, std::string(300, ' '));
      std::vector<Communicator::Request> requests;
      for (int i = 0; i < 8; ++i) out.push_back(std::string(300, static_cast<char>('a' + i)));
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == comm.rank()) continue;
        for (int i = 0; i < 8; ++i) {
          const auto s = comm.Send(peer, 5, TcpView(out[static_cast<std::size_t>(i)]));
          const auto r = comm.Receive(peer, 5, TcpView(in[static_cast<std::size_t>(peer * 8 + i)]));
          if (!s.ok() || !r.ok()) return 1;
          requests.push_back(s.value());
          requests.push_back(r.value());
        }
      }
      for (const Communicator::Request r : requests) {
        if (const Status status = TcpWait(comm, r); !status.ok()) return TcpReport(comm, status);
      }
      for (int peer = 0; peer < kRanks; ++peer) {
        for (int i = 0; i < 8 && peer != comm.rank(); ++i) {
          if (in[static_cast<std::size_t>(peer * 8 + i)] != out[static_cast<std::size_t>(i)])
            return 2;
        }
      }
      return 0;
    };
    ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(kRanks, way, body));
    for (const ForkedGroup::Exit& e : group->Wait(seconds(60))) EXPECT_EQ(e.code, 0) << turn;
  }
}

}  // namespace
}  // namespace tensormount
