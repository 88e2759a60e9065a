// SPDX-License-Identifier: Apache-2.0
// A rank that is killed or stopped while it loads: the others return, and name it.
#include <chrono>
#include <cstdio>
#include <signal.h>

#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "collective/comm/socket_group.h"
#include "tests/collective/load_testing.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

constexpr int kLoadRanks = 3;
// So large that leaves prove no column, and the ranks must meet for a digest.
constexpr std::int64_t kRows = 900;
constexpr std::int64_t kColumns = 600;

// Saves rows and loads columns; rank 1 sends itself `signal` before the proof. 0: no signal.
// Exit codes: 0 as expected, others say where it went wrong.
int Body(Communicator& comm, const std::string& path, int signal) {
  const std::int64_t rank = comm.rank();
  std::string rows(static_cast<std::size_t>(kRows / kLoadRanks * kColumns),
                   static_cast<char>('a' + rank));
  StateDict state;
  const Box mine =
      Box::Make({kRows / kLoadRanks * rank, 0}, {kRows / kLoadRanks, kColumns}).value();
  if (!state
           .AddTensor(
               "w",
               {{kRows, kColumns}, mine, BufferView::Host(DType::kU8, rows.data(), mine.extent())})
           .ok()) {
    return 2;
  }
  if (!Save(state, path, comm).ok()) return 3;

  std::string columns(static_cast<std::size_t>(kRows * kColumns / kLoadRanks), '\0');
  StateDict request;
  const Box want =
      Box::Make({0, kColumns / kLoadRanks * rank}, {kRows, kColumns / kLoadRanks}).value();
  if (!request
           .AddTensor("w", {{kRows, kColumns},
                            want,
                            BufferView::Host(DType::kU8, columns.data(), want.extent())})
           .ok()) {
    return 4;
  }
  static int sent;
  sent = signal;
  LoadOptions options;
  options.timeouts.liveness = std::chrono::milliseconds(800);
  options.timeouts.arrival = std::chrono::seconds(30);
  options.before_proof = [](int r) {
    if (r == 1 && sent != 0) raise(sent);
  };
  const Status status = Load(request, path, comm, options).status();
  if (signal == 0) {
    if (!status.ok()) return 5;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (columns[i] != static_cast<char>('a' + i / (columns.size() / kLoadRanks))) return 6;
    }
    return 0;
  }
  const bool expected =
      status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded;
  const bool named = status.message().find("rank 1") != std::string::npos;
  if (expected && named) return 0;
  std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
  return 7;
}

void RunWith(int signal) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK_AND_ASSIGN(auto group, ForkedGroup::Start(kLoadRanks, [&](Communicator& comm) {
                         return Body(comm, path, signal);
                       }));
  const std::vector<ForkedGroup::Exit> exits = group->Wait(std::chrono::seconds(20));
  ASSERT_EQ(exits.size(), 3u);
  for (const std::size_t r : {std::size_t{0}, std::size_t{2}}) {
    EXPECT_TRUE(exits[r].exited) << "rank " << r << " still waits";
    EXPECT_EQ(exits[r].code, 0) << "rank " << r;
  }
  EXPECT_EQ(exits[1].signal, signal);
}

TEST(LoadKilledRank, AllLiveAndLoad) { RunWith(0); }
TEST(LoadKilledRank, AKilledRankIsNamed) { RunWith(SIGKILL); }

TEST(LoadKilledRank, AStoppedRankIsNamedByTheDeadline) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK_AND_ASSIGN(auto group, ForkedGroup::Start(kLoadRanks, [&](Communicator& comm) {
                         return Body(comm, path, SIGSTOP);
                       }));
  // The stopped one never ends by itself: only the others are waited for.
  const auto start = std::chrono::steady_clock::now();
  std::vector<ForkedGroup::Exit> exits;
  do {
    exits = group->Wait(std::chrono::milliseconds(10));
  } while (!(exits[0].exited && exits[2].exited) &&
           std::chrono::steady_clock::now() - start < std::chrono::seconds(12));
  for (const std::size_t r : {std::size_t{0}, std::size_t{2}}) {
    EXPECT_TRUE(exits[r].exited) << "rank " << r << " still waits";
    EXPECT_EQ(exits[r].code, 0) << "rank " << r;
  }
  EXPECT_FALSE(exits[1].exited);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(12));
}

}  // namespace
}  // namespace tensormount
