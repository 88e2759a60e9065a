// SPDX-License-Identifier: Apache-2.0
// Which opens are passed through, without a kernel: one that is played here refuses what the real
// one refuses.
#include "fs/mount/open_modes.h"

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <set>
#include <sys/stat.h>
#include <thread>

#include <gtest/gtest.h>

#include "base/deadline.h"
#include "index/read/proven_ranges.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

// What of Linux decides whether a mode is accepted: registrations, and the inode's state.
class FakeKernel : public BackingRegistrar {
 public:
  Result<int> Register(int descriptor) override {
    struct stat st;
    if (fstat(descriptor, &st) != 0) return Status::FromErrno(errno, "register", "a file");
    ++asked;
    while (hold) std::this_thread::yield();
    const std::lock_guard lock(mutex_);
    if (refusal != 0) return Status::FromErrno(refusal, "register", "a file");
    live_.insert(++last_);
    return last_;
  }
  void Unregister(int id) noexcept override {
    const std::lock_guard lock(mutex_);
    if (live_.erase(id) == 0) ++mistakes;
  }
  // An OPEN reply is taken: false for what the kernel answers EIO to.
  bool FinishOpen(NodeId node, int backing_id) {
    const std::lock_guard lock(mutex_);
    Inode& inode = inodes_[node];
    if (backing_id > 0 && !live_.contains(backing_id)) return false;
    if (inode.open > 0 && inode.backing_id != backing_id) return false;
    inode.backing_id = backing_id;
    ++inode.open;
    return true;
  }
  // close(2): the file leaves the inode before RELEASE is sent.
  void Close(NodeId node) {
    const std::lock_guard lock(mutex_);
    --inodes_[node].open;
  }
  std::size_t live() const {
    const std::lock_guard lock(mutex_);
    return live_.size();
  }

  int refusal = 0;
  std::atomic<bool> hold{false};  // Does not answer.
  std::atomic<int> asked{0};
  std::atomic<int> mistakes{0};

 private:
  struct Inode {
    int open = 0;
    int backing_id = 0;
  };
  mutable std::mutex mutex_;
  int last_ = 0;
  std::set<int> live_;
  std::map<NodeId, Inode> inodes_;
};

constexpr std::uint64_t kBig = 200'000;

class OpenModesTest : public testing::Test {
 protected:
  void SetUp() override {
    TinySpec spec;
    for (const char* key : {"a", "b", "c"}) {
      spec.tensors.push_back(
          {.key = key, .dtype = DType::kU8, .shape = {kBig}, .seed = 7, .tensor_file = true});
    }
    spec.tensors.push_back({.key = "pieces", .dtype = DType::kU8, .shape = {kBig}, .parts = 2});
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step", spec));
    ASSERT_OK_AND_ASSIGN(vfs_, Vfs::Open(HostFileSystem(), {.source = dir_.Join("store/step")}));
  }
  struct Opened {
    NodeId node = 0;
    std::shared_ptr<const VirtualFile> file;
  };
  Opened File(const std::string& key) {
    const auto entry = VfsOps(*vfs_).Walk("tensors/" + key);
    EXPECT_OK(entry);
    auto file = vfs_->OpenFile(entry.value().id);
    EXPECT_OK(file);
    return {entry.value().id, file.value()};
  }
  OpenModes Modes(OpenModes::Options options = {}) {
    return OpenModes(
        kernel_, [this] { return negotiated_; }, options, prover_);
  }
  static Result<std::shared_ptr<OpenModes::Lease>> Open(OpenModes& modes, const Opened& of) {
    return modes.Open(of.node, of.file, {}, [] { return [] {}; });
  }

  TempDir dir_;
  std::unique_ptr<Vfs> vfs_;
  FakeKernel kernel_;
  bool negotiated_ = true;
  std::atomic<bool> wanted_{true};
  std::atomic<int> reported_{0};
  FileProver prover_{[this](NodeId) { return wanted_.load(); },
                     [this](const VirtualFile&, const Status&) { ++reported_; }};
};

