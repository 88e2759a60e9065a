// SPDX-License-Identifier: Apache-2.0
// A rank that is killed or stopped in any phase of a save: the others return by their deadline, all
// with the same verdict, in agreement with the disk, and the same save in a new job succeeds.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <signal.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/coding.h"
#include "bench/counting_communicator.h"
#include "bench/forked_group.h"
#include "collective/layout/layout_exchange.h"
#include "collective/save_load.h"
#include "index/read/checkpoint.h"
#include "tests/collective/killed_rank_testing.h"
#include "tests/collective/save_testing.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 4;
constexpr milliseconds kLiveness{1000};
constexpr milliseconds kArrival{5000};  // Of a rank that is stopped before it says anything.

// A tensor file that all share, rank shards by columns, replicas, an object a rank.
void FillRank(int rank, RankState& state) {
  const RandomTensor big = MakeTensor("big", DType::kF32, {2048, 520});
  const RandomTensor cols = MakeTensor("cols", DType::kF32, {64, 400});
  const RandomTensor same = MakeTensor("same", DType::kF32, {64, 64});
  state.Add(big, Box::Make({512 * rank, 0}, {512, 520}).value());
  state.Add(cols, Box::Make({0, 100 * rank}, {64, 100}).value());
  state.Add(same, Box::Whole(same.shape));
  (void)state.dict.AddObject("rng", std::to_string(rank), {.index = {rank}, .grid = {kRanks}});
}

// What a rank does, each counted for itself.
enum VictimEvent { kOperation, kMessage, kEvents };  // A call of a file; a send or a receive.

// Who gets which signal before which of its events of that kind in the second save.
struct Scenario {
  int victim = -1;
  VictimEvent event = kOperation;
  int number = -1;
  int signal = 0;
  int way = 0;  // Of kWays.
};

// How the ranks check their layouts in the second save: with what the first one found, or anew, in
// which case so many of them share the work (0: as many as the save chooses).
struct Way {
  bool reuse_plan;
  int owners;
};
constexpr std::array<Way, 3> kWays = {{{true, 0}, {false, 0}, {false, 3}}};

struct Group {
  Scenario scenario;
  std::unique_ptr<TempDir> dir;
  std::unique_ptr<ForkedGroup> ranks;

  std::string Path(const std::string& name) const { return dir->Join("store/" + name); }
  std::string ResultFile(int rank) const { return dir->Join("result." + std::to_string(rank)); }
  std::string HitFile() const { return dir->Join("hit"); }
  bool WasHit() const { return access(HitFile().c_str(), F_OK) == 0; }
};

// What a rank of a group writes down when it returns.
struct Outcome {
  bool returned = false;
  bool committed = false;
  Code code = Code::kOk;
  std::string message;
  std::array<int, kEvents> events{};
  std::uint64_t milliseconds = 0;
};

// Runs in the child. Saves step-1 unless `again`, then step-2 with the scenario's signal.
int RankBody(Communicator& through, const Group& group, bool again) {
  const Scenario& s = group.scenario;
  const Way& way = kWays[static_cast<std::size_t>(s.way)];
  ForceOwners(static_cast<std::uint32_t>(way.owners));
  std::array<std::atomic<int>, kEvents> seen{};
  std::atomic<bool> armed{false};
  const auto before = [&](VictimEvent event) {
    if (!armed) return;
    const int n = seen[event]++;
    if (through.rank() == s.victim && event == s.event && n == s.number) {
      Hit(group.HitFile(), s.signal);
    }
  };
  CountingCommunicator comm(through, [&] { before(kMessage); });
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent&) {
    before(kOperation);
    return Status();
  });
  RankState state;
  FillRank(comm.rank(), state);
  SaveOptions options;
  options.reuse_plan = way.reuse_plan;
  options.timeouts.liveness = kLiveness;
  options.timeouts.arrival = kArrival;
  if (!again && !SaveOn(fs, state.dict, group.Path("step-1"), comm, options).ok()) return 2;
  armed = true;
  const auto start = std::chrono::steady_clock::now();
  const Result<SaveReport> result = SaveOn(fs, state.dict, group.Path("step-2"), comm, options);
  const auto took =
      std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  ByteWriter out;
  out.U8(static_cast<std::uint8_t>(result.status().code()));
  for (const std::atomic<int>& n : seen) out.U32(static_cast<std::uint32_t>(n.load()));
  out.U64(static_cast<std::uint64_t>(took.count()));
  if (!result.ok()) out.String(result.status().message());
  WriteAtOnce(group.ResultFile(comm.rank()), out.bytes());
  return result.ok() ? 0 : 1;
}

