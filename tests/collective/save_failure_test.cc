// SPDX-License-Identifier: Apache-2.0
// File operations of every rank, the coordinator's included, fail once, from the first to the last:
// the verdict is the same on all ranks, names the failing rank and no other, and agrees with the
// disk.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/collective/save_testing.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

constexpr int kFailureRanks = 3;

// Fails the n-th operation that it is asked for.
class FailingOnce {
 public:
  FailingOnce() : fs_(HostFileSystem(), [this](const FileEvent& e) { return Before(e); }) {}

  FileSystem& fs() { return fs_; }
  void FailAt(int n, int err) {
    fail_at_ = n;
    err_ = err;
    seen_ = 0;
    what_.clear();
  }
  int seen() const { return seen_; }
  const std::string& what() const { return what_; }  // That failed.

 private:
  Status Before(const FileEvent& event) {
    if (seen_++ != fail_at_) return Status();
    what_ = std::string(FileOpName(event.op)) + " " + event.path;
    return Status::FromErrno(err_, FileOpName(event.op), event.path);
  }

  std::atomic<int> fail_at_{-1};
  std::atomic<int> err_{0};
  std::atomic<int> seen_{0};
  std::string what_;
  ObservedFileSystem fs_;
};

// By the number of writers of a rank.
class SaveFailureTest : public testing::TestWithParam<int> {
 protected:
  // `reuse`: of what the store holds already.
  Status Save(const std::string& name, Reuse reuse = Reuse::kOff) {
    SaveOptions options;
    options.reuse = reuse;
    options.writers = GetParam();
    return OneVerdict(SaveOnThreads(
        Path(name), kFailureRanks,
        [&](int rank, RankState& state) {
          // A shared tensor file, rank shards, packs, replicas, objects, values of each rank.
          state.Add(big_, Box::Make({600 * rank, 0}, {600, 600}).value());
          state.Add(cols_, Box::Make({0, 100 * rank}, {64, 100}).value());
          state.Add(same_, Box::Whole(same_.shape));
          ASSERT_OK(state.dict.AddObject("rng", std::to_string(rank),
                                         {.index = {rank}, .grid = {kFailureRanks}}));
          ASSERT_OK(state.dict.SetRankCommon("seed", rank));
        },
        options,
        [&](int rank) -> FileSystem& { return disks_[static_cast<std::size_t>(rank)].fs(); }));
  }
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }
  bool Published(const std::string& name) const {
    return HostFileSystem().Exists(Path(name) + "/COMMIT");
  }

  TempDir dir_;
  std::vector<FailingOnce> disks_ = std::vector<FailingOnce>(kFailureRanks);
  const RandomTensor big_ = MakeTensor("big", DType::kF32, {1800, 600});
  const RandomTensor cols_ = MakeTensor("cols", DType::kF32, {64, 300});
  const RandomTensor same_ = MakeTensor("same", DType::kF32, {64, 64});
};

// A power cut keeps what an fsync after it vouches for: its mode too, which says that nobody writes
// there any more.
TEST(SaveSealTest, SealedFilesAreSyncedAfterSealing) {
  const TempDir dir;
  std::mutex mutex;
  std::map<std::string, std::vector<FileOp>> seen;
  ObservedFileSystem fs(HostFileSystem(), {}, [&](const FileEvent& e) {
    if (e.op != FileOp::kWrite && e.op != FileOp::kSeal && e.op != FileOp::kSync) return;
    const std::lock_guard lock(mutex);
    seen[e.path].push_back(e.op);
  });
  const RandomTensor big = MakeTensor("big", DType::kF32, {1800, 600});
  const RandomTensor cols = MakeTensor("cols", DType::kF32, {64, 300});
  ASSERT_OK(OneVerdict(SaveOnThreads(
      dir.Join("store/a"), kFailureRanks,
      [&](int rank, RankState& state) {
        state.Add(big, Box::Make({600 * rank, 0}, {600, 600}).value());
        state.Add(cols, Box::Make({0, 100 * rank}, {64, 100}).value());
      },
      {}, [&](int) -> FileSystem& { return fs; })));
  int shared = 0;
  int sealed = 0;
  for (const auto& [path, ops] : seen) {
    const auto seal = std::find(ops.begin(), ops.end(), FileOp::kSeal);
    if (path.find("/data/") == std::string::npos) continue;
    ASSERT_NE(seal, ops.end()) << path;
    ++sealed;
    shared += path.ends_with(".bin") && path.find("-t") != std::string::npos ? 1 : 0;
    EXPECT_NE(std::find(seal, ops.end(), FileOp::kSync), ops.end()) << path;
    EXPECT_EQ(std::find(seal, ops.end(), FileOp::kWrite), ops.end()) << path;
  }
  EXPECT_EQ(shared, 1);
  EXPECT_GT(sealed, shared);
}

