// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/forked_group.h"
#include "collective/comm/bulk_transport.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/host_transports.h"
#include "tests/collective/tcp_testing.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

// A process that is killed in an exchange is named by all others, long before their deadline: also
// by those that have no unit with it.
TEST(BulkKilledRankTest, AllOtherRanksNameTheKilledRank) {
  for (const int victim : {0, 1, 3}) {
    // Whoever ends is gone, too, and may be named by one who was slower: all stay until all know.
    void* const shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(shared, MAP_FAILED);
    auto* const told = new (shared) std::atomic<int>(0);
    const auto body = [victim, told](Communicator& comm) {
      auto made = MakeMessageTransport(comm, kPatient);
      if (!made.ok()) return 1;
      BulkTransport& transport = *made.value();
      std::vector<std::byte> memory(std::size_t{8} << 20);
      const std::uint64_t half = memory.size() / 2;
      if (!transport.Register({memory.data(), memory.size(), {}}).ok()) return 2;
      // A chain: each rank waits for the one before.
      std::vector<BulkUnit> plan;
      for (int r = 0; r + 1 < comm.size(); ++r) plan.push_back({r, r + 1, half});
      if (!transport.Begin(plan).ok()) return 3;
      if (comm.rank() == victim) ::raise(SIGKILL);
      const Deadline deadline = Deadline::After(std::chrono::seconds(60));
      const auto me = static_cast<std::uint64_t>(comm.rank());
      Status status;
      if (me > 0) {
        const BulkBlock in{me - 1, nullptr, memory.data()};
        status = transport.Put({&in, 1});
      }
      // Whose part is over is told of the failure with its next call.
      while (status.ok() && !deadline.Passed()) status = transport.Poll().status();
      ++*told;
      while (*told < comm.size() - 1 && !deadline.Passed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const std::string gone = "rank " + std::to_string(victim);
      if (status.code() == Code::kUnavailable && status.fields().rank == victim &&
          status.message().find(gone) != std::string::npos) {
        return 0;
      }
      std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
      return 4;
    };
    ASSERT_OK_AND_ASSIGN(const auto group, StartTcpRanks(4, TcpWay::kUnix, body));
    const auto exits = group->Wait(std::chrono::seconds(120));
    for (int r = 0; r < 4; ++r) {
      const auto& e = exits[static_cast<std::size_t>(r)];
      if (r == victim) {
        EXPECT_EQ(e.signal, SIGKILL);
      } else {
        EXPECT_EQ(e.code, 0) << "rank " << r << " of victim " << victim;
      }
    }
    munmap(shared, sizeof(std::atomic<int>));
  }
}

}  // namespace
}  // namespace tensormount
