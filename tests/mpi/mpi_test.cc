// SPDX-License-Identifier: Apache-2.0
// Runs mpi_ranks under mpirun. This program itself is linked against the form without MPI.
#include "tensormount/mpi.h"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <set>
#include <signal.h>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/collective/collective_cases.h"
#include "tests/support/mpi_job.h"
#include "tests/support/require.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

class MpiTest : public testing::Test {
 protected:
  void SetUp() override {
    static const std::string why = WhyNoMpi("tests/mpi_ranks");
    if (!why.empty()) TENSORMOUNT_SKIP_UNLESS_REQUIRED("mpi", why);
  }
};

std::unique_ptr<Subprocess> StartRanks(int ranks, const std::vector<std::string>& arguments,
                                       const std::vector<std::string>& options = {}) {
  return StartMpi("tests/mpi_ranks", ranks, arguments, options);
}

ProcessOutcome RunRanks(int ranks, const std::vector<std::string>& arguments,
                        const std::vector<std::string>& options = {}) {
  return StartRanks(ranks, arguments, options)->Wait();
}

// What each rank said, in no order.
std::multiset<std::string> Said(const ProcessOutcome& outcome) {
  std::multiset<std::string> said;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("rank ", 0) == 0) said.insert(line);
  }
  return said;
}

void ExpectAllGood(int ranks, const ProcessOutcome& outcome) {
  std::multiset<std::string> expected;
  for (int r = 0; r < ranks; ++r) expected.insert("rank " + std::to_string(r) + ": good");
  EXPECT_EQ(Said(outcome), expected) << outcome;
  EXPECT_EQ(outcome.exit_code, 0) << outcome;
}

TEST_F(MpiTest, ConformsOnTwoRanks) { ExpectAllGood(2, RunRanks(2, {"conformance"})); }
TEST_F(MpiTest, ConformsOnFourRanks) { ExpectAllGood(4, RunRanks(4, {"conformance"})); }

// MPI cannot take back what was sent, so these processes leave without MPI_Finalize.
TEST_F(MpiTest, CancelledRequestsReleaseTheirMemory) {
  const ProcessOutcome outcome = RunRanks(2, {"cancel"}, {"--enable-recovery"});
  EXPECT_FALSE(outcome.timed_out) << outcome;
  EXPECT_EQ(Said(outcome), (std::multiset<std::string>{"rank 0: good", "rank 1: good"})) << outcome;
}

TEST_F(MpiTest, ConformsOnOneRank) { ExpectAllGood(1, RunRanks(1, {"conformance"})); }

TEST_F(MpiTest, EveryCollectiveOperationWorksOnEveryRank) {
  ExpectAllGood(2, RunRanks(2, {"collective"}));
  ExpectAllGood(3, RunRanks(3, {"collective"}));
}

TEST_F(MpiTest, ChannelsAndSubgroupsConformAndWorkConcurrently) {
  ExpectAllGood(4, RunRanks(4, {"views"}));
}

TEST_F(MpiTest, BulkTransportsConform) { ExpectAllGood(3, RunRanks(3, {"bulk"})); }

TEST_F(MpiTest, WorldsAreReused) { ExpectAllGood(3, RunRanks(3, {"worlds"})); }

// It was missed after half an hour (arrival) where it died outside of a call.
TEST_F(MpiTest, RankThatDiesBetweenJobsIsDetectedByLiveness) {
  for (const int victim : {0, 2}) {
    const ProcessOutcome outcome = RunRanks(
        3, {"between", std::to_string(victim), std::to_string(SIGKILL)}, {"--enable-recovery"});
    std::multiset<std::string> expected;
    for (int r = 0; r < 3; ++r) {
      if (r != victim) expected.insert("rank " + std::to_string(r) + ": good");
    }
    EXPECT_EQ(Said(outcome), expected) << outcome;
  }
}

TEST_F(MpiTest, LateRankIsNamedAndReceivesTheFailure) {
  TempDir folder;
  const ProcessOutcome outcome = RunRanks(3, {"late", folder.path()});
  EXPECT_EQ(Said(outcome),
            (std::multiset<std::string>{"rank 0: good", "rank 1: good", "rank 2: good"}))
      << outcome;
}

struct Fate {
  Operation operation;
  int victim;
  int signal;
  std::string mode = "victim";
};

// All survivors return by their deadline, with one code, and name the victim. The jobs run beside
// each other, because they mostly wait.
void ExpectSurvivorsNameTheVictim(const std::vector<Fate>& fates) {
  constexpr int kRanks = 4;
  std::vector<std::unique_ptr<Subprocess>> jobs;
  for (const Fate& f : fates) {
    jobs.push_back(StartRanks(kRanks,
                              {f.mode, std::to_string(static_cast<int>(f.operation)),
                               std::to_string(f.victim), std::to_string(f.signal)},
                              {"--enable-recovery"}));
  }
  for (std::size_t i = 0; i < fates.size(); ++i) {
    const ProcessOutcome outcome = jobs[i]->Wait();
    EXPECT_FALSE(outcome.timed_out) << outcome;
    std::multiset<std::string> lost;
    std::multiset<std::string> gone;
    for (int r = 0; r < kRanks; ++r) {
      if (r == fates[i].victim) continue;
      const std::string line = "rank " + std::to_string(r) + ": saw ";
      lost.insert(line + std::to_string(kSawFailure + static_cast<int>(Code::kDeadlineExceeded)));
      gone.insert(line + std::to_string(kSawFailure + static_cast<int>(Code::kUnavailable)));
    }
    // MPI does not say that a process is gone; where a transport does, all see that.
    EXPECT_THAT(Said(outcome), testing::AnyOf(lost, gone)) << outcome;
  }
}

TEST_F(MpiTest, AllRanksNameAKilledRank) {
  ExpectSurvivorsNameTheVictim(
      {{Operation::kAllGather, 2, SIGKILL}, {Operation::kExchange, 0, SIGKILL}});
}
TEST_F(MpiTest, AllRanksNameAStoppedRank) {
  ExpectSurvivorsNameTheVictim(
      {{Operation::kExchange, 2, SIGSTOP}, {Operation::kAgree, 0, SIGSTOP}});
}

// Between ranks that hear of each other only because their subgroup asked for it.
TEST_F(MpiTest, AllRanksNameAStoppedRankOfASubgroup) {
  ExpectSurvivorsNameTheVictim({{Operation::kAllToAll, 2, SIGSTOP, "victim-of-subgroup"},
                                {Operation::kAgree, 0, SIGSTOP, "victim-of-subgroup"}});
}

TEST(WithoutMpiTest, ErrorSaysThatMpiIsMissing) {
  const auto session = MpiSession::Init();
  EXPECT_THAT(session, HasCode(Code::kUnsupported));
  EXPECT_THAT(session, HasMessage("no MPI"));
}

TEST(UnderMpiLauncherTest, LauncherIsFoundInTheEnvironment) {
  const std::vector<const char*> names = {"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                                          "PMIX_RANK", "MV2_COMM_WORLD_SIZE"};
  for (const char* name : names) ::unsetenv(name);
  EXPECT_FALSE(UnderMpiLauncher());
  for (const char* name : names) {
    ::setenv(name, "0", 1);
    EXPECT_TRUE(UnderMpiLauncher()) << name;
    ::unsetenv(name);
  }
}

}  // namespace
}  // namespace tensormount
