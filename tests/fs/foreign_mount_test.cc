// SPDX-License-Identifier: Apache-2.0
// What a mount shows of checkpoints that other programs wrote, and of their training directories.
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/deadline.h"
#include "fs/vfs.h"
#include "tests/adopt/safetensors_maker.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

using testing::ElementsAre;
using testing::UnorderedElementsAre;

class ForeignMountTest : public testing::Test {
 protected:
  static MadeTensor Tensor(const std::string& key) { return {key, DType::kF32, {3, 2}}; }
  std::string run() const { return dir_.Join("run"); }
  void Step(const std::string& name, const std::string& key = "w") {
    ASSERT_OK(HostFileSystem().CreateDirectories(run() + "/" + name));
    // By rename, as writers that mind their readers do.
    WriteSafetensors(run() + "/fresh", {Tensor(key)});
    ASSERT_EQ(
        rename((run() + "/fresh").c_str(), (run() + "/" + name + "/model.safetensors").c_str()), 0);
  }
  void Open(const std::string& source, const std::vector<std::string>& roots = {}) {
    auto vfs = Vfs::Open(HostFileSystem(), {.source = source, .writable = true, .roots = roots});
    ASSERT_OK(vfs);
    vfs_ = std::move(vfs).value();
    ops_ = std::make_unique<VfsOps>(*vfs_);
  }
  nlohmann::json Status() { return nlohmann::json::parse("{" + vfs_->StatusFields() + "}"); }
  std::vector<std::string> Names() {
    auto names = ops_->List("");
    return names.ok() ? names.value() : std::vector<std::string>{names.status().ToString()};
  }
  template <typename Condition>
  void ExpectSoon(const Condition& condition) {
    const Deadline deadline = Deadline::After(std::chrono::seconds(30));
    while (!condition()) {
      ASSERT_FALSE(deadline.Passed());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  TempDir dir_;
  std::unique_ptr<Vfs> vfs_;
  std::unique_ptr<VfsOps> ops_;
};

TEST_F(ForeignMountTest, DirectoryMountsAsACheckpoint) {
  Step("step1");
  timespec times[2] = {{.tv_sec = 1000, .tv_nsec = 5}, {.tv_sec = 1000, .tv_nsec = 5}};
  const std::string file = run() + "/step1/model.safetensors";
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  Open(run() + "/step1");
  EXPECT_EQ(Status()["kind"], "foreign");
  EXPECT_THAT(ops_->ReadAll("tensors/w"), IsOkAndHolds(Tensor("w").bytes()));
  EXPECT_EQ(ops_->Stat("tensors/w").value().mtime, 1000);
  const auto text = nlohmann::json::parse(ops_->ReadAll("checkpoint.json").value());
  EXPECT_EQ(text["producer"], "safetensors");
  EXPECT_FALSE(vfs_->writable());
  // Written to behind our back: refused, not misread.
  WriteWholeFile(file, ReadWholeFile(file));
  EXPECT_EQ(ops_->ReadAll("tensors/w").status().ToErrno(), ESTALE);
}

// As `rsync -t --inplace` does: size and time are what they were.
TEST_F(ForeignMountTest, FileRewrittenWithItsOldMtimeIsRefused) {
  Step("step1");
  const timespec times[2] = {{.tv_sec = 1000, .tv_nsec = 5}, {.tv_sec = 1000, .tv_nsec = 5}};
  const std::string file = run() + "/step1/model.safetensors";
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  Open(run() + "/step1");
  ASSERT_OK_AND_ASSIGN(const auto open, ops_->Open("tensors/w"));
  EXPECT_THAT(open->Read(0, 100), IsOkAndHolds(Tensor("w").bytes()));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // Longer than the clock's grain.
  // Another name or another mode changes no byte.
  ASSERT_EQ(link(file.c_str(), (run() + "/backup").c_str()), 0);
  EXPECT_THAT(open->Read(0, 100), IsOkAndHolds(Tensor("w").bytes()));
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  EXPECT_THAT(open->Read(0, 100), IsOkAndHolds(Tensor("w").bytes()));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::string bytes = ReadWholeFile(file);
  bytes.back() ^= 1;
  WriteWholeFile(file, bytes);
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  EXPECT_EQ(open->Read(0, 100).status().ToErrno(), ESTALE);
  EXPECT_EQ(ops_->ReadAll("tensors/w").status().ToErrno(), ESTALE);
}

TEST_F(ForeignMountTest, TrainingDirectoryMountsAsAStore) {
  Step("iter_0000010", "a");
  Step("iter_0000020", "b");
  ASSERT_OK(HostFileSystem().CreateDirectory(run() + "/iter_0000030"));  // Being saved.
  ASSERT_OK(HostFileSystem().CreateDirectory(run() + "/logs"));
  Open(run());
  EXPECT_EQ(Status()["kind"], "foreign-steps");
  EXPECT_FALSE(vfs_->writable());
  EXPECT_THAT(Names(), UnorderedElementsAre("iter_0000010", "iter_0000020", "latest"));
  EXPECT_THAT(ops_->ReadLink("latest"), IsOkAndHolds(std::string("iter_0000020")));
  EXPECT_THAT(ops_->ReadAll("iter_0000010/tensors/a"), IsOkAndHolds(Tensor("a").bytes()));
  EXPECT_EQ(ops_->Stat("logs").status().ToErrno(), ENOENT);
  EXPECT_EQ(ops_->Stat(".staging").status().ToErrno(), ENOENT);

  // The save ends; the trainer says which one is the last.
  Step("iter_0000030", "c");
  ExpectSoon([&] { return ops_->ReadLink("latest").value() == "iter_0000030"; });
  WriteWholeFile(run() + "/latest_checkpointed_iteration.txt", "20");
  ExpectSoon([&] { return ops_->ReadLink("latest").value() == "iter_0000020"; });
  EXPECT_EQ(Status()["latest"], "iter_0000020");

  ASSERT_OK(HostFileSystem().RemoveTree(run() + "/iter_0000010"));
  // Not by Names(), which looks up what it lists: between the two a name may go.
  ExpectSoon([&] { return ops_->Stat("iter_0000010").status().ToErrno() == ENOENT; });
  EXPECT_EQ(Names().size(), 3u);
}

TEST_F(ForeignMountTest, ReplacedStepGetsNewInodes) {
  Step("step5", "old");
  Open(run());
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry before, ops_->Walk("step5"));
  ASSERT_OK_AND_ASSIGN(const Vfs::Entry tensor, ops_->Walk("step5/tensors/old"));
  EXPECT_THAT(ops_->ReadAll("step5/tensors/old"), IsOkAndHolds(Tensor("old").bytes()));
  Step("step5", "new");
  ExpectSoon([&] { return ops_->Stat("step5/tensors/new").ok(); });
  // The new step is shown before the old one ends.
  ExpectSoon([&] { return vfs_->Stat(tensor.id).status().ToErrno() == ESTALE; });
  ExpectSoon([&] { return vfs_->Stat(before.id).status().ToErrno() == ESTALE; });
  EXPECT_NE(ops_->Walk("step5").value().attributes.inode, before.attributes.inode);
  EXPECT_THAT(ops_->ReadAll("step5/tensors/new"), IsOkAndHolds(Tensor("new").bytes()));
}

TEST_F(ForeignMountTest, LinksOutNeedARootExceptInAHubCache) {
  for (const char* folder : {"hub/blobs", "hub/snapshots/x", "hub/links/x"}) {
    ASSERT_OK(HostFileSystem().CreateDirectories(dir_.Join(folder)));
  }
  WriteSafetensors(dir_.Join("hub/blobs/0123"), {Tensor("w")});
  for (const char* folder : {"hub/snapshots/x", "hub/links/x"}) {
    const std::string link = dir_.Join(folder) + "/model.safetensors";
    ASSERT_EQ(symlink("../../blobs/0123", link.c_str()), 0);
  }
  EXPECT_THAT(Vfs::Open(HostFileSystem(), {dir_.Join("hub/links/x")}),
              HasCode(Code::kPermissionDenied));
  Open(dir_.Join("hub/links/x"), {dir_.Join("hub")});
  EXPECT_THAT(ops_->ReadAll("tensors/w"), IsOkAndHolds(Tensor("w").bytes()));
  Open(dir_.Join("hub/links/x"), {dir_.Join("hub/blobs")});
  EXPECT_THAT(ops_->ReadAll("tensors/w"), IsOkAndHolds(Tensor("w").bytes()));
  Open(dir_.Join("hub/snapshots/x"));
  EXPECT_THAT(ops_->ReadAll("tensors/w"), IsOkAndHolds(Tensor("w").bytes()));
}

TEST_F(ForeignMountTest, UnreadableItemHidesNoOther) {
  const std::string source = SourcePath("tests/golden/foreign/dcp-old/torch-1.13");
  ASSERT_OK(HostFileSystem().CreateDirectories(run()));
  for (const char* name : {".metadata", "__0_0.distcp", "__1_0.distcp"}) {
    WriteWholeFile(run() + "/" + name, ReadWholeFile(source + "/" + name));
  }
  const std::string damaged = run() + "/__1_0.distcp";
  WriteWholeFile(damaged, std::string(ReadWholeFile(damaged).size(), 'x'));
  Open(run());
  EXPECT_EQ(ops_->ReadAll("tensors/rows").status().ToErrno(), EIO);
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, ops_->List("extents"));
  EXPECT_THAT(names, testing::IsSupersetOf({"rows.json", "scalar.json"}));
  for (const std::string& name : names) {
    ASSERT_OK_AND_ASSIGN(const std::string text, ops_->ReadAll("extents/" + name));
    EXPECT_EQ(ops_->Stat("extents/" + name).value().size, text.size());
    EXPECT_EQ(nlohmann::json::parse(text).contains("error"),
              !ops_->ReadAll("tensors/" + name.substr(0, name.size() - 5)).ok())
        << text;
  }
}

}  // namespace
}  // namespace tensormount::fs
