// SPDX-License-Identifier: Apache-2.0
// What checkpoints cost that share files, and who is named where a shared file is damaged.
#include "index/store/costs.h"

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>

#include "tests/index/sharing_store.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class CostsTest : public SharingStoreTest {
 protected:
  // Besides, copy has base as copies.
  void SetUp() override {
    SharingStoreTest::SetUp();
    ASSERT_OK(SaveSharing(fs(), MakeStore(), "copy", StepSpec(30), "base", true));
  }
  StoreCosts Costs() {
    auto costs = StoreCosts::Of(fs(), MakeStore());
    EXPECT_OK(costs);
    return std::move(costs).value();
  }
  // What `du --apparent-size` finds of it, folders aside: all files, and those whose inode no other
  // checkpoint has.
  struct Found {
    std::uint64_t bytes = 0;
    std::uint64_t own = 0;
  };
  Found Look(const std::string& name) {
    Found found;
    std::set<std::uint64_t> others;
    for (const std::string& other : NamesIn(StorePath())) {
      if (other == name || !CheckCheckpointName(other).ok()) continue;
      for (const auto& [file, bytes] : FilesBelow(InStore(other))) {
        others.insert(fs().LinkStat(InStore(other + "/" + file)).value().inode);
      }
    }
    for (const auto& [file, bytes] : FilesBelow(InStore(name))) {
      const FileInfo info = fs().LinkStat(InStore(name + "/" + file)).value();
      found.bytes += info.size;
      if (!others.contains(info.inode)) found.own += info.size;
    }
    return found;
  }
};

TEST_F(CostsTest, CostsMatchTheFilesOnDisk) {
  const StoreCosts costs = Costs();
  ASSERT_THAT(costs.checkpoints(), SizeIs(4));
  std::uint64_t own = 0;
  for (const CheckpointCost& cost : costs.checkpoints()) {
    SCOPED_TRACE(cost.listing.name);
    const Found found = Look(cost.listing.name);
    EXPECT_EQ(cost.bytes, found.bytes);
    EXPECT_EQ(cost.own_bytes, found.own);
    EXPECT_NEAR(
        static_cast<double>(cost.created),
        static_cast<double>(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())),
        600);
    own += cost.own_bytes;
  }
  const CheckpointCost* const base = costs.Find("base");
  ASSERT_NE(base, nullptr);
  EXPECT_EQ(base->shared_bytes(), base->data_bytes) << "its manifests are its own";
  EXPECT_EQ(costs.Find("copy")->shared_bytes(), 0u);
  EXPECT_EQ(costs.stored_bytes(), own + base->data_bytes);
  EXPECT_EQ(costs.shared_bytes(), base->data_bytes);
  const auto sharers = costs.SharersOf("link-1");
  ASSERT_THAT(sharers, SizeIs(2));
  EXPECT_EQ(sharers[0].name, "base");
  EXPECT_EQ(sharers[1].name, "link-2");
  EXPECT_EQ(sharers[1].bytes, base->data_bytes);
  EXPECT_EQ(sharers[1].files, 3u);
  EXPECT_THAT(costs.SharersOf("copy"), IsEmpty());
  EXPECT_EQ(costs.Find("nothing"), nullptr);
}

TEST_F(CostsTest, RemovingACheckpointFreesItsOwnBytes) {
  const std::uint64_t before = Costs().stored_bytes();
  const std::uint64_t own = Costs().Find("link-1")->own_bytes;
  ASSERT_OK(MakeStore().Remove("link-1"));
  ASSERT_OK_AND_ASSIGN(const auto report, MakeStore().Gc({.grace = std::chrono::seconds(0)}));
  EXPECT_EQ(Costs().stored_bytes(), before - own);
  EXPECT_EQ(report.bytes_freed, own);
  ASSERT_OK(MakeStore().Remove("link-2"));
  EXPECT_EQ(Costs().Find("base")->shared_bytes(), 0u) << "in .trash/ nobody shares it";
}

// Each COMMIT is read once, no index is opened, and only files that several list are looked at.
TEST_F(CostsTest, CostsReadOnlyCommitRecordsAndSharedFiles) {
  std::mutex mutex;
  std::map<std::string, int> opened;
  std::set<std::string> looked;
  ObservedFileSystem seen(fs(), [&](const FileEvent& e) {
    const std::lock_guard lock(mutex);
    const std::string below = e.path.substr(StorePath().size());
    if (e.op == FileOp::kOpenRead) ++opened[below];
    if (e.op == FileOp::kStat && below.find("/data/") != std::string::npos) looked.insert(below);
    return Status();
  });
  ASSERT_OK_AND_ASSIGN(const Store store, Store::Open(seen, StorePath()));
  ASSERT_OK(StoreCosts::Of(seen, store));
  opened.erase("/store.json");
  for (const auto& [path, times] : opened) {
    EXPECT_TRUE(path.ends_with("/COMMIT") || path.ends_with("/manifest/coordinator.tmm")) << path;
    EXPECT_EQ(times, 1) << path;
  }
  EXPECT_THAT(opened, SizeIs(8));
  EXPECT_THAT(looked, SizeIs(4 * 3)) << "one of four names is a copy: each is looked at";
  looked.clear();
  ASSERT_OK(MakeStore().Remove("copy"));
  ASSERT_OK(MakeStore().Gc({.grace = std::chrono::seconds(0)}));
  ASSERT_OK(StoreCosts::Of(seen, store));
  EXPECT_THAT(looked, SizeIs(2 * 3)) << "three names, and as many links";
}