TEST_F(OpenModesTest, OneRegistrationServesANodeUntilItsLastRelease) {
  OpenModes modes = Modes();
  const Opened a = File("a");
  EXPECT_EQ(modes.Join(a.node), nullptr);
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "passthrough");
  ASSERT_OK_AND_ASSIGN(auto first, Open(modes, a));
  ASSERT_TRUE(first->passthrough());
  auto second = modes.Join(a.node);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->backing_id(), first->backing_id());
  ASSERT_OK_AND_ASSIGN(const auto other, Open(modes, File("b")));
  EXPECT_NE(other->backing_id(), first->backing_id());
  EXPECT_EQ(modes.counts().live_backings, 2u);
  const int id = first->backing_id();
  first.reset();
  EXPECT_EQ(kernel_.live(), 2u);
  second.reset();
  EXPECT_EQ(kernel_.live(), 1u);
  ASSERT_OK_AND_ASSIGN(const auto again, Open(modes, a));
  EXPECT_NE(again->backing_id(), id);
  EXPECT_EQ(modes.counts().passed, 4u);
  EXPECT_EQ(modes.counts().fell_back, 0u);
}

TEST_F(OpenModesTest, TensorsInPiecesUseTheDaemonWithoutFallback) {
  OpenModes modes = Modes();
  const Opened pieces = File("pieces");
  EXPECT_EQ(modes.TierOf(pieces.node, *pieces.file), "daemon");
  ASSERT_OK_AND_ASSIGN(const auto lease, Open(modes, pieces));
  EXPECT_FALSE(lease->passthrough());
  EXPECT_EQ(kernel_.asked, 0);
  EXPECT_EQ(modes.counts().daemon, 1u);
  EXPECT_EQ(modes.counts().fell_back, 0u);
}

TEST_F(OpenModesTest, ModeStaysWhileAnyHandleIsOpen) {
  OpenModes modes = Modes();
  const Opened a = File("a");
  kernel_.refusal = ELOOP;
  ASSERT_OK_AND_ASSIGN(auto first, Open(modes, a));
  EXPECT_FALSE(first->passthrough());
  kernel_.refusal = 0;
  ASSERT_OK_AND_ASSIGN(auto second, Open(modes, a));
  EXPECT_FALSE(second->passthrough());
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "daemon");
  first.reset();
  second.reset();
  ASSERT_OK_AND_ASSIGN(const auto third, Open(modes, a));
  EXPECT_TRUE(third->passthrough());
  const auto counts = modes.counts();
  EXPECT_EQ(counts.fell_back, 1u);
  ASSERT_EQ(counts.reasons.size(), 1u);
  EXPECT_NE(counts.reasons.begin()->first.find("ELOOP"), std::string::npos);
}

TEST_F(OpenModesTest, MissingPrivilegeIsTriedOnce) {
  OpenModes modes = Modes();
  kernel_.refusal = EPERM;
  EXPECT_OK(Open(modes, File("a")));
  EXPECT_OK(Open(modes, File("b")));
  EXPECT_EQ(kernel_.asked, 1);
  EXPECT_NE(modes.DisabledReason().find("CAP_SYS_ADMIN"), std::string::npos);
  EXPECT_THAT(modes.Probe(), HasCode(Code::kUnsupported));
}

TEST_F(OpenModesTest, ReasonForNoPassthroughIsReported) {
  OpenModes told = Modes({.disabled_reason = "--tier daemon"});
  EXPECT_EQ(told.DisabledReason(), "--tier daemon");
  EXPECT_NE(told.Join(File("a").node), nullptr);  // Without a look at storage.
  negotiated_ = false;
  OpenModes old = Modes();
  EXPECT_NE(old.DisabledReason().find("6.9"), std::string::npos);
  EXPECT_FALSE(Open(old, File("a")).value()->passthrough());
  EXPECT_EQ(kernel_.asked, 0);
  negotiated_ = true;
  OpenModes works = Modes();
  EXPECT_OK(works.Probe());
  EXPECT_EQ(kernel_.live(), 0u);
}