Outcome ReadOutcome(const Group& group, int rank) {
  Outcome outcome;
  if (access(group.ResultFile(rank).c_str(), F_OK) != 0) return outcome;
  const std::string bytes = ReadWholeFile(group.ResultFile(rank));
  ByteReader in(bytes, "outcome");
  outcome.returned = true;
  outcome.code = static_cast<Code>(in.U8());
  outcome.committed = outcome.code == Code::kOk;
  for (int& n : outcome.events) n = static_cast<int>(in.U32());
  outcome.milliseconds = in.U64();
  if (!outcome.committed) outcome.message = in.String(1 << 20);
  return outcome;
}

void Start(Group& group, bool again) {
  Result<std::unique_ptr<ForkedGroup>> started =
      ForkedGroup::Start(kRanks, [&](Communicator& comm) { return RankBody(comm, group, again); });
  ASSERT_OK(started);
  group.ranks = std::move(started).value();
}

class SaveKilledRankTest : public testing::Test {
 protected:
  // Never forks once threads exist: opening a checkpoint may start some.
  static Group NewGroup(const Scenario& scenario) {
    Group group;
    group.scenario = scenario;
    group.dir = std::make_unique<TempDir>();
    return group;
  }
};

std::string ScenarioName(const Scenario& s) {
  return std::string(s.signal == SIGKILL ? "killed" : "stopped") + " rank " +
         std::to_string(s.victim) + " before " + (s.event == kMessage ? "message " : "operation ") +
         std::to_string(s.number) + ", way " + std::to_string(s.way);
}

bool IsPublished(const Group& group) {
  return access((group.Path("step-2") + "/COMMIT").c_str(), F_OK) == 0;
}

