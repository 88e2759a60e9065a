// SPDX-License-Identifier: Apache-2.0
// A rank that is killed or stopped while it loads, before the proof or before any message: the
// others return, and name it or have the right bytes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <signal.h>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "base/coding.h"
#include "bench/counting_communicator.h"
#include "bench/forked_group.h"
#include "tests/collective/killed_rank_testing.h"
#include "tests/collective/load_testing.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

constexpr int kLoadRanks = 3;
constexpr int kAtTheProof = -1;

// Who gets which signal before which of its sends and receives in a load, and how the ranks load.
struct LoadScenario {
  int victim = -1;
  int message = 0;
  int signal = 0;
  LoadPath path = LoadPath::kDirect;
};

struct LoadGroup {
  LoadScenario scenario;
  std::unique_ptr<TempDir> dir;
  std::unique_ptr<ForkedGroup> ranks;

  std::string Path() const { return dir->Join("store/step"); }
  std::string ResultFile(int rank) const { return dir->Join("result." + std::to_string(rank)); }
  std::string HitFile() const { return dir->Join("hit"); }
  bool WasHit() const { return access(HitFile().c_str(), F_OK) == 0; }
};

// What a rank writes down when its load returns.
struct LoadOutcome {
  bool returned = false;
  Status status;
  bool is_right = false;  // Every byte is what was saved.
  int messages = 0;
  std::uint64_t milliseconds = 0;
};

// Every cell says its row and column.
std::uint32_t CellOf(std::int64_t row, std::int64_t column) {
  return static_cast<std::uint32_t>(row * 7919 + column * 31 + 1);
}

const Dims kCells{96, 3000};  // Several chunks.
Box LoadRowsOf(int rank) {
  return Box::Make({kCells[0] / kLoadRanks * rank, 0}, {kCells[0] / kLoadRanks, kCells[1]}).value();
}
Box LoadColumnsOf(int rank) {
  return Box::Make({0, kCells[1] / kLoadRanks * rank}, {kCells[0], kCells[1] / kLoadRanks}).value();
}
std::vector<std::uint32_t> LoadCellsIn(const Box& box) {
  std::vector<std::uint32_t> cells;
  for (std::int64_t row = 0; row < box.extent()[0]; ++row) {
    for (std::int64_t column = 0; column < box.extent()[1]; ++column) {
      cells.push_back(CellOf(box.begin()[0] + row, box.begin()[1] + column));
    }
  }
  return cells;
}

// Runs in the child. Saves rows, then loads columns with the scenario's signal.
int LoadBody(Communicator& through, const LoadGroup& group) {
  const LoadScenario& s = group.scenario;
  std::vector<std::uint32_t> rows = LoadCellsIn(LoadRowsOf(through.rank()));
  StateDict state;
  const auto add = [&](StateDict& to, const Box& box, std::vector<std::uint32_t>& cells) {
    return to.AddTensor("w",
                        {kCells, box, BufferView::Host(DType::kU32, cells.data(), box.extent())});
  };
  if (!add(state, LoadRowsOf(through.rank()), rows).ok()) return 2;
  SaveOptions saving;
  saving.placement = PlacementRule::kTensorFile;
  if (!Save(state, group.Path(), through, saving).ok()) return 3;

  const Box want = LoadColumnsOf(through.rank());
  const std::vector<std::uint32_t> right = LoadCellsIn(want);
  std::vector<std::uint32_t> columns(right.size());
  StateDict request;
  if (!add(request, want, columns).ok()) return 4;
  std::atomic<int> seen{0};
  CountingCommunicator comm(through, [&] {
    const int n = seen++;
    if (through.rank() == s.victim && n == s.message) {
      Hit(group.HitFile(), s.signal);
    }
  });
  LoadOptions options;
  static const LoadGroup* hit_at_the_proof;
  hit_at_the_proof = through.rank() == s.victim && s.message == kAtTheProof ? &group : nullptr;
  options.events = [](const Event& event) {
    if (event.phase != "prove" || event.kind != Event::Kind::kStart) return;
    if (hit_at_the_proof == nullptr) return;
    Hit(hit_at_the_proof->HitFile(), hit_at_the_proof->scenario.signal);
  };
  options.path = s.path;
  options.timeouts.liveness = std::chrono::seconds(2);  // A busy machine is no lost rank.
  options.timeouts.arrival = std::chrono::seconds(5);
  const auto start = std::chrono::steady_clock::now();
  const Status status = Load(request, group.Path(), comm, options).status();
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  ByteWriter out;
  out.U8(static_cast<std::uint8_t>(status.code()));
  out.String(status.message());
  out.U8(columns == right ? 1 : 0);
  out.U32(static_cast<std::uint32_t>(seen.load()));
  out.U64(static_cast<std::uint64_t>(took.count()));
  WriteAtOnce(group.ResultFile(through.rank()), out.bytes());
  return 0;
}

