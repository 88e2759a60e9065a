// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/coding.h"
#include "base/hash.h"
#include "collective/comm/collective.h"
#include "collective/comm/collective_frame.h"
#include "collective/comm/collective_round.h"
#include "collective/guarded.h"
#include "shard/utf8.h"
#include "tests/collective/bulk_exchange.h"
#include "tests/collective/collective_cases.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

class CollectiveThreadTest : public testing::TestWithParam<int> {};

TEST_P(CollectiveThreadTest, EveryOperationWorksOnEveryRank) {
  EXPECT_OK(RunOnThreads(GetParam(), ExerciseCollective));
}
TEST_P(CollectiveThreadTest, JobsWorkAfterFailedJobs) {
  EXPECT_OK(RunOnThreads(GetParam(), [](Communicator& comm) {
    return ExerciseFailures(comm, TestScale(comm.size() == 2 ? 200 : 40));
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveThreadTest, testing::Values(1, 2, 3, 4, 8),
                         testing::PrintToStringParamName());

// What is thrown between two calls, of whatever type, keeps no rank from the next one.
TEST(GuardedTest, EveryExceptionBecomesAStatus) {
  EXPECT_THAT(Guarded([]() -> Status { throw 7; }), HasCode(Code::kInternal));
  EXPECT_THAT(Guarded([]() -> Status { throw std::runtime_error("why"); }), HasMessage("why"));
  EXPECT_THAT(Guarded([]() -> Status { throw std::bad_alloc(); }),
              HasCode(Code::kResourceExhausted));
  EXPECT_OK(Guarded([] { return Status(); }));
}

TEST(CollectiveTest, AHundredMegabytesAreGathered) {
  EXPECT_OK(RunOnThreads(2, [](Communicator& c) {
    return ExerciseLargePayload(c, Amount(100'000'000u, 20'000'000u));
  }));
}

// They were added to the clock as they are, and passed at once.
TEST(CollectiveTest, HugeTimeoutsDoNotExpireAtOnce) {
  for (const milliseconds limit : {milliseconds::max(), milliseconds(std::chrono::years(300))}) {
    EXPECT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
      Collective c(comm, {.liveness = limit, .arrival = limit});
      TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "begin"));
      std::this_thread::sleep_for(milliseconds(20) * comm.rank());
      TENSORMOUNT_RETURN_IF_ERROR(c.Gather(std::string(100'000, 'x'), "gather").status());
      return c.Agree({}, "end");
    }));
  }
}

TEST(CollectiveTest, DifferentPhasesAreNamedOnAllRanks) {
  for (const int other : {0, 1, 2}) {
    std::vector<Status> seen(3);
    EXPECT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
      Collective c(comm, kPatient);
      TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "begin"));
      const bool odd = comm.rank() == other;
      seen[static_cast<std::size_t>(comm.rank())] = c.Agree({}, odd ? "publish" : "validate");
      return {};
    }));
    for (const Status& s : seen) {
      EXPECT_THAT(s, HasCode(Code::kInternal));
      EXPECT_THAT(s, HasMessage("publish"));
      EXPECT_THAT(s, HasMessage("validate"));
      if (other != 0) {
        EXPECT_THAT(s, HasMessage("rank " + std::to_string(other)));
      }
    }
  }
}

TEST(CollectiveTest, DifferentOperationsInOnePhaseAreDetected) {
  std::vector<Status> seen(2);
  EXPECT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    Collective c(comm, kPatient);
    seen[static_cast<std::size_t>(comm.rank())] =
        comm.rank() == 0 ? c.Agree({}, "end") : c.Gather("x", "end").status();
    return {};
  }));
  for (const Status& s : seen) EXPECT_THAT(s, HasCode(Code::kInternal));
}

