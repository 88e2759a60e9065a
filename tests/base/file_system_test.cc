// SPDX-License-Identifier: Apache-2.0
#include "base/file_system.h"

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file_system_for.h"
#include "base/host_directory.h"
#include "base/host_pins.h"
#include "base/host_rename.h"
#include "base/spare_descriptors.h"
#include "tests/support/forked.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/unmapped_file.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Maker {
  std::string name;
  std::function<std::unique_ptr<FileSystem>(const std::string& root)> make;  // Empty: the host's.
};

// What every FileSystem must do.
class FileSystemTest : public testing::TestWithParam<Maker> {
 protected:
  FileSystemTest() {
    if (GetParam().make) made_ = GetParam().make(dir_.path());
  }
  FileSystem& fs() { return made_ ? *made_ : HostFileSystem(); }
  std::string At(std::string_view name) const { return dir_.Join(name); }
  void Put(const std::string& name, std::string_view data) {
    ASSERT_THAT(fs().WriteFileDurably(At(name), data), IsOk());
  }
  std::string Get(const std::string& name) {
    Result<std::string> data = fs().ReadFile(At(name), 1 << 20);
    return data.ok() ? data.value() : data.status().ToString();
  }
  std::vector<std::string> Names(const std::string& path) {
    std::vector<std::string> names;
    const Result<std::vector<DirectoryEntry>> entries = fs().List(path);
    if (!entries.ok()) return {entries.status().ToString()};
    for (const DirectoryEntry& e : entries.value()) names.push_back(e.name);
    return names;
  }

  TempDir dir_;
  std::unique_ptr<FileSystem> made_;
};

INSTANTIATE_TEST_SUITE_P(All, FileSystemTest,
                         testing::Values(Maker{"Host", {}},
                                         Maker{"Observed",
                                               [](const std::string&) {
                                                 return std::make_unique<ObservedFileSystem>(
                                                     HostFileSystem(),
                                                     [](const FileEvent&) { return Status(); },
                                                     [](const FileEvent&) {});
                                               }},
                                         Maker{"PowerCut",
                                               [](const std::string& root) {
                                                 return std::make_unique<PowerCutFileSystem>(root);
                                               }}),
                         [](const auto& maker) { return maker.param.name; });

TEST_P(FileSystemTest, WritesAndReadsAtOffsets) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().CreateExclusive(At("f")));
  EXPECT_OK(file->WriteAt(3, "defg", 4));
  EXPECT_OK(file->WriteAt(0, "abc", 3));
  char buffer[16] = {};
  EXPECT_THAT(file->ReadAt(2, buffer, 16), IsOkAndHolds(5u));
  EXPECT_STREQ(buffer, "cdefg");
  EXPECT_THAT(file->ReadAt(100, buffer, 4), IsOkAndHolds(0u));
  EXPECT_OK(file->Truncate(2));
  EXPECT_OK(file->Sync());
  EXPECT_EQ(file->Stat().value().size, 2u);
  EXPECT_EQ(file->path(), At("f"));
  EXPECT_GE(file->descriptor(), 0);
  EXPECT_OK(file->Close());
  EXPECT_OK(file->Close());
  EXPECT_THAT(file->ReadAt(0, buffer, 1), HasCode(Code::kInvalidArgument));
}

TEST_P(FileSystemTest, ShortReadErrorNamesTheEndOfFile) {
  Put("f", "0123456789");
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().OpenRead(At("f")));
  char buffer[16];
  EXPECT_OK(file->ReadExactAt(4, buffer, 6));
  const Status s = file->ReadExactAt(4, buffer, 7);
  EXPECT_THAT(s, HasCode(Code::kDataLoss));
  EXPECT_THAT(s,
              HasMessage(At("f") + ": 7 bytes expected at byte 4, but the file ends at byte 10"));
}

TEST_P(FileSystemTest, OneReadFillsManyPieces) {
  std::string data(9000, '\0');
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31 >> 3);
  Put("f", data);
  Result<std::unique_ptr<File>> file = fs().OpenRead(At("f"));
  ASSERT_THAT(file, IsOk());
  // More pieces than one call takes, empty ones among them, and past the end.
  std::string out(9000, '\0');
  std::vector<File::Buffer> pieces;
  for (std::size_t at = 0; at < 8000; at += 5) {
    pieces.push_back({out.data() + at, 5});
    pieces.push_back({nullptr, 0});
  }
  EXPECT_THAT(file.value()->ReadVectorAt(100, pieces), IsOkAndHolds(8000u));
  EXPECT_EQ(out.substr(0, 8000), data.substr(100, 8000));
  out.assign(9000, '\0');
  EXPECT_THAT(file.value()->ReadVectorAt(8997, pieces), IsOkAndHolds(3u));
  EXPECT_EQ(out.substr(0, 4), data.substr(8997) + std::string(1, '\0'));
  EXPECT_THAT(file.value()->ReadVectorAt(9000, pieces), IsOkAndHolds(0u));
}

