// SPDX-License-Identifier: Apache-2.0
// How a mount learns of the checkpoints of a store, without a mount.
#include "fs/store_watch.h"

#include <atomic>
#include <cerrno>
#include <thread>

#include <gtest/gtest.h>

#include "base/deadline.h"
#include "base/doorbell.h"
#include "index/store/store.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount::fs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TinySpec SmallSpec(std::uint64_t seed = 1) {
  TinySpec spec;
  spec.writers = 1;
  spec.tensors.push_back({.key = "w", .shape = {4}, .seed = seed});
  return spec;
}

class StoreWatchTest : public testing::Test {
 protected:
  std::string store() const { return dir_.Join("store"); }
  void Write(const std::string& name, IfExists if_exists = IfExists::kFail) {
    Store::PublishOptions options;
    options.if_exists = if_exists;
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store(), name, SmallSpec(++seed_), options));
  }
  void Start(FileSystem& fs = HostFileSystem(), milliseconds grain = StoreWatch::kStampGrain) {
    auto watch = StoreWatch::Start(fs, SourceKind::kStore, store(), false, ServeVerify::kOff, {},
                                   {}, {}, false, grain);
    ASSERT_OK(watch);
    watch_ = std::move(watch).value();
  }
  // The patience is for machines that are busy: that changes show within a second is measured at
  // real mounts.
  template <typename Condition>
  void ExpectSoon(const Condition& condition) {
    const Deadline deadline = Deadline::After(seconds(30));
    while (!condition()) {
      ASSERT_FALSE(deadline.Passed());
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  // Declared after a file system of the test's own, which the looking thread uses to its end.
  struct WatchEnd {
    explicit WatchEnd(StoreWatchTest& t) : test(t) {}
    ~WatchEnd() { test.watch_ = nullptr; }
    StoreWatchTest& test;
  };

  TempDir dir_;
  std::unique_ptr<StoreWatch> watch_;
  std::uint64_t seed_ = 0;
};

// Copies whole checkpoints: quicker than to publish many. Their uuids are equal, which only
// matters to `latest`.
void CopyMany(const std::string& store, const std::string& from, int count) {
  for (int i = 0; i < count; ++i) {
    const std::string to = store + "/copy-" + std::to_string(i);
    ASSERT_OK(HostFileSystem().CreateDirectory(to));
    WriteWholeFile(to + "/COMMIT", ReadWholeFile(store + "/" + from + "/COMMIT"));
  }
}

TEST_F(StoreWatchTest, ReadsEachCommitOnceAndScansLargeStoresInTurns) {
  Write("step-1");
  CopyMany(store(), "step-1", 300);
  Write("step-2");
  std::atomic<int> read{0};
  // How many commit records each look asked for; the last one may not have ended.
  std::mutex mutex;
  std::vector<int> looks;
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) -> Status {
    const bool commit = event.path.ends_with("COMMIT");
    if (commit && event.op == FileOp::kOpenRead) ++read;
    if (event.op != FileOp::kStat) return {};
    const std::lock_guard lock(mutex);
    if (event.path.ends_with("/store")) looks.push_back(0);
    if (commit && !looks.empty()) ++looks.back();
    return {};
  });
  const WatchEnd end(*this);
  Start(fs, milliseconds(800));
  ExpectSoon([&] { return watch_->CurrentListing()->by_id.size() == 302; });
  EXPECT_EQ(watch_->CurrentListing()->latest->name, "step-2");
  EXPECT_EQ(read, 302);
  // While time stamps may be too coarse to tell, everything is looked at; then a part.
  ExpectSoon([&] {
    EXPECT_EQ(watch_->CurrentListing()->by_id.size(), 302u);
    const std::lock_guard lock(mutex);
    return looks.size() >= 4 && looks[looks.size() - 2] <= 70;
  });
  {
    const std::lock_guard lock(mutex);
    EXPECT_GE(looks[1], 302);  // The first is that of Start, which only asks for the folder.
    EXPECT_GE(looks[looks.size() - 2], 64);
  }
  EXPECT_EQ(read, 302);
  Write("step-3");
  ExpectSoon([&] { return watch_->CurrentListing()->latest->name == "step-3"; });
  EXPECT_EQ(read, 303);
  const auto old = watch_->FindName("step-2");
  Write("step-2", IfExists::kReplace);
  ExpectSoon([&] {
    const auto now = watch_->FindName("step-2");
    return now != nullptr && now != old;
  });
  EXPECT_TRUE(old->gone());
  EXPECT_EQ(watch_->CurrentListing()->latest->name, "step-2");
  ASSERT_OK_AND_ASSIGN(const Store opened, Store::Open(HostFileSystem(), store()));
  ASSERT_OK(opened.Remove("step-2"));
  ExpectSoon([&] { return watch_->FindName("step-2") == nullptr; });
  EXPECT_EQ(watch_->CurrentListing()->latest->name, "step-3");
  EXPECT_EQ(watch_->FindName("copy-17")->name, "copy-17");
  EXPECT_EQ(watch_->FindName("copy-300"), nullptr);
  EXPECT_EQ(watch_->FindName(".staging"), nullptr);
}