// `late` beats its heart but does not come to a call until all others have failed.
void RankThatDoesNotCome(int ranks, int late, Operation operation) {
  const Timeouts timeouts{seconds(60), milliseconds(300)};
  std::vector<Status> seen(static_cast<std::size_t>(ranks));
  std::atomic<int> failed{0};
  std::barrier all_there(ranks);
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) -> Status {
    Collective c(comm, timeouts);
    // That threads begin late on a loaded machine is not what is asked here.
    all_there.arrive_and_wait();
    // With patience, so that a loaded machine fails nobody here.
    Status& mine = seen[static_cast<std::size_t>(comm.rank())];
    if (comm.rank() == late) {
      const auto give_up = Clock::now() + seconds(60);
      while (failed.load() < ranks - 1 && Clock::now() < give_up) {
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
    const auto start = Clock::now();
    mine = CallOperation(c, operation, "evaluate");
    if (Clock::now() - start > timeouts.arrival + seconds(5) + kMargin) {
      return {Code::kInternal, "rank " + std::to_string(comm.rank()) + " waited too long"};
    }
    failed.fetch_add(1);
    // The communicator lives until the late one has its answer.
    const auto give_up = Clock::now() + seconds(60);
    while (failed.load() < ranks && Clock::now() < give_up) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    return {};
  }));
  for (std::size_t r = 0; r < seen.size(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r) + ", late " + std::to_string(late));
    EXPECT_THAT(seen[r], HasCode(Code::kDeadlineExceeded));
    EXPECT_THAT(seen[r], HasMessage("rank " + std::to_string(late) + " did not arrive within"));
    EXPECT_THAT(seen[r], HasMessage("evaluate"));
    if (late != 0) {
      EXPECT_EQ(seen[r].message(), seen[0].message());
    }
  }
}

TEST(CollectiveTest, LateRankIsNamedAndReceivesTheFailureOnArrival) {
  // At once: they mostly wait.
  std::vector<std::thread> groups;
  groups.emplace_back([] { RankThatDoesNotCome(2, 1, Operation::kAllGather); });
  groups.emplace_back([] { RankThatDoesNotCome(4, 2, Operation::kAgree); });
  groups.emplace_back([] { RankThatDoesNotCome(4, 3, Operation::kExchange); });
  groups.emplace_back([] { RankThatDoesNotCome(4, 1, Operation::kAllToAll); });
  for (std::thread& group : groups) group.join();
}

TEST(CollectiveTest, LateRankZeroIsNamed) { RankThatDoesNotCome(3, 0, Operation::kBroadcast); }

TEST(CollectiveTest, AllRanksNameTheRankThatLeft) {
  for (const int leaver : {0, 2}) {
    std::vector<Status> seen(4);
    EXPECT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
      Collective c(comm, kPatient);
      TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "begin"));
      if (comm.rank() == leaver) return {};
      seen[static_cast<std::size_t>(comm.rank())] = c.AllGather("x", "next").status();
      return {};
    }));
    for (int r = 0; r < 4; ++r) {
      if (r == leaver) continue;
      EXPECT_THAT(seen[static_cast<std::size_t>(r)], HasCode(Code::kUnavailable));
      EXPECT_THAT(seen[static_cast<std::size_t>(r)],
                  HasMessage("rank " + std::to_string(leaver) + " is gone"));
    }
  }
}

TEST(CollectiveTest, ExchangeOfUnequalSizesFailsOnAllRanks) {
  std::vector<Status> seen(3);
  EXPECT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    Collective c(comm, kPatient);
    std::string out(1 << 20, 'o');
    std::string in(1 << 20, ' ');
    std::vector<BulkTransfer> sends = {{(comm.rank() + 1) % 3, out.data(), out.size()}};
    std::vector<BulkTransfer> receives = {{(comm.rank() + 2) % 3, in.data(), in.size()}};
    if (comm.rank() == 1) receives[0].size -= 1;
    seen[static_cast<std::size_t>(comm.rank())] = ExchangeBulk(c, sends, receives, "reshard");
    return {};
  }));
  for (const Status& s : seen) {
    EXPECT_THAT(s, HasCode(Code::kDataLoss));
    EXPECT_THAT(s, HasMessage("rank 1: message of rank 0: 1048576 bytes came"));
  }
}

