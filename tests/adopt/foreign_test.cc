// SPDX-License-Identifier: Apache-2.0
#include "index/foreign/foreign.h"

#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "index/foreign/format.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class ForeignTest : public testing::Test {
 protected:
  ForeignTest() {
    for (const char* name : {"ckpt", "ckpt/sub", "other"}) {
      EXPECT_OK(HostFileSystem().CreateDirectory(dir_.Join(name)));
    }
    WriteWholeFile(dir_.Join("ckpt/a.bin"), std::string(100, 'a'));
    WriteWholeFile(dir_.Join("ckpt/sub/b.bin"), std::string(50, 'b'));
    WriteWholeFile(dir_.Join("other/c.bin"), std::string(10, 'c'));
  }
  ForeignFolder Open(const std::vector<std::string>& roots = {}) {
    auto folder = ForeignFolder::Open(HostFileSystem(), Resolved("ckpt"), roots);
    EXPECT_OK(folder);
    return std::move(folder).value();
  }
  std::string Resolved(const std::string& name) {
    return HostFileSystem().Resolve(dir_.Join(name)).value();
  }
  void Link(const std::string& to, const std::string& name) {
    ASSERT_EQ(symlink(to.c_str(), dir_.Join(name).c_str()), 0);
  }
  Box BoxOf(const Dims& begin, const Dims& extent) { return Box::Make(begin, extent).value(); }

  TempDir dir_;
};

TEST_F(ForeignTest, FileNamesCannotLeaveTheRoot) {
  Link("../other/c.bin", "ckpt/out");
  Link(dir_.Join("other"), "ckpt/out-folder");
  Link("sub/b.bin", "ckpt/in");
  Link(Resolved("ckpt") + "/sub", "ckpt/absolute");
  const ForeignFolder folder = Open();
  EXPECT_EQ(folder.root(), folder.path());
  EXPECT_EQ(folder.ReadFile("a.bin", 1000).value(), std::string(100, 'a'));
  EXPECT_THAT(folder.ReadFile("a.bin", 99), HasCode(Code::kDataLoss));
  EXPECT_EQ(folder.ReadFile("in", 1000).value().size(), 50u);
  EXPECT_EQ(folder.ReadFile("absolute/b.bin", 1000).value().size(), 50u);
  EXPECT_EQ(folder.Locate("absolute/b.bin").value(), "sub/b.bin");
  for (const char* name : {"out", "out-folder/c.bin", "../other/c.bin", "sub/../../other/c.bin"}) {
    const Status status = folder.OpenRead(name).status();
    EXPECT_THAT(status, HasCode(Code::kPermissionDenied)) << name;
    EXPECT_THAT(status.message(),
                testing::AnyOf(HasSubstr("leads out of "), HasSubstr("outside of ")))
        << name;
  }
  EXPECT_THAT(folder.OpenRead("out").status().message(), HasSubstr("--root"));
  EXPECT_THAT(folder.List("out-folder"), HasCode(Code::kPermissionDenied));
  const std::string nul("a\0b", 3);
  for (const std::string& name :
       {std::string("/etc/passwd"), std::string(""), std::string("a//b"), std::string("./a"),
        std::string("a/"), nul, std::string(5000, 'x')}) {
    EXPECT_THAT(folder.OpenRead(name), HasCode(Code::kDataLoss)) << name;
  }
  EXPECT_THAT(folder.OpenRead("none"), HasCode(Code::kNotFound));
  EXPECT_FALSE(folder.Has("out"));
  EXPECT_TRUE(folder.Has("sub"));
}

TEST_F(ForeignTest, RootAboveTheSourceAllowsLinksWithinIt) {
  Link("../other/c.bin", "ckpt/out");
  const ForeignFolder folder = Open({dir_.Join("other"), dir_.path(), "/"});
  EXPECT_EQ(folder.root(), HostFileSystem().Resolve(dir_.path()).value());
  EXPECT_EQ(folder.ReadFile("out", 100).value(), std::string(10, 'c'));
  EXPECT_EQ(folder.PathFromRoot("sub/b.bin").value(), "ckpt/sub/b.bin");
  ASSERT_OK_AND_ASSIGN(const ForeignFolder below, folder.Subfolder("sub"));
  EXPECT_EQ(below.root(), folder.root());
  EXPECT_EQ(below.PathFromRoot("b.bin").value(), "ckpt/sub/b.bin");
  EXPECT_EQ(below.path(), Resolved("ckpt/sub"));
  EXPECT_THAT(folder.Subfolder("a.bin"), HasCode(Code::kNotFound));
  EXPECT_THAT(ForeignFolder::Open(HostFileSystem(), Resolved("ckpt"),
                                  std::vector<std::string>{dir_.Join("none")}),
              HasCode(Code::kNotFound));
}

