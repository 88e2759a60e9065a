// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/bulk_transport.h"

#include <functional>
#include <string>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/collective/bulk_transport_conformance.h"
#include "tests/collective/collective_cases.h"
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