LoadOutcome OutcomeOf(const LoadGroup& group, int rank) {
  LoadOutcome outcome;
  if (access(group.ResultFile(rank).c_str(), F_OK) != 0) return outcome;
  const std::string bytes = ReadWholeFile(group.ResultFile(rank));
  ByteReader in(bytes, "outcome");
  outcome.returned = true;
  const auto code = static_cast<Code>(in.U8());
  const std::string message(in.String(1 << 20));
  if (code != Code::kOk) outcome.status = Status(code, message);
  outcome.is_right = in.U8() == 1;
  outcome.messages = static_cast<int>(in.U32());
  outcome.milliseconds = in.U64();
  return outcome;
}

LoadGroup StartLoad(const LoadScenario& scenario) {
  LoadGroup group;
  group.scenario = scenario;
  group.dir = std::make_unique<TempDir>();
  return group;
}

void Fork(LoadGroup& group) {
  ASSERT_OK_AND_ASSIGN(group.ranks, ForkedGroup::Start(kLoadRanks, [&](Communicator& comm) {
                         return LoadBody(comm, group);
                       }));
}

// What a rank may return: success with every byte, or a failure that names the victim.
void CheckReturned(const LoadOutcome& outcome, int victim) {
  ASSERT_TRUE(outcome.returned);
  EXPECT_LT(outcome.milliseconds, 10'000u);
  if (outcome.status.ok()) {
    EXPECT_TRUE(outcome.is_right);
    return;
  }
  EXPECT_TRUE(outcome.status.code() == Code::kUnavailable ||
              outcome.status.code() == Code::kDeadlineExceeded)
      << outcome.status.ToString();
  EXPECT_NE(outcome.status.message().find("rank " + std::to_string(victim)), std::string::npos)
      << outcome.status.ToString();
}

// The victim did less than was counted: then the load is as good as any.
void NobodyWasHitInLoad(LoadGroup& group) {
  (void)group.ranks->Wait(std::chrono::seconds(30));
  for (int r = 0; r < kLoadRanks; ++r) {
    const LoadOutcome outcome = OutcomeOf(group, r);
    EXPECT_OK(outcome.status);
    EXPECT_TRUE(outcome.is_right);
    if (r == group.scenario.victim) {
      EXPECT_LE(outcome.messages, group.scenario.message);
    }
  }
  group.ranks.reset();
}

void FinishLoad(LoadGroup& group) {
  const LoadScenario& s = group.scenario;
  const bool stopped = s.signal == SIGSTOP;
  SCOPED_TRACE(std::string(stopped ? "stopped" : "killed") + " rank " + std::to_string(s.victim) +
               " before " +
               (s.message == kAtTheProof ? "the proof" : "message " + std::to_string(s.message)) +
               (s.path == LoadPath::kExchange ? " of an exchange" : ""));
  std::vector<ForkedGroup::Exit> ends;
  if (stopped) {
    WaitForRanks(kLoadRanks, [&](int r) {
      return OutcomeOf(group, r).returned || (r == s.victim && group.WasHit());
    });
  } else {
    ends = group.ranks->Wait(std::chrono::seconds(30));
  }
  if (!group.WasHit()) return NobodyWasHitInLoad(group);
  if (!stopped) {
    EXPECT_EQ(ends[static_cast<std::size_t>(s.victim)].signal, SIGKILL);
  }
  EXPECT_FALSE(OutcomeOf(group, s.victim).returned);
  std::vector<bool> verdicts;
  for (int r = 0; r < kLoadRanks; ++r) {
    if (r == s.victim) continue;
    SCOPED_TRACE("rank " + std::to_string(r));
    CheckReturned(OutcomeOf(group, r), s.victim);
    verdicts.push_back(OutcomeOf(group, r).status.ok());
    EXPECT_FALSE(verdicts.back() && s.message == kAtTheProof);
  }
  // While the last verdict is told, one who tells it can end between two ranks.
  if (s.victim != 0) {
    EXPECT_EQ(verdicts.front(), verdicts.back());
  }
  if (stopped) {
    ASSERT_EQ(kill(group.ranks->pid(s.victim), SIGCONT), 0);
    ends = group.ranks->Wait(std::chrono::seconds(30));
    EXPECT_TRUE(ends[static_cast<std::size_t>(s.victim)].exited) << "it returns when it wakes up";
    const LoadOutcome late = OutcomeOf(group, s.victim);
    EXPECT_TRUE(late.returned);
    if (late.status.ok()) {
      EXPECT_TRUE(late.is_right);
    }
    if (s.victim != 0) {
      EXPECT_EQ(late.status.ok(), verdicts.front()) << late.status.ToString();
    }
  }
  group.ranks.reset();
}

TEST(LoadKilledRank, SurvivorsAgreeAndNameTheVictim) {
  Random random(TestSeed());
  std::vector<LoadScenario> scenarios;
  const auto add = [&](int signal, LoadPath path, int victim, const std::vector<int>& messages) {
    for (const int n : messages) scenarios.push_back({victim, n, signal, path});
  };
  for (const LoadPath path : {LoadPath::kDirect, LoadPath::kExchange}) {
    LoadGroup dry = StartLoad({.path = path});
    ASSERT_NO_FATAL_FAILURE(Fork(dry));
    for (const ForkedGroup::Exit& e : dry.ranks->Wait(std::chrono::seconds(30))) {
      ASSERT_TRUE(e.exited);
      ASSERT_EQ(e.code, 0);
    }
    for (const int victim : {0, 2}) {
      const LoadOutcome outcome = OutcomeOf(dry, victim);
      ASSERT_OK(outcome.status);
      ASSERT_TRUE(outcome.is_right);
      ASSERT_GT(outcome.messages, 8);
      add(SIGSTOP, path, victim, SampleEvents(random, outcome.messages, TestScale(2)));
      add(SIGKILL, path, victim, SampleEvents(random, outcome.messages, TestScale(4)));
    }
    for (const int signal : {SIGSTOP, SIGKILL}) add(signal, path, 1, {kAtTheProof});
  }
  // They mostly wait: those with stopped ranks together.
  std::stable_sort(
      scenarios.begin(), scenarios.end(),
      [](const LoadScenario& a, const LoadScenario& b) { return a.signal > b.signal; });
  constexpr std::size_t kAtOnce = 12;
  std::vector<LoadGroup> groups;
  for (const LoadScenario& s : scenarios) groups.push_back(StartLoad(s));
  for (std::size_t from = 0; from < groups.size(); from += kAtOnce) {
    const std::size_t to = std::min(groups.size(), from + kAtOnce);
    for (std::size_t i = from; i < to; ++i) ASSERT_NO_FATAL_FAILURE(Fork(groups[i]));
    for (std::size_t i = from; i < to; ++i) FinishLoad(groups[i]);
  }
}

}  // namespace
}  // namespace tensormount