TEST_F(ForeignTest, SingleFileOpensAsADirectoryOfOneFile) {
  ASSERT_OK_AND_ASSIGN(const ForeignFolder one,
                       ForeignFolder::Open(HostFileSystem(), Resolved("ckpt/a.bin"), {}));
  EXPECT_EQ(one.file(), "a.bin");
  EXPECT_EQ(one.root(), Resolved("ckpt"));
  EXPECT_OK(one.OpenRead(one.file()));
}

TEST_F(ForeignTest, NonRegularFilesAreRefused) {
  ASSERT_EQ(mkfifo(dir_.Join("ckpt/fifo").c_str(), 0600), 0);
  const ForeignFolder folder = Open();
  EXPECT_THAT(folder.OpenRead("fifo"), HasCode(Code::kDataLoss));
  ForeignBuilder builder(folder, "test");
  EXPECT_THAT(builder.AddFile("fifo"), HasCode(Code::kDataLoss));
  EXPECT_THAT(builder.AddFile("sub"), HasCode(Code::kDataLoss));
  EXPECT_THAT(builder.AddFile("none"), HasCode(Code::kNotFound));
}

TEST_F(ForeignTest, ContentIsSortedAndComplete) {
  const ForeignFolder folder = Open();
  ForeignBuilder builder(folder, "test");
  ASSERT_OK_AND_ASSIGN(const std::uint32_t b, builder.AddFile("sub/b.bin"));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t a, builder.AddFile("a.bin"));
  EXPECT_EQ(builder.AddFile("a.bin").value(), a);
  ASSERT_OK_AND_ASSIGN(const std::uint32_t w, builder.AddTensor("w", DType::kU8, {4, 10}));
  ASSERT_OK(builder.AddChunk(w, Region(BoxOf({2, 0}, {2, 10})), b, 0, 20));
  ASSERT_OK(builder.AddChunk(w, Region(BoxOf({0, 0}, {2, 10})), a, 60, 20));
  // An empty piece may lie at the end (seen in DCP).
  ASSERT_OK(builder.AddChunk(w, Region(BoxOf({4, 0}, {0, 10})), a, 0, 0));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t t, builder.AddTensor("t", DType::kI16, {3, 2}));
  ASSERT_OK(builder.AddChunk(t, Region(Box::Whole({3, 2})), a, 0, 12, {2, 6}));
  ASSERT_OK(builder.AddTensor("none", DType::kF32, {0, 3}));
  builder.AddCommon("step", std::int64_t{7});
  ASSERT_OK(builder.AddObject("o", b, 10, 5));
  ASSERT_OK_AND_ASSIGN(const ForeignInventory found, builder.Finish());
  EXPECT_THAT(found.warnings, IsEmpty());
  const Inventory& inventory = found.inventory;
  ASSERT_EQ(inventory.files.size(), 2u);
  EXPECT_EQ(inventory.files[0].name, "a.bin");
  EXPECT_EQ(inventory.files[1].name, "sub/b.bin");
  EXPECT_EQ(inventory.files[1].length, 50u);
  EXPECT_NE(inventory.files[1].mtime_seconds, 0);
  ASSERT_EQ(inventory.tensors.size(), 3u);
  EXPECT_EQ(inventory.tensors[0].meta.key(), "none");
  EXPECT_EQ(inventory.tensors[0].mtime, inventory.info.created);
  EXPECT_EQ(inventory.tensors[1].extents.At(0).value().strides, (Dims{2, 6}));
  ASSERT_EQ(inventory.tensors[2].extents.size(), 2u);
  EXPECT_EQ(inventory.tensors[2].extents.At(0).value().file, 0u);
  EXPECT_EQ(inventory.tensors[2].extents.At(1).value().file, 1u);
  EXPECT_EQ(inventory.tensors[2].extents.At(1).value().region.box(), BoxOf({2, 0}, {2, 10}));
  EXPECT_FALSE(inventory.tensors[2].extents.At(1).value().has_hash);
  ASSERT_EQ(inventory.objects.size(), 1u);
  EXPECT_EQ(inventory.objects[0].file, 1u);
  EXPECT_FALSE(inventory.objects[0].has_hash());
  EXPECT_EQ(inventory.common.at("step"), CommonValue(std::int64_t{7}));
  EXPECT_FALSE(inventory.info.self_contained);
  EXPECT_EQ(inventory.info.root, folder.root());
}