// What `cp` or rsync bring is there when its commit record is, though the store's folder has not
// changed since.
TEST_F(StoreWatchTest, FindsCheckpointsCopiedIntoTheStore) {
  Write("step-1");
  CopyMany(store(), "step-1", 100);
  ASSERT_OK(HostFileSystem().CreateDirectory(store() + "/slow"));
  Start(HostFileSystem(), milliseconds(150));
  EXPECT_EQ(watch_->CurrentListing()->by_id.size(), 101u);
  std::this_thread::sleep_for(milliseconds(250));  // Until the folder counts as unchanged.
  EXPECT_EQ(watch_->FindName("slow"), nullptr);
  WriteWholeFile(store() + "/slow/COMMIT", ReadWholeFile(store() + "/step-1/COMMIT"));
  ExpectSoon([&] { return watch_->FindName("slow") != nullptr; });
}

TEST_F(StoreWatchTest, UnreadableCommitMakesLatestUnknown) {
  Write("old");
  Write("new");
  std::atomic<bool> fails{true};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& e) {
    return fails && e.op == FileOp::kRead && e.path.ends_with("new/COMMIT")
               ? Status::FromErrno(EIO, "read", e.path)
               : Status();
  });
  const WatchEnd end(*this);
  Start(fs);
  const auto now = watch_->CurrentListing();
  EXPECT_EQ(now->latest, nullptr) << "an older one would be believed";
  EXPECT_THAT(now->latest_unknown, HasCode(Code::kDataLoss));
  EXPECT_THAT(now->problems, testing::SizeIs(1));
  fails = false;
  ExpectSoon([&] {
    const auto later = watch_->CurrentListing();
    return later->latest && later->latest->name == "new";
  });
  // Damage that was proven is passed over.
  ASSERT_OK(HostFileSystem().CreateDirectory(store() + "/bad"));
  WriteWholeFile(store() + "/bad/COMMIT", "nonsense");
  ExpectSoon([&] { return watch_->CurrentListing()->problems.size() == 1; });
  EXPECT_EQ(watch_->CurrentListing()->latest->name, "new");
  EXPECT_OK(watch_->CurrentListing()->latest_unknown);
}

TEST_F(StoreWatchTest, FindsANameDuringTheFirstScan) {
  Write("step-1");
  CopyMany(store(), "step-1", 20);
  // The look gets on slowly, and does not end before this test has its answers.
  std::atomic<bool> answered{false};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) -> Status {
    if (event.op != FileOp::kOpenRead || event.path.find("/copy-") == std::string::npos) return {};
    if (!answered) std::this_thread::sleep_for(milliseconds(20));
    const Deadline deadline = Deadline::After(seconds(20));
    const bool last = event.path.find("/copy-9/") != std::string::npos;
    while (last && !answered && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(2));
    return {};
  });
  const WatchEnd end(*this);
  Start(fs);
  EXPECT_FALSE(watch_->first_check_done());
  const auto found = watch_->FindName("step-1");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(watch_->FindName("step-2"), nullptr);
  EXPECT_EQ(watch_->FindName(".trash"), nullptr);
  EXPECT_FALSE(watch_->first_check_done());
  EXPECT_OK(watch_->View(*found));
  answered = true;
  // "latest" needs all.
  const auto now = watch_->CurrentListing();
  EXPECT_EQ(now->by_id.size(), 21u);
  EXPECT_EQ(now->Find("step-1"), found);
  EXPECT_FALSE(found->gone());
}

