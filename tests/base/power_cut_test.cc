// SPDX-License-Identifier: Apache-2.0
#include "tests/support/power_cut.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::IsSubsetOf;
using testing::Not;
using testing::UnorderedElementsAre;

class PowerCutTest : public testing::Test {
 protected:
  PowerCutTest() {
    EXPECT_OK(HostFileSystem().CreateDirectory(dir_.Join("live")));
    fs_ = std::make_unique<PowerCutFileSystem>(dir_.Join("live"));
  }
  std::string At(std::string_view name) const { return dir_.Join("live/" + std::string(name)); }
  std::unique_ptr<File> Create(const std::string& name, const std::string& data) {
    Result<std::unique_ptr<File>> file = fs_->CreateExclusive(At(name));
    EXPECT_OK(file);
    EXPECT_OK(file.value()->WriteAt(0, data.data(), data.size()));
    return std::move(file).value();
  }
  // "name=bytes" of every file and "name/" of every folder, in order, joined by blanks.
  static std::string Show(const std::string& path, const std::string& prefix = "") {
    std::string out;
    const Result<std::vector<DirectoryEntry>> entries = HostFileSystem().List(path);
    if (!entries.ok()) return entries.status().ToString();
    for (const DirectoryEntry& e : entries.value()) {
      const std::string child = JoinPath(path, e.name);
      if (e.kind == FileKind::kDirectory) {
        out += prefix + e.name + "/ " + Show(child, prefix + e.name + "/");
      } else {
        out += prefix + e.name + "=" + HostFileSystem().ReadFile(child, 1 << 20).value() + " ";
      }
    }
    return out;
  }
  // The different states that many cuts after operation `k` leave.
  std::set<std::string> States(std::size_t k, int cuts = 120) {
    Random random(TestSeed() + k);
    std::set<std::string> states;
    for (int i = 0; i < cuts; ++i) {
      EXPECT_OK(fs_->Materialise(k, random, dir_.Join("after")));
      states.insert(Show(dir_.Join("after")));
      EXPECT_OK(HostFileSystem().RemoveTree(dir_.Join("after")));
    }
    return states;
  }
  std::set<std::string> StatesNow() { return States(fs_->op_count()); }

  TempDir dir_;
  std::unique_ptr<PowerCutFileSystem> fs_;
};

TEST_F(PowerCutTest, UnsyncedDataMayBeLostInAnyWay) {
  Create("f", "ab");
  EXPECT_THAT(StatesNow(), AllOf(Contains(""), Contains("f= "), Contains("f=ab "),
                                 Contains(std::string("f=\0\0 ", 5))));
}

TEST_F(PowerCutTest, FileSyncDoesNotPersistTheName) {
  ASSERT_OK(Create("f", "ab")->Sync());
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("", "f=ab "));
}

TEST_F(PowerCutTest, DirectorySyncDoesNotPersistTheBytes) {
  Create("f", "ab");
  ASSERT_OK(fs_->SyncDirectory(At("")));
  const std::set<std::string> states = StatesNow();
  EXPECT_THAT(states, Not(Contains("")));
  EXPECT_THAT(states, Contains("f= "));
  EXPECT_THAT(states, Contains("f=ab "));
}

TEST_F(PowerCutTest, FileAndDirectorySyncTogetherAreDurable) {
  ASSERT_OK(Create("f", "ab")->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("")));
  EXPECT_THAT(StatesNow(), ElementsAre("f=ab "));
  // Whatever happens later to others, and not before the last sync.
  ASSERT_OK(fs_->CreateDirectory(At("d")));
  EXPECT_THAT(StatesNow(), ElementsAre("d/ f=ab ", "f=ab "));
  EXPECT_THAT(States(3), UnorderedElementsAre("", "f=ab "));
}

TEST_F(PowerCutTest, WritesAfterASyncMayTear) {
  const std::string old(2048, 'o');
  const std::unique_ptr<File> file = Create("f", old);
  ASSERT_OK(file->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("")));
  const std::string fresh(2048, 'n');
  ASSERT_OK(file->WriteAt(0, fresh.data(), fresh.size()));
  const std::set<std::string> states = StatesNow();
  EXPECT_THAT(states, Contains("f=" + old + " "));
  EXPECT_THAT(states, Contains("f=" + fresh + " "));
  EXPECT_GT(states.size(), 4u);
  // Synced bytes are never zeros, and sectors are whole.
  for (const std::string& state : states) {
    ASSERT_EQ(state.size(), 2048u + 3);
    for (std::size_t at = 0; at < 2048; ++at) {
      ASSERT_EQ(state[2 + at], state[2 + at / 512 * 512]);
      ASSERT_TRUE(state[2 + at] == 'o' || state[2 + at] == 'n');
    }
  }
  ASSERT_OK(file->Sync());
  EXPECT_THAT(StatesNow(), ElementsAre("f=" + fresh + " "));
}

