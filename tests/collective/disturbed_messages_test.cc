// SPDX-License-Identifier: Apache-2.0
// Messages that change, come twice, too short, too late or 64 jobs later: a job ends with what was
// said or with an error, and the jobs after it work.
#include <array>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collective/comm/collective.h"
#include "tests/collective/bulk_exchange.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/disturbed_communicator.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using Fault = DisturbedCommunicator::Fault;

std::string Said(std::uint64_t job, int from, int to, std::size_t size) {
  std::string text(size, '\0');
  for (std::size_t i = 0; i < size; ++i) {
    text[i] = static_cast<char>(i * 13 + job * 101 + static_cast<std::uint64_t>(from * 7 + to * 3));
  }
  return text;
}

// What `job` says is known: wrong bytes are INTERNAL "wrong ...", everything else is as it comes.
Status TalkInJob(Communicator& comm, const Timeouts& timeouts, std::uint64_t job) {
  const int n = comm.size();
  const int me = comm.rank();
  // Around what fits into a frame, and the size of a frame itself.
  const std::array<std::size_t, 6> sizes = {0, 24, 140, 141, 256, 9000};
  const std::size_t size = sizes[job % sizes.size()];
  const auto wrong = [](const char* what) { return Status(Code::kInternal, what); };
  Collective c(comm, timeouts);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, c.AllGather(Said(job, me, -1, size), "gather"));
  for (int r = 0; r < n; ++r) {
    if (all[static_cast<std::size_t>(r)] != Said(job, r, -1, size)) return wrong("wrong gathered");
  }
  std::vector<std::string> out;
  for (int r = 0; r < n; ++r) out.push_back(Said(job, me, r, size));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto in, AllToAll(c, out, "letters"));
  for (int r = 0; r < n; ++r) {
    if (in[static_cast<std::size_t>(r)] != Said(job, r, me, size)) return wrong("wrong letter");
  }
  std::vector<std::string> rooms(static_cast<std::size_t>(n), std::string(size + 1, ' '));
  std::vector<BulkTransfer> sends;
  std::vector<BulkTransfer> receives;
  for (int r = 0; r < n; ++r) {
    out[static_cast<std::size_t>(r)] = Said(job + 1, me, r, size + 1);
    sends.push_back({r, out[static_cast<std::size_t>(r)].data(), size + 1});
    receives.push_back({r, rooms[static_cast<std::size_t>(r)].data(), size + 1});
  }
  TENSORMOUNT_RETURN_IF_ERROR(ExchangeBulk(c, sends, receives, "bulk"));
  for (int r = 0; r < n; ++r) {
    if (rooms[static_cast<std::size_t>(r)] != Said(job + 1, r, me, size + 1)) {
      return wrong("wrong bulk");
    }
  }
  return {};
}

TEST(DisturbedMessagesTest, LoadsAreExactOrFailAndNextJobsWork) {
  constexpr int kRanks = 3;
  constexpr Timeouts kShort{milliseconds(2000), milliseconds(150)};
  const int cases = TestScale(25);
  int bad = 0;
  for (int i = 0; i < cases; ++i) {
    const std::uint64_t seed = TestSeed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto group = MakeThreadGroup(kRanks);
    std::vector<Status> disturbed(kRanks);
    std::vector<Status> after(kRanks);
    std::barrier over(kRanks);
    std::vector<std::thread> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back([&, r] {
        Random random(seed * kRanks + static_cast<std::uint64_t>(r));
        DisturbedCommunicator comm(*group[static_cast<std::size_t>(r)]);
        const auto kind = static_cast<Fault>(1 + seed % 4);
        comm.SetFaults([&](int, std::uint32_t, std::size_t) {
          return random.OneIn(12) ? kind : Fault::kNone;
        });
        disturbed[static_cast<std::size_t>(r)] = TalkInJob(comm, kShort, seed);
        comm.SetFaults(nullptr);
        // Nobody is 63 jobs ahead of another that still waits.
        over.arrive_and_wait();
        // What was held back comes right before the job that has the same tags again.
        for (int job = 0; job < 63; ++job) (void)comm.BeginJob();
        comm.Release();
        Status& mine = after[static_cast<std::size_t>(r)];
        for (std::uint64_t job = 1; job <= 3 && mine.ok(); ++job) {
          mine = TalkInJob(comm, kPatient, seed + job);
        }
      });
    }
    for (std::thread& t : ranks) t.join();
    for (const Status& s : disturbed) {
      if (!s.ok()) ++bad;
      EXPECT_NE(s.code(), Code::kInternal) << s.ToString();
    }
    for (const Status& s : after) EXPECT_OK(s);
  }
  EXPECT_GT(bad, cases / 4);
}

}  // namespace
}  // namespace tensormount
