// SPDX-License-Identifier: Apache-2.0
// Promises 1, 2, 3 and 8 under kills and I/O errors at every operation of a save.

#include <cerrno>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/crash/crash_support.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

constexpr int kKilled = 42;
constexpr int kMaxOps = 2000;

// What is there already, what is saved, how.
struct Scenario {
  bool replace = false;
  const char* name = "new";
};

Result<Store::Published> RunSave(FileSystem& fs, const std::string& path, const Scenario& s,
                                 const TinySpec& spec) {
  // Without memory for rows: every file that a publish may make is made.
  return WriteTinyCheckpoint(
      fs, path, s.name, spec,
      {.if_exists = s.replace ? IfExists::kReplace : IfExists::kFail, .rows_in_memory = 0});
}

// In a child process that ends before operation `k` (of a write: in its middle). Whether it was
// killed; false: the save came to its end, which must have been a good one.
bool SaveKilledBefore(int k, const std::string& path, const Scenario& s, const TinySpec& spec) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    int op = 0;
    ObservedFileSystem dying(HostFileSystem(), [&](const FileEvent& e) {
      if (op++ != k) return Status();
      if (e.op == FileOp::kWrite) {
        auto file = HostFileSystem().OpenShared(e.path);
        if (file.ok()) (void)file.value()->WriteAt(e.offset, e.data, e.size / 2);
      }
      _exit(kKilled);
    });
    _exit(RunSave(dying, path, s, spec).ok() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "op " << k;
  EXPECT_TRUE(WEXITSTATUS(status) == kKilled || WEXITSTATUS(status) == 0)
      << "op " << k << ": " << WEXITSTATUS(status);
  return WIFEXITED(status) && WEXITSTATUS(status) == kKilled;
}

class PublishCrashTest : public StoreTest {};

TEST_F(PublishCrashTest, KilledPublishLeavesAWholeCheckpointOrNone) {
  const TinySpec old_spec = CrashSpec(1);
  const TinySpec spec = CrashSpec(20);
  ASSERT_OK(Save("old", old_spec));
  const Scenario s;
  int k = 0;
  int seen_whole = 0;
  for (bool killed = true; killed; ++k) {
    ASSERT_LT(k, kMaxOps);
    SCOPED_TRACE("killed before operation " + std::to_string(k));
    killed = SaveKilledBefore(k, StorePath(), s, spec);
    const auto store = Store::Open(fs(), StorePath());
    ASSERT_OK(store);
    ASSERT_TRUE(NothingHalf(store.value()));
    ASSERT_TRUE(HoldsWhole(InStore("old"), old_spec));
    if (!killed) {
      ASSERT_TRUE(Visible(StorePath(), s.name));
    }
    if (Visible(StorePath(), s.name)) {
      ++seen_whole;
      ASSERT_TRUE(HoldsWhole(InStore(s.name), spec));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), s.name));
  }
  EXPECT_GT(k, 50);
  EXPECT_GT(seen_whole, 1);
}

TEST_F(PublishCrashTest, KilledReplaceLeavesTheOldOrTheNewCheckpoint) {
  const TinySpec old_spec = CrashSpec(1);
  const TinySpec spec = CrashSpec(20);
  const Scenario s{.replace = true, .name = "step"};
  int saw_old = 0;
  int saw_new = 0;
  for (bool killed = true; killed;) {
    const int k = saw_old + saw_new;
    ASSERT_LT(k, kMaxOps);
    SCOPED_TRACE("killed before operation " + std::to_string(k));
    ASSERT_OK(Save("step", old_spec));
    killed = SaveKilledBefore(k, StorePath(), s, spec);
    const auto store = Store::Open(fs(), StorePath());
    ASSERT_OK(store);
    ASSERT_TRUE(NothingHalf(store.value()));
    const bool is_old = HoldsWhole(InStore("step"), old_spec);
    if (!is_old || !killed) {
      ASSERT_TRUE(HoldsWhole(InStore("step"), spec));
    }
    ++(is_old ? saw_old : saw_new);
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "step"));
  }
  EXPECT_GT(saw_old, 50);
  EXPECT_GT(saw_new, 1);
}

TEST_F(PublishCrashTest, SaveWorksAfterKilledStoreCreation) {
  const TinySpec spec = CrashSpec(20);
  const Scenario s;
  for (int k = 0; k < 40; ++k) {
    SCOPED_TRACE("killed before operation " + std::to_string(k));
    const std::string path = dir_.Join("fresh/" + std::to_string(k) + "/store");
    ASSERT_TRUE(SaveKilledBefore(k, path, s, spec));
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(path, s.name));
  }
}