TEST_F(StoreWatchTest, CheckpointReplacedDuringTheFirstScanIsGone) {
  Write("step-1");
  Write("a");
  std::atomic<bool> hold{true};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) -> Status {
    const bool slow = event.path.ends_with("/a/COMMIT") && event.op == FileOp::kOpenRead;
    const Deadline deadline = Deadline::After(seconds(10));
    while (slow && hold && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(2));
    return {};
  });
  std::shared_ptr<Slot> early;
  const WatchEnd end(*this);
  {
    Start(fs);
    std::thread asks([&] { early = watch_->FindName("step-1"); });
    std::this_thread::sleep_for(milliseconds(100));
    Write("step-1", IfExists::kReplace);
    hold = false;
    asks.join();
  }
  ExpectSoon([&] {
    const auto now = watch_->FindName("step-1");
    return now != nullptr && !now->gone();
  });
  if (early && early != watch_->FindName("step-1")) {
    EXPECT_TRUE(early->gone());
  }
}

TEST_F(StoreWatchTest, RefreshSeesEarlierPublishes) {
  Write("step-1");
  Start();
  for (int i = 2; i < 6; ++i) {
    EXPECT_NE(watch_->CurrentListing()->latest, nullptr);
    const std::string name = "step-" + std::to_string(i);
    Write(name);
    watch_->Refresh();
    EXPECT_EQ(watch_->CurrentListing()->latest->name, name);
  }
}

// While somebody has a file open, what was let go of is found again and not opened twice.
TEST_F(StoreWatchTest, KeepsALimitedNumberOfCheckpointsOpen) {
  Write("step-1");
  for (int i = 0; i < 40; ++i) Write("more-" + std::to_string(i));
  Start();
  std::vector<std::shared_ptr<const CheckpointView>> views;
  const auto now = watch_->CurrentListing();
  for (const auto& slot : now->by_id) {
    auto view = watch_->View(*slot);
    ASSERT_OK(view);
    views.push_back(view.value());
  }
  ASSERT_GT(views.size(), StoreWatch::kKeptOpen);
  // A check may have closed some already.
  EXPECT_GE(watch_->open_checkpoints(), StoreWatch::kKeptOpen);
  std::this_thread::sleep_for(StoreWatch::kMaxAge);
  ExpectSoon([&] {
    (void)watch_->CurrentListing();
    return watch_->open_checkpoints() <= StoreWatch::kKeptOpen;
  });
  EXPECT_THAT(watch_->View(*watch_->CurrentListing()->by_id[0]), IsOkAndHolds(views[0]));
}

TEST(DoorbellTest, RingsForCallsAndForNewNames) {
  TempDir dir;
  ASSERT_OK_AND_ASSIGN(const auto bell, Doorbell::Make(dir.path()));
  EXPECT_TRUE(bell->watches());
  EXPECT_FALSE(bell->Wait(milliseconds(1)));
  bell->Ring();
  bell->Ring();
  EXPECT_FALSE(bell->Wait({}));  // Returns, though nothing has changed.
  WriteWholeFile(dir.Join("x"), "x");
  EXPECT_TRUE(bell->Wait({}));
  EXPECT_FALSE(bell->Wait(milliseconds(1)));
  ASSERT_OK_AND_ASSIGN(const auto deaf, Doorbell::Make(dir.Join("nothing")));
  EXPECT_FALSE(deaf->watches());
  deaf->Ring();
  EXPECT_FALSE(deaf->Wait({}));
}

}  // namespace
}  // namespace tensormount::fs
