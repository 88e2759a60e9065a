// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <new>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/forked_group.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/forwarding_communicator.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int Report(const Communicator& comm, const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
  return 1;
}

class CollectiveSocketTest : public testing::TestWithParam<int> {};

TEST_P(CollectiveSocketTest, EveryOperationWorksOnEveryRank) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(GetParam(), [](Communicator& comm) {
                         return Report(comm, ExerciseCollective(comm));
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
}

TEST_P(CollectiveSocketTest, JobsWorkAfterFailedJobs) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(GetParam(), [](Communicator& comm) {
                         return Report(comm, ExerciseFailures(comm, comm.size() == 2 ? 200 : 30));
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveSocketTest, testing::Values(1, 2, 3, 4, 8),
                         testing::PrintToStringParamName());

TEST(CollectiveForkTest, AHundredMegabytesAreGathered) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(2, [](Communicator& comm) {
                         return Report(comm, ExerciseLargePayload(comm, 100'000'000));
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(120))) EXPECT_EQ(e.code, 0);
}

struct Victim {
  int rank;
  int signal;
  int code;  // That all survivors must see.
};

// For each operation: all survivors fail by their deadline, with the same code, and name the
// victim. All groups run at once: their waits overlap.
TEST(CollectiveForkTest, AllRanksNameADeadOrStoppedRankInEveryOperation) {
  constexpr int kRanks = 4;
  const std::vector<Victim> victims = {
      {0, SIGKILL, kSawFailure + static_cast<int>(Code::kUnavailable)},
      {2, SIGKILL, kSawFailure + static_cast<int>(Code::kUnavailable)},
      {0, SIGSTOP, kSawFailure + static_cast<int>(Code::kDeadlineExceeded)},
      {2, SIGSTOP, kSawFailure + static_cast<int>(Code::kDeadlineExceeded)},
  };
  // The groups of the next victim start while those of a stopped one wait for its deadline.
  std::vector<std::vector<std::unique_ptr<ForkedGroup>>> started(victims.size());
  const auto start = [&](std::size_t i) {
    for (int op = 0; op < kOperations; ++op) {
      const Victim& v = victims[i];
      ASSERT_OK_AND_ASSIGN(auto group, ForkedGroup::Start(kRanks, [&](Communicator& comm) {
                             return WatchVictim(comm, static_cast<Operation>(op), v.rank, v.signal);
                           }));
      started[i].push_back(std::move(group));
    }
  };
  for (std::size_t i = 0; i < victims.size(); ++i) {
    const Victim& v = victims[i];
    const std::size_t ahead = v.signal == SIGSTOP ? std::min(i + 2, victims.size()) : i + 1;
    for (std::size_t n = i; n < ahead; ++n) {
      if (started[n].empty()) {
        ASSERT_NO_FATAL_FAILURE(start(n));
      }
    }
    std::vector<std::unique_ptr<ForkedGroup>> groups = std::move(started[i]);
    for (int op = 0; op < kOperations; ++op) {
      SCOPED_TRACE("operation " + std::to_string(op) + ", victim " + std::to_string(v.rank) +
                   ", signal " + std::to_string(v.signal));
      ForkedGroup& group = *groups[static_cast<std::size_t>(op)];
      std::vector<ForkedGroup::Exit> exits;
      const auto give_up = std::chrono::steady_clock::now() + seconds(90);
      const auto survivors_left = [&] {
        int left = 0;
        for (int r = 0; r < kRanks; ++r) {
          left += r != v.rank && !exits[static_cast<std::size_t>(r)].exited ? 1 : 0;
        }
        return left;
      };
      do {
        exits = group.Wait(milliseconds(10));
      } while (survivors_left() > 0 && std::chrono::steady_clock::now() < give_up);
      for (int r = 0; r < kRanks; ++r) {
        if (r != v.rank) {
          EXPECT_EQ(exits[static_cast<std::size_t>(r)].code, v.code) << r;
        }
      }
      const auto it = static_cast<std::size_t>(v.rank);
      if (v.signal == SIGKILL) {
        EXPECT_EQ(exits[it].signal, SIGKILL);
        continue;
      }
      // Woken up, the victim learns the same: it cannot go on with what the others gave up.
      EXPECT_FALSE(exits[it].exited);
      ::kill(group.pid(v.rank), SIGCONT);
      exits = group.Wait(seconds(60));
      if (v.rank == 0) {
        EXPECT_GE(exits[it].code, kSawFailure);
      } else {
        EXPECT_EQ(exits[it].code, v.code);
      }
    }
  }
}

// Dies when it would send its `sends`-th message of bulk.
class DyingCommunicator final : public ForwardingCommunicator {
 public:
  DyingCommunicator(Communicator& parent, int sends)
      : ForwardingCommunicator(parent), left_(sends) {}
  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    if (tag % 4 == 2 && --left_ == 0) ::raise(SIGKILL);
    return ForwardingCommunicator::Send(to, tag, view);
  }

 private:
  int left_;
};