TEST_F(OpenModesTest, OnlySealedFilesOfTheRightSizeArePassedThrough) {
  OpenModes modes = Modes();
  const Opened a = File("a");
  const Opened b = File("b");
  ASSERT_OK_AND_ASSIGN(const std::string path, a.file->BackingPath());
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_FALSE(Open(modes, a).value()->passthrough());
  ASSERT_OK_AND_ASSIGN(const std::string longer, b.file->BackingPath());
  ASSERT_EQ(truncate(longer.c_str(), kBig + 1), 0);
  EXPECT_FALSE(Open(modes, b).value()->passthrough());
  ASSERT_OK_AND_ASSIGN(const std::string link, File("c").file->BackingPath());
  const Opened c = File("c");
  ASSERT_EQ(rename(link.c_str(), (link + "x").c_str()), 0);
  ASSERT_EQ(symlink((link + "x").c_str(), link.c_str()), 0);
  EXPECT_FALSE(Open(modes, c).value()->passthrough());
  EXPECT_EQ(modes.counts().fell_back, 3u);
  EXPECT_EQ(kernel_.asked, 0);
}

TEST_F(OpenModesTest, FirstOpenVerifiesTheFile) {
  OpenModes modes = Modes({.verify = true});
  const Opened a = File("a");
  ASSERT_OK_AND_ASSIGN(const std::string path, a.file->BackingPath());
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  std::string bytes = ReadWholeFile(path);
  bytes[123'456] ^= 1;
  WriteWholeFile(path, bytes);
  ASSERT_EQ(chmod(path.c_str(), 0444), 0);
  EXPECT_THAT(Open(modes, a), HasCode(Code::kDataLoss));
  EXPECT_EQ(kernel_.live(), 0u);
  EXPECT_TRUE(Open(modes, File("b")).value()->passthrough());
  const Opened c = File("c");
  const auto interrupted = modes.Open(
      c.node, c.file, [] { return true; }, [] { return [] {}; });
  EXPECT_THAT(interrupted, HasCode(Code::kCancelled));
  EXPECT_TRUE(Open(modes, c).value()->passthrough());
}

TEST_F(OpenModesTest, FilesOutsideTheCheckpointAreNotPassedThrough) {
  OpenModes modes = Modes();
  const std::string data = dir_.Join("store/step/data");
  ASSERT_EQ(rename(data.c_str(), dir_.Join("elsewhere").c_str()), 0);
  ASSERT_EQ(symlink(dir_.Join("elsewhere").c_str(), data.c_str()), 0);
  EXPECT_FALSE(Open(modes, File("a")).value()->passthrough());
  EXPECT_EQ(kernel_.asked, 0);
  ASSERT_EQ(unlink(data.c_str()), 0);
  ASSERT_EQ(rename(dir_.Join("elsewhere").c_str(), data.c_str()), 0);
  EXPECT_TRUE(Open(modes, File("a")).value()->passthrough());
}

TEST_F(OpenModesTest, ChangedFileIsVerifiedAgain) {
  OpenModes modes = Modes({.verify = true});
  const Opened a = File("a");
  ASSERT_OK_AND_ASSIGN(const std::string path, a.file->BackingPath());
  const auto passes = [&] {
    const auto opened = Open(modes, a);
    return opened.ok() && opened.value()->passthrough();
  };
  EXPECT_TRUE(passes());
  EXPECT_TRUE(passes());
  EXPECT_EQ(modes.counts().verified_at_open, 1u);
  // A hard link changes the inode, not the bytes: a later save makes one of each file it reuses.
  ASSERT_EQ(link(path.c_str(), dir_.Join("link").c_str()), 0);
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "passthrough");
  EXPECT_TRUE(passes());
  ASSERT_EQ(unlink(dir_.Join("link").c_str()), 0);
  EXPECT_TRUE(passes());
  EXPECT_EQ(modes.counts().verified_at_open, 1u);
  // Another file in its place, damaged and whole, and damage in place under the old time.
  const std::string good = ReadWholeFile(path);
  std::string bad = good;
  bad[99] ^= 1;
  const auto put = [&](const std::string& bytes) {
    WriteWholeFile(path + "x", bytes);
    ASSERT_EQ(chmod((path + "x").c_str(), 0444), 0);
    ASSERT_EQ(rename((path + "x").c_str(), path.c_str()), 0);
  };
  put(bad);
  EXPECT_THAT(Open(modes, a), HasCode(Code::kDataLoss));
  put(good);
  EXPECT_TRUE(passes());
  struct stat st;
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  const timespec times[2] = {st.st_atim, st.st_mtim};
  const auto in_place = [&](const std::string& bytes) {
    ASSERT_EQ(chmod(path.c_str(), 0644), 0);
    WriteWholeFile(path, bytes);
    ASSERT_EQ(chmod(path.c_str(), 0444), 0);
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  in_place(bad);
  EXPECT_THAT(Open(modes, a), HasCode(Code::kDataLoss));
  in_place(good);
  // While one holds it open the kernel reads for all: the next one is not let in before a look.
  ASSERT_OK_AND_ASSIGN(const auto held, Open(modes, a));
  EXPECT_TRUE(held->passthrough());
  EXPECT_EQ(modes.Join(a.node), nullptr);
  EXPECT_TRUE(passes());
  in_place(bad);
  EXPECT_THAT(Open(modes, a), HasCode(Code::kDataLoss));
  in_place(good);
  EXPECT_TRUE(passes());
  EXPECT_EQ(kernel_.live(), 1u);
}

TEST_F(OpenModesTest, LargeFilesUseTheDaemonUntilVerified) {
  OpenModes modes = Modes({.verify = true, .verified_in_open = kBig - 1});
  const Opened a = File("a");
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "daemon (not proven)");
  {
    ASSERT_OK_AND_ASSIGN(const auto first, Open(modes, a));
    EXPECT_FALSE(first->passthrough());
    const Deadline deadline = Deadline::After(std::chrono::seconds(20));
    while (prover_.load().proven == 0 && !deadline.Passed()) std::this_thread::yield();
    EXPECT_EQ(modes.TierOf(a.node, *a.file), "daemon");  // As long as one has it open so.
    EXPECT_FALSE(Open(modes, a).value()->passthrough());
  }
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "passthrough");
  EXPECT_TRUE(Open(modes, a).value()->passthrough());
  EXPECT_EQ(modes.counts().fell_back, 0u);
  // What reads have touched need not be proven in the open.
  const Opened b = File("b");
  ASSERT_OK_AND_ASSIGN(const std::string path, b.file->BackingPath());
  // What is read of a file that was changed a moment ago is not remembered.
  const Deadline deadline = Deadline::After(FileStamp::kSettleTime);
  while (!FileStamp::OfForeignFile(HostFileSystem().Stat(path).value()).IsSettled() &&
         !deadline.Passed()) {
    std::this_thread::yield();
  }
  char byte = 0;
  ASSERT_OK(b.file->Read(100, &byte, 1, nullptr));
  EXPECT_TRUE(Open(modes, b).value()->passthrough());
  EXPECT_EQ(prover_.load().proven, 1u);
}

