// SPDX-License-Identifier: Apache-2.0
// Which commits a watch of a store reports, with inotify and without.
#include "index/store/commit_watch.h"

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <thread>

#include <gtest/gtest.h>

#include "index/records/store_paths.h"
#include "index/store/store_moves.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

// A file system behind a network: no inotify, and no descriptors of the kernel.
class FarFileSystem : public ObservedFileSystem {
 public:
  explicit FarFileSystem(FileSystem& base) : ObservedFileSystem(base, {}) {}
  bool Can(Ability ability) const override {
    return ability != Ability::kKernelFiles && ObservedFileSystem::Can(ability);
  }
};

class CommitWatchTest : public testing::TestWithParam<bool> {
 protected:
  std::string store() const { return dir_.Join("store"); }
  FileSystem& fs() { return GetParam() ? static_cast<FileSystem&>(far_) : HostFileSystem(); }

  std::string Publish(const std::string& name, IfExists if_exists = IfExists::kFail,
                      bool derived = false) {
    TinySpec spec;
    spec.writers = 1;
    spec.tensors.push_back({.key = "w", .shape = {4}, .seed = ++seed_});
    Store::PublishOptions options;
    options.if_exists = if_exists;
    options.derived = derived;
    const auto published = WriteTinyCheckpoint(HostFileSystem(), store(), name, spec, options);
    EXPECT_OK(published.status());
    return published.ok() ? published.value().info.uuid.ToString() : "";
  }
  void Start(CommitWatch::Options options = {}) {
    options.interval = milliseconds(5);
    auto watch = CommitWatch::Start(fs(), store(), options);
    ASSERT_OK(watch.status());
    watch_ = std::move(watch).value();
  }
  // The next commit; fails the test if none comes.
  Commit Next() {
    if (HasFailure()) return {};  // It would wait in vain each time.
    const auto next = watch_->Next(milliseconds(20000));
    EXPECT_OK(next.status());
    if (!next.ok() || !next.value()) {
      ADD_FAILURE() << "no commit";
      return {};
    }
    return *next.value();
  }
  // The only warning. Fails the test if none comes.
  std::string Warning() {
    std::vector<std::string> warnings;
    for (int i = 0; i < 2000 && warnings.empty(); ++i) {
      const auto none = watch_->Next(milliseconds(10));
      EXPECT_TRUE(none.ok() && !none.value());
      warnings = watch_->TakeWarnings();
    }
    EXPECT_EQ(warnings.size(), 1u);
    return warnings.empty() ? "" : warnings[0];
  }
  // Publishes one more, which must be the next one: nothing else was reported before.
  void ExpectNothingElse() {
    const std::string last = Publish("last-" + std::to_string(seed_));
    EXPECT_EQ(Next().uuid.ToString(), last);
  }

  TempDir dir_;
  FarFileSystem far_{HostFileSystem()};
  std::uint64_t seed_ = 0;
  std::unique_ptr<CommitWatch> watch_;
};

TEST_P(CommitWatchTest, EachCommitIsReportedOnceWithItsFacts) {
  Publish("old");
  Start();
  const std::string uuid = Publish("step-1");
  const Commit commit = Next();
  EXPECT_EQ(commit.name, "step-1");
  EXPECT_EQ(commit.uuid.ToString(), uuid);
  EXPECT_EQ(commit.generation, 2u);
  EXPECT_FALSE(commit.parent.IsZero());
  EXPECT_GT(commit.created, 0);
  EXPECT_FALSE(commit.derived || commit.removed);
  EXPECT_EQ(commit.path(), store() + "/step-1");
  Publish("base", IfExists::kFail, /*derived=*/true);
  EXPECT_TRUE(Next().derived);
  ExpectNothingElse();
}

TEST_P(CommitWatchTest, ExistingCheckpointsAboveAGenerationComeFirst) {
  Publish("a");
  const std::string b = Publish("b");
  const std::string c = Publish("c");
  Start({.existing = true, .above = 1});
  EXPECT_EQ(Next().uuid.ToString(), b);
  EXPECT_EQ(Next().uuid.ToString(), c);
  ExpectNothingElse();
  Start({.since = "b"});
  EXPECT_EQ(Next().uuid.ToString(), c);
  EXPECT_EQ(Next().name, "last-3");
  ExpectNothingElse();
  EXPECT_EQ(CommitWatch::Start(fs(), store(), {.since = "d"}).status().code(), Code::kNotFound);
}

