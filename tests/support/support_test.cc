// SPDX-License-Identifier: Apache-2.0
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/random.h"
#include "tests/support/require.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

TEST(TempDir, RemovesReadOnlyTreesAndKeepsLinkTargets) {
  TempDir outside;
  WriteWholeFile(outside.Join("kept"), "x");
  std::string path;
  {
    TempDir dir;
    path = dir.path();
    ASSERT_EQ(mkdir(dir.Join("a").c_str(), 0700), 0);
    WriteWholeFile(dir.Join("a/b"), "bytes");
    EXPECT_EQ(ReadWholeFile(dir.Join("a/b")), "bytes");
    ASSERT_EQ(chmod(dir.Join("a").c_str(), 0500), 0);
    ASSERT_EQ(symlink(outside.path().c_str(), dir.Join("link").c_str()), 0);
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_EQ(ReadWholeFile(outside.Join("kept")), "x");
}

TEST(Random, SameSeedGivesTheSameCases) {
  Random a(7), b(7), c(8);
  EXPECT_EQ(a.Bytes(13), b.Bytes(13));
  EXPECT_NE(a.Next(), c.Next());
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t value = a.Int(-2, 3);
    EXPECT_GE(value, -2);
    EXPECT_LE(value, 3);
  }
}

TEST(Require, ReadsTheWholeList) {
  ASSERT_EQ(setenv("TENSORMOUNT_REQUIRE", "fuse,mpi", 1), 0);
  EXPECT_TRUE(IsRequired("fuse"));
  EXPECT_TRUE(IsRequired("mpi"));
  EXPECT_FALSE(IsRequired("mp"));
  ASSERT_EQ(setenv("TENSORMOUNT_REQUIRE", "", 1), 0);
  EXPECT_FALSE(IsRequired("fuse"));
}

TEST(Subprocess, ReturnsOutputsAndExitStatus) {
  const ProcessOutcome outcome =
      RunProcess({"sh", "-c", "cat; echo $WORD; echo no >&2; exit 3"},
                 {.environment = {{"WORD", "two"}}, .stdin_bytes = "one\n"});
  EXPECT_EQ(outcome.out, "one\ntwo\n");
  EXPECT_EQ(outcome.err, "no\n");
  EXPECT_EQ(outcome.exit_code, 3);
}

TEST(Subprocess, MissingProgramExits127WithAMessage) {
  const ProcessOutcome outcome = RunProcess({"/nonexistent/program"});
  EXPECT_EQ(outcome.exit_code, 127);
  EXPECT_NE(outcome.err.find("/nonexistent/program: cannot start"), std::string::npos);
}

TEST(Subprocess, DeadlineKillsTheWholeGroup) {
  const ProcessOutcome outcome = RunProcess({"sh", "-c", "sleep 50 & echo $!; wait"},
                                            {.deadline = std::chrono::milliseconds(300)});
  EXPECT_TRUE(outcome.timed_out);
  EXPECT_EQ(outcome.signal, SIGKILL);
  const pid_t grandchild = static_cast<pid_t>(std::stol(outcome.out));
  for (int i = 0; i < 1000 && kill(grandchild, 0) == 0; ++i) {
    // A zombie without a parent that reaps it still has a pid; what counts is that it stopped.
    const std::string stat =
        RunProcess({"cat", "/proc/" + std::to_string(grandchild) + "/stat"}).out;
    if (stat.empty() || stat.find(") Z ") != std::string::npos) return;
    usleep(2000);
  }
  EXPECT_NE(kill(grandchild, 0), 0);
}

}  // namespace
}  // namespace tensormount