// Runs in order and not, that meet, that are empty, and more of them than one call is told of.
TEST_P(FileSystemTest, ReadsManyRuns) {
  std::string data;
  for (int i = 0; i < 9000; ++i) data += static_cast<char>(i * 7 + i / 256);
  Put("f", data);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().OpenRead(At("f")));
  std::string out(9000, '\0');
  std::vector<ReadRun> runs;
  std::string want;
  const auto add = [&](std::size_t offset, std::size_t size) {
    runs.push_back({offset, std::as_writable_bytes(std::span(out)).subspan(want.size(), size)});
    want += (data + std::string(100, '\0')).substr(offset, size);
  };
  for (std::size_t i = 0; i < 700; ++i) add(i * 12, i % 3 == 0 ? 12 : 5);
  add(8400, 0);
  add(3, 90);
  add(8990, 10);
  EXPECT_OK(file->ReadMany(runs));
  EXPECT_EQ(out.substr(0, want.size()), want);
  EXPECT_EQ(out[want.size()], '\0');
  EXPECT_OK(file->ReadMany({}));

  add(8980, 10);
  add(8990, 11);
  add(9001, 5);
  const Status beyond = file->ReadMany(runs);
  EXPECT_THAT(beyond, HasCode(Code::kDataLoss));
  EXPECT_THAT(beyond.message(),
              HasSubstr(": 11 bytes expected at byte 8990, but the file ends at byte 9000"));
}

TEST_P(FileSystemTest, ReadManyStopsAtDeadlineOrCancel) {
  Put("f", std::string(100, 'x'));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().OpenRead(At("f")));
  std::string out(100, '\0');
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(out));
  const std::vector<ReadRun> runs = {{0, bytes.subspan(0, 5)}, {50, bytes.subspan(5, 5)}};
  const std::vector<ReadRun> meet = {{0, bytes.subspan(0, 5)}, {5, bytes.subspan(5, 5)}};
  std::atomic<bool> cancel{false};
  const auto later = Deadline::After(std::chrono::hours(1));
  const auto before = Deadline::After(std::chrono::seconds(-1));
  for (const auto& some : {runs, meet}) {
    EXPECT_OK(file->ReadMany(some, {.deadline = later, .cancel = &cancel}));
    const Status late = file->ReadMany(some, {.deadline = before});
    EXPECT_THAT(late, HasCode(Code::kDeadlineExceeded));
    EXPECT_THAT(late.message(), HasSubstr(At("f")));
    cancel = true;
    EXPECT_THAT(file->ReadMany(some, {.deadline = before, .cancel = &cancel}),
                HasCode(Code::kCancelled));
    cancel = false;
  }
}

// Between two calls on storage, also within a large run.
TEST(ReadManyTest, ReadManyCanBeCancelledMidway) {
  TempDir dir;
  WriteWholeFile(dir.Join("f"), std::string(std::size_t{20} << 20, 'x'));
  std::atomic<bool> cancel{false};
  int reads = 0;
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    if (event.op == FileOp::kRead && ++reads == 2) cancel = true;
    return Status();
  });
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs.OpenRead(dir.Join("f")));
  std::vector<std::byte> out(std::size_t{20} << 20);
  const std::vector<ReadRun> large = {{0, out}};
  EXPECT_THAT(file->ReadMany(large, {.cancel = &cancel}), HasCode(Code::kCancelled));
  EXPECT_EQ(reads, 2);
  cancel = false;
  reads = 0;
  const std::span<std::byte> all(out);
  const std::vector<ReadRun> small = {
      {0, all.subspan(0, 1)}, {10, all.subspan(1, 1)}, {20, all.subspan(2, 1)}};
  EXPECT_THAT(file->ReadMany(small, {.cancel = &cancel}), HasCode(Code::kCancelled));
  EXPECT_EQ(reads, 2);
}

// Runs that meet are one call, others are told of before the first is read.
TEST(ReadManyTest, ReadManyStartsAllReadsBeforeWaiting) {
  class Told : public UnmappedFile {
   public:
    using UnmappedFile::UnmappedFile;
    Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
      log += "read " + std::to_string(offset) + "+" + std::to_string(size) + "\n";
      return UnmappedFile::ReadAt(offset, out, size);
    }
    Result<std::size_t> ReadVectorAt(std::uint64_t offset,
                                     std::span<const Buffer> pieces) override {
      log += "read " + std::to_string(pieces.size()) + " from " + std::to_string(offset) + "\n";
      return base_->ReadVectorAt(offset, pieces);
    }
    void StartReading(std::uint64_t offset, std::uint64_t size) override {
      log += "start " + std::to_string(offset) + "+" + std::to_string(size) + "\n";
    }
    std::string log;
  };
  TempDir dir;
  WriteWholeFile(dir.Join("f"), std::string(100, 'x'));
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<File> base, HostFileSystem().OpenRead(dir.Join("f")));
  Told file(std::move(base));
  std::vector<std::byte> out(100);
  const std::span<std::byte> all(out);
  EXPECT_OK(file.ReadMany(std::vector<ReadRun>{{0, all.subspan(0, 4)},
                                               {4, all.subspan(4, 3)},
                                               {20, all.subspan(7, 5)},
                                               {40, all.subspan(12, 5)},
                                               {45, all.subspan(17, 5)}}));
  EXPECT_EQ(file.log, "start 20+5\nstart 40+10\nread 2 from 0\nread 20+5\nread 2 from 40\n");
}