// Rank 1 (played here) says that a message comes which nobody has in store: refused before there is
// memory for it.
TEST(CollectiveTest, ImpossibleMessageSizeIsRefused) {
  auto group = MakeThreadGroup(2);
  Status seen;
  std::thread root([&] {
    Collective c(*group[0], {seconds(60), seconds(60)});
    seen = AllToAll(c, {"mine", "yours"}, "letters").status();
  });
  const Communicator::Job job = group[1]->BeginJob();
  FrameSender sender(*group[1], job, 16384);
  Frame frame;
  frame.kind = Frame::kContribution;
  frame.op = static_cast<std::uint8_t>(CollectiveOp::kNeighborAllToAll);
  frame.round = 1;
  frame.phase = "letters";
  frame.phase_hash = Xxh3Low64(frame.phase);
  // 16 bytes in all, one message to rank 0 and one from it.
  const auto pair = [](std::uint32_t from, std::uint32_t to) {
    ByteWriter bytes;
    bytes.U32(from);
    bytes.U32(to);
    return Xxh3Low64(bytes.bytes());
  };
  ByteWriter volume;
  volume.U64(16);
  volume.U64(pair(1, 0));
  volume.U64(pair(0, 1));
  sender.Send(0, frame, Payload(volume.bytes()));
  FrameSender letters(*group[1], job, 16386);
  frame.kind = Frame::kLetter;
  letters.Send(0, frame, Payload("seventeen letters"));
  root.join();
  EXPECT_THAT(seen, HasCode(Code::kDataLoss));
  EXPECT_THAT(seen, HasMessage("message of rank 1: the message has 17 bytes, the limit is 16"));
}

// A job that failed leaves messages behind; the next one on the same communicator is not confused.
TEST(CollectiveTest, JobAfterAFailedJobWorks) {
  EXPECT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    {
      Collective c(comm, kPatient);
      if (c.Agree({}, comm.rank() == 1 ? "a" : "b").ok()) return {Code::kInternal, "no failure"};
    }
    Collective c(comm, kPatient);
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, c.AllGather(std::to_string(comm.rank()), "again"));
    return all == std::vector<std::string>{"0", "1", "2"} ? Status()
                                                          : Status(Code::kInternal, "confused");
  }));
}

// Many steps, each within `arrival`: the call as a whole has a limit too, on all ranks.
TEST(CollectiveTest, TotalTimeoutBoundsTheWholeCall) {
  Timeouts limited{seconds(60), seconds(60)};
  limited.total = milliseconds(600);
  for (const int slow : {0, 1}) {
    std::vector<Status> seen(3);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
      Collective c(comm, limited);
      Status status;
      for (int step = 0; step < 100 && status.ok(); ++step) {
        if (comm.rank() == slow) std::this_thread::sleep_for(milliseconds(step < 4 ? 50 : 900));
        status = c.Agree({}, "step " + std::to_string(step));
      }
      seen[static_cast<std::size_t>(comm.rank())] = status;
      return {};
    }));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20));
    for (int r = 0; r < 3; ++r) {
      const Status& status = seen[static_cast<std::size_t>(r)];
      EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded)) << r;
      EXPECT_THAT(status, HasMessage("(total timeout)")) << r;
      EXPECT_THAT(status, HasMessage("rank " + std::to_string(slow))) << r;
    }
  }
}

// The heartbeat goes on while the owner is busy elsewhere for longer than liveness.
TEST(CollectiveTest, BusyRankIsNotReportedAsDead) {
  EXPECT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    Collective c(comm, {milliseconds(900), seconds(60)});
    TENSORMOUNT_RETURN_IF_ERROR(c.Agree({}, "begin"));
    if (comm.rank() != 1) return c.Agree({}, "end");
    std::this_thread::sleep_for(milliseconds(1200));
    return c.Agree({}, "end");
  }));
}