TEST_P(CommitWatchTest, ReplacedNamesAreCommitsAndRenamedOnesAreNot) {
  Publish("a");
  Start();
  const std::string second = Publish("a", IfExists::kReplace);
  Commit commit = Next();
  EXPECT_EQ(commit.uuid.ToString(), second);
  EXPECT_EQ(commit.name, "a");
  std::filesystem::rename(store() + "/a", store() + "/b");
  std::filesystem::copy(
      store() + "/b", store() + "/c",
      std::filesystem::copy_options::recursive | std::filesystem::copy_options::create_hard_links);
  const std::string third = Publish("a");
  EXPECT_EQ(Next().uuid.ToString(), third);
  std::filesystem::rename(store() + "/a", store() + "/x");
  std::filesystem::rename(store() + "/b", store() + "/a");
  ExpectNothingElse();
}

// The look happens after the checkpoint was removed, and is told where the entry of .trash is, or
// finds it.
TEST_P(CommitWatchTest, CommitsRemovedBeforeALookAreFoundInTheTrash) {
  Publish("a");
  const auto opened = Store::Open(HostFileSystem(), store());
  ASSERT_OK(opened.status());
  CommitWatch::Options options;
  options.interval = milliseconds(GetParam() ? 100 : 5);
  auto watch = CommitWatch::Start(fs(), store(), options);
  ASSERT_OK(watch.status());
  watch_ = std::move(watch).value();
  std::vector<std::string> published;
  for (int i = 0; i < 5; ++i) {
    published.push_back(Publish("short-lived"));
    ASSERT_OK(opened.value().Remove("short-lived"));
  }
  for (const std::string& uuid : published) EXPECT_EQ(Next().uuid.ToString(), uuid);
  ExpectNothingElse();
}