TEST_P(FileSystemTest, OffsetsBeyondTheirTypeAreErrors) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().CreateExclusive(At("f")));
  const std::uint64_t far = ~std::uint64_t{0} - 1;
  char c = 0;
  EXPECT_THAT(file->ReadAt(far, &c, 1), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(file->WriteAt(far, &c, 1), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(file->Truncate(far), HasCode(Code::kInvalidArgument));
}

TEST_P(FileSystemTest, CreateExclusiveRefusesExistingFiles) {
  Put("f", "old");
  EXPECT_THAT(fs().CreateExclusive(At("f")), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(fs().CreateExclusive(At("no/f")), HasCode(Code::kNotFound));
  EXPECT_EQ(Get("f"), "old");
}

TEST_P(FileSystemTest, SharedWritersWriteToOneFile) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> a, fs().OpenShared(At("f")));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> b, fs().OpenShared(At("f")));
  EXPECT_OK(b->WriteAt(2, "cd", 2));
  EXPECT_OK(a->WriteAt(0, "ab", 2));
  EXPECT_EQ(Get("f"), "abcd");
}

TEST_P(FileSystemTest, OnlyRegularFilesOpen) {
  ASSERT_OK(fs().CreateDirectory(At("d")));
  EXPECT_EQ(fs().OpenRead(At("d")).status().ToErrno(), EISDIR);
  EXPECT_THAT(fs().OpenRead(At("none")), HasCode(Code::kNotFound));
}

TEST_P(FileSystemTest, LastComponentLinksAreNotFollowed) {
  Put("f", "x");
  ASSERT_OK(fs().CreateDirectory(At("d")));
  ASSERT_EQ(symlink("f", At("l").c_str()), 0);
  ASSERT_EQ(symlink("d", At("ld").c_str()), 0);
  EXPECT_EQ(fs().OpenRead(At("l")).status().ToErrno(), ELOOP);
  EXPECT_EQ(fs().OpenShared(At("l")).status().ToErrno(), ELOOP);
  EXPECT_THAT(fs().CreateExclusive(At("l")), HasCode(Code::kAlreadyExists));
  EXPECT_EQ(fs().List(At("ld")).status().ToErrno(), ELOOP);
  EXPECT_EQ(fs().SyncDirectory(At("ld")).ToErrno(), ELOOP);
  EXPECT_EQ(fs().Stat(At("l")).value().kind, FileKind::kFile);
  EXPECT_EQ(fs().LinkStat(At("l")).value().kind, FileKind::kSymlink);
  EXPECT_EQ(fs().Resolve(At("ld")).value(), fs().Resolve(At("d")).value());
  EXPECT_THAT(fs().Resolve(At("none")), HasCode(Code::kNotFound));
}

TEST_P(FileSystemTest, OpenReadBelowFollowsNoLink) {
  ASSERT_OK(fs().CreateDirectory(At("d")));
  ASSERT_OK(fs().CreateDirectory(At("out")));
  Put("d/f", "x");
  Put("out/f", "y");
  ASSERT_EQ(symlink(At("out").c_str(), At("d/link").c_str()), 0);
  ASSERT_EQ(symlink(At("d").c_str(), At("name").c_str()), 0);
  EXPECT_OK(fs().OpenReadBelow(At("d"), "f"));
  EXPECT_OK(fs().OpenReadBelow(At("name"), "f"));
  EXPECT_EQ(fs().OpenReadBelow(At("d"), "link/f").status().ToErrno(), ELOOP);
  EXPECT_EQ(fs().OpenReadBelow(At("d"), "../out/f").status().ToErrno(), EXDEV);
  EXPECT_THAT(fs().OpenReadBelow(At("d"), "none"), HasCode(Code::kNotFound));
  EXPECT_EQ(fs().OpenReadBelow(At(""), "d").status().ToErrno(), EISDIR);
}