// Between the sizes and the bytes, having told some and not others.
TEST(CollectiveForkTest, AllRanksNameARankThatDiesInAllToAll) {
  constexpr int kRanks = 4;
  for (int victim = 0; victim < kRanks; victim += 3) {
    for (int sends = 1; sends <= 6; ++sends) {
      SCOPED_TRACE("victim " + std::to_string(victim) + ", send " + std::to_string(sends));
      ASSERT_OK_AND_ASSIGN(
          const auto group, ForkedGroup::Start(kRanks, [&](Communicator& comm) {
            DyingCommunicator dying(comm, comm.rank() == victim ? sends : 0);
            Collective c(dying, kPatient);
            const std::vector<std::string> letters(kRanks, std::string(1 << 20, 'l'));
            const Status status = AllToAll(c, letters, "letters").status();
            const bool named = status.message().find("rank " + std::to_string(victim) +
                                                     " is gone") != std::string::npos;
            return status.code() == Code::kUnavailable && named ? 0 : 10 + Report(comm, status);
          }));
      const auto exits = group->Wait(seconds(60));
      for (int r = 0; r < kRanks; ++r) {
        const ForkedGroup::Exit& e = exits[static_cast<std::size_t>(r)];
        EXPECT_EQ(r == victim ? e.signal : e.code, r == victim ? SIGKILL : 0) << r;
      }
    }
  }
}

// A rank that did not even begin its part is found by its closed connection.
TEST(CollectiveForkTest, RankThatDiedBeforeTheCallIsNamed) {
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(3, [](Communicator& comm) {
                         if (comm.rank() == 1) ::raise(SIGKILL);
                         Collective c(comm, kPatient);
                         const Status status = c.Agree({}, "begin");
                         return status.code() == Code::kUnavailable &&
                                        status.message().find("rank 1 is gone") != std::string::npos
                                    ? 0
                                    : Report(comm, status);
                       }));
  const auto exits = group->Wait(seconds(60));
  EXPECT_EQ(exits[0].code, 0);
  EXPECT_EQ(exits[2].code, 0);
}

// A rank that lives but does not come: named at `arrival`, and answered when it comes at last.
TEST(CollectiveForkTest, LateRankIsNamedAndReceivesTheFailure) {
  // How many have given up, seen by all processes: the late one comes after them, however slow
  // the machine is.
  void* shared = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* failed = new (shared) std::atomic<int>(0);
  ASSERT_OK_AND_ASSIGN(const auto group, ForkedGroup::Start(3, [&](Communicator& comm) {
                         Collective c(comm, {seconds(60), milliseconds(500)});
                         const auto give_up = std::chrono::steady_clock::now() + seconds(60);
                         while (comm.rank() == 2 && failed->load() < 2 &&
                                std::chrono::steady_clock::now() < give_up) {
                           std::this_thread::sleep_for(milliseconds(2));
                         }
                         const Status status = c.Agree({}, "evaluate");
                         failed->fetch_add(1);
                         const bool as_expected =
                             status.code() == Code::kDeadlineExceeded &&
                             status.message().find("rank 2 did not arrive within") !=
                                 std::string::npos;
                         return as_expected ? 0 : 10 + Report(comm, status);
                       }));
  for (const ForkedGroup::Exit& e : group->Wait(seconds(90))) EXPECT_EQ(e.code, 0);
  ::munmap(shared, sizeof(std::atomic<int>));
}

}  // namespace
}  // namespace tensormount
