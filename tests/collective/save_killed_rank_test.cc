// SPDX-License-Identifier: Apache-2.0
// A rank that is killed or stopped in any phase of a save: the others return by their deadline, all
// with the same verdict, in agreement with the disk, and the same save in a new job succeeds.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <signal.h>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/coding.h"
#include "collective/comm/socket_group.h"
#include "collective/save_load.h"
#include "index/checkpoint.h"
#include "tests/collective/save_testing.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 4;
constexpr milliseconds kLiveness{1000};

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

// Who gets which signal before which of its operations in the second save.
struct Scenario {
  int victim = -1;
  int operation = -1;
  int signal = 0;
};

struct Group {
  Scenario scenario;
  std::unique_ptr<TempDir> dir;
  std::unique_ptr<ForkedGroup> ranks;

  std::string Path(const std::string& name) const { return dir->Join("store/" + name); }
  std::string ResultFile(int rank) const { return dir->Join("result." + std::to_string(rank)); }
};

// What a rank of a group writes down when it returns.
struct Outcome {
  bool returned = false;
  bool committed = false;
  Code code = Code::kOk;
  std::string message;
  int operations = 0;
  std::uint64_t milliseconds = 0;
};

// Runs in the child. Saves step-1 unless `again`, then step-2 with the scenario's signal.
int RankBody(Communicator& comm, const Group& group, bool again) {
  SetOwners(group.scenario.operation % 2 == 0 ? 3 : 0);  // Each process has its environment.
  std::atomic<int> seen{0};
  std::atomic<bool> armed{false};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent&) {
    if (!armed) return Status();
    const int n = seen++;
    if (comm.rank() == group.scenario.victim && n == group.scenario.operation) {
      (void)kill(getpid(), group.scenario.signal);  // Cannot fail for ourselves.
    }
    return Status();
  });
  RankState state;
  FillRank(comm.rank(), state);
  SaveOptions options;
  options.timeouts.liveness = kLiveness;
  options.timeouts.arrival = milliseconds(20'000);
  if (!again && !SaveOn(fs, state.dict, group.Path("step-1"), comm, options).ok()) return 2;
  armed = true;
  const auto start = std::chrono::steady_clock::now();
  const Result<SaveReport> result = SaveOn(fs, state.dict, group.Path("step-2"), comm, options);
  const auto took =
      std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  ByteWriter out;
  out.U8(static_cast<std::uint8_t>(result.status().code()));
  out.U32(static_cast<std::uint32_t>(seen.load()));
  out.U64(static_cast<std::uint64_t>(took.count()));
  if (!result.ok()) out.String(result.status().message());
  WriteWholeFile(group.ResultFile(comm.rank()), out.bytes());
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
  outcome.operations = static_cast<int>(in.U32());
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
         std::to_string(s.victim) + " before operation " + std::to_string(s.operation);
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

// Where the coordinator lived, an aborted staging is in .trash, without its data but where a rank
// that is silent may still work on them.
void CheckLeftovers(const Group& group) {
  if (group.scenario.victim == 0 || IsPublished(group)) return;
  for (const std::string& name : Inside(group.dir->Join("store"))) {
    EXPECT_FALSE(name.starts_with(".staging/")) << name;
    if (group.scenario.signal == SIGSTOP) continue;
    EXPECT_EQ(access((group.Path(name) + "/data").c_str(), F_OK) == 0, name == "step-1") << name;
  }
}

// Waits for everybody but stopped victims; wakes these up and waits for them.
void Finish(Group& group) {
  SCOPED_TRACE(ScenarioName(group.scenario));
  const auto v = static_cast<std::size_t>(group.scenario.victim);
  if (group.scenario.signal == SIGSTOP) {
    // Survivors write their outcome last.
    for (int waited = 0; waited < 30'000; waited += 20) {
      bool all = true;
      for (int r = 0; r < kRanks; ++r) {
        all = all && (r == group.scenario.victim || ReadOutcome(group, r).returned);
      }
      if (all) break;
      std::this_thread::sleep_for(milliseconds(20));
    }
    EXPECT_FALSE(ReadOutcome(group, group.scenario.victim).returned) << "it is still stopped";
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
    EXPECT_EQ(ends[v].signal, SIGKILL);
    CheckSurvivors(group);
    CheckLeftovers(group);
  }
  group.ranks.reset();
}

// `n` of `count` operations, spread over all of them and moved by the seed; the last one included.
std::vector<int> Sample(Random& random, int count, int n) {
  std::vector<int> points = {count - 1};
  for (int i = 0; i + 1 < n; ++i) {
    const int from = count * i / (n - 1);
    const int to = std::max(from, count * (i + 1) / (n - 1) - 1);
    points.push_back(static_cast<int>(random.Int(from, to)));
  }
  return points;
}

TEST_F(SaveKilledRankTest, SurvivorsAgreeWithEachOtherAndWithTheDisk) {
  Random random(TestSeed());
  // How many operations there are.
  Group dry = NewGroup({});
  Start(dry, false);
  for (const ForkedGroup::Exit& e : dry.ranks->Wait(milliseconds(30'000))) {
    ASSERT_TRUE(e.exited);
    ASSERT_EQ(e.code, 0);
  }
  dry.ranks.reset();
  const int of_coordinator = ReadOutcome(dry, 0).operations;
  const int of_writer = ReadOutcome(dry, 2).operations;
  ASSERT_GT(of_coordinator, 30);
  ASSERT_GT(of_writer, 8);

  std::vector<Scenario> scenarios;
  for (const int n : Sample(random, of_coordinator, TestScale(5))) {
    scenarios.push_back({0, n, SIGSTOP});
  }
  for (const int n : Sample(random, of_writer, TestScale(2))) scenarios.push_back({2, n, SIGSTOP});
  for (const int n : Sample(random, of_coordinator, TestScale(9))) {
    scenarios.push_back({0, n, SIGKILL});
  }
  for (const int n : Sample(random, of_writer, TestScale(4))) scenarios.push_back({2, n, SIGKILL});

  // They mostly wait: several groups at once, those with stopped ranks together.
  constexpr std::size_t kAtOnce = 7;
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