TEST_P(FileSystemTest, OpenReadBeneathFollowsLinksThatStayInside) {
  ASSERT_OK(fs().CreateDirectory(At("d")));
  ASSERT_OK(fs().CreateDirectory(At("d/blobs")));
  ASSERT_OK(fs().CreateDirectory(At("d/snap")));
  ASSERT_OK(fs().CreateDirectory(At("out")));
  Put("d/blobs/b", "inside");
  Put("out/f", "outside");
  ASSERT_EQ(symlink("../blobs/b", At("d/snap/in").c_str()), 0);
  ASSERT_EQ(symlink("../../out/f", At("d/snap/out").c_str()), 0);
  ASSERT_EQ(symlink("../../out", At("d/snap/folder").c_str()), 0);
  ASSERT_EQ(symlink(At("d").c_str(), At("name").c_str()), 0);
  for (const char* directory : {"d", "name"}) {
    ASSERT_OK_AND_ASSIGN(const auto file, fs().OpenReadBeneath(At(directory), "snap/in"));
    std::string got(6, '\0');
    EXPECT_OK(file->ReadExactAt(0, got.data(), got.size()));
    EXPECT_EQ(got, "inside");
    EXPECT_EQ(fs().OpenReadBeneath(At(directory), "snap/out").status().ToErrno(), EXDEV);
    EXPECT_EQ(fs().OpenReadBeneath(At(directory), "snap/folder/f").status().ToErrno(), EXDEV);
    EXPECT_EQ(fs().OpenReadBeneath(At(directory), "../out/f").status().ToErrno(), EXDEV);
    EXPECT_EQ(fs().ListBeneath(At(directory), "snap/folder").status().ToErrno(), EXDEV);
    EXPECT_EQ(fs().StatBeneath(At(directory), "snap/out").status().ToErrno(), EXDEV);
    EXPECT_EQ(fs().StatBeneath(At(directory), "snap/in").value().size, 6u);
    EXPECT_EQ(fs().StatBeneath(At(directory), "").value().kind, FileKind::kDirectory);
    ASSERT_OK_AND_ASSIGN(const auto all, fs().ListBeneath(At(directory), ""));
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].name, "blobs");
    EXPECT_EQ(fs().ListBeneath(At(directory), "snap").value().size(), 3u);
    EXPECT_THAT(fs().OpenReadBeneath(At(directory), "none"), HasCode(Code::kNotFound));
    EXPECT_EQ(fs().OpenReadBeneath(At(directory), "snap").status().ToErrno(), EISDIR);
  }
}

TEST_P(FileSystemTest, ListIsSortedAndReportsKinds) {
  Put("b", "");
  ASSERT_OK(fs().CreateDirectory(At("a")));
  ASSERT_EQ(symlink("b", At("c").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const std::vector<DirectoryEntry> entries, fs().List(dir_.path()));
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_EQ(entries[0].kind, FileKind::kDirectory);
  EXPECT_EQ(entries[1].name, "b");
  EXPECT_EQ(entries[1].kind, FileKind::kFile);
  EXPECT_EQ(entries[2].name, "c");
  EXPECT_EQ(entries[2].kind, FileKind::kSymlink);
  EXPECT_THAT(fs().List(At("none")), HasCode(Code::kNotFound));
  EXPECT_THAT(fs().List(At("b")), HasCode(Code::kNotFound));  // ENOTDIR
}

TEST_P(FileSystemTest, SealRemovesWritePermission) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().CreateExclusive(At("f")));
  const std::uint32_t mode = file->Stat().value().mode;
  EXPECT_NE(mode & 0200, 0u);
  EXPECT_OK(file->Seal());
  EXPECT_EQ(fs().Stat(At("f")).value().mode, mode & 0444);
}

