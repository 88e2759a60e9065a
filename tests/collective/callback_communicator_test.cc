// SPDX-License-Identifier: Apache-2.0
#include "tensormount/callback_communicator.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collective/comm/collective.h"
#include "tests/collective/callback_host.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/communicator_conformance.h"
#include "tests/collective/group_view_cases.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// `body` on one thread a rank, each with a communicator on `host`. The first failure by rank.
Status RunOnHost(CallbackHost& host, int ranks, const std::function<Status(Communicator&)>& body,
                 const CallbackOptions& options = {.leave_wait = seconds(60)}) {
  std::vector<Status> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      auto comm = host.Make(r, options);
      results[static_cast<std::size_t>(r)] =
          comm.ok() ? body(*comm.value()).WithContext("rank " + std::to_string(r)) : comm.status();
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& status : results) TENSORMOUNT_RETURN_IF_ERROR(status);
  return {};
}

class CallbackRanksTest : public testing::TestWithParam<int> {
 protected:
  void Holds(const std::function<Status(Communicator&)>& body) {
    CallbackHost host(GetParam());
    EXPECT_OK(RunOnHost(host, GetParam(), body));
    EXPECT_THAT(host.violations(), testing::IsEmpty());
    EXPECT_EQ(host.under_way(), 0u);  // All took leave of each other.
    EXPECT_EQ(host.cancelled(), 0u);
  }
};

TEST_P(CallbackRanksTest, Conforms) {
  Holds([](Communicator& comm) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Conform(comm, /*cancels=*/false));
    return Conform(comm, /*cancels=*/true);
  });
}

TEST_P(CallbackRanksTest, EveryCollectiveOperationWorks) { Holds(ExerciseCollective); }
TEST_P(CallbackRanksTest, JobsWorkAfterFailedJobs) {
  Holds([](Communicator& comm) { return ExerciseFailures(comm, TestScale(60)); });
}

INSTANTIATE_TEST_SUITE_P(All, CallbackRanksTest, testing::Values(1, 3),
                         testing::PrintToStringParamName());

TEST(CallbackCommunicatorTest, SubgroupsConformAndWorkConcurrently) {
  CallbackHost host(4);
  EXPECT_OK(RunOnHost(host, 4, ExerciseSubgroups));
  EXPECT_THAT(host.violations(), testing::IsEmpty());
  EXPECT_EQ(host.under_way(), 0u);
}

// On a host that takes messages over: the threads of MakeThreadGroup.
TEST(CallbackCommunicatorTest, ConformsOverAThreadCommunicator) {
  const auto start = [](const Result<Communicator::Request>& started, std::uint64_t* request) {
    if (started.ok()) *request = started.value();
    return started.ok() ? 0 : -1;
  };
  static const auto started = start;
  const auto view = [](void* data, std::uint64_t size) {
    return BufferView::Host(DType::kU8, data, Dims{static_cast<std::int64_t>(size)});
  };
  static const auto viewed = view;
  CommunicatorCallbacks callbacks;
  callbacks.send = [](void* context, int to, std::uint32_t tag, const void* data,
                      std::uint64_t size, std::uint64_t* request) {
    auto* host = static_cast<Communicator*>(context);
    return started(host->Send(to, tag, viewed(const_cast<void*>(data), size)), request);
  };
  callbacks.receive = [](void* context, int from, std::uint32_t tag, void* data, std::uint64_t size,
                         std::uint64_t* request) {
    auto* host = static_cast<Communicator*>(context);
    return started(host->Receive(from, tag, viewed(data, size)), request);
  };
  callbacks.test = [](void* context, std::uint64_t request) {
    const Result<bool> done = static_cast<Communicator*>(context)->Test(request);
    return !done.ok() ? -1 : done.value() ? 1 : 0;
  };
  EXPECT_OK(RunOnThreads(3, [&](Communicator& host) -> Status {
    CommunicatorCallbacks mine = callbacks;
    mine.context = &host;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto comm,
        MakeCallbackCommunicator(mine, host.rank(), host.size(), {.tag = 7, .kind = "mail"}));
    if (comm->kind() != "mail") return {Code::kInternal, "kind"};
    return Conform(*comm, /*cancels=*/false);
  }));
}

TEST(CallbackCommunicatorTest, InvalidArgumentsAreRefused) {
  CallbackHost host(2);
  const auto make = [](const CommunicatorCallbacks& callbacks, int rank, int size) {
    return MakeCallbackCommunicator(callbacks, rank, size).status();
  };
  EXPECT_THAT(make({}, 0, 2), HasMessage("send, receive and test must be given"));
  EXPECT_THAT(make(host.Callbacks(0), 2, 2), HasMessage("rank 2"));
  EXPECT_THAT(make(host.Callbacks(0), -1, 2), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(make(host.Callbacks(0), 0, 0), HasCode(Code::kInvalidArgument));
}

TEST(CallbackCommunicatorTest, AllRanksNameTheRankThatLeft) {
  CallbackHost host(3);
  EXPECT_OK(RunOnHost(host, 3, [](Communicator& comm) -> Status {
    Collective c(comm, kPatient);
    TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "begin"));
    if (comm.rank() == 2) return {};
    const Status status = c.AllGather("x", "next").status();
    return status.code() == Code::kUnavailable &&
                   status.message().find("rank 2 is gone") != std::string::npos
               ? Status()
               : Status(Code::kInternal, "saw " + status.ToString());
  }));
  EXPECT_THAT(host.violations(), testing::IsEmpty());
  EXPECT_EQ(host.under_way(), 0u);
}