TEST_F(PowerCutTest, UnsyncedTruncationMayBeLost) {
  const std::unique_ptr<File> file = Create("f", "abcdef");
  ASSERT_OK(file->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("")));
  ASSERT_OK(file->Truncate(2));
  EXPECT_THAT(StatesNow(), AllOf(Contains("f=ab "), Contains("f=abcdef ")));
}

TEST_F(PowerCutTest, EntriesOfOneDirectoryAreIndependent) {
  ASSERT_OK(fs_->CreateDirectory(At("a")));
  ASSERT_OK(fs_->CreateDirectory(At("b")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("", "a/ ", "b/ ", "a/ b/ "));
}

TEST_F(PowerCutTest, ContentsOfALostDirectoryAreLost) {
  ASSERT_OK(fs_->CreateDirectory(At("d")));
  ASSERT_OK(Create("d/f", "x")->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("d")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("", "d/ d/f=x "));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  EXPECT_THAT(StatesNow(), ElementsAre("d/ d/f=x "));
}

// The publishing of a checkpoint: which syncs make it durable.
TEST_F(PowerCutTest, RenamedDirectoryHasExactlyOneName) {
  ASSERT_OK(fs_->CreateDirectories(At("staging/s")));
  ASSERT_OK(Create("staging/s/f", "x")->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("staging/s")));
  ASSERT_OK(fs_->SyncDirectory(At("staging")));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  ASSERT_OK(fs_->RenameNoReplace(At("staging/s"), At("c")));
  const std::string before = "staging/ staging/s/ staging/s/f=x ";
  const std::string after = "c/ c/f=x staging/ ";
  EXPECT_THAT(StatesNow(), UnorderedElementsAre(before, after));
  ASSERT_OK(fs_->SyncDirectory(At("staging")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre(before, after));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  EXPECT_THAT(StatesNow(), ElementsAre(after));
}

TEST_F(PowerCutTest, MovedFileAlwaysHasAName) {
  ASSERT_OK(fs_->CreateDirectory(At("a")));
  ASSERT_OK(Create("a/f", "x")->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("a")));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  ASSERT_OK(fs_->CreateDirectory(At("b")));  // Not synced: the rename brings it along.
  ASSERT_OK(fs_->RenameNoReplace(At("a/f"), At("b/f")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("a/ a/f=x ", "a/ a/f=x b/ ", "a/ b/ b/f=x ",
                                                "a/ a/f=x b/ b/f=x "));
  ASSERT_OK(fs_->SyncDirectory(At("b")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("a/ b/ b/f=x ", "a/ a/f=x b/ b/f=x "));
  ASSERT_OK(fs_->SyncDirectory(At("a")));
  EXPECT_THAT(StatesNow(), ElementsAre("a/ b/ b/f=x "));
}

TEST_F(PowerCutTest, ExchangeIsAtomic) {
  ASSERT_OK(Create("a", "1")->Sync());
  ASSERT_OK(Create("b", "2")->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("")));
  ASSERT_OK(fs_->Exchange(At("a"), At("b")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("a=1 b=2 ", "a=2 b=1 "));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  EXPECT_THAT(StatesNow(), ElementsAre("a=2 b=1 "));
}

TEST_F(PowerCutTest, UnsyncedRemovalsMayBeUndone) {
  ASSERT_OK(fs_->CreateDirectory(At("d")));
  ASSERT_OK(Create("d/f", "x")->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("d")));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  ASSERT_OK(fs_->RemoveTree(At("d")));
  EXPECT_THAT(StatesNow(), UnorderedElementsAre("", "d/ ", "d/ d/f=x "));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  EXPECT_THAT(StatesNow(), ElementsAre(""));
}

TEST_F(PowerCutTest, HardLinksShareOneFileAfterACut) {
  ASSERT_OK(Create("f", "x")->Sync());
  ASSERT_OK(fs_->Link(At("f"), At("g")));
  ASSERT_OK(fs_->SyncDirectory(At("")));
  Random random(TestSeed());
  ASSERT_OK(fs_->Materialise(fs_->op_count(), random, dir_.Join("after")));
  EXPECT_EQ(HostFileSystem().Stat(dir_.Join("after/f")).value().inode,
            HostFileSystem().Stat(dir_.Join("after/g")).value().inode);
}

TEST_F(PowerCutTest, SealIsDurableAfterASync) {
  const std::unique_ptr<File> file = Create("f", "x");
  ASSERT_OK(file->Seal());
  ASSERT_OK(file->Sync());
  ASSERT_OK(fs_->SyncDirectory(At("")));
  Random random(TestSeed());
  ASSERT_OK(fs_->Materialise(fs_->op_count(), random, dir_.Join("after")));
  EXPECT_EQ(HostFileSystem().Stat(dir_.Join("after/f")).value().mode & 0222, 0u);
}

TEST_F(PowerCutTest, ExistingFilesAreDurable) {
  ASSERT_OK(Create("f", "x")->Close());
  ASSERT_OK(fs_->CreateDirectories(At("d/e")));
  PowerCutFileSystem again(dir_.Join("live"));
  EXPECT_EQ(again.op_count(), 0u);
  Random random(TestSeed());
  ASSERT_OK(again.Materialise(0, random, dir_.Join("after")));
  EXPECT_EQ(Show(dir_.Join("after")), "d/ d/e/ f=x ");
}

TEST_F(PowerCutTest, ChangesOutsideTheFileSystemAreDetected) {
  ASSERT_OK(Create("f", "x")->Close());
  EXPECT_OK(fs_->CompareWithDisk());
  ASSERT_OK(HostFileSystem().WriteFileDurably(At("g"), "x"));
  EXPECT_THAT(fs_->CompareWithDisk(), HasCode(Code::kInternal));
  EXPECT_THAT(fs_->Link(At("g"), At("h")), HasCode(Code::kInternal));
  EXPECT_THAT(fs_->CreateDirectory(dir_.Join("outside")), HasCode(Code::kInvalidArgument));
}

// Random work; the journal adds up to the disk, whatever was durable stays, and nothing appears
// that was never there.
TEST_F(PowerCutTest, RandomWorkReplaysToTheDiskState) {
  Random random(TestSeed());
  for (int round = 0; round < TestScale(3); ++round) {
    ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("live")));
    ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("live")));
    fs_ = std::make_unique<PowerCutFileSystem>(dir_.Join("live"));
    const std::vector<std::string> names = {"a", "b", "a/a", "a/b", "b/a", "b/b", "a/a/a"};
    for (int i = 0; i < 120; ++i) {
      const std::string from = At(random.Pick(names));
      const std::string to = At(random.Pick(names));
      switch (random.Int(0, 8)) {  // Most fail; that is fine.
        case 0:
        case 1:
          (void)fs_->CreateDirectory(to);
          break;
        case 2: {
          Result<std::unique_ptr<File>> file = fs_->OpenShared(to);
          if (!file.ok()) break;
          const std::string data = random.Bytes(static_cast<std::size_t>(random.Int(0, 1500)));
          const auto at = static_cast<std::uint64_t>(random.Int(0, 900));
          EXPECT_OK(file.value()->WriteAt(at, data.data(), data.size()));
          if (random.OneIn(4)) {
            EXPECT_OK(file.value()->Truncate(at));
          }
          if (random.OneIn(2)) {
            EXPECT_OK(file.value()->Sync());
          }
          break;
        }
        case 3:
          (void)fs_->Link(from, to);
          break;
        case 4:
          if (!to.starts_with(from)) (void)fs_->RenameNoReplace(from, to);
          break;
        case 5:
          if (!to.starts_with(from) && !from.starts_with(to)) (void)fs_->Exchange(from, to);
          break;
        case 6:
          (void)fs_->RemoveFile(to);
          break;
        case 7:
          (void)fs_->RemoveDirectory(to);
          break;
        default:
          if (!HostFileSystem().List(to).ok()) break;
          EXPECT_OK(fs_->SyncDirectory(to));
      }
    }
    ASSERT_OK(fs_->CompareWithDisk());
    for (int cut = 0; cut < 60; ++cut) {
      const auto k =
          static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(fs_->op_count())));
      ASSERT_OK(fs_->Materialise(k, random, dir_.Join("after"))) << fs_->Describe(k);
      ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("after")));
    }
    // All synced: one state, what the disk has.
    std::function<void(const std::string&)> sync_all = [&](const std::string& path) {
      const Result<std::vector<DirectoryEntry>> entries = HostFileSystem().List(path);
      ASSERT_OK(entries);
      for (const DirectoryEntry& e : entries.value()) {
        const std::string child = JoinPath(path, e.name);
        if (e.kind == FileKind::kDirectory) {
          sync_all(child);
        } else {
          EXPECT_OK(fs_->OpenRead(child).value()->Sync());
        }
      }
      EXPECT_OK(fs_->SyncDirectory(path));
    };
    sync_all(dir_.Join("live"));
    EXPECT_THAT(States(fs_->op_count(), 10), ElementsAre(Show(dir_.Join("live"))));
  }
}

}  // namespace
}  // namespace tensormount