// Survivors agree with each other and with the disk, and name the victim.
void CheckSurvivors(const Group& group) {
  const Scenario& s = group.scenario;
  const bool published = IsPublished(group);
  for (int r = 0; r < kRanks; ++r) {
    if (r == s.victim) continue;
    SCOPED_TRACE("rank " + std::to_string(r));
    const Outcome outcome = ReadOutcome(group, r);
    ASSERT_TRUE(outcome.returned);
    EXPECT_LT(outcome.milliseconds, 10'000u);
    EXPECT_EQ(outcome.committed, published) << outcome.message;
    if (outcome.committed) continue;
    EXPECT_TRUE(outcome.code == Code::kUnavailable || outcome.code == Code::kDeadlineExceeded)
        << CodeName(outcome.code) << ": " << outcome.message;
    EXPECT_NE(outcome.message.find("rank " + std::to_string(s.victim)), std::string::npos)
        << outcome.message;
  }
}

// Where the coordinator lived, an aborted staging is in .trash, and of its data only what the
// victim may have written.
void CheckLeftovers(const Group& group) {
  const int victim = group.scenario.victim;
  if (victim == 0 || IsPublished(group)) return;
  for (const std::string& entry : Inside(group.dir->Join("store"))) {
    EXPECT_FALSE(entry.starts_with(".staging/")) << entry;
    const std::string data = group.Path(entry) + "/data";
    if (entry == "step-1" || access(data.c_str(), F_OK) != 0) continue;
    for (const auto& file : std::filesystem::directory_iterator(data)) {
      const std::string name = file.path().filename();
      // A link to a file of the checkpoint before takes no space.
      if (entry.find(name.substr(0, 8)) == std::string::npos) continue;
      for (int r = 0; r < kRanks; ++r) {
        if (r == victim) continue;
        EXPECT_FALSE(name.ends_with("-r" + std::to_string(r) + ".safetensors")) << name;
        EXPECT_FALSE(name.ends_with("-p" + std::to_string(r) + ".bin")) << name;
      }
    }
  }
}

// The victim did less than was counted: then the save is as good as any.
void NobodyWasHit(Group& group) {
  (void)group.ranks->Wait(milliseconds(30'000));
  EXPECT_EQ(group.scenario.event, kMessage);
  for (int r = 0; r < kRanks; ++r) {
    const Outcome outcome = ReadOutcome(group, r);
    EXPECT_TRUE(outcome.committed) << outcome.message;
    if (r == group.scenario.victim) {
      EXPECT_LE(outcome.events[kMessage], group.scenario.number);
    }
  }
  group.ranks.reset();
}

// Waits for everybody but stopped victims; wakes these up and waits for them.
void Finish(Group& group) {
  SCOPED_TRACE(ScenarioName(group.scenario));
  const auto v = static_cast<std::size_t>(group.scenario.victim);
  if (group.scenario.signal == SIGSTOP) {
    // Survivors write their outcome last.
    WaitForRanks(kRanks, [&](int rank) {
      return ReadOutcome(group, rank).returned || (rank == group.scenario.victim && group.WasHit());
    });
    if (!group.WasHit()) return NobodyWasHit(group);
    CheckSurvivors(group);
    CheckLeftovers(group);
    const bool published = IsPublished(group);
    ASSERT_EQ(kill(group.ranks->pid(group.scenario.victim), SIGCONT), 0);
    const std::vector<ForkedGroup::Exit> ends = group.ranks->Wait(milliseconds(30'000));
    EXPECT_TRUE(ends[v].exited) << "a rank that wakes up late returns";
    EXPECT_EQ(IsPublished(group), published) << "a rank that wakes up late changes nothing";
    const Outcome late = ReadOutcome(group, group.scenario.victim);
    EXPECT_TRUE(late.returned);
    EXPECT_EQ(late.committed, published) << late.message;
    if (!late.committed) {
      EXPECT_NE(late.code, Code::kInternal) << late.message;
      EXPECT_NE(late.code, Code::kUnknown) << late.message;
    }
  } else {
    const std::vector<ForkedGroup::Exit> ends = group.ranks->Wait(milliseconds(30'000));
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_TRUE(ends[static_cast<std::size_t>(r)].exited) << r;
    }
    if (!group.WasHit()) return NobodyWasHit(group);
    EXPECT_EQ(ends[v].signal, SIGKILL);
    CheckSurvivors(group);
    CheckLeftovers(group);
  }
  group.ranks.reset();
}

// By way, rank and kind: what a rank does in a save in which nothing happens to anybody.
using Counts = std::array<std::array<std::array<int, kEvents>, kRanks>, kWays.size()>;

void CountEvents(Counts& counts) {
  for (std::size_t way = 0; way < kWays.size(); ++way) {
    Group dry;
    dry.scenario.way = static_cast<int>(way);
    dry.dir = std::make_unique<TempDir>();
    Start(dry, false);
    for (const ForkedGroup::Exit& e : dry.ranks->Wait(milliseconds(30'000))) {
      ASSERT_TRUE(e.exited);
      ASSERT_EQ(e.code, 0);
    }
    for (int r = 0; r < kRanks; ++r) {
      counts[way][static_cast<std::size_t>(r)] = ReadOutcome(dry, r).events;
    }
    for (const int n : counts[way][0]) ASSERT_GT(n, 30);
    for (const int n : counts[way][2]) ASSERT_GT(n, 8);
  }
}

TEST_F(SaveKilledRankTest, SurvivorsAgreeWithEachOtherAndWithTheDisk) {
  Random random(TestSeed());
  Counts counts;
  ASSERT_NO_FATAL_FAILURE(CountEvents(counts));
  struct Kind {
    int victim;
    VictimEvent event;
    int signal;
    int cases;
  };
  std::vector<Scenario> scenarios;
  for (const Kind& kind : std::vector<Kind>{{0, kOperation, SIGSTOP, 5},
                                            {2, kOperation, SIGSTOP, 2},
                                            {0, kMessage, SIGSTOP, 3},
                                            {2, kMessage, SIGSTOP, 2},
                                            {0, kOperation, SIGKILL, 9},
                                            {2, kOperation, SIGKILL, 4},
                                            {0, kMessage, SIGKILL, 5},
                                            {2, kMessage, SIGKILL, 5}}) {
    const int cases = TestScale(kind.cases);
    const auto way = static_cast<std::size_t>(random.Int(0, kWays.size() - 1));
    const int events = counts[way][static_cast<std::size_t>(kind.victim)][kind.event];
    for (const int n : SampleEvents(random, events, cases)) {
      scenarios.push_back({kind.victim, kind.event, n, kind.signal, static_cast<int>(way)});
    }
  }

  // They mostly wait: several groups at once, those with stopped ranks together.
  constexpr std::size_t kAtOnce = 12;
  std::vector<Group> groups;
  for (const Scenario& s : scenarios) groups.push_back(NewGroup(s));
  for (std::size_t from = 0; from < groups.size(); from += kAtOnce) {
    const std::size_t to = std::min(groups.size(), from + kAtOnce);
    for (std::size_t i = from; i < to; ++i) Start(groups[i], false);
    for (std::size_t i = from; i < to; ++i) Finish(groups[i]);
  }
  int committed = 0;
  for (Group& group : groups) {
    SCOPED_TRACE(ScenarioName(group.scenario));
    const bool published = IsPublished(group);
    committed += published ? 1 : 0;
    // The same save in a new job.
    group.scenario = {};
    Start(group, true);
    for (const ForkedGroup::Exit& e : group.ranks->Wait(milliseconds(30'000))) {
      EXPECT_TRUE(e.exited);
    }
    group.ranks.reset();
    for (int r = 0; r < kRanks; ++r) {
      const Outcome outcome = ReadOutcome(group, r);
      EXPECT_EQ(outcome.code, published ? Code::kAlreadyExists : Code::kOk) << outcome.message;
    }
  }
  EXPECT_LT(committed, static_cast<int>(groups.size()));
  // No fork comes after this.
  for (Group& group : groups) {
    for (const char* name : {"step-1", "step-2"}) {
      const Result<VerifyReport> report = VerifyCheckpoint(HostFileSystem(), group.Path(name), {});
      ASSERT_OK(report);
      EXPECT_TRUE(report.value().damages.empty()) << group.Path(name);
    }
  }
}

}  // namespace
}  // namespace tensormount