TEST_F(PublishCrashTest, KilledGcAndRemoveFinishNextTime) {
  const TinySpec spec = CrashSpec(20);
  ASSERT_OK(Save("stays", spec));
  bool killed = true;
  for (int k = 0; killed; ++k) {
    ASSERT_LT(k, kMaxOps);
    SCOPED_TRACE("killed before operation " + std::to_string(k));
    ASSERT_OK(Save("goes", spec));
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      int op = 0;
      ObservedFileSystem dying(HostFileSystem(), [&](const FileEvent&) {
        if (op++ == k) _exit(kKilled);
        return Status();
      });
      const auto store = Store::Open(dying, StorePath());
      _exit(store.ok() && store.value().Remove("goes").ok() && store.value().Gc(kGcAll).ok() ? 0
                                                                                             : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) != 1);
    killed = WEXITSTATUS(status) == kKilled;
    const auto store = Store::Open(fs(), StorePath());
    ASSERT_OK(store);
    ASSERT_TRUE(NothingHalf(store.value()));
    ASSERT_TRUE(HoldsWhole(InStore("stays"), spec));
    if (Visible(StorePath(), "goes")) {
      ASSERT_TRUE(HoldsWhole(InStore("goes"), spec));
      ASSERT_OK(store.value().Remove("goes"));
    }
    ASSERT_OK(store.value().Gc(kGcAll));
    ASSERT_THAT(NamesIn(InStore(".trash")), testing::IsEmpty());
  }
}

// ---- I/O errors --------------------------------------------------------------------------------

int ErrnoFor(FileOp op, int k) {
  const bool may_fill = op == FileOp::kWrite || op == FileOp::kCreate ||
                        op == FileOp::kCreateDirectory || op == FileOp::kSync;
  return may_fill && k % 2 == 0 ? ENOSPC : EIO;
}

class IoErrorTest : public StoreTest, public testing::WithParamInterface<bool> {};

TEST_P(IoErrorTest, AnyIoErrorIsReportedAndNothingIsPartlyVisible) {
  const bool for_good = GetParam();  // From then on, or once.
  const TinySpec old_spec = CrashSpec(1);
  const TinySpec spec = CrashSpec(20);
  ASSERT_OK(Save("old", old_spec));
  int survived = 0;
  bool reached = true;
  int k = 0;
  for (; reached; ++k) {
    ASSERT_LT(k, kMaxOps);
    const Scenario s{.replace = k % 3 == 0, .name = "new"};
    if (s.replace) {
      ASSERT_OK(Save("new", old_spec));
    }
    int op = 0;
    std::string what;
    bool renamed = false;
    ObservedFileSystem faulty(
        fs(),
        [&](const FileEvent& e) {
          const int n = op++;
          if (n < k || (n > k && !for_good)) return Status();
          const Status error = Status::FromErrno(ErrnoFor(e.op, k), FileOpName(e.op), e.path);
          if (n == k) what = error.message();
          return error;
        },
        [&](const FileEvent& e) {
          renamed = renamed || e.op == FileOp::kExchange ||
                    (e.op == FileOp::kRename && e.path2.ends_with("/new"));
        });
    const auto saved = RunSave(faulty, StorePath(), s, spec);
    reached = !what.empty();
    SCOPED_TRACE("operation " + std::to_string(k) + ": " + what + ": " + saved.status().ToString());
    const auto store = Store::Open(fs(), StorePath());
    ASSERT_OK(store);
    ASSERT_TRUE(NothingHalf(store.value()));
    ASSERT_TRUE(HoldsWhole(InStore("old"), old_spec));
    if (saved.ok()) {
      ++survived;
      ASSERT_TRUE(HoldsWhole(InStore("new"), spec));
    } else if (saved.status().code() == Code::kUnknown) {
      // Unknown is only for what may have happened; without a reader nobody can tell.
      ASSERT_TRUE(renamed || for_good);
      if (renamed) {
        ASSERT_TRUE(HoldsWhole(InStore("new"), spec));
      }
    } else {
      ASSERT_FALSE(renamed);
      ASSERT_EQ(Visible(StorePath(), "new"), s.replace);
      if (s.replace) {
        ASSERT_TRUE(HoldsWhole(InStore("new"), old_spec));
      }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "new"));
  }
  EXPECT_GT(k, 50);
  // Only what is no loss may fail in silence.
  EXPECT_LT(survived, k / 3);
}

INSTANTIATE_TEST_SUITE_P(Once, IoErrorTest, testing::Values(false),
                         [](const auto&) { return std::string("AndThenWell"); });
INSTANTIATE_TEST_SUITE_P(ForGood, IoErrorTest, testing::Values(true),
                         [](const auto&) { return std::string("FromThenOn"); });

TEST_F(PublishCrashTest, FailedPublishCanBeRetriedWithTheSameStaging) {
  const Store store = MakeStore();
  const TinySpec spec = CrashSpec(20);
  for (int k = 0;; ++k) {
    ASSERT_LT(k, kMaxOps);
    const Staging staging = Written(store, "step", spec);
    int op = 0;
    ObservedFileSystem faulty(fs(), [&](const FileEvent& e) {
      return op++ == k ? Status::FromErrno(EIO, FileOpName(e.op), e.path) : Status();
    });
    const auto through = Store::Open(faulty, StorePath());
    const auto first = through.ok() ? through.value().Publish(staging, TinyCoordinator(spec),
                                                              {.rows_in_memory = 0})
                                    : Result<Store::Published>(through.status());
    SCOPED_TRACE("operation " + std::to_string(k) + ": " + first.status().ToString());
    if (!first.ok() && first.status().code() != Code::kUnknown) {
      ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {}));
    }
    ASSERT_TRUE(HoldsWhole(InStore("step"), spec));
    ASSERT_OK(store.Remove("step"));
    ASSERT_OK(store.Gc(kGcAll));
    if (op <= k) break;
  }
}

}  // namespace
}  // namespace tensormount
