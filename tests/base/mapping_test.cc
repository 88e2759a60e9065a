// SPDX-License-Identifier: Apache-2.0
#include "base/mapping.h"

#include <atomic>
#include <csignal>
#include <cstddef>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using SignalAction = struct sigaction;  // sigaction alone is the function.

constexpr std::size_t kBytes = 16 * 4096;

class MappingGuardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    EnableMappingGuard();
    fd_ = open(dir_.Join("file").c_str(), O_RDWR | O_CREAT, 0600);
    ASSERT_GE(fd_, 0);
    const std::string bytes(kBytes, 'x');
    ASSERT_EQ(pwrite(fd_, bytes.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
    void* map = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd_, 0);
    ASSERT_NE(map, MAP_FAILED);
    map_ = static_cast<const volatile char*>(map);
  }
  void TearDown() override {
    munmap(const_cast<char*>(map_), kBytes);
    close(fd_);
  }
  // How many bytes were read before it ended.
  bool Sum(std::size_t* read) const {
    return RunOnMapping([&] {
      for (*read = 0; *read < kBytes; ++*read) (void)map_[*read];
    });
  }

  TempDir dir_;
  int fd_ = -1;
  const volatile char* map_ = nullptr;
};

TEST_F(MappingGuardTest, PopulateReportsUnreadablePagesBeforeAccess) {
  const auto* map = reinterpret_cast<const std::byte*>(const_cast<const char*>(map_));
  for (const bool mincore_is_true : {false, true}) {
    ASSERT_EQ(ftruncate(fd_, kBytes), 0);
    EXPECT_TRUE(Populate(map, kBytes, mincore_is_true));
    EXPECT_TRUE(Populate(map + 5000, 10, mincore_is_true));
    EXPECT_TRUE(InMemory(map, kBytes));
    ASSERT_EQ(ftruncate(fd_, 3 * 4096), 0);
    EXPECT_FALSE(Populate(map, kBytes, mincore_is_true));
    EXPECT_FALSE(Populate(map + 5 * 4096 + 7, 1, mincore_is_true));
    EXPECT_TRUE(Populate(map + 100, 2 * 4096, mincore_is_true));
  }
}

// Whichever pages of a few blocks are there, all are afterwards; only where all can be.
TEST(PopulateTest, PopulateLoadsEveryMissingPage) {
  constexpr std::size_t kPages = 3 * 512 + 7;
  const TempDir dir;
  const std::string path = dir.Join("f");
  WriteWholeFile(path, std::string(kPages * 4096, 'x'));
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(fdatasync(fd), 0);
  Random random(TestSeed());
  for (int i = 0; i < TestScale(60); ++i) {
    void* const map = mmap(nullptr, kPages * 4096, PROT_READ, MAP_SHARED, fd, 0);
    ASSERT_NE(map, MAP_FAILED);
    const auto first = static_cast<std::size_t>(random.Int(0, kPages - 1));
    const auto pages =
        static_cast<std::size_t>(random.Int(1, static_cast<std::int64_t>(kPages - first)));
    // A part leaves memory, of all or of nothing that is asked for.
    const auto gone = random.Int(0, kPages - 1);
    ASSERT_EQ(posix_fadvise(fd, gone * 4096, random.Int(1, 200) * 4096, POSIX_FADV_DONTNEED), 0);
    const auto* data = static_cast<const std::byte*>(map) + first * 4096;
    EXPECT_TRUE(Populate(data, pages * 4096, true));
    EXPECT_TRUE(InMemory(data, pages * 4096));
    munmap(map, kPages * 4096);
  }
  close(fd);
}

TEST_F(MappingGuardTest, TruncatedMappingReturnsAnErrorInsteadOfSigbus) {
  std::size_t read = 0;
  EXPECT_TRUE(Sum(&read));
  EXPECT_EQ(read, kBytes);
  ASSERT_EQ(ftruncate(fd_, 3 * 4096), 0);
  EXPECT_FALSE(Sum(&read));
  EXPECT_EQ(read, 3u * 4096);
  EXPECT_FALSE(Sum(&read));  // Again and again.
  ASSERT_EQ(ftruncate(fd_, kBytes), 0);
  EXPECT_TRUE(Sum(&read));
}

TEST_F(MappingGuardTest, GuardWorksInEveryThreadAndNested) {
  ASSERT_EQ(ftruncate(fd_, 0), 0);
  std::vector<std::thread> threads;
  std::vector<int> failed(8, 0);
  for (int& count : failed) {
    threads.emplace_back([this, &count] {
      for (int i = 0; i < 100; ++i) {
        std::size_t read = 0;
        bool inner = true;
        const bool outer = RunOnMapping([&] { inner = Sum(&read); });
        if (outer && !inner) ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : failed) EXPECT_EQ(count, 100);
}

// A thread that blocks all signals, as servers' threads do, would be ended by the fault.
TEST_F(MappingGuardTest, GuardWorksInThreadsThatBlockSigbus) {
  ASSERT_EQ(ftruncate(fd_, 4096), 0);
  std::thread([this] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    std::size_t read = 0;
    EXPECT_FALSE(Sum(&read));
    EXPECT_EQ(read, 4096u);
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    EXPECT_EQ(sigismember(&now, SIGBUS), 1) << "the thread's mask is as it was";
    EXPECT_EQ(sigismember(&now, SIGTERM), 1);
  }).join();
}

std::atomic<int> g_hosts_signals{0};
void HostsHandler(int) { ++g_hosts_signals; }

// In a process of its own, whose handlers are ours to change.
TEST(MappingGuardDeathTest, GuardPreservesTheHostsSignalHandlers) {
  EXPECT_EXIT(
      {
        const auto must = [](bool good, int line) {
          if (!good) _exit(line % 200 + 1);
        };
        // Before ours: hears of what is not ours.
        signal(SIGBUS, HostsHandler);
        must(EnableMappingGuard() && MappingGuarded(), __LINE__);
        raise(SIGBUS);
        must(g_hosts_signals == 1, __LINE__);
        // After ours: the guard is gone, and comes back with our handler.
        SignalAction ours{};
        SignalAction theirs{};
        theirs.sa_handler = HostsHandler;
        sigaction(SIGBUS, &theirs, &ours);
        must(!MappingGuarded(), __LINE__);
        DisableMappingGuard();  // Not in use: theirs stays.
        sigaction(SIGBUS, &ours, &theirs);
        must(theirs.sa_handler == HostsHandler && MappingGuarded(), __LINE__);
        DisableMappingGuard();
        sigaction(SIGBUS, nullptr, &theirs);
        must(theirs.sa_handler == HostsHandler && !MappingGuarded(), __LINE__);
        _exit(0);
      },
      testing::ExitedWithCode(0), "");
}

// What is not ours ends the process as it always did.
TEST(MappingGuardDeathTest, FaultsOutsideTheGuardEndTheProcess) {
  TempDir dir;
  EXPECT_EXIT(
      {
        EnableMappingGuard();
        const int fd = open(dir.Join("file").c_str(), O_RDWR | O_CREAT, 0600);
        const void* map = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
        (void)*static_cast<const volatile char*>(map);
      },
      // Sanitizers have a word to say first.
      [](int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }, "");
}

}  // namespace
}  // namespace tensormount