// Rank 0 (played here) came, but has to wait for others: who waits for it waits along, for longer
// than it would wait for a rank 0 of which it knows nothing.
TEST(CollectiveTest, OtherRanksWaitAsLongAsRankZero) {
  auto group = MakeThreadGroup(2);
  Status seen;
  std::thread member([&] {
    Collective c(*group[1], {seconds(60), milliseconds(500)});
    seen = c.Agree({}, "together");
  });
  FrameSender sender(*group[0], group[0]->BeginJob(), 16385);
  Frame frame;
  frame.op = 5;
  frame.round = 1;
  for (int i = 0; i < 10; ++i) {
    frame.kind = Frame::kWaiting;
    sender.Send(1, frame);
    std::this_thread::sleep_for(milliseconds(100));
  }
  frame.kind = Frame::kVerdict;
  sender.Send(1, frame);
  member.join();
  EXPECT_OK(seen);
}

TEST(CollectiveFrameTest, FrameRoundTrips) {
  Frame f;
  f.kind = Frame::kVerdict;
  f.fatal = true;
  f.job = {0x123456789abcdef0, 0xfedcba9876543210};
  f.sequence = 11;
  f.round = 9;
  f.op = 3;
  f.phase_hash = 0x1234567890abcdef;
  f.phase = "a phase whose name is longer than what fits into a frame of this size";
  f.status = Status::FromErrno(28, "write", "x");
  for (const std::size_t size : {std::size_t{0}, kInlinePayload, kInlinePayload + 1}) {
    const std::string text(size, 'p');
    std::string payload;
    ASSERT_OK_AND_ASSIGN(const Frame g, DecodeFrame(EncodeFrame(f, Payload(text)), &payload));
    EXPECT_EQ(g.kind, f.kind);
    EXPECT_TRUE(g.fatal);
    EXPECT_EQ(g.job, f.job);
    EXPECT_EQ(g.sequence, 11u);
    EXPECT_EQ(g.round, 9u);
    EXPECT_EQ(g.op, 3);
    EXPECT_EQ(g.phase_hash, f.phase_hash);
    EXPECT_EQ(g.phase, f.phase.substr(0, 37) + "...");
    EXPECT_EQ(g.status.code(), f.status.code());
    EXPECT_EQ(g.status.ToErrno(), 28);
    EXPECT_EQ(g.payload_size, size);
    EXPECT_EQ(g.payload_hash, Xxh3Low64(text));
    EXPECT_EQ(payload, size <= kInlinePayload ? text : "");
  }
}

TEST(CollectiveFrameTest, LongPhasesAreCutBetweenCharacters) {
  for (std::size_t before = 30; before <= 40; ++before) {
    Frame f;
    f.phase = std::string(before, 'p') + "\u00e9\u20ac\U0001F600";
    std::string payload;
    ASSERT_OK_AND_ASSIGN(const Frame g, DecodeFrame(EncodeFrame(f, Payload()), &payload));
    EXPECT_TRUE(IsUtf8(g.phase)) << g.phase;
    EXPECT_TRUE(g.phase == f.phase || g.phase.ends_with("...")) << g.phase;
  }
}

TEST(CollectiveFrameTest, EveryFlippedByteIsRefused) {
  Frame f;
  f.kind = Frame::kContribution;
  f.phase = "save";
  const FrameBytes good = EncodeFrame(f, Payload("payload"));
  for (std::size_t i = 0; i < good.size(); ++i) {
    FrameBytes bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    std::string payload;
    EXPECT_THAT(DecodeFrame(bad, &payload), HasCode(Code::kDataLoss)) << "byte " << i;
  }
}

}  // namespace
}  // namespace tensormount