TEST_F(OpenModesTest, DamageOfALargeFileIsReportedOnce) {
  OpenModes modes = Modes({.verify = true, .verified_in_open = 0});
  const Opened a = File("a");
  ASSERT_OK_AND_ASSIGN(const std::string path, a.file->BackingPath());
  FlipByte(path, 150'000);
  const auto told = [&](int times) {
    const Deadline deadline = Deadline::After(std::chrono::seconds(20));
    while ((reported_ < times || !prover_.load().file.empty()) && !deadline.Passed()) {
      std::this_thread::yield();
    }
    return reported_ == times;
  };
  EXPECT_FALSE(Open(modes, a).value()->passthrough());
  EXPECT_TRUE(told(1));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(Open(modes, a).value()->passthrough());
  EXPECT_EQ(prover_.load().file, "");
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "daemon (damaged)");
  ASSERT_EQ(link(path.c_str(), dir_.Join("link").c_str()), 0);
  EXPECT_EQ(modes.TierOf(a.node, *a.file), "daemon (damaged)") << "a link mends nothing";
  EXPECT_FALSE(Open(modes, a).value()->passthrough());
  EXPECT_EQ(reported_, 1);
  std::string byte(1, '\0');
  EXPECT_OK(a.file->Read(10, byte.data(), 1, nullptr)) << "what is whole is served";
  EXPECT_THAT(a.file->Read(150'000, byte.data(), 1, nullptr), HasCode(Code::kDataLoss));
  FlipByte(path, 150'000);
  EXPECT_FALSE(Open(modes, a).value()->passthrough());
  const Deadline deadline = Deadline::After(std::chrono::seconds(20));
  while (prover_.load().proven == 0 && !deadline.Passed()) std::this_thread::yield();
  EXPECT_TRUE(Open(modes, a).value()->passthrough());
}

TEST_F(OpenModesTest, ClosedFilesAreNotVerifiedInTheBackground) {
  wanted_ = false;
  OpenModes modes = Modes({.verify = true, .verified_in_open = 0});
  const Opened a = File("a");
  EXPECT_FALSE(Open(modes, a).value()->passthrough());
  const Deadline deadline = Deadline::After(std::chrono::seconds(20));
  while (!prover_.load().file.empty() && !deadline.Passed()) std::this_thread::yield();
  EXPECT_EQ(prover_.load().proven, 0u);
  EXPECT_EQ(reported_, 0);
  wanted_ = true;
  EXPECT_FALSE(Open(modes, a).value()->passthrough());
  while (prover_.load().proven == 0 && !deadline.Passed()) std::this_thread::yield();
  EXPECT_TRUE(Open(modes, a).value()->passthrough());
  prover_.Stop();
  EXPECT_FALSE(Open(modes, File("b")).value()->passthrough());
  EXPECT_EQ(prover_.load().waiting, 0u);
}

TEST_F(OpenModesTest, OpenDuringADecisionIsRetried) {
  kernel_.hold = true;
  OpenModes modes = Modes();
  const Opened a = File("a");
  std::shared_ptr<OpenModes::Lease> first;
  std::thread decides([&] { first = Open(modes, a).value(); });
  while (kernel_.asked == 0) std::this_thread::yield();
  int again = 0;
  const auto waits = modes.Open(a.node, a.file, {}, [&] { return [&] { ++again; }; });
  ASSERT_OK(waits);
  EXPECT_EQ(waits.value(), nullptr);
  EXPECT_EQ(modes.Join(a.node), nullptr);
  EXPECT_EQ(again, 0);
  kernel_.hold = false;
  decides.join();
  EXPECT_EQ(again, 1);
  EXPECT_EQ(Open(modes, a).value()->backing_id(), first->backing_id());
}

// Opens, late releases and refusals on three nodes at once: the kernel never meets two modes.
TEST_F(OpenModesTest, ConcurrentOpensNeverMixModes) {
  OpenModes modes = Modes();
  const std::vector<Opened> files = {File("a"), File("b"), File("pieces")};
  std::atomic<int> refused{0};
  std::atomic<int> passed{0};
  const int rounds = TestScale(3000);
  const auto work = [&](int thread) {
    Random random(TestSeed() + static_cast<std::uint64_t>(thread));
    for (int i = 0; i < rounds; ++i) {
      const Opened& of = files[static_cast<std::size_t>(random.Int(0, 2))];
      std::shared_ptr<OpenModes::Lease> lease = modes.Join(of.node);
      while (!lease) {
        const auto opened = Open(modes, of);
        ASSERT_OK(opened);
        lease = opened.value();
      }
      if (random.OneIn(20)) continue;  // The reply did not arrive.
      if (random.OneIn(4)) std::this_thread::yield();
      if (!kernel_.FinishOpen(of.node, lease->backing_id())) {
        ++refused;  // RELEASE follows.
        continue;
      }
      passed += lease->passthrough() ? 1 : 0;
      if (random.OneIn(4)) std::this_thread::yield();
      kernel_.Close(of.node);
      if (random.OneIn(4)) std::this_thread::yield();
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) threads.emplace_back(work, t);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 0);
  EXPECT_EQ(kernel_.mistakes, 0);
  EXPECT_EQ(kernel_.live(), 0u);
  EXPECT_EQ(modes.counts().live_backings, 0u);
  EXPECT_GT(passed, 0);
}

}  // namespace
}  // namespace tensormount::fs
