// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/log.h"

#include "base/at_exit.h"
#include "gpu/nccl_link.h"
#include "tests/collective/bulk_transport_conformance.h"
#include "tests/collective/collective_cases.h"
#include "tests/gpu/nccl_shim_testing.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount::gpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using NcclVersion = NcclShim::Version;

constexpr Device kNcclDevice{.kind = DeviceKind::kCuda};

Deadline NcclPatience() { return Deadline::After(seconds(60)); }

// Each rank on a thread; each checks for itself.
void OnNcclRanks(int ranks, const std::function<void(Communicator&)>& body) {
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) {
    body(comm);
    return Status();
  }));
}

class NcclConformanceTest
    : public testing::TestWithParam<std::tuple<std::size_t, NcclVersion, int>> {};

TEST_P(NcclConformanceTest, ConformanceCaseHolds) {
  const auto [index, version, ranks] = GetParam();
  const BulkCase& c = BulkCases()[index];
  if (ranks < c.min_ranks) return;
  const NcclShim shim(version);
  OnNcclRanks(ranks, [&, body = c.body](Communicator& comm) {
    BulkRank rank{.comm = comm,
                  .make =
                      [&] {
                        return MakeDeviceTransport(
                            comm, kPatient,
                            shim.MakeLink({.group_units = 7, .group_bytes = 300'000}));
                      },
                  .device = kNcclDevice,
                  .seed = TestSeed(),
                  .plans = TestScale(2),
                  .many = 300,
                  .names_one = false};
    EXPECT_OK(body(rank)) << "rank " << comm.rank();
  });
  EXPECT_STREQ(shim.misuse(), "");
  EXPECT_EQ(shim.live(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, NcclConformanceTest,
                         testing::Combine(testing::Range<std::size_t>(0, BulkCases().size()),
                                          testing::Values(NcclVersion::kNew, NcclVersion::kOld),
                                          testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::string(BulkCases()[std::get<0>(param.param)].name) +
                                  (std::get<1>(param.param) == NcclVersion::kNew ? "New" : "Old") +
                                  "On" + std::to_string(std::get<2>(param.param));
                         });

// A ring in two groups, and what became of it on one rank.
struct NcclRing {
  static constexpr std::uint64_t kBytes = 10'000;

  explicit NcclRing(Communicator& c) : comm(c), memory(4 * kBytes) {
    std::memset(memory.data(), comm.rank() + 1, 2 * kBytes);
  }

  Result<std::unique_ptr<BulkTransport>> Make(const NcclShim& shim,
                                              const Timeouts& timeouts = kPatient) {
    return MakeDeviceTransport(comm, timeouts,
                               shim.MakeLink({.group_units = 2, .patience = milliseconds(100)}));
  }
  Status Put(BulkTransport& transport) {
    const int n = comm.size();
    std::vector<BulkUnit> plan;
    for (int turn = 0; turn < 2; ++turn) {
      for (int r = 0; r < n; ++r) plan.push_back({r, (r + 1) % n, kBytes});
    }
    TENSORMOUNT_RETURN_IF_ERROR(transport.Begin(plan));
    std::vector<BulkBlock> blocks;
    for (std::uint64_t turn = 0; turn < 2; ++turn) {
      const auto me = static_cast<std::uint64_t>(comm.rank());
      const auto size = static_cast<std::uint64_t>(n);
      std::byte* const out = memory.data() + turn * kBytes;
      std::byte* const in = out + 2 * kBytes;
      blocks.push_back({turn * size + me, out, n == 1 ? in : nullptr});
      if (n > 1) blocks.push_back({turn * size + (me + size - 1) % size, nullptr, in});
    }
    return transport.Put(blocks);
  }
  Status Go(BulkTransport& transport, const Deadline& deadline) {
    TENSORMOUNT_RETURN_IF_ERROR(Put(transport));
    return transport.Wait(deadline);
  }
  Status Go(BulkTransport& transport) { return Go(transport, NcclPatience()); }
  bool Came() const {
    const auto left = std::byte((comm.rank() + comm.size() - 1) % comm.size() + 1);
    return std::all_of(memory.begin() + 2 * kBytes, memory.end(),
                       [&](std::byte b) { return b == left; });
  }
  Status Register(BulkTransport& transport) {
    return transport.Register({memory.data(), memory.size(), kNcclDevice});
  }

  Communicator& comm;
  std::vector<std::byte> memory;
};

// What all ranks are told where a fault befalls the second exchange: the first one is good.
void ExpectRingFails(const NcclShim& shim, int ranks, const std::function<void()>& plant,
                     const std::function<void(int rank, const Status&)>& expect,
                     const Deadline& deadline = NcclPatience()) {
  OnNcclRanks(ranks, [&](Communicator& comm) {
    NcclRing ring(comm);
    ASSERT_OK_AND_ASSIGN(auto transport, ring.Make(shim));
    ASSERT_OK(ring.Register(*transport));
    ASSERT_OK(ring.Go(*transport));
    EXPECT_TRUE(ring.Came());
    ASSERT_OK(Collective(comm, kPatient).Agree({}, "the first exchange"));
    if (comm.rank() == 0) plant();
    ASSERT_OK(Collective(comm, kPatient).Agree({}, "planted"));
    Status status = ring.Go(*transport, comm.rank() == 0 ? deadline : NcclPatience());
    // Whose units were moved is told of the failure all the same.
    for (const Deadline end = NcclPatience(); status.ok() && !end.Passed();) {
      status = transport->Poll().status();
      std::this_thread::sleep_for(milliseconds(1));
    }
    expect(comm.rank(), status);
    EXPECT_OK(transport->Settle(NcclPatience()));
    transport.reset();
    // The thread is as good as before.
    ASSERT_OK(Collective(comm, kPatient).Agree({}, "settled"));
    if (comm.rank() == 0) shim.clear_faults();
    NcclRing next(comm);
    ASSERT_OK_AND_ASSIGN(const auto another, next.Make(shim));
    ASSERT_OK(next.Register(*another));
    EXPECT_OK(next.Go(*another));
    EXPECT_TRUE(next.Came());
  });
  EXPECT_STREQ(shim.misuse(), "");
  EXPECT_EQ(shim.live(), 0);
}

TEST(NcclTransportTest, HungReceiveIsReportedAtTheDeadline) {
  for (const NcclVersion version : {NcclVersion::kNew, NcclVersion::kOld}) {
    const NcclShim shim(version);
    ExpectRingFails(
        shim, 3, [&] { shim.Fault("ncclRecv", 0, 3, kNcclShimHang); },
        [](int rank, const Status& status) {
          EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
          EXPECT_THAT(status, HasMessage(rank == 0 ? "nccl: unit 0 (10000 bytes) to rank 1 was"
                                                   : "rank 0: nccl: unit 0 (10000 bytes)"));
          // Send and receive are one group.
          EXPECT_THAT(status, HasMessage("its group (unit 0 to 2, with ranks 1, 2)"));
        },
        Deadline::After(milliseconds(100)));
    EXPECT_EQ(shim.calls("ncclCommAbort"), 3);
    EXPECT_EQ(shim.calls("ncclCommRevoke"), version == NcclVersion::kNew ? 3 : 0);
    EXPECT_EQ(shim.calls("ncclCommFinalize"), 3);  // Of the good ones, that came after.
  }
}

TEST(NcclTransportTest, HungLaunchIsReportedAtTheDeadline) {
  const NcclShim shim;
  ExpectRingFails(
      shim, 2, [&] { shim.Fault("ncclGroupEnd", 0, 3, kNcclShimHang); },
      [](int rank, const Status& status) {
        EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
        EXPECT_THAT(status, HasMessage(rank == 0 ? "unit 0" : "rank 0: nccl: unit 0"));
      },
      Deadline::After(milliseconds(100)));
}

struct PlantedError {
  const char* call;
  NcclShimAction action;
  NcclResult result;
  Code code;
};

TEST(NcclTransportTest, ErrorOfEachNcclFunctionIsReportedOnAll) {
  for (const PlantedError& planted : std::vector<PlantedError>{
           {"ncclSend", kNcclShimError, NcclResult::kInvalidArgument, Code::kInvalidArgument},
           {"ncclRecv", kNcclShimError, NcclResult::kInternalError, Code::kInternal},
           {"ncclGroupEnd", kNcclShimError, NcclResult::kSystemError, Code::kUnavailable},
           {"ncclCommGetAsyncError", kNcclShimError, NcclResult::kSystemError, Code::kUnavailable},
           {"ncclGroupEnd", kNcclShimAsyncError, NcclResult::kRemoteError, Code::kUnavailable},
           {"ncclRecv", kNcclShimAsyncError, NcclResult::kUnhandledCudaError, Code::kUnavailable},
           {"ncclSend", kNcclShimAsyncError, NcclResult::kTimeout, Code::kDeadlineExceeded}}) {
    for (const int victim : {0, 2}) {
      const NcclShim shim;
      ExpectRingFails(
          shim, 3,
          [&] {
            const int at = std::strcmp(planted.call, "ncclCommGetAsyncError") == 0 ? 0 : 3;
            shim.Fault(planted.call, victim, at, planted.action, static_cast<int>(planted.result));
          },
          [&](int rank, const Status& status) {
            EXPECT_THAT(status, HasCode(planted.code)) << planted.call << " at " << victim;
            if (rank != victim) {
              EXPECT_THAT(status, HasMessage("rank " + std::to_string(victim) + ": "));
            }
            if (planted.action == kNcclShimError) {
              EXPECT_THAT(status, HasMessage(planted.call));
            } else {
              EXPECT_THAT(status, HasMessage("a fault of the shim"));
              EXPECT_THAT(status, HasMessage("unit "));
            }
          });
    }
  }
}

TEST(NcclTransportTest, LateCallsAreAwaited) {
  const NcclShim shim;
  for (const char* call : {"ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclSend",
                           "ncclGroupEnd", "ncclCommSuspend", "ncclCommFinalize"}) {
    shim.Fault(call, 1, 0, kNcclShimDelay, 2000);
  }
  OnNcclRanks(3, [&](Communicator& comm) {
    NcclRing ring(comm);
    ASSERT_OK_AND_ASSIGN(const auto transport, ring.Make(shim));
    ASSERT_OK(ring.Register(*transport));
    for (int i = 0; i < 2; ++i) {
      std::fill(ring.memory.begin() + 2 * NcclRing::kBytes, ring.memory.end(), std::byte{0});
      EXPECT_OK(ring.Go(*transport));
      EXPECT_TRUE(ring.Came());
      EXPECT_OK(transport->Release(NcclPatience()));
    }
  });
  EXPECT_STREQ(shim.misuse(), "");
  EXPECT_EQ(shim.live(), 0);
}

void ExpectNoTransport(const NcclShim& shim, const Timeouts& timeouts,
                       const std::function<void(int rank, const Status&)>& expect) {
  OnNcclRanks(3, [&](Communicator& comm) {
    NcclRing ring(comm);
    const auto begin = std::chrono::steady_clock::now();
    const auto made = ring.Make(shim, timeouts);
    expect(comm.rank(), made.status());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kMargin);
  });
  EXPECT_STREQ(shim.misuse(), "");
  for (const Deadline end = NcclPatience(); shim.live() != 0 && !end.Passed();) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(shim.live(), 0);
}

TEST(NcclTransportTest, HungInitIsAbandoned) {
  const NcclShim shim;
  shim.Fault("ncclCommInitRankConfig", 1, 0, kNcclShimHang);
  ExpectNoTransport(shim, {seconds(30), milliseconds(2000)}, [](int, const Status& status) {
    EXPECT_THAT(status, HasCode(Code::kDeadlineExceeded));
    EXPECT_THAT(status, HasMessage("nccl"));
  });
}

TEST(NcclTransportTest, FailedInitIsReportedOnAll) {
  for (const int victim : {0, 2}) {
    for (const char* call : {"ncclGetUniqueId", "ncclCommInitRankConfig"}) {
      if (victim != 0 && std::strcmp(call, "ncclGetUniqueId") == 0) continue;
      const NcclShim shim;
      shim.Fail(call, victim, 0, NcclResult::kSystemError);
      ExpectNoTransport(shim, kPatient, [&](int, const Status& status) {
        EXPECT_THAT(status, HasCode(Code::kUnavailable));
        EXPECT_THAT(status, HasMessage(call));
        EXPECT_THAT(status, HasMessage("rank " + std::to_string(victim)));
      });
    }
  }
}

TEST(NcclTransportTest, ErrorNamesRanksThatShareAGpu) {
  const NcclShim shim;
  OnNcclRanks(3, [&](Communicator& comm) {
    const std::string name = comm.rank() == 1 ? "GPU-b" : "GPU-a";
    const auto made =
        MakeDeviceTransport(comm, kPatient, shim.MakeLink({}, shim.MakeStream(-1, name)));
    EXPECT_THAT(made, HasCode(Code::kUnsupported));
    EXPECT_THAT(made, HasMessage("ranks 0 and 2 are both on GPU-a"));
  });
  // Where nobody knows what the GPUs are called, NCCL finds out.
  OnNcclRanks(3, [&](Communicator& comm) {
    const auto made = MakeDeviceTransport(
        comm, kPatient, shim.MakeLink({}, shim.MakeStream(comm.rank() == 1 ? 1 : 0)));
    EXPECT_THAT(made, HasCode(Code::kUnsupported));
    EXPECT_THAT(made, HasMessage("rank 0 and rank 2 both on CUDA device 0"));
  });
  EXPECT_EQ(shim.live(), 0);
}

// A call that waits for other ranks for ever keeps neither a wait nor the destructor.
TEST(NcclTransportTest, HungAbortIsLeftBehind) {
  const NcclShim shim;
  std::vector<std::string> log;
  SetLogSink([&](LogLevel, std::string_view line) { log.emplace_back(line); });
  const AtExit own_sink([] { SetLogSink({}); });
  OnNcclRanks(2, [&](Communicator& comm) {
    NcclRing ring(comm);
    auto made = MakeDeviceTransport(comm, kPatient, shim.MakeLink({.patience = milliseconds(50)}));
    ASSERT_OK(made);
    auto transport = std::move(made).value();
    ASSERT_OK(ring.Register(*transport));
    if (comm.rank() == 0) shim.Fault("ncclCommAbort", 0, 0, kNcclShimHang);
    const auto begin = std::chrono::steady_clock::now();
    if (comm.rank() == 0) {
      EXPECT_OK(ring.Put(*transport));
      EXPECT_THAT(transport->Wait(Deadline::After(milliseconds(50))),
                  HasCode(Code::kDeadlineExceeded));
      const Status settled = transport->Settle(Deadline::After(milliseconds(20)));
      EXPECT_THAT(settled, HasCode(Code::kDeadlineExceeded));
      EXPECT_THAT(settled, HasMessage("may still write to the memory"));
    }
    ASSERT_OK(Collective(comm, kPatient).Agree({}, "given up"));
    transport.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kMargin);
  });
  EXPECT_THAT(log, testing::ElementsAre(
                       testing::HasSubstr("a communicator was not destroyed by the deadline")));
  EXPECT_EQ(shim.live(), 1);
  shim.reset();
  for (const Deadline end = NcclPatience(); shim.live() != 0 && !end.Passed();) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(shim.live(), 0);
}

TEST(NcclTransportTest, MemoryIsReleasedBetweenExchanges) {
  for (const NcclVersion version : {NcclVersion::kNew, NcclVersion::kOld}) {
    const NcclShim shim(version);
    OnNcclRanks(2, [&](Communicator& comm) {
      NcclRing ring(comm);
      ASSERT_OK_AND_ASSIGN(const auto transport, ring.Make(shim));
      ASSERT_OK(ring.Register(*transport));
      ASSERT_OK(ring.Go(*transport));
      ASSERT_OK(transport->Release(NcclPatience()));
      ASSERT_OK(transport->Release(NcclPatience()));  // Nothing is left to give.
      ASSERT_OK(Collective(comm, kPatient).Agree({}, "released"));
      EXPECT_EQ(shim.live(), version == NcclVersion::kNew ? 2 : 0);
      ASSERT_OK(Collective(comm, kPatient).Agree({}, "counted"));
      ASSERT_OK(ring.Go(*transport));
      EXPECT_TRUE(ring.Came());
      ASSERT_OK(transport->Release(NcclPatience()));  // And destroyed so.
    });
    const bool suspends = version == NcclVersion::kNew;
    EXPECT_EQ(shim.calls("ncclCommSuspend"), suspends ? 4 : 0);
    EXPECT_EQ(shim.calls("ncclCommResume"), suspends ? 2 : 0);
    EXPECT_EQ(shim.calls("ncclCommInitRankConfig"), suspends ? 2 : 4);
    EXPECT_STREQ(shim.misuse(), "");
    EXPECT_EQ(shim.live(), 0);
  }
}

TEST(NcclTransportTest, RankThatCannotSuspendKeepsItsMemory) {
  const NcclShim shim;
  shim.Fail("ncclCommSuspend", 1, 0, NcclResult::kInvalidUsage);
  OnNcclRanks(2, [&](Communicator& comm) {
    NcclRing ring(comm);
    ASSERT_OK_AND_ASSIGN(const auto transport, ring.Make(shim));
    ASSERT_OK(ring.Register(*transport));
    for (int i = 0; i < 2; ++i) {
      EXPECT_OK(ring.Go(*transport));
      EXPECT_OK(transport->Release(NcclPatience()));
    }
  });
  EXPECT_STREQ(shim.misuse(), "");
}

TEST(NcclTransportTest, HostMemoryIsRefused) {
  const NcclShim shim;
  OnNcclRanks(1, [&](Communicator& comm) {
    NcclRing ring(comm);
    ASSERT_OK_AND_ASSIGN(const auto transport, ring.Make(shim));
    EXPECT_THAT(transport->Register({ring.memory.data(), 8, {}}), HasCode(Code::kUnsupported));
    EXPECT_EQ(transport->kind(), "nccl");
  });
}

TEST(NcclTransportTest, CountsMayExceed32Bits) {
  const NcclShim shim;
  OnNcclRanks(2, [&](Communicator& comm) {
    BulkRank rank{.comm = comm,
                  .make = [&] { return MakeDeviceTransport(comm, kPatient, shim.MakeLink()); },
                  .device = kNcclDevice};
    for (const BulkCase& c : BulkCases()) {
      if (std::strcmp(c.name, "LargeUnitsAreCountedRight") != 0) continue;
      EXPECT_OK(c.body(rank));
    }
  });
  EXPECT_EQ(shim.largest(), (std::uint64_t{5} << 30) + 1);
}

TEST(NcclLibraryTest, ErrorNamesTheMissingLibraryOrSymbol) {
  EXPECT_THAT(NcclLibrary::Open("/no/such/libnccl.so.2"), HasCode(Code::kUnavailable));
  EXPECT_THAT(NcclLibrary::Open("/no/such/libnccl.so.2"), HasMessage("/no/such/libnccl.so.2"));
  EXPECT_THAT(NcclLibrary::Open("/no/such/libnccl.so.2"), HasMessage("TENSORMOUNT_NCCL"));
  EXPECT_THAT(NcclLibrary::Open("libm.so.6"), HasCode(Code::kUnsupported));
  EXPECT_THAT(NcclLibrary::Open("libm.so.6"), HasMessage("libm.so.6 has no ncclGetVersion"));
  const NcclShim old(NcclVersion::kOld);
  ASSERT_OK(old.library());
  EXPECT_EQ(old.library().value()->VersionText(), "2.14.3");
  EXPECT_EQ(old.library().value()->api().comm_revoke, nullptr);
  const NcclShim newer;
  ASSERT_OK(newer.library());
  EXPECT_EQ(newer.library().value()->VersionText(), "2.32.3");
}

TEST(NcclLibraryTest, RankWithoutOrWithAnotherNcclIsNamed) {
  const NcclShim newer;
  const NcclShim old(NcclVersion::kOld);
  OnNcclRanks(3, [&](Communicator& comm) {
    auto link = newer.MakeLink();
    if (comm.rank() == 2) link = NcclLibrary::Open("/no/such/library").status();
    const auto made = MakeDeviceTransport(comm, kPatient, std::move(link));
    EXPECT_THAT(made, HasCode(Code::kUnavailable));
    EXPECT_THAT(made, HasMessage("rank 2"));
  });
  OnNcclRanks(3, [&](Communicator& comm) {
    const NcclShim& mine = comm.rank() == 1 ? old : newer;
    const auto made = MakeDeviceTransport(comm, kPatient, mine.MakeLink());
    EXPECT_THAT(made, HasCode(Code::kUnsupported));
    EXPECT_THAT(made, HasMessage("rank 1 has NCCL 2.14.3, rank 0 has NCCL 2.32.3"));
  });
}

TEST(NcclGroupsTest, GroupsEndWhenARankReachesItsLimit) {
  const NcclOptions two{.group_units = 2};
  EXPECT_EQ(NcclGroups({}, 3, two), (std::vector<std::uint64_t>{0}));
  EXPECT_EQ(NcclGroups({{0, 1, 1}, {0, 2, 1}, {1, 2, 1}, {0, 1, 1}}, 3, two),
            (std::vector<std::uint64_t>{0, 3}));
  // Of itself a unit counts once, an empty one not at all.
  EXPECT_EQ(NcclGroups({{0, 0, 1}, {0, 0, 0}, {0, 0, 1}, {0, 0, 1}}, 1, two),
            (std::vector<std::uint64_t>{0, 3}));
  const NcclOptions bytes{.group_bytes = 100};
  EXPECT_EQ(NcclGroups({{0, 1, 60}, {2, 3, 60}, {1, 2, 40}, {0, 3, 41}}, 4, bytes),
            (std::vector<std::uint64_t>{0, 3}));
  // One that is larger than a group is one.
  constexpr std::uint64_t kMost = ~std::uint64_t{0};
  EXPECT_EQ(NcclGroups({{0, 1, kMost}, {0, 1, 1}, {0, 1, kMost - 1}, {1, 0, 101}}, 2, bytes),
            (std::vector<std::uint64_t>{0, 1, 2, 3}));
}

// Of random plans: no rank has more in a group than it may, and no group could have been longer.
TEST(NcclGroupsTest, GroupsAreAsLongAsTheLimitsAllow) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(200); ++i) {
    const int ranks = static_cast<int>(random.Int(1, 5));
    const NcclOptions options{.group_units = static_cast<std::size_t>(random.Int(1, 5)),
                              .group_bytes = static_cast<std::uint64_t>(random.Int(1, 50))};
    std::vector<BulkUnit> plan(static_cast<std::size_t>(random.Int(0, 40)));
    for (BulkUnit& unit : plan) {
      unit = {static_cast<int>(random.Int(0, ranks - 1)),
              static_cast<int>(random.Int(0, ranks - 1)),
              static_cast<std::uint64_t>(random.Int(0, 30))};
    }
    const auto fits = [&](std::size_t begin, std::size_t end) {
      for (int r = 0; r < ranks; ++r) {
        std::size_t units = 0;
        std::uint64_t bytes = 0;
        for (std::size_t u = begin; u < end; ++u) {
          if (plan[u].bytes == 0 || (plan[u].from != r && plan[u].to != r)) continue;
          ++units;
          bytes += plan[u].bytes;
        }
        if (units > options.group_units || (units > 1 && bytes > options.group_bytes)) return false;
      }
      return true;
    };
    const std::vector<std::uint64_t> groups = NcclGroups(plan, ranks, options);
    ASSERT_EQ(groups.front(), 0u);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::size_t end = g + 1 < groups.size() ? groups[g + 1] : plan.size();
      EXPECT_TRUE(fits(groups[g], end)) << g;
      EXPECT_FALSE(end < plan.size() && fits(groups[g], end + 1)) << g;
    }
  }
}

}  // namespace
}  // namespace tensormount::gpu