// What fails while a base is looked at, linked and described costs the reuse or the save, and
// nothing of what is there.
TEST_P(SaveFailureTest, EveryFaultInASaveWithABaseIsContained) {
  ASSERT_OK(Save("old"));
  for (FailingOnce& disk : disks_) disk.FailAt(-1, 0);
  ASSERT_OK(Save("count", Reuse::kAuto));
  std::vector<int> counts;
  for (FailingOnce& disk : disks_) counts.push_back(disk.seen());
  ASSERT_OK(HostFileSystem().RemoveTree(Path("count")));
  for (int rank = 0; rank < kFailureRanks; ++rank) {
    FailingOnce& disk = disks_[static_cast<std::size_t>(rank)];
    const int operations = counts[static_cast<std::size_t>(rank)];
    const int step = std::max(1, operations / TestScale(30));
    for (int point = rank; point < operations; point += step) {
      disk.FailAt(point, EIO);
      const Status status = Save("new", Reuse::kAuto);
      SCOPED_TRACE("rank " + std::to_string(rank) + ", operation " + std::to_string(point) + ": " +
                   disk.what() + ": " + status.ToString());
      disk.FailAt(-1, 0);
      if (status.ok() || status.code() == Code::kUnknown) {
        const auto report = VerifyCheckpoint(HostFileSystem(), Path("new"), {});
        ASSERT_OK(report);
        EXPECT_TRUE(report.value().damages.empty()) << report.value().damages.front().reason;
        EXPECT_EQ(ReadAll(Path("new")).at("big"), big_.bytes);
      } else {
        EXPECT_FALSE(Published("new"));
      }
      ASSERT_OK(HostFileSystem().RemoveTree(Path("new")));
      const auto old = VerifyCheckpoint(HostFileSystem(), Path("old"), {});
      ASSERT_OK(old);
      EXPECT_TRUE(old.value().damages.empty());
    }
  }
}

// Kinds of operations whose failure ends a save.
constexpr const char* kKinds[] = {"write", "sync", "seal"};

TEST_P(SaveFailureTest, EveryOperationFailureGivesOneVerdict) {
  ASSERT_OK(Save("old"));
  for (FailingOnce& disk : disks_) disk.FailAt(-1, 0);
  ASSERT_OK(Save("count"));
  std::vector<int> counts;
  for (FailingOnce& disk : disks_) counts.push_back(disk.seen());
  ASSERT_OK(HostFileSystem().RemoveTree(Path("count")));
  Random random(TestSeed());
  std::set<std::string> failed_ops;
  int failures = 0;
  const auto fail_at = [&](int rank, int point) {
    FailingOnce& disk = disks_[static_cast<std::size_t>(rank)];
    disk.FailAt(point, random.OneIn(2) ? ENOSPC : EACCES);
    const Status status = Save("new");
    SCOPED_TRACE("rank " + std::to_string(rank) + ", operation " + std::to_string(point) + ": " +
                 disk.what() + ": " + status.ToString());
    if (status.ok()) {
      // One that a save can do without.
      EXPECT_TRUE(Published("new"));
      EXPECT_EQ(ReadAll(Path("new")).at("big"), big_.bytes);
    } else if (status.code() != Code::kUnknown) {
      ++failures;
      failed_ops.insert(disk.what().substr(0, disk.what().find(' ')));
      EXPECT_FALSE(Published("new"));
      EXPECT_TRUE(status.message().starts_with("rank " + std::to_string(rank) + ": "));
      EXPECT_EQ(status.message().find("more ranks"), std::string::npos);
      for (const std::string& name : Inside(dir_.Join("store"))) {
        EXPECT_EQ(name, "old") << "nothing else is left";
      }
    }
    disk.FailAt(-1, 0);
    ASSERT_OK(HostFileSystem().RemoveTree(Path("new")));
  };
  for (int rank = 0; rank < kFailureRanks; ++rank) {
    const int operations = counts[static_cast<std::size_t>(rank)];
    ASSERT_GT(operations, 8);
    // Every second of a writer; of the coordinator, who does much more, some of each part.
    const int most = rank == 0 ? TestScale(20) : (operations + 1) / 2 * TestScale(1);
    const int step = std::max(1, operations / most);
    for (int from = 0; from < operations; from += step) {
      const int last = std::min(step, operations - from) - 1;
      ASSERT_NO_FATAL_FAILURE(fail_at(rank, from + static_cast<int>(random.Int(0, last))));
    }
  }
  // That the test reaches what it is about: nearly all fail, of all kinds. With several writers the
  // order of operations differs from save to save, so a kind may have been missed so far.
  EXPECT_GT(failures, (counts[1] + counts[2]) / 2);
  const auto missed = [&] {
    return std::any_of(std::begin(kKinds), std::end(kKinds),
                       [&](const char* op) { return !failed_ops.contains(op); });
  };
  for (int more = 0; more < 100 && missed(); ++more) {
    ASSERT_NO_FATAL_FAILURE(fail_at(1, static_cast<int>(random.Int(0, counts[1] - 1))));
  }
  for (const char* op : kKinds) EXPECT_EQ(failed_ops.count(op), 1u) << op;
  EXPECT_EQ(ReadAll(Path("old")).at("cols"), cols_.bytes);
  ASSERT_OK(Save("after"));
  EXPECT_EQ(ReadAll(Path("after")).at("same"), same_.bytes);
}

TEST_P(SaveFailureTest, FailuresOfSeveralRanksReportTheLowestRank) {
  ASSERT_OK(Save("old"));
  for (FailingOnce& disk : disks_) disk.FailAt(-1, 0);
  ASSERT_OK(Save("count"));
  std::vector<int> counts;
  for (FailingOnce& disk : disks_) counts.push_back(disk.seen());
  for (const std::size_t rank : {std::size_t{1}, std::size_t{2}}) {
    disks_[rank].FailAt(counts[rank] - 2, ENOSPC);  // Near the end: the manifest.
  }
  const Status status = Save("new");
  EXPECT_THAT(status, HasCode(Code::kResourceExhausted));
  EXPECT_THAT(status, HasMessage("rank 1: "));
  EXPECT_THAT(status, HasMessage("(1 other rank failed too)"));
}

INSTANTIATE_TEST_SUITE_P(Writers, SaveFailureTest, testing::Values(1, 3));

}  // namespace
}  // namespace tensormount