TEST_P(FileSystemTest, LinksShareTheInode) {
  Put("f", "x");
  ASSERT_OK(fs().Link(At("f"), At("g")));
  const FileInfo f = fs().Stat(At("f")).value();
  const FileInfo g = fs().Stat(At("g")).value();
  EXPECT_EQ(f.inode, g.inode);
  EXPECT_EQ(f.device, g.device);
  EXPECT_EQ(g.links, 2u);
  EXPECT_THAT(fs().Link(At("f"), At("g")), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(fs().Link(At("none"), At("h")), HasCode(Code::kNotFound));
}

TEST_P(FileSystemTest, RenameNeverReplaces) {
  ASSERT_OK(fs().CreateDirectories(At("a/x")));
  ASSERT_OK(fs().CreateDirectory(At("empty")));
  Put("f", "f");
  Put("g", "g");
  EXPECT_THAT(fs().RenameNoReplace(At("a"), At("empty")), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(fs().RenameNoReplace(At("a"), At("f")), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(fs().RenameNoReplace(At("f"), At("g")), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(fs().RenameNoReplace(At("none"), At("n")), HasCode(Code::kNotFound));
  EXPECT_EQ(Get("g"), "g");
  EXPECT_OK(fs().RenameNoReplace(At("a"), At("b")));
  EXPECT_OK(fs().RenameNoReplace(At("f"), At("h")));
  EXPECT_THAT(Names(dir_.path()), ElementsAre("b", "empty", "g", "h"));
  EXPECT_THAT(Names(At("b")), ElementsAre("x"));
}

TEST_P(FileSystemTest, ExchangeSwapsNamesOrReportsUnsupported) {
  Put("a", "1");
  Put("b", "2");
  const Status s = fs().Exchange(At("a"), At("b"));
  if (s.code() == Code::kUnsupported) return;
  ASSERT_OK(s);
  EXPECT_EQ(Get("a") + Get("b"), "21");
  EXPECT_THAT(fs().Exchange(At("a"), At("none")), HasCode(Code::kNotFound));
}

TEST_P(FileSystemTest, RemovesFilesAndDirectories) {
  ASSERT_OK(fs().CreateDirectories(At("d/e")));
  EXPECT_THAT(fs().RemoveDirectory(At("d")), HasCode(Code::kAlreadyExists));  // ENOTEMPTY
  EXPECT_OK(fs().RemoveDirectory(At("d/e")));
  EXPECT_OK(fs().RemoveDirectory(At("d")));
  EXPECT_THAT(fs().RemoveDirectory(At("d")), HasCode(Code::kNotFound));
  EXPECT_THAT(fs().RemoveFile(At("d")), HasCode(Code::kNotFound));
}

TEST_P(FileSystemTest, CreateDirectoriesCreatesMissingParents) {
  EXPECT_OK(fs().CreateDirectories(At("a/b/c")));
  EXPECT_OK(fs().CreateDirectories(At("a/b/c")));
  EXPECT_OK(fs().CreateDirectories(At("a/b/d/")));
  EXPECT_THAT(Names(At("a/b")), ElementsAre("c", "d"));
  Put("f", "");
  EXPECT_FALSE(fs().CreateDirectories(At("f")).ok());
  EXPECT_FALSE(fs().CreateDirectories(At("f/g")).ok());
  EXPECT_THAT(fs().CreateDirectory(At("a")), HasCode(Code::kAlreadyExists));
  EXPECT_OK(fs().SyncDirectory(At("a")));
  EXPECT_THAT(fs().SyncDirectory(At("none")), HasCode(Code::kNotFound));
}

TEST_P(FileSystemTest, ReadFileHasALimit) {
  Put("f", "12345");
  EXPECT_THAT(fs().ReadFile(At("f"), 5), IsOkAndHolds("12345"));
  EXPECT_THAT(fs().ReadFile(At("f"), 4), HasCode(Code::kDataLoss));
  EXPECT_TRUE(fs().Exists(At("f")));
  EXPECT_FALSE(fs().Exists(At("g")));
}

TEST_P(FileSystemTest, LocksExcludeEachOther) {
  Put("f", "");
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> a, fs().OpenRead(At("f")));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> b, fs().OpenRead(At("f")));
  EXPECT_OK(a->TryLockShared());
  EXPECT_OK(b->TryLockShared());
  EXPECT_THAT(b->TryLockExclusive(), HasCode(Code::kBusy));
  ASSERT_OK(a->Close());
  EXPECT_OK(b->TryLockExclusive());
}

TEST_P(FileSystemTest, RemoveTreeRemovesEverythingAndFollowsNoLink) {
  ASSERT_OK(fs().CreateDirectories(At("keep/x")));
  ASSERT_OK(fs().CreateDirectories(At("t/a/b")));
  Put("t/a/f", "1");
  Put("t/g", "2");
  if (GetParam().name != "PowerCut") {  // Has no links, so knows none.
    ASSERT_EQ(symlink(At("keep").c_str(), At("t/a/link").c_str()), 0);
  }
  EXPECT_OK(fs().RemoveTree(At("t")));
  EXPECT_OK(fs().RemoveTree(At("t")));
  EXPECT_THAT(Names(dir_.path()), ElementsAre("keep"));
  EXPECT_THAT(Names(At("keep")), ElementsAre("x"));
  Put("f", "1");
  EXPECT_OK(fs().RemoveTree(At("f")));
  EXPECT_FALSE(fs().Exists(At("f")));
}

TEST_P(FileSystemTest, ConcurrentThreadsWriteTheirRanges) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file, fs().CreateExclusive(At("f")));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&file, t] {
      const std::string mine(100, static_cast<char>('a' + t));
      for (int i = 0; i < 20; ++i) {
        const auto at = static_cast<std::uint64_t>(100 * (4 * i + t));
        EXPECT_OK(file->WriteAt(at, mine.data(), 100));
        std::string back(100, ' ');
        EXPECT_OK(file->ReadExactAt(at, back.data(), 100));
        EXPECT_EQ(back, mine);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(file->Stat().value().size, 8000u);
}

// RemoveTree needs no permission that its caller could grant itself. Root needs none anyway, so
// there the modes are tried in vain; CI runs both.
TEST(HostFileSystemTest, RemoveTreeRemovesUnreadableDirectories) {
  TempDir dir;
  FileSystem& fs = HostFileSystem();
  ASSERT_OK(fs.CreateDirectories(dir.Join("t/a/b")));
  ASSERT_OK(fs.WriteFileDurably(dir.Join("t/a/b/f"), "x"));
  ASSERT_EQ(chmod(dir.Join("t/a/b/f").c_str(), 0444), 0);
  ASSERT_EQ(chmod(dir.Join("t/a/b").c_str(), 0555), 0);
  ASSERT_EQ(chmod(dir.Join("t/a").c_str(), 0000), 0);
  const uid_t old = geteuid();
  if (old == 0) {  // As nobody: then the modes count.
    for (const char* name : {"t/a/b/f", "t/a/b", "t/a", "t", ""}) {
      ASSERT_EQ(chown(dir.Join(name).c_str(), 65534, 65534), 0);
    }
    // By a relative path: the folders above may be closed to nobody.
    ASSERT_EQ(chdir(dir.path().c_str()), 0);
    ASSERT_EQ(seteuid(65534), 0);
  }
  const Status s = fs.RemoveTree(old == 0 ? "t" : dir.Join("t"));
  if (old == 0) {
    ASSERT_EQ(seteuid(old), 0);
    ASSERT_EQ(chdir("/"), 0);
  }
  EXPECT_OK(s);
  EXPECT_FALSE(fs.Exists(dir.Join("t")));
}

TEST(HostFileSystemTest, RenameWithoutTheFlagStillNeverReplaces) {
  TempDir dir;
  FileSystem& fs = HostFileSystem();
  ASSERT_OK(fs.CreateDirectories(dir.Join("a/x")));
  ASSERT_OK(fs.CreateDirectories(dir.Join("full/y")));
  ASSERT_OK(fs.CreateDirectory(dir.Join("empty")));
  ASSERT_OK(fs.WriteFileDurably(dir.Join("f"), "f"));
  ASSERT_OK(fs.WriteFileDurably(dir.Join("g"), "g"));
  const auto rename = [&](const char* from, const char* to) {
    return RenameNoReplaceWithoutFlag(dir.Join(from), dir.Join(to));
  };
  EXPECT_THAT(rename("a", "full"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(rename("a", "empty"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(rename("a", "f"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(rename("f", "g"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(rename("f", "full"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(rename("empty", "n"), HasCode(Code::kUnsupported));
  EXPECT_THAT(rename("none", "n"), HasCode(Code::kNotFound));
  EXPECT_THAT(rename("a", "none/n"), HasCode(Code::kNotFound));
  EXPECT_OK(rename("a", "b"));
  EXPECT_OK(rename("f", "h"));
  EXPECT_TRUE(fs.Exists(dir.Join("b/x")));
  EXPECT_FALSE(fs.Exists(dir.Join("a")));
  EXPECT_FALSE(fs.Exists(dir.Join("f")));
  EXPECT_EQ(fs.ReadFile(dir.Join("h"), 10).value(), "f");
}

TEST(HostFileSystemTest, OpeningAFifoDoesNotHang) {
  TempDir dir;
  ASSERT_EQ(mkfifo(dir.Join("p").c_str(), 0600), 0);
  EXPECT_THAT(HostFileSystem().OpenRead(dir.Join("p")), HasCode(Code::kInvalidArgument));
}

TEST(HostFileSystemTest, OpenReadBeneathRefusesNonFiles) {
  TempDir dir;
  ASSERT_EQ(mkfifo(dir.Join("p").c_str(), 0600), 0);
  EXPECT_THAT(HostFileSystem().OpenReadBeneath(dir.path(), "p"), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(HostFileSystem().OpenReadBeneath("/dev", "zero"), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(HostFileSystem().StatBeneath(dir.path(), "p").value().kind, FileKind::kOther);
  EXPECT_EQ(HostFileSystem().OpenReadBeneath(dir.path(), "/etc/passwd").status().ToErrno(), EXDEV);
}

TEST(HostFileSystemTest, OpenReadBeneathFollowsNoLinkWithoutOpenat2) {
  TempDir dir;
  FileSystem& fs = HostFileSystem();
  ASSERT_OK(fs.CreateDirectory(dir.Join("d")));
  ASSERT_OK(fs.WriteFileDurably(dir.Join("d/f"), "x"));
  ASSERT_EQ(symlink("f", dir.Join("d/link").c_str()), 0);
  ASSERT_EQ(symlink("d", dir.Join("folder").c_str()), 0);
  const auto walk = [&](const std::string& name) {
    const int fd = OpenHostBeneath(dir.path(), name, O_RDONLY, HostLinks::kInside, true);
    if (fd < 0) return errno;
    close(fd);
    return 0;
  };
  EXPECT_EQ(walk("d/f"), 0);
  EXPECT_EQ(walk("d//f"), 0);
  EXPECT_EQ(walk("./d/./f"), 0);
  EXPECT_EQ(walk(""), 0);
  EXPECT_EQ(walk("d/link"), ELOOP);
  EXPECT_EQ(walk("folder/f"), ELOOP);
  EXPECT_EQ(walk("d/../d/f"), EXDEV);
  EXPECT_EQ(walk("/etc/passwd"), EXDEV);
  EXPECT_EQ(walk("d/none"), ENOENT);
  EXPECT_EQ(walk("d/f/x"), ENOTDIR);
}

TEST(HostFileSystemTest, OpeningADeviceIsRefused) {
  EXPECT_THAT(HostFileSystem().OpenShared("/dev/null"), HasCode(Code::kInvalidArgument));
}

// The kernel writes the page that it can read and stops; the rest is what follows, not what stood
// before.
TEST(HostFileSystemTest, ShortWriteContinuesWhereItStopped) {
  constexpr std::size_t kPage = 4096;
  void* const map =
      mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(map, MAP_FAILED);
  char* const data = static_cast<char*>(map) + kPage;
  ASSERT_EQ(mprotect(data + kPage, kPage, PROT_NONE), 0);
  const TempDir dir;
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file,
                       HostFileSystem().CreateExclusive(dir.Join("f")));
  EXPECT_EQ(file->WriteAt(0, data, 2 * kPage).ToErrno(), EFAULT);
  EXPECT_EQ(file->Stat().value().size, kPage);
  munmap(map, 3 * kPage);
}

TEST(SpareDescriptorsTest, OpenRetriesOnlyWhenDescriptorsRunOut) {
  const auto opens = [](int error) {
    int tries = 0;
    EXPECT_EQ(OpenDescriptor([&] {
                ++tries;
                errno = error;
                return -1;
              }),
              -1);
    EXPECT_EQ(errno, error);
    return tries;
  };
  EXPECT_EQ(opens(EMFILE), 1);
  int asked = 0;
  const SpareDescriptors keeper([&](bool /*may_wait*/) { ++asked; });
  EXPECT_EQ(opens(EMFILE), 3);
  EXPECT_EQ(opens(ENFILE), 3);
  EXPECT_EQ(asked, 4);
  EXPECT_EQ(opens(ENOENT), 1);
}

// Of a keeper of its parent a child may wait for nothing; its own are asked as ever.
TEST(SpareDescriptorsTest, ForkedChildReleasesInheritedDescriptors) {
  int waited = 0;
  int asked = 0;
  const SpareDescriptors keeper([&](bool may_wait) { ++(may_wait ? waited : asked); });
  EXPECT_TRUE(InForkedChild([&] {
    const SpareDescriptors own([&](bool may_wait) { waited += may_wait ? 10 : 100; });
    return SpareDescriptors::CloseSpare() && waited == 10 && asked == 1;
  }));
  EXPECT_TRUE(SpareDescriptors::CloseSpare());
  EXPECT_EQ(waited, 1);
}

// The child has the lock without the thread that would give it back.
TEST(SpareDescriptorsTest, ForkedChildDoesNotWaitForParentThreads) {
  std::promise<void> inside;
  std::promise<void> go;
  const SpareDescriptors keeper([&](bool /*may_wait*/) {
    inside.set_value();
    go.get_future().wait();
  });
  std::thread asks([] { SpareDescriptors::CloseSpare(); });
  inside.get_future().wait();
  EXPECT_TRUE(InForkedChild([] {
    int asked = 0;
    const SpareDescriptors own([&](bool /*may_wait*/) { ++asked; });
    return SpareDescriptors::CloseSpare() && asked == 1;
  }));
  go.set_value();
  asks.join();
}

// While another thread asks all the time, who mostly has the lock.
TEST(HostPinsTest, ForkedChildKeepsPinnedDirectories) {
  const TempDir dir;
  ASSERT_OK_AND_ASSIGN(const auto pinned, PinHostDirectory(dir.path()));
  std::atomic<bool> end = false;
  std::thread asks([&] {
    while (!end) (void)PinnedDescriptor(*pinned);
  });
  bool known = true;
  for (int i = 0; i < 20 && known; ++i) {
    known = InForkedChild([&] {
      return PinnedDescriptor(*pinned) >= 0 && ShownPath(*pinned + "/f") == dir.Join("f") &&
             PinHostDirectory(dir.path()).ok();
    });
  }
  EXPECT_TRUE(known);
  end = true;
  asks.join();
}

TEST(ObservedFileSystemTest, BeforeHookRefusesWithoutSideEffects) {
  TempDir dir;
  FileOp refused = FileOp::kWrite;
  std::vector<FileOp> done;
  ObservedFileSystem fs(
      HostFileSystem(),
      [&](const FileEvent& e) {
        return e.op == refused ? Status::FromErrno(ENOSPC, FileOpName(e.op), e.path) : Status();
      },
      [&](const FileEvent& e) { done.push_back(e.op); });
  EXPECT_THAT(fs.WriteFileDurably(dir.Join("f"), "x"), HasCode(Code::kResourceExhausted));
  EXPECT_THAT(done, ElementsAre(FileOp::kCreate, FileOp::kClose, FileOp::kRemoveFile));
  EXPECT_FALSE(fs.Exists(dir.Join("f")));
  refused = FileOp::kCreateDirectory;
  done.clear();
  EXPECT_FALSE(fs.CreateDirectory(dir.Join("d")).ok());
  EXPECT_THAT(done, IsEmpty());
  EXPECT_FALSE(HostFileSystem().Exists(dir.Join("d")));
}

TEST(ObservedFileSystemTest, AfterHookSeesEveryOperation) {
  TempDir dir;
  std::string log;
  ObservedFileSystem fs(HostFileSystem(), {}, [&](const FileEvent& e) {
    log += std::string(FileOpName(e.op)) + " " + e.path.substr(dir.path().size());
    if (!e.path2.empty()) log += " " + e.path2.substr(dir.path().size());
    if (e.op == FileOp::kWrite) log += " " + std::string(static_cast<const char*>(e.data), e.size);
    if (e.op == FileOp::kWrite || e.op == FileOp::kRead) log += " at " + std::to_string(e.offset);
    log += "\n";
  });
  {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> f, fs.CreateExclusive(dir.Join("f")));
    ASSERT_OK(f->WriteAt(2, "xy", 2));
    char c;
    ASSERT_OK(f->ReadAt(1, &c, 1));
    ASSERT_OK(f->Truncate(3));
    ASSERT_OK(f->Sync());
    ASSERT_OK(f->Seal());
    ASSERT_OK(f->TryLockShared());
    ASSERT_OK(f->Stat());
    ASSERT_OK(f->Close());
  }
  ASSERT_OK(fs.Link(dir.Join("f"), dir.Join("g")));
  ASSERT_OK(fs.RenameNoReplace(dir.Join("g"), dir.Join("h")));
  ASSERT_OK(fs.SyncDirectory(dir.Join("")));
  ASSERT_OK(fs.List(dir.Join("")));
  ASSERT_OK(fs.RemoveFile(dir.Join("h")));
  ASSERT_OK(fs.CreateDirectory(dir.Join("d")));
  ASSERT_OK(fs.RemoveDirectory(dir.Join("d")));
  EXPECT_FALSE(fs.RemoveFile(dir.Join("h")).ok());  // Failed: not told.
  EXPECT_EQ(log,
            "create /f\nwrite /f xy at 2\nread /f at 1\ntruncate /f\nsync /f\nseal /f\nlock /f\n"
            "stat /f\nclose /f\nlink /f /g\nrename /g /h\nsync-directory /\nlist /\nunlink /h\n"
            "mkdir /d\nrmdir /d\n");
}

// As a path each would be a folder here, found by nobody who looks for it on that machine.
TEST(FileSystemForTest, UrlsAndRemotePathsAreRefused) {
  for (const char* text : {"s3://bucket/x", "user@host:/backup", "user@host:backup", "host:/backup",
                           "host:", "10.0.0.1:/x", "file:///x", "~", "~/x"}) {
    EXPECT_THAT(FileSystemFor(text), HasCode(Code::kUnsupported)) << text;
  }
  for (const char* text : {"a", "/a:b", "./host:/x", "./user@host:x", "a:b", "step:1/x", "@x:y",
                           "user@host", "a/b@c:d", ":x", "", "~x", "./~/x"}) {
    ASSERT_OK_AND_ASSIGN(FileSystem* const fs, FileSystemFor(text));
    EXPECT_EQ(fs, &HostFileSystem()) << text;
  }
}

TEST(FileSystemForTest, RegisteredSchemeSelectsItsFileSystem) {
  static ObservedFileSystem other(HostFileSystem(), {});
  EXPECT_THAT(FileSystemFor("known-scheme://a"), HasCode(Code::kUnsupported));
  AddFileSystem("known-scheme://", other);
  ASSERT_OK_AND_ASSIGN(FileSystem* const fs, FileSystemFor("known-scheme://a"));
  EXPECT_EQ(fs, &other);
  EXPECT_THAT(FileSystemFor("known-scheme:/a"), HasCode(Code::kUnsupported));  // As scp has it.
  ASSERT_OK_AND_ASSIGN(FileSystem* const host, FileSystemFor("./known-scheme://a"));
  EXPECT_EQ(host, &HostFileSystem());
}

TEST(JoinPathTest, JoinsWithOneSlash) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "/b"), "a/b");
  EXPECT_EQ(JoinPath("/", "b"), "/b");
  EXPECT_EQ(JoinPath("", "b"), "b");
}

}  // namespace
}  // namespace tensormount
