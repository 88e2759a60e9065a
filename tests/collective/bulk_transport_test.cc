// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/bulk_transport.h"

#include <cstring>
#include <functional>
#include <string>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collective/comm/bulk_notes.h"
#include "tests/collective/bulk_transport_conformance.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/forwarding_communicator.h"
#include "tests/collective/host_transports.h"
#include "tests/collective/tcp_testing.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

enum class BulkKind { kMemory, kThreadMessages, kTcpMessages };

std::string BulkKindName(BulkKind kind) {
  switch (kind) {
    case BulkKind::kMemory:
      return "Memory";
    case BulkKind::kThreadMessages:
      return "ThreadMessages";
    case BulkKind::kTcpMessages:
      return "TcpMessages";
  }
  return "?";
}

Status RunBulkRanks(BulkKind kind, int ranks, Status (*body)(BulkRank&)) {
  const auto run = [&](Communicator& comm) {
    BulkRank rank{.comm = comm,
                  .make =
                      [&] {
                        return kind == BulkKind::kMemory ? MakeMemoryTransport(comm, kPatient)
                                                         : MakeMessageTransport(comm, kPatient);
                      },
                  .seed = TestSeed(),
                  .plans = TestScale(4),
                  .many = kSanitized || kind == BulkKind::kTcpMessages ? 3000u : 20'000u};
    // Of each rank: what the others say may only follow from it.
    EXPECT_OK(body(rank)) << "rank " << comm.rank();
    return Status();
  };
  if (kind == BulkKind::kTcpMessages) return RunTcpThreads(ranks, OptionsFor(TcpWay::kUnix), run);
  return RunOnThreads(ranks, run);
}

class BulkConformanceTest : public testing::TestWithParam<std::tuple<std::size_t, BulkKind, int>> {
};

TEST_P(BulkConformanceTest, ConformanceCaseHolds) {
  const auto [index, kind, ranks] = GetParam();
  const BulkCase& c = BulkCases()[index];
  if (ranks < c.min_ranks) return;
  EXPECT_OK(RunBulkRanks(kind, ranks, c.body));
}

INSTANTIATE_TEST_SUITE_P(All, BulkConformanceTest,
                         testing::Combine(testing::Range<std::size_t>(0, BulkCases().size()),
                                          testing::Values(BulkKind::kMemory,
                                                          BulkKind::kThreadMessages,
                                                          BulkKind::kTcpMessages),
                                          testing::Values(1, 2, 5)),
                         [](const auto& param) {
                           return std::string(BulkCases()[std::get<0>(param.param)].name) + "By" +
                                  BulkKindName(std::get<1>(param.param)) + "On" +
                                  std::to_string(std::get<2>(param.param));
                         });

// One after the other on one communicator: what failed before does not disturb.
TEST(BulkTransportTest, FailedTransportDoesNotDisturbTheNext) {
  for (const BulkKind kind :
       {BulkKind::kMemory, BulkKind::kThreadMessages, BulkKind::kTcpMessages}) {
    EXPECT_OK(RunBulkRanks(kind, 3, ConformBulk)) << BulkKindName(kind);
  }
}

// After the first message on a tag it arrives again and again.
class RepeatingCommunicator final : public ForwardingCommunicator {
 public:
  // Fails after `most` repetitions: without a bound in the receiver the test would never end.
  RepeatingCommunicator(Communicator& inner, std::uint32_t tag, int most)
      : ForwardingCommunicator(inner), tag_(tag), most_(most) {}
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    if (tag != tag_) return ForwardingCommunicator::Receive(from, tag, view);
    into_ = view.data;
    if (!first_.empty()) return kRepeated;
    TENSORMOUNT_ASSIGN_OR_RETURN(waits_, ForwardingCommunicator::Receive(from, tag, view));
    return waits_;
  }
  Result<bool> Test(Request request) override {
    if (request == kRepeated) {
      if (++repeated > most_) return Status(Code::kUnavailable, "too many messages were read");
      std::memcpy(into_, first_.data(), first_.size());
      return true;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool done, ForwardingCommunicator::Test(request));
    if (done && request == waits_) first_.assign(static_cast<const char*>(into_), kNoteBytes);
    return done;
  }
  void Cancel(Request request) override {
    if (request != kRepeated) ForwardingCommunicator::Cancel(request);
  }

  static constexpr std::size_t kNoteBytes = 1024;
  int repeated = 0;

 private:
  static constexpr Request kRepeated = ~Request{0};
  const std::uint32_t tag_;
  const int most_;
  Request waits_ = 0;
  void* into_ = nullptr;
  std::string first_;
};

TEST(BulkNotesTest, OnePollReadsFewMessagesThatAreNoNotes) {
  const auto group = MakeThreadGroup(2);
  const std::uint32_t tag = BulkNotes::TagOf(*group[0]);
  std::string other(RepeatingCommunicator::kNoteBytes, 'x');
  ASSERT_OK(group[1]->Send(
      0, tag,
      BufferView::Host(DType::kU8, other.data(), {static_cast<std::int64_t>(other.size())})));
  RepeatingCommunicator comm(*group[0], tag, 100'000);
  BulkNotes notes(comm, 1);
  ASSERT_OK_AND_ASSIGN(const auto note, notes.Poll());
  EXPECT_FALSE(note);
  EXPECT_LT(comm.repeated, 1000);
}

// A rank that repeats a note without end does not keep the others from their exchange.
TEST(BulkTransportTest, RepeatedNotesDoNotHoldUpAnExchange) {
  EXPECT_OK(RunOnThreads(2, [](Communicator& comm) -> Status {
    RepeatingCommunicator repeating(comm, BulkNotes::TagOf(comm), 2'000'000);
    Communicator& mine = comm.rank() == 0 ? static_cast<Communicator&>(repeating) : comm;
    BulkRank rank{.comm = mine,
                  .make = [&] { return MakeMessageTransport(mine, kPatient); },
                  .seed = TestSeed(),
                  .many = 3000};
    TENSORMOUNT_RETURN_IF_ERROR(BulkCases()[1].body(rank));
    EXPECT_EQ(repeating.repeated > 0, comm.rank() == 0);
    return {};
  }));
}

TEST(BulkTransportTest, ExchangesAHundredThousandUnits) {
  EXPECT_OK(RunOnThreads(2, [](Communicator& comm) {
    BulkRank rank{.comm = comm,
                  .make = [&] { return MakeMemoryTransport(comm, kPatient); },
                  .seed = TestSeed(),
                  .many = kSanitized ? 20'000u : 100'000u};
    return BulkCases()[1].body(rank);
  }));
}

}  // namespace
}  // namespace tensormount