TEST_P(CommitWatchTest, UnreadableCheckpointsAreReportedWhenTheyCanBeRead) {
  const auto commit_of = [&](const std::string& name) { return store() + "/" + name + "/COMMIT"; };
  Publish("old");
  Publish("a");
  std::filesystem::rename(commit_of("old"), dir_.Join("old"));
  WriteWholeFile(commit_of("old"), "damaged");
  Start();
  EXPECT_NE(Warning().find("old cannot be read: "), std::string::npos);
  // It was there when the watch began, so it is no new commit.
  std::filesystem::rename(dir_.Join("old"), commit_of("old"));
  ExpectNothingElse();
  // This one comes without its COMMIT, which is damaged at first.
  const std::string late = Publish("late");
  EXPECT_EQ(Next().uuid.ToString(), late);
  std::filesystem::copy(store() + "/late", dir_.Join("new"),
                        std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(store() + "/late");
  Start();
  std::filesystem::rename(dir_.Join("new") + "/COMMIT", dir_.Join("COMMIT"));
  std::filesystem::rename(dir_.Join("new"), store() + "/new");
  const auto none = watch_->Next(milliseconds(20));
  ASSERT_OK(none.status());
  EXPECT_FALSE(none.value());
  EXPECT_TRUE(watch_->TakeWarnings().empty());
  WriteWholeFile(commit_of("new"), "damaged");
  EXPECT_NE(Warning().find("new cannot be read: "), std::string::npos);
  std::filesystem::rename(dir_.Join("COMMIT"), commit_of("new"));
  EXPECT_EQ(Next().uuid.ToString(), late);
  ExpectNothingElse();
}

TEST_P(CommitWatchTest, StoreIsWaitedForAndItsEndIsReported) {
  Start();
  const std::string first = Publish("a");
  EXPECT_EQ(Next().uuid.ToString(), first);
  const std::string second = Publish("b");
  EXPECT_EQ(Next().uuid.ToString(), second);
  std::filesystem::remove_all(store());
  Status ended;
  for (int i = 0; i < 100 && ended.ok(); ++i) ended = watch_->Next(milliseconds(200)).status();
  EXPECT_EQ(ended.code(), Code::kStale);
  std::filesystem::create_directories(store() + "/not-a-store");
  WriteWholeFile(store() + "/COMMIT", "x");
  EXPECT_EQ(CommitWatch::Start(fs(), store(), {}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(CommitWatch::Start(fs(), store() + "/COMMIT", {}).status().code(),
            Code::kInvalidArgument);
}

// Published, removed and deleted between two looks: inotify has the name that it had in .trash.
TEST(CommitWatchDeleted, CommitsDeletedBeforeALookAreReportedByUuid) {
  TempDir dir;
  const std::string store = dir.Join("store");
  std::atomic<bool> hold = false;
  std::atomic<bool> held = false;
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    if (event.op == FileOp::kList && event.path == store) {
      while (hold) held = true;
    }
    return Status();
  });
  TinySpec spec;
  spec.tensors.push_back({.key = "w", .shape = {4}});
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store, "a", spec).status());
  const auto opened = Store::Open(HostFileSystem(), store);
  ASSERT_OK(opened.status());
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store, "b", spec).status());
  ASSERT_OK(opened.value().Remove("b"));  // Makes .trash.
  const auto watch = CommitWatch::Start(fs, store, {.interval = milliseconds(2)});
  ASSERT_OK(watch.status());
  hold = true;
  while (!held) std::this_thread::yield();
  const auto published = WriteTinyCheckpoint(HostFileSystem(), store, "c", spec);
  EXPECT_OK(published.status());
  EXPECT_OK(opened.value().Remove("c"));
  EXPECT_OK(opened.value().Gc({.grace = std::chrono::seconds(0)}).status());
  EXPECT_TRUE(HostFileSystem().List(store + "/.trash").value().empty());
  hold = false;
  const auto next = watch.value()->Next(milliseconds(20000));
  ASSERT_OK(next.status());
  ASSERT_TRUE(next.value());
  EXPECT_EQ(next.value()->uuid, published.value().info.uuid);
  EXPECT_TRUE(next.value()->removed);
  EXPECT_EQ(next.value()->generation, 0u);
  EXPECT_EQ(next.value()->name, "");
  const auto none = watch.value()->Next(milliseconds(20));
  ASSERT_OK(none.status());
  EXPECT_FALSE(none.value());
}

// Errors of storage do not end the watch, and lose nothing.
TEST(CommitWatchErrors, FailedLooksAreRepeated) {
  TempDir dir;
  const std::string store = dir.Join("store");
  std::atomic<bool> fails = false;
  std::atomic<int> failed = 0;
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    const bool look = event.op == FileOp::kList || event.op == FileOp::kStat;
    if (!fails || !look) return Status();
    ++failed;
    return Status::FromErrno(EIO, "list", event.path);
  });
  TinySpec spec;
  spec.tensors.push_back({.key = "w", .shape = {4}});
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), store, "a", spec).status());
  const auto watch = CommitWatch::Start(fs, store, {.interval = milliseconds(2)});
  ASSERT_OK(watch.status());
  fails = true;
  const auto published = WriteTinyCheckpoint(HostFileSystem(), store, "b", spec);
  ASSERT_OK(published.status());
  while (failed < 3) {
    const auto none = watch.value()->Next(milliseconds(5));
    ASSERT_OK(none.status());
    ASSERT_FALSE(none.value());
  }
  fails = false;
  const auto next = watch.value()->Next(milliseconds(20000));
  ASSERT_OK(next.status());
  ASSERT_TRUE(next.value());
  EXPECT_EQ(next.value()->uuid, published.value().info.uuid);
  const std::vector<std::string> warnings = watch.value()->TakeWarnings();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("cannot be read"), std::string::npos) << warnings[0];
}

INSTANTIATE_TEST_SUITE_P(, CommitWatchTest, testing::Bool(),
                         [](const auto& one) { return one.param ? "Far" : "Local"; });

}  // namespace
}  // namespace tensormount