// As many names as there are checkpoints that list the file, one of which has a copy: the name that
// is missing there is in .trash/ or in a staging, and must not hide the copy.
TEST_F(CostsTest, LinksInTrashOrStagingDoNotHideCopies) {
  ASSERT_OK(
      MakeStore().Remove("link-1"));  // Links: base, link-2, .trash; listed: base, copy, link-2.
  const auto agree = [&] {
    const StoreCosts costs = Costs();
    for (const CheckpointCost& cost : costs.checkpoints()) {
      EXPECT_EQ(cost.own_bytes, Look(cost.listing.name).own) << cost.listing.name;
    }
  };
  agree();
  ASSERT_OK(MakeStore().Gc({.grace = std::chrono::seconds(0)}));
  const std::string inner = InStore(".staging/.copy-1/checkpoint/data");
  ASSERT_OK(fs().CreateDirectories(inner));
  for (const std::string& file : NamesIn(InStore("base/data"))) {
    ASSERT_OK(fs().Link(InStore("base/data/" + file), JoinPath(inner, file)));
  }
  agree();
}

// A number that leaves out what could not be looked at would be a wrong one.
TEST_F(CostsTest, UnreadableFileFailsTheCosts) {
  for (const int err : {EACCES, EIO}) {
    for (int point = 0; point < 12; ++point) {
      std::atomic<int> seen = 0;
      ObservedFileSystem failing(fs(), [&](const FileEvent& e) {
        const bool data = e.path.find("/data/") != std::string::npos;
        return e.op == FileOp::kStat && data && seen++ == point
                   ? Status::FromErrno(err, "injected", e.path)
                   : Status();
      });
      ASSERT_OK_AND_ASSIGN(const Store store, Store::Open(failing, StorePath()));
      EXPECT_FALSE(StoreCosts::Of(failing, store).ok()) << point;
    }
  }
}

TEST_F(CostsTest, CheckpointsWithAProblemHaveNoKnownCost) {
  WriteWholeFile(InStore("link-2/COMMIT"), "nonsense");
  const StoreCosts costs = Costs();
  ASSERT_THAT(costs.checkpoints(), SizeIs(4));
  EXPECT_THAT(costs.Find("link-2")->listing.problem, HasCode(Code::kDataLoss));
  EXPECT_EQ(costs.Find("link-2")->bytes, 0u);
  EXPECT_EQ(costs.Find("link-1")->shared_bytes(), costs.Find("base")->data_bytes);
  // Without its manifest the date is that of COMMIT.
  ASSERT_OK(fs().RemoveFile(InStore("copy/manifest/coordinator.tmm")));
  SetMtime(InStore("copy/COMMIT"), 1234567);
  EXPECT_EQ(Costs().Find("copy")->created, 1234567);
  // Where a file is gone it is shared with nobody.
  for (const std::string& file : NamesIn(InStore("base/data"))) {
    ASSERT_OK(fs().RemoveFile(InStore("base/data/" + file)));
  }
  EXPECT_EQ(Costs().Find("base")->shared_bytes(), 0u);
}

TEST_F(CostsTest, DamagedSharedFileNamesAllItsCheckpoints) {
  const std::string file = "data/" + NamesIn(InStore("base/data"))[0];
  FlipByte(InStore("base/" + file), 20);
  const auto sharers = [&](const std::string& name) {
    auto report = VerifyCheckpoint(fs(), InStore(name), {});
    EXPECT_OK(report);
    NameSharers(fs(), InStore(name), report.value());
    std::vector<std::string> names;
    for (const VerifyReport::Damage& damage : report.value().damages) {
      EXPECT_EQ(damage.file, file);
      names = damage.shared_with;
    }
    return names;
  };
  EXPECT_THAT(sharers("base"), ElementsAre("link-1", "link-2"));
  EXPECT_THAT(sharers("link-2"), ElementsAre("base", "link-1"));
  EXPECT_THAT(sharers("copy"), IsEmpty()) << "it has bytes of its own, which are whole";
  ASSERT_OK_AND_ASSIGN(const auto findings, MakeStore().Fsck({.read_data = true}));
  int named = 0;
  for (const Store::FsckFinding& finding : findings) {
    if (!finding.damage) continue;
    ++named;
    EXPECT_THAT(finding.shared_with, SizeIs(2)) << finding.object;
    EXPECT_THAT(finding.problem, HasSubstr("; the same file is in "));
  }
  EXPECT_EQ(named, 3);
  // Of a file that has one name, or is damaged as a copy, nobody else.
  const std::string copied = "copy/" + file;
  FlipByte(InStore(copied), 20);
  EXPECT_THAT(sharers("copy"), IsEmpty());
}

}  // namespace
}  // namespace tensormount
