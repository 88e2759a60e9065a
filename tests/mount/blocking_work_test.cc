// SPDX-License-Identifier: Apache-2.0
// Who waits for whom: threads for work that hangs, late answers, and what /proc says of callers.
#include "fs/mount/blocking_work.h"

#include <condition_variable>
#include <csignal>
#include <future>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "fs/mount/callers.h"
#include "fs/mount/publish_calls.h"

namespace tensormount::fs {
namespace {

using Ms = std::chrono::milliseconds;

std::shared_ptr<PendingAnswer> NeverLate(
    PendingAnswer::EarlyAnswer once_begun = PendingAnswer::EarlyAnswer::kAllowed) {
  return std::make_shared<PendingAnswer>(once_begun, [](Ms) { return false; });
}

// Work that hangs until it is let go.
class Gate {
 public:
  void Wait() {
    std::unique_lock lock(mutex_);
    ++inside_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  bool AwaitInside(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return inside_ >= count; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  bool open_ = false;
};

// As the mount's watchdog does, until `over`.
bool WatchUntil(BlockingWork& work, const std::function<bool()>& over) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!over()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(Ms(5));
    (void)work.Watch();
  }
  return true;
}

TEST(BlockingWorkTest, HungWorkDoesNotBlockOtherWork) {
  BlockingWork work(nullptr, 2);
  Gate gate;
  std::atomic<int> done = 0;
  for (int i = 0; i < 30; ++i) work.Run(NeverLate(), [&] { gate.Wait(); });
  work.Run(NeverLate(), [&] { ++done; });
  EXPECT_TRUE(WatchUntil(work, [&] { return done == 1; }));
  EXPECT_EQ(work.load().running, 30);
  gate.Open();
  EXPECT_TRUE(WatchUntil(work, [&] { return work.idle(); }));
}

TEST(BlockingWorkTest, ProgressingWorkGetsFewThreads) {
  BlockingWork work(nullptr, 2);
  std::atomic<int> now = 0;
  std::atomic<int> most = 0;
  std::atomic<int> done = 0;
  for (int i = 0; i < 200; ++i) {
    work.Run(NeverLate(), [&] {
      const int running = ++now;
      for (int seen = most; running > seen && !most.compare_exchange_weak(seen, running);) {
      }
      std::this_thread::sleep_for(Ms(1));
      --now;
      ++done;
    });
  }
  EXPECT_TRUE(WatchUntil(work, [&] { return done == 200; }));
  // A machine that stops for longer than kStuckAfter may make one look stuck.
  EXPECT_LE(most, 8);
}

TEST(BlockingWorkTest, CallersDoTheWorkWhileSlotsAreFree) {
  const auto slots = std::make_shared<CallerSlots>(1);
  BlockingWork reads(slots, 1);
  BlockingWork writes(slots, 1);
  std::thread::id by;
  reads.Run(NeverLate(), [&] { by = std::this_thread::get_id(); });
  EXPECT_EQ(by, std::this_thread::get_id());
  // While a write has the only slot, a read is the pool's.
  Gate gate;
  std::thread writer([&] { writes.Run(NeverLate(), [&] { gate.Wait(); }); });
  ASSERT_TRUE(gate.AwaitInside(1));
  std::promise<std::thread::id> other;
  bool kept = false;
  reads.Run(
      NeverLate(), [&] { other.set_value(std::this_thread::get_id()); }, [&] { kept = true; });
  EXPECT_NE(other.get_future().get(), std::this_thread::get_id());
  EXPECT_TRUE(kept);
  gate.Open();
  writer.join();
  reads.Run(NeverLate(), [&] { by = {}; });
  EXPECT_EQ(by, std::thread::id());
}

TEST(PendingAnswerTest, WorkThatBeganAChangeGetsNoLateAnswer) {
  for (const auto kind :
       {PendingAnswer::EarlyAnswer::kBeforeBegin, PendingAnswer::EarlyAnswer::kAllowed}) {
    int late = 0;
    PendingAnswer answer(kind, [&](Ms) { return ++late > 0; });
    ASSERT_TRUE(answer.Begin());
    const bool may = kind == PendingAnswer::EarlyAnswer::kAllowed;
    EXPECT_EQ(answer.AnswerLate(), may);
    EXPECT_EQ(answer.Claim(), !may);
    EXPECT_EQ(late, may ? 1 : 0);
    EXPECT_FALSE(answer.AnswerLate());  // Once.
  }
}

TEST(PendingAnswerTest, WaitingWorkIsAbandonedBeforeItBegins) {
  PendingAnswer answer(PendingAnswer::EarlyAnswer::kBeforeBegin, [](Ms) { return true; });
  EXPECT_TRUE(answer.AnswerLate());
  EXPECT_FALSE(answer.Begin());
  EXPECT_FALSE(answer.Claim());
}

TEST(PendingAnswerTest, UnconditionalWorkRunsAfterItsLateAnswer) {
  BlockingWork work(nullptr, 1);
  Gate gate;
  work.Run(NeverLate(), [&] { gate.Wait(); });
  ASSERT_TRUE(gate.AwaitInside(1));
  const auto answer = std::make_shared<PendingAnswer>(PendingAnswer::EarlyAnswer::kKeepsWork,
                                                      [](Ms) { return true; });
  std::promise<bool> claimed;
  work.Run(answer, [&] { claimed.set_value(answer->Claim()); });
  EXPECT_TRUE(answer->AnswerLate());  // While it waits for its turn.
  gate.Open();
  EXPECT_FALSE(claimed.get_future().get());
}

// A child that is stopped keeps its signals pending, as one that waits for a file system does.
class CallersTest : public testing::Test {
 protected:
  void SetUp() override {
    struct sigaction nothing {};
    nothing.sa_handler = [](int) {};
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) {
      sigaction(SIGUSR1, &nothing, nullptr);
      signal(SIGUSR2, SIG_IGN);
      signal(SIGQUIT, SIG_DFL);  // A shell's `&` has it ignored.
      sigset_t blocked;
      sigemptyset(&blocked);
      sigaddset(&blocked, SIGTERM);
      sigprocmask(SIG_BLOCK, &blocked, nullptr);
      raise(SIGSTOP);
      for (;;) pause();
    }
    int status = 0;
    ASSERT_EQ(waitpid(child_, &status, WUNTRACED), child_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  void TearDown() override {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  pid_t child_ = 0;
};

TEST_F(CallersTest, HandledAndIgnoredSignalsAreNotKills) {
  EXPECT_FALSE(IsBeingKilled(child_));
  // Handled, ignored, blocked, and those that do nothing by default.
  for (const int number : {SIGUSR1, SIGUSR2, SIGTERM, SIGWINCH, SIGCHLD, SIGURG, SIGTSTP}) {
    ASSERT_EQ(kill(child_, number), 0);
    EXPECT_FALSE(IsBeingKilled(child_)) << number;
  }
  EXPECT_EQ(ProcessOf(child_), child_);
}

TEST_F(CallersTest, FatalSignalIsDetectedAsAKill) {
  ASSERT_EQ(kill(child_, SIGQUIT), 0);  // With a core: it is pending until the thread takes it.
  EXPECT_TRUE(IsBeingKilled(child_));
}

TEST_F(CallersTest, DeadCallerIsDetected) {
  ASSERT_EQ(kill(child_, SIGKILL), 0);
  siginfo_t ended{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child_), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(IsBeingKilled(child_));  // A zombie.
  EXPECT_EQ(waitpid(child_, nullptr, 0), child_);
  EXPECT_TRUE(IsBeingKilled(child_));
  EXPECT_EQ(ProcessOf(child_), 0);
  EXPECT_FALSE(IsBeingKilled(0));  // Not to be seen is not gone.
}

TEST(PublishCallsTest, RepeatedPublishCallIsNotifiedAtTheEnd) {
  PublishCalls calls;
  const auto call = calls.Add(7, {.folder = 1, .name = "staging", .as = "step"});
  int asked = 0;
  int called = 0;
  const auto again = [&] {
    ++asked;
    return [&called] { ++called; };
  };
  EXPECT_TRUE(calls.WaitForEnd(*call, again));
  EXPECT_EQ(called, 0);
  calls.End(*call, Status());
  EXPECT_EQ(called, 1);
  EXPECT_FALSE(calls.WaitForEnd(*call, again));
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace tensormount::fs