TEST_F(ForeignTest, BuilderRefusesInconsistentEntries) {
  const ForeignFolder folder = Open();
  ForeignBuilder builder(folder, "test");
  ASSERT_OK_AND_ASSIGN(const std::uint32_t a, builder.AddFile("a.bin"));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t w, builder.AddTensor("w", DType::kF32, {2, 3}));
  const Region whole(Box::Whole({2, 3}));
  const auto refused = [&](const Status& status) { EXPECT_THAT(status, HasCode(Code::kDataLoss)); };
  refused(builder.AddTensor("w", DType::kF32, {2, 3}).status());
  refused(builder.AddTensor("", DType::kF32, {}).status());
  refused(builder.AddTensor(std::string("a\0b", 3), DType::kF32, {}).status());
  refused(builder.AddTensor("\xff", DType::kF32, {}).status());
  refused(builder.AddTensor(std::string(3000, 'k'), DType::kF32, {}).status());
  refused(builder.AddTensor("big", DType::kF32, {std::int64_t{1} << 40, 1 << 30}).status());
  refused(builder.AddTensor("minus", DType::kF32, {-1}).status());
  refused(builder.AddChunk(w, whole, a, 0, 23));                       // Another length.
  refused(builder.AddChunk(w, whole, a, 77, 24));                      // Past the end.
  refused(builder.AddChunk(w, whole, a, ~std::uint64_t{0} - 3, 24));   // Wraps.
  refused(builder.AddChunk(w, whole, a + 1, 0, 24));                   // No such file.
  refused(builder.AddChunk(w, Region(Box::Whole({3, 3})), a, 0, 36));  // Past the shape.
  refused(builder.AddChunk(w, Region(Box::Whole({2})), a, 0, 8));      // Another rank.
  refused(builder.AddChunk(w, whole, a, 0, 24, {-4, 8}));              // Backwards.
  refused(builder.AddChunk(w, whole, a, 0, 24, {4, 16}));              // Reaches further.
  refused(builder.AddChunk(w, whole, a, 0, 24, {4}));
  refused(builder.AddChunk(w, whole, a, 0, 24, {std::int64_t{1} << 62, std::int64_t{1} << 62}));
  refused(builder.AddObject("o", a, 90, 11));
  refused(builder.AddObject("o", a, 0, 1, {2}, {2}));
  refused(builder.AddObject("o", a, 0, 1, {0}, {2, 2}));
  ASSERT_OK(builder.AddPendingChunk(w, whole, a, 0, 100));
  EXPECT_THAT(builder.Finish(), HasCode(Code::kInternal));  // Nobody finds the bytes.
}