// What `rank` 0 sees of rank 1 after `happens`.
Status SeenAfter(CallbackHost& host, const std::function<void()>& happens) {
  auto zero = host.Make(0, {.leave_wait = milliseconds(20)});
  auto one = host.Make(1, {.leave_wait = milliseconds(20)});
  char byte = 0;
  const auto view = BufferView::Host(DType::kU8, &byte, Dims{1});
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto request, zero.value()->Receive(1, 5, view));
  TENSORMOUNT_RETURN_IF_ERROR(zero.value()->Test(request).status());
  happens();
  TENSORMOUNT_RETURN_IF_ERROR(one.value()->Send(0, 5, view).status());
  return zero.value()->Test(request).status();
}

TEST(CallbackCommunicatorTest, ErrorContainsTheCallbackReturnValue) {
  CallbackHost host(2);
  const Status seen = SeenAfter(host, [&] { host.Break(1, -5); });
  EXPECT_THAT(seen, HasCode(Code::kUnavailable));
  EXPECT_THAT(seen,
              HasMessage("rank 1 is gone: receive failed in the communicator's callbacks (-5)"));
}

TEST(CallbackCommunicatorTest, DamagedPacketIsRefused) {
  CallbackHost host(2);
  const Status seen = SeenAfter(host, [&] { host.DamageNext(1); });
  EXPECT_THAT(seen, HasCode(Code::kDataLoss));
  EXPECT_THAT(seen, HasMessage("rank 1"));
}

TEST(CallbackCommunicatorTest, UnansweredRequestsAreCancelledAtDestruction) {
  CallbackHost host(2);
  {
    ASSERT_OK_AND_ASSIGN(const auto comm, host.Make(0, {.leave_wait = milliseconds(10)}));
    ASSERT_OK(comm->Progress());
    EXPECT_EQ(host.under_way(), 1u);
  }
  EXPECT_EQ(host.under_way(), 0u);
  EXPECT_EQ(host.cancelled(), 2u);  // The receive and the good-bye.
}

// Without `cancel` the host may still write into what the communicator had received.
TEST(CallbackCommunicatorTest, MemoryHeldByTheHostIsNotFreed) {
  static void* data = nullptr;
  static std::uint64_t size = 0;
  CommunicatorCallbacks callbacks;
  callbacks.send = [](void*, int, std::uint32_t, const void*, std::uint64_t, std::uint64_t*) {
    return 0;
  };
  callbacks.receive = [](void*, int, std::uint32_t, void* to, std::uint64_t bytes, std::uint64_t*) {
    data = to;
    size = bytes;
    return 0;
  };
  callbacks.test = [](void*, std::uint64_t) { return 0; };
  {
    ASSERT_OK_AND_ASSIGN(const auto comm, MakeCallbackCommunicator(
                                              callbacks, 0, 2, {.leave_wait = milliseconds(5)}));
    ASSERT_OK(comm->Progress());
  }
  ASSERT_GT(size, 0u);
  std::memset(data, 1, size);
}

// The host's calls cost it time of its own (a Python interpreter's lock): 17,000 a second once.
TEST(CallbackCommunicatorTest, WaitingRankPollsTheHostRarely) {
  CallbackHost host(2);
  std::atomic<std::uint64_t> asked = 0;
  EXPECT_OK(RunOnHost(host, 2, [&](Communicator& comm) -> Status {
    Collective c(comm, kPatient);
    TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "begin"));
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      const std::uint64_t before = host.tests();
      std::this_thread::sleep_for(seconds(2));
      asked = host.tests() - before;
    }
    return c.Agree({}, "end");
  }));
  EXPECT_LE(asked, 2000u);
}

TEST(CallbackCommunicatorTest, ThrowingCallbackIsAFailure) {
  CommunicatorCallbacks callbacks;
  callbacks.send = [](void*, int, std::uint32_t, const void*, std::uint64_t,
                      std::uint64_t*) -> int { throw 1; };
  callbacks.receive = [](void*, int, std::uint32_t, void*, std::uint64_t, std::uint64_t*) -> int {
    throw 1;
  };
  callbacks.test = [](void*, std::uint64_t) -> int { throw 1; };
  ASSERT_OK_AND_ASSIGN(const auto comm, MakeCallbackCommunicator(callbacks, 0, 2));
  char byte = 0;
  ASSERT_OK_AND_ASSIGN(const auto request,
                       comm->Send(1, 5, BufferView::Host(DType::kU8, &byte, Dims{1})));
  EXPECT_OK(comm->Progress());
  const Result<bool> done = comm->Test(request);
  if (!done.ok()) {
    EXPECT_THAT(done, HasCode(Code::kUnavailable));
  }
}

}  // namespace
}  // namespace tensormount