TEST_F(ForeignTest, HolesAreKeptOverlapsAreLeftOut) {
  const ForeignFolder folder = Open();
  ForeignBuilder builder(folder, "test");
  ASSERT_OK_AND_ASSIGN(const std::uint32_t a, builder.AddFile("a.bin"));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t hole, builder.AddTensor("hole", DType::kU8, {4, 4}));
  ASSERT_OK(builder.AddChunk(hole, Region(BoxOf({0, 0}, {4, 3})), a, 0, 12));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t twice, builder.AddTensor("twice", DType::kU8, {4}));
  ASSERT_OK(builder.AddChunk(twice, Region(BoxOf({0}, {3})), a, 0, 3));
  ASSERT_OK(builder.AddChunk(twice, Region(BoxOf({2}, {2})), a, 10, 2));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t gone, builder.AddTensor("gone", DType::kU8, {4}));
  builder.Drop(gone, "its file is lost");
  builder.Drop(gone, "said once");
  ASSERT_OK(builder.AddObject("part", a, 0, 1, {0}, {2}));
  ASSERT_OK(builder.AddObject("same", a, 0, 1, {0}, {2}));
  ASSERT_OK(builder.AddObject("same", a, 0, 1, {0}, {2}));
  ASSERT_OK(builder.AddObject("whole", a, 0, 1, {1}, {2}));
  ASSERT_OK(builder.AddObject("whole", a, 1, 1, {0}, {2}));
  builder.AddCommon("$rank.0", std::int64_t{1});
  CommonValue deep;
  for (int i = 0; i < kMaxCommonDepth + 2; ++i) {
    CommonList list;
    list.items.push_back(std::move(deep));
    deep = CommonValue(std::move(list));
  }
  builder.AddCommon("deep", std::move(deep));
  ASSERT_OK_AND_ASSIGN(const ForeignInventory found, builder.Finish());
  ASSERT_EQ(found.inventory.tensors.size(), 1u);
  EXPECT_EQ(found.inventory.tensors[0].meta.key(), "hole");
  ASSERT_EQ(found.inventory.objects.size(), 2u);
  EXPECT_EQ(found.inventory.objects[0].key, "whole");
  EXPECT_EQ(found.inventory.objects[0].index, Dims{0});
  EXPECT_THAT(found.inventory.common, IsEmpty());
  EXPECT_THAT(found.warnings,
              ElementsAre(HasSubstr("gone: left out: its file is lost"), HasSubstr("$rank.0"),
                          HasSubstr("deep"), HasSubstr("hole: [0:4, 3:4] is not stored"),
                          HasSubstr("twice: left out: [2:3] is stored twice"),
                          HasSubstr("object part: left out: only 1 of the 2 parts"),
                          HasSubstr("object same: left out: part [0] is stored twice")));
  // What verify counts as damage: not the values that only are not shown.
  EXPECT_EQ(found.lost.size(), 5u);
}

TEST_F(ForeignTest, UuidDependsOnContentAndFiles) {
  const auto uuid = [&](std::uint64_t offset, const std::string& producer,
                        const std::string& name = "a.bin") {
    const ForeignFolder folder = Open();
    ForeignBuilder builder(folder, producer);
    const std::uint32_t a = builder.AddFile(name).value();
    const std::uint32_t w = builder.AddTensor("w", DType::kU8, {4}).value();
    EXPECT_OK(builder.AddChunk(w, Region(Box::Whole({4})), a, offset, 4));
    return builder.Finish().value().inventory.info.uuid;
  };
  const Uuid first = uuid(0, "x");
  EXPECT_FALSE(first.IsZero());
  EXPECT_EQ(uuid(0, "x"), first);
  EXPECT_NE(uuid(1, "x"), first);
  EXPECT_NE(uuid(0, "y"), first);
  timespec times[2] = {{.tv_sec = 5, .tv_nsec = 6}, {.tv_sec = 5, .tv_nsec = 6}};
  ASSERT_EQ(utimensat(AT_FDCWD, dir_.Join("ckpt/a.bin").c_str(), times, 0), 0);
  const Uuid touched = uuid(0, "x");
  EXPECT_NE(touched, first);
  // The same file under another name.
  std::filesystem::rename(dir_.Join("ckpt/a.bin"), dir_.Join("ckpt/renamed.bin"));
  EXPECT_NE(uuid(0, "x", "renamed.bin"), touched);
}

TEST_F(ForeignTest, SurplusWarningsAreCounted) {
  const ForeignFolder folder = Open();
  ForeignBuilder builder(folder, "test");
  for (int i = 0; i < 1000; ++i) builder.Warn("w" + std::to_string(i));
  ASSERT_OK_AND_ASSIGN(const ForeignInventory found, builder.Finish());
  ASSERT_EQ(found.warnings.size(), 101u);
  EXPECT_EQ(found.warnings.back(), "and 900 more warnings");
}

TEST_F(ForeignTest, UnknownSourceErrorSaysWhatWasFound) {
  const auto read = [&] { return ReadForeign(Open()).status(); };
  EXPECT_THAT(read(), HasCode(Code::kUnsupported));
  EXPECT_THAT(read().message(), HasSubstr("ckpt: not a checkpoint: no COMMIT"));
  WriteWholeFile(dir_.Join("ckpt/__0_0.distcp"), "x");
  EXPECT_THAT(read().message(), HasSubstr("the save did not finish"));
}

}  // namespace
}  // namespace tensormount
