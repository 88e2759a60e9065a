// SPDX-License-Identifier: Apache-2.0
// Repair: damaged files become what they were, byte for byte, for every checkpoint that shares
// them; what the other checkpoint does not hold is named and harms nothing.
#include "index/store/repair.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>

#include "index/records/store_paths.h"
#include "index/store/copy.h"
#include "index/store/linking.h"
#include "tests/index/sharing_store.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;

// Damages a file in place, as a disk does: every name of it has the damage.
void Damage(const std::string& path, const std::function<void()>& how) {
  const std::uint32_t mode = HostFileSystem().LinkStat(path).value().mode & 07777;
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0) << path;
  how();
  ASSERT_EQ(::chmod(path.c_str(), mode), 0) << path;
}
void Flip(const std::string& path, std::uint64_t at) {
  Damage(path, [&] { FlipByte(path, at); });
}
void Overwrite(const std::string& path, const std::string& bytes) {
  Damage(path, [&] { WriteWholeFile(path, bytes); });
}
void Resize(const std::string& path, std::uint64_t size) {
  Damage(path, [&] { std::filesystem::resize_file(path, size); });
}

class RepairTest : public SharingStoreTest {
 protected:
  // Besides, a copy of all of them.
  void SetUp() override {
    SharingStoreTest::SetUp();
    ASSERT_OK(CopyCheckpoints(fs(), {StorePath()}, dir_.Join("copy"), {}));
    whole_ = FilesBelow(StorePath());
  }
  std::string InCopy(const std::string& name) const { return dir_.Join("copy/" + name); }
  Result<RepairReport> Repair(FileSystem& on, const std::string& name, const std::string& from,
                              const RepairOptions& options = {}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto other, OpenedCheckpoint::Open(fs(), from, {}));
    return RepairOn(on, InStore(name), std::move(other), options);
  }
  Result<RepairReport> Repair(const std::string& name, const std::string& from,
                              const RepairOptions& options = {}) {
    return Repair(fs(), name, from, options);
  }
  // As it was before the damage: every file of every checkpoint, modes too, and nothing besides.
  void ExpectWhole() {
    auto now = FilesBelow(StorePath());
    EXPECT_EQ(now.size(), whole_.size());
    for (const auto& [file, bytes] : whole_) EXPECT_EQ(now[file] == bytes, true) << file;
  }
  std::string DataOf(const std::string& name, std::string_view with) {
    for (const std::string& file : NamesIn(InStore(name + "/data"))) {
      if (file.find(with) != std::string::npos) return "data/" + file;
    }
    ADD_FAILURE() << name << " has no " << with;
    return {};
  }
  std::uint64_t InodeOf(const std::string& file) {
    return fs().LinkStat(InStore(file)).value().inode;
  }

  std::map<std::string, std::string> whole_;
};

TEST_F(RepairTest, AnyFileIsRepairedFromACopy) {
  std::size_t number = 0;
  for (const auto& [file, bytes] : FilesBelow(InStore("link-1"))) {
    ++number;
    const std::string path = InStore("link-1/" + file);
    const std::uint64_t size = fs().LinkStat(path).value().size;
    const std::map<std::string, std::function<void()>> ways = {
        {"a bit at the begin", [&] { Flip(path, 0); }},
        {"a bit at the end", [&] { Flip(path, size - 1); }},
        {"cut", [&] { Resize(path, size / 2); }},
        {"empty", [&] { Resize(path, 0); }},
        {"longer", [&] { Resize(path, size + 1000); }},
        {"lost", [&] { ASSERT_OK(fs().RemoveFile(path)); }},
        {"a folder",
         [&] {
           ASSERT_OK(fs().RemoveFile(path));
           ASSERT_OK(fs().CreateDirectory(path));
         }},
    };
    for (const auto& [way, damage] : ways) {
      if (file == "COMMIT" && way == "a folder") continue;
      // Every third way of each; another one of the next file.
      if (TestScale(1) == 1 && ++number % 3 != 0) continue;
      SCOPED_TRACE(file + ": " + way);
      damage();
      const auto damaged = FilesBelow(StorePath());
      ASSERT_OK_AND_ASSIGN(const RepairReport dry,
                           Repair("link-1", InCopy("link-1"), {.dry_run = true}));
      ASSERT_EQ(FilesBelow(StorePath()), damaged);
      ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("link-1", InCopy("link-1")));
      ASSERT_THAT(report.files, SizeIs(1));
      EXPECT_EQ(report.files[0].file, file);
      EXPECT_TRUE(report.files[0].whole);
      EXPECT_EQ(report.files[0].bytes_repaired, report.files[0].bytes_damaged);
      EXPECT_THAT(report.left, IsEmpty());
      ASSERT_THAT(dry.files, SizeIs(1));
      EXPECT_EQ(dry.files[0].bytes_repaired, report.files[0].bytes_repaired);
      EXPECT_EQ(dry.files[0].damage, report.files[0].damage);
      ExpectWhole();
      ASSERT_OK_AND_ASSIGN(const auto verified, VerifyCheckpoint(fs(), InStore("link-1"), {}));
      EXPECT_THAT(verified.damages, IsEmpty());
      if (HasFailure()) return;
    }
  }
  ASSERT_OK_AND_ASSIGN(const RepairReport nothing, Repair("link-1", InCopy("link-1")));
  EXPECT_THAT(nothing.files, IsEmpty());
}

TEST_F(RepairTest, BothDamagedCopiesOfCommitAreRepaired) {
  const std::uint64_t size = fs().LinkStat(InStore("link-1/COMMIT")).value().size;
  const auto damage = [&] {
    Flip(InStore("link-1/COMMIT"), 20);
    Flip(InStore("link-1/COMMIT"), size / 2 + 20);
  };
  damage();
  // The same files, and another save.
  EXPECT_THAT(Repair("link-1", InCopy("link-2")), HasCode(Code::kDataLoss));
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("link-1", InCopy("link-1")));
  EXPECT_THAT(report.left, IsEmpty());
  ExpectWhole();
  // Of one copy that is good anybody may be `from`.
  Flip(InStore("link-1/COMMIT"), 20);
  ASSERT_OK(Repair("link-1", InCopy("link-2")));
  ExpectWhole();
  // Not while somebody reads: gc looks for his lock on the file of this name.
  Flip(InStore("link-1/COMMIT"), 20);
  ASSERT_OK_AND_ASSIGN(const auto reader, OpenedCheckpoint::Open(fs(), InStore("link-1"), {}));
  ASSERT_OK_AND_ASSIGN(const RepairReport read, Repair("link-1", InCopy("link-1")));
  ASSERT_THAT(read.left, SizeIs(1));
  EXPECT_THAT(read.left[0].reason, HasSubstr("the checkpoint is in use"));
}

TEST_F(RepairTest, NewerFormatIsOnlyRead) {
  const std::string path = InStore("link-1/COMMIT");
  ASSERT_OK_AND_ASSIGN(DecodedCommit decoded, DecodeCommit(ReadWholeFile(path), kCommitName));
  decoded.record.read_compatible = 4;
  Overwrite(path, EncodeCommit(decoded.record));
  EXPECT_OK(OpenedCheckpoint::Open(fs(), InStore("link-1"), {}));
  const std::string data = InStore("link-1/" + DataOf("link-1", ""));
  Flip(data, 0);
  const std::string damaged = ReadWholeFile(data);
  EXPECT_THAT(Repair("link-1", InCopy("link-1")), HasCode(Code::kReadOnly));
  EXPECT_EQ(ReadWholeFile(data), damaged);
  RepairOptions dry;
  dry.dry_run = true;
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("link-1", InCopy("link-1"), dry));
  EXPECT_THAT(report.files, SizeIs(1));
}

// One that this program could write only shorter stays as it is, and is damaged still.
TEST_F(RepairTest, CommitWithUnknownFieldsIsNotRewritten) {
  const std::string path = InStore("link-1/COMMIT");
  const std::string was = ReadWholeFile(path);
  const std::string longer = was.substr(0, was.size() / 2) + std::string(4096, '\0');
  Overwrite(path, longer + longer);
  Flip(path, 20);
  const std::string damaged = ReadWholeFile(path);
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("link-1", InCopy("link-1")));
  ASSERT_THAT(report.files, SizeIs(1));
  EXPECT_FALSE(report.files[0].whole);
  EXPECT_EQ(report.files[0].bytes_damaged, was.size());
  EXPECT_EQ(report.files[0].bytes_repaired, 0u);
  ASSERT_THAT(report.left, SizeIs(1));
  EXPECT_THAT(report.left[0].reason, HasSubstr("has fields that this version does not know"));
  EXPECT_EQ(ReadWholeFile(path), damaged);
}

TEST_F(RepairTest, SharedFileIsRepairedInAllCheckpoints) {
  const std::string shared = DataOf("base", "-t");
  // A save under way that has linked it.
  ASSERT_OK_AND_ASSIGN(const Staging staging, MakeStore().Begin("next", IfExists::kFail));
  ASSERT_OK(fs().Link(InStore("base/" + shared), JoinPath(staging.directory, shared)));
  ASSERT_OK(MakeStore().Remove("base"));
  Flip(InStore("link-1/" + shared), 70000);
  const std::uint64_t old = InodeOf("link-1/" + shared);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> reader,
                       fs().OpenRead(InStore("link-1/" + shared)));
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("link-1", InCopy("link-1")));
  ASSERT_THAT(report.files, SizeIs(1));
  EXPECT_THAT(report.files[0].shared_with, ElementsAre("link-2"));
  EXPECT_EQ(report.files[0].bytes_damaged, 60000u) << "one chunk of two";
  const std::uint64_t fresh = InodeOf("link-1/" + shared);
  EXPECT_NE(fresh, old);
  EXPECT_EQ(InodeOf("link-2/" + shared), fresh);
  EXPECT_EQ(fs().LinkStat(JoinPath(staging.directory, shared)).value().inode, fresh);
  ASSERT_OK_AND_ASSIGN(const FileInfo info, reader->Stat());
  EXPECT_EQ(info.links, 0u) << "also in .trash";
  for (const char* name : {"link-1", "link-2"}) {
    ASSERT_OK_AND_ASSIGN(const auto verified, VerifyCheckpoint(fs(), InStore(name), {}));
    EXPECT_THAT(verified.damages, IsEmpty()) << name;
  }
  // One name is lost: the file of the others is linked.
  ASSERT_OK(fs().RemoveFile(InStore("link-2/" + shared)));
  ASSERT_OK(Repair("link-2", InCopy("link-1")));
  EXPECT_EQ(InodeOf("link-2/" + shared), fresh);
}

// Between the last look for other names and the exchange of its own.
TEST_F(RepairTest, FileLinkedByASaveDuringRepairIsRepaired) {
  const std::string shared = DataOf("base", "-t");
  Flip(InStore("base/" + shared), 5);
  ASSERT_OK_AND_ASSIGN(const Staging staging, MakeStore().Begin("next", IfExists::kFail));
  const std::string late = JoinPath(staging.directory, shared);
  int exchanges = 0;
  ObservedFileSystem beside(fs(), [&](const FileEvent& e) {
    if (e.op != FileOp::kExchange || ++exchanges != 3) return Status();
    return fs().Link(InStore("base/" + shared), late);
  });
  ASSERT_OK(Repair(beside, "base", InCopy("base")));
  EXPECT_EQ(exchanges, 4);
  EXPECT_EQ(fs().LinkStat(late).value().inode, InodeOf("base/" + shared));
}

// The same, and it is moved while the last look goes through the folders of the store.
TEST_F(RepairTest, FileMovedDuringRepairIsRepaired) {
  const std::string shared = DataOf("base", "-t");
  for (const char* from : {".staging/next", ".trash/next"}) {
    SCOPED_TRACE(from);
    ASSERT_OK(fs().CreateDirectories(InStore(from + std::string("/data"))));
    Flip(InStore("base/" + shared), 5);
    int exchanges = 0;
    bool moved = false;
    ObservedFileSystem beside(
        fs(),
        [&](const FileEvent& e) {
          if (e.op != FileOp::kExchange || ++exchanges != 3) return Status();
          return fs().Link(InStore("base/" + shared), InStore(JoinPath(from, shared)));
        },
        [&](const FileEvent& e) {
          if (e.op != FileOp::kList || e.path != StorePath() || exchanges < 3) return;
          if (!std::exchange(moved, true)) {
            ASSERT_OK(fs().RenameNoReplace(InStore(from), InStore("next")));
          }
        });
    ASSERT_OK(Repair(beside, "base", InCopy("base")));
    EXPECT_TRUE(moved);
    EXPECT_EQ(InodeOf("next/" + shared), InodeOf("base/" + shared));
    ASSERT_OK(fs().RemoveTree(InStore("next")));
  }
}

// As ext4, which gives the number of an inode that was just freed to the next file.
class ReusesInodes : public ObservedFileSystem {
 public:
  // `next` makes that file, and says where it is.
  ReusesInodes(std::uint64_t inode, std::function<std::string()> next)
      : ObservedFileSystem(HostFileSystem(), {},
                           [this](const FileEvent& e) {
                             if (made_.empty() && e.op == FileOp::kRemoveFile && !InUse()) {
                               made_ = next_();
                             }
                           }),
        inode_(inode),
        next_(std::move(next)) {}
  Result<FileInfo> LinkStat(const std::string& path) override {
    auto info = ObservedFileSystem::LinkStat(path);
    if (info.ok() && path == made_) info.value().inode = inode_;
    return info;
  }
  const std::string& made() const { return made_; }

 private:
  bool InUse() const {
    if (std::filesystem::exists(names_)) {
      for (const auto& e : std::filesystem::recursive_directory_iterator(names_)) {
        if (InodeAt(e.path()) == inode_) return true;
      }
    }
    for (const auto& e : std::filesystem::directory_iterator("/proc/self/fd")) {
      if (InodeAt(e.path(), true) == inode_) return true;
    }
    return false;
  }
  static std::uint64_t InodeAt(const std::string& path, bool follow = false) {
    struct stat st = {};
    return (follow ? ::stat : ::lstat)(path.c_str(), &st) == 0 ? st.st_ino : 0;
  }

 public:
  std::string names_;  // Below it all names of the file are.

 private:
  const std::uint64_t inode_;
  const std::function<std::string()> next_;
  std::string made_;
};

TEST_F(RepairTest, RepairKeepsTheManifestOfAConcurrentSave) {
  for (const char* what : {"flipped", "not to be opened"}) {
    SCOPED_TRACE(what);
    const std::string manifest = "manifest/" + NamesIn(InStore("base/manifest")).back();
    Flip(InStore("base/" + manifest), 500);
    ASSERT_OK_AND_ASSIGN(const Staging staging, MakeStore().Begin("next", IfExists::kFail));
    ReusesInodes reuses(InodeOf("base/" + manifest), [&] {
      WriteWholeFile(JoinPath(staging.directory, manifest), "of another save");
      return JoinPath(staging.directory, manifest);
    });
    reuses.names_ = StorePath();
    ObservedFileSystem on(reuses, [&](const FileEvent& e) {
      const bool fails = what == std::string("not to be opened") && e.op == FileOp::kOpenRead &&
                         e.path == InStore("base/" + manifest);
      return fails ? Status::FromErrno(EIO, "open", e.path) : Status();
    });
    ASSERT_OK(Repair(on, "base", InCopy("base")));
    EXPECT_EQ(ReadWholeFile(InStore("base/" + manifest)),
              ReadWholeFile(InCopy("base/") + manifest));
    if (!reuses.made().empty()) {
      EXPECT_EQ(ReadWholeFile(reuses.made()), "of another save");
    }
    ASSERT_OK(fs().RemoveTree(staging.directory));
  }
}

// Between the look for other names and their exchange.
TEST_F(RepairTest, RepairKeepsAFileReplacedMeanwhile) {
  const std::string manifest = "manifest/" + NamesIn(InStore("base/manifest")).back();
  // By `cp -al`.
  ASSERT_OK(fs().CreateDirectory(InStore("twin")));
  ASSERT_OK(fs().CreateDirectory(InStore("twin/manifest")));
  ASSERT_OK(fs().Link(InStore("base/" + manifest), InStore("twin/" + manifest)));
  for (const bool exchange : {true, false}) {
    SCOPED_TRACE(exchange);
    Flip(InStore("base/" + manifest), 500);
    const std::string twin = InStore("twin/" + manifest);
    bool replaced = false;
    ObservedFileSystem beside(fs(), [&](const FileEvent& e) {
      if (e.op != FileOp::kExchange) return Status();
      if (e.path2 == twin && !std::exchange(replaced, true)) {
        TENSORMOUNT_RETURN_IF_ERROR(fs().RemoveFile(twin));
        WriteWholeFile(twin, "a newer one");
      }
      return exchange ? Status() : Status(Code::kUnsupported, "exchange");
    });
    ASSERT_OK(Repair(beside, "base", InCopy("base")));
    EXPECT_TRUE(replaced);
    EXPECT_EQ(ReadWholeFile(twin), "a newer one");
    EXPECT_EQ(ReadWholeFile(InStore("base/" + manifest)),
              ReadWholeFile(InCopy("base/") + manifest));
    ASSERT_OK(fs().RemoveFile(twin));
    ASSERT_OK(fs().Link(InStore("base/" + manifest), twin));
  }
}

// A filesystem without RENAME_NOREPLACE cannot move an empty directory out of the way.
TEST_F(RepairTest, FilesThatAppearInAnEmptyDirectoryAreKept) {
  const std::string manifest = "manifest/" + NamesIn(InStore("base/manifest")).back();
  const std::string path = InStore("base/" + manifest);
  for (const bool fills : {true, false}) {
    SCOPED_TRACE(fills);
    ASSERT_OK(fs().RemoveTree(path));
    ASSERT_OK(fs().CreateDirectory(path));
    bool refused = false;
    ObservedFileSystem beside(fs(), [&](const FileEvent& e) {
      if (e.op == FileOp::kExchange) return Status(Code::kUnsupported, "exchange");
      if (e.op != FileOp::kRename || !e.path.ends_with(manifest) || refused) return Status();
      refused = true;
      if (fills) WriteWholeFile(path + "/new", "somebody's");
      return Status(Code::kUnsupported, "rename");
    });
    const auto repaired = Repair(beside, "base", InCopy("base"));
    EXPECT_TRUE(refused);
    if (fills) {
      EXPECT_FALSE(repaired.ok());
      EXPECT_EQ(ReadWholeFile(path + "/new"), "somebody's");
    } else {
      ASSERT_OK(repaired);
      EXPECT_EQ(ReadWholeFile(path), ReadWholeFile(InCopy("base/") + manifest));
    }
  }
}

// A checkpoint that was cut otherwise has neither the files nor the manifests.
TEST_F(RepairTest, RepairsFromAnotherSharding) {
  TinySpec other = FrozenSpec();
  other.tensors[0].parts = 5;
  other.tensors[0].axis = 1;
  other.tensors[0].tensor_file = false;
  other.tensors[1].parts = 3;
  other.tensors[1].axis = 0;
  other.writers = 3;
  ASSERT_OK(WriteTinyCheckpoint(fs(), dir_.Join("cut"), "x", other));
  const std::string from = dir_.Join("cut/x");
  const std::string tensor_file = DataOf("base", "-t");
  Flip(InStore("base/" + tensor_file), 0);
  Flip(InStore("base/" + tensor_file), 119999);
  Flip(InStore("base/" + DataOf("base", "-r0")),
       fs().LinkStat(InStore("base/" + DataOf("base", "-r0"))).value().size - 1);
  ASSERT_OK_AND_ASSIGN(const RepairReport flips, Repair("base", from));
  EXPECT_THAT(flips.files, SizeIs(2));
  EXPECT_THAT(flips.left, IsEmpty());
  ExpectWhole();
  ASSERT_OK(fs().RemoveFile(InStore("base/" + tensor_file)));
  for (const char* name : {"link-1", "link-2"}) {
    ASSERT_OK(fs().RemoveFile(InStore(name + ("/" + tensor_file))));
  }
  ASSERT_OK_AND_ASSIGN(const RepairReport lost, Repair("base", from));
  EXPECT_THAT(lost.files[0].shared_with, UnorderedElementsAre("link-1", "link-2"));
  ExpectWhole();
  // A manifest is nobody's but a copy's, and neither is the index. The data are repaired all the
  // same, by the roots in the index.
  const std::string manifest = "manifest/" + NamesIn(InStore("base/manifest")).back();
  Flip(InStore("base/" + manifest), 500);
  Flip(InStore("base/" + tensor_file), 5);
  ASSERT_OK_AND_ASSIGN(const RepairReport roots, Repair("base", from));
  ASSERT_THAT(roots.left, SizeIs(1));
  EXPECT_EQ(roots.left[0].file, manifest);
  EXPECT_THAT(roots.left[0].reason, HasSubstr("is not a copy of this checkpoint"));
  ASSERT_THAT(roots.files, SizeIs(2));
  EXPECT_TRUE(roots.files[1].whole);
  ASSERT_OK(Repair("base", InCopy("base")));
  ExpectWhole();
}

TEST_F(RepairTest, RepairRefusesDifferentBytes) {
  TinySpec other = FrozenSpec(99);
  other.tensors[1] = FrozenSpec().tensors[1];
  ASSERT_OK(WriteTinyCheckpoint(fs(), dir_.Join("other"), "x", other));
  const std::string tensor_file = DataOf("base", "-t");
  const std::string shard = DataOf("base", "-r1");
  Flip(InStore("base/" + tensor_file), 5);
  const auto damaged = FilesBelow(StorePath());
  Flip(InStore("base/" + shard), fs().LinkStat(InStore("base/" + shard)).value().size - 1);
  // The rest is repaired.
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("base", dir_.Join("other/x")));
  ASSERT_THAT(report.left, SizeIs(1));
  EXPECT_THAT(report.left[0].object, HasSubstr("tensor frozen.big"));
  EXPECT_EQ(report.left[0].file, tensor_file);
  EXPECT_THAT(report.left[0].reason, HasSubstr("has different bytes"));
  ASSERT_THAT(report.files, SizeIs(2));
  EXPECT_EQ(FilesBelow(StorePath()), damaged);
  // Neither tensor is there, or it is another one.
  TinySpec less;
  less.tensors = {{"frozen.big", DType::kF32, {100, 300}, 1, 1, 0, false}};
  ASSERT_OK(WriteTinyCheckpoint(fs(), dir_.Join("other"), "y", less));
  ASSERT_OK_AND_ASSIGN(const RepairReport shape, Repair("base", dir_.Join("other/y")));
  ASSERT_THAT(shape.left, SizeIs(1));
  EXPECT_THAT(shape.left[0].reason, HasSubstr("the tensor of the other checkpoint is f32 [100, "
                                              "300], not f32 [300, 100]"));
  ASSERT_OK_AND_ASSIGN(const RepairReport none, Repair("link-1", InCopy("base")));
  EXPECT_THAT(none.left, IsEmpty()) << "what it shares with base";
  ExpectWhole();
}

// Half of a file is better than none: what can be had is there, the rest is named.
TEST_F(RepairTest, LostFileIsPartlyRepaired) {
  ASSERT_OK(Save("two", Both(FrozenSpec(5), StepSpec(6))));
  TinySpec part = StepSpec(6);
  ASSERT_OK(WriteTinyCheckpoint(fs(), dir_.Join("part"), "x", part));
  const std::string shard = DataOf("two", "-r0.saf");
  ASSERT_OK(fs().RemoveFile(InStore("two/" + shard)));
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("two", dir_.Join("part/x")));
  EXPECT_THAT(report.left, SizeIs(2)) << "the header, and frozen.small";
  ASSERT_THAT(report.files, SizeIs(1));
  EXPECT_FALSE(report.files[0].whole);
  EXPECT_GT(report.files[0].bytes_repaired, 0u);
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(fs(), InStore("two"), {}));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("adapter"));
  std::string bytes(entry.meta.bytes(), '?');
  ASSERT_OK(
      opened->ReadBytes(entry, 0, bytes.data(), bytes.size(), ReadVerify::kExtendLeaves, nullptr));
  EXPECT_EQ(bytes, TinyBytes(part.tensors[0]));
}

// A sector of the source that cannot be read costs its 64 KiB, and no more.
TEST_F(RepairTest, BadSectorOfTheSourceLosesOneBlock) {
  TinySpec large;
  large.tensors = {{"w", DType::kU8, {10 * 65536}, 3, 1, 0, true}};
  ASSERT_OK(Save("large", large));
  ASSERT_OK(CopyCheckpoints(fs(), {InStore("large")}, dir_.Join("copy"), {}));
  const std::string file = DataOf("large", "-t");
  for (std::uint64_t leaf = 0; leaf < 10; ++leaf) {
    Flip(InStore("large/" + file), leaf * 65536 + 9);
  }
  ObservedFileSystem bad(fs(), [&](const FileEvent& e) {
    constexpr std::uint64_t kSector = 3 * 65536 + 512;
    const bool hit = e.op == FileOp::kRead && e.path.ends_with(file) && e.offset <= kSector &&
                     e.offset + e.size > kSector;
    return hit ? Status::FromErrno(EIO, "read", e.path) : Status();
  });
  OpenedCheckpoint::Options options;
  ASSERT_OK_AND_ASSIGN(auto other, OpenedCheckpoint::Open(bad, InCopy("large"), options));
  ASSERT_OK_AND_ASSIGN(const RepairReport report,
                       RepairOn(fs(), InStore("large"), std::move(other), {}));
  ASSERT_THAT(report.files, SizeIs(1));
  EXPECT_EQ(report.files[0].bytes_repaired, 9u * 65536);
  ASSERT_THAT(report.left, SizeIs(1));
  EXPECT_EQ(report.left[0].offset, 3u * 65536);
  EXPECT_THAT(report.left[0].reason, HasSubstr("Input/output error"));
}

// Nothing is known of the bytes: neither verify nor repair calls them damaged.
TEST_F(RepairTest, NewerManifestIsNotReportedAsDamage) {
  const std::string commit = InStore("base/COMMIT");
  ASSERT_OK_AND_ASSIGN(DecodedCommit decoded, DecodeCommit(ReadWholeFile(commit), "COMMIT"));
  const std::string manifest = "manifest/" + NamesIn(InStore("base/manifest")).back();
  std::string bytes = ReadWholeFile(InStore("base/" + manifest));
  ++bytes[8];  // The version; the hash of the header stands in its last 16 bytes.
  const Hash128 header = Xxh3(bytes.substr(0, 112));
  std::memcpy(bytes.data() + 112, &header.low, 8);
  std::memcpy(bytes.data() + 120, &header.high, 8);
  Overwrite(InStore("base/" + manifest), bytes);
  for (CommitRecord::Entry& entry : decoded.record.files) {
    if (entry.name == manifest) entry.hash = Xxh3(bytes);
  }
  Overwrite(commit, EncodeCommit(decoded.record));
  EXPECT_THAT(VerifyCheckpoint(fs(), InStore("base"), {}), HasCode(Code::kUnsupported));
  const auto before = FilesBelow(StorePath());
  EXPECT_THAT(Repair("base", InCopy("base")), HasCode(Code::kUnsupported));
  EXPECT_EQ(FilesBelow(StorePath()), before);
}

TEST_F(RepairTest, InvalidRepairsAreRefused) {
  EXPECT_THAT(Repair("link-1", InStore("link-1")), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Repair("none", InCopy("base")), HasCode(Code::kNotFound));
  Flip(InStore("base/" + DataOf("base", "-t")), 5);
  bool asked = false;
  ASSERT_OK(Repair("base", InCopy("base"), {.watch = [&](std::uint64_t, std::uint64_t) {
                     if (!std::exchange(asked, true)) {
                       EXPECT_THAT(Repair("link-1", InCopy("base")), HasCode(Code::kBusy));
                       SetMtimes(InStore(".staging"), 1000);
                       const auto gc = MakeStore().Gc({});
                       EXPECT_THAT(gc.value().kept, ElementsAre(HasSubstr(".repair: in use")));
                     }
                     return Status();
                   }}));
  EXPECT_TRUE(asked);
  ExpectWhole();
  // What an interrupted one left is named, and gone with the next.
  ASSERT_OK(fs().CreateDirectory(InStore(".staging/.repair")));
  WriteWholeFile(InStore(".staging/.repair/part-1"), "x");
  ASSERT_OK_AND_ASSIGN(const auto findings, MakeStore().Fsck({}));
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings[0].problem, HasSubstr("a repair that is running"));
  ASSERT_OK(Repair("base", InCopy("base")));
  ExpectWhole();
}

// Whoever can write to a store must not lead a repair by somebody else out of it.
TEST_F(RepairTest, RepairChangesNothingOutsideTheStore) {
  const std::string outside = dir_.Join("outside");
  const std::string shared = DataOf("base", "-t");
  ASSERT_OK(fs().RenameNoReplace(InStore("base/data"), outside));
  std::filesystem::create_directory_symlink(outside, InStore("base/data"));
  Flip(JoinPath(outside, shared.substr(5)), 5);
  const auto before = FilesBelow(outside);
  const auto repaired = Repair("base", InCopy("base"));
  EXPECT_THAT(repaired, HasCode(Code::kDataLoss));
  EXPECT_THAT(repaired.status().message(),
              HasSubstr("has the name of a parent directory of this file"));
  EXPECT_EQ(FilesBelow(outside), before);
  // Another checkpoint keeps what a link of it leads to.
  ASSERT_OK(fs().RemoveFile(InStore("base/data")));
  ASSERT_OK(fs().RenameNoReplace(outside, InStore("base/data")));
  ASSERT_OK(fs().RenameNoReplace(InStore("link-1/data"), outside));
  std::filesystem::create_directory_symlink(outside, InStore("link-1/data"));
  ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair("base", InCopy("base")));
  ASSERT_THAT(report.files, SizeIs(1));
  EXPECT_THAT(report.files[0].shared_with, ElementsAre("link-2"));
  EXPECT_EQ(FilesBelow(outside)[shared.substr(5)], before.at(shared.substr(5)));
}

TEST_F(RepairTest, RepairsWithoutExchangeAndHardLinks) {
  const std::string shared = DataOf("base", "-t");
  for (const FileOp refused : {FileOp::kExchange, FileOp::kLink}) {
    SCOPED_TRACE(std::string(FileOpName(refused)));
    Flip(InStore("base/" + shared), 5);
    ObservedFileSystem refusing(fs(), [&](const FileEvent& e) {
      if (e.op != refused) return Status();
      return refused == FileOp::kLink ? Status::FromErrno(EPERM, "link", e.path)
                                      : Status(Code::kUnsupported, "exchange");
    });
    ASSERT_OK_AND_ASSIGN(const RepairReport report, Repair(refusing, "base", InCopy("base")));
    if (refused == FileOp::kExchange) {
      EXPECT_THAT(report.left, IsEmpty());
    } else {
      // The others have the damaged one still, and are named.
      EXPECT_THAT(report.left, SizeIs(2));
      EXPECT_TRUE(report.files.at(0).whole);
      for (const char* name : {"link-1", "link-2"}) ASSERT_OK(Repair(name, InCopy("base")));
    }
    ExpectWhole();
  }
}

// Each operation fails in turn: no file gets worse, and the next repair ends well.
TEST_F(RepairTest, FaultAtAnyOperationLosesNothing) {
  const std::string shared = DataOf("base", "-t");
  int failed = 0;
  bool reached = true;
  // Every third one; all of them in three runs.
  for (int k = static_cast<int>(TestSeed() % 3); reached; k += 3) {
    Flip(InStore("base/" + shared), 5);
    const std::string damaged = FilesBelow(InStore("base"))[shared];
    int op = 0;
    std::string what;
    ObservedFileSystem faulty(fs(), [&](const FileEvent& e) {
      if (op++ != k) return Status();
      const Status error = Status::FromErrno(k % 2 == 0 ? EIO : ENOSPC, FileOpName(e.op), e.path);
      what = error.message();
      return error;
    });
    const auto repaired = Repair(faulty, "base", InCopy("base"));
    reached = !what.empty();
    SCOPED_TRACE("operation " + std::to_string(k) + ": " + what + ": " +
                 repaired.status().ToString());
    failed += repaired.ok() && repaired.value().left.empty() ? 0 : 1;
    for (const auto& [file, bytes] : whole_) {
      if (file.starts_with(".")) continue;
      const std::string now = FilesBelow(StorePath())[file];
      ASSERT_TRUE(now == bytes || (file.ends_with(shared) && now == damaged)) << file;
    }
    ASSERT_OK(Repair("base", InCopy("base")));
    // Where one name was replaced before the failure, the next repair does the others.
    ASSERT_NO_FATAL_FAILURE(ExpectWhole());
    ASSERT_EQ(InodeOf("link-1/" + shared), InodeOf("link-2/" + shared));
    ASSERT_EQ(InodeOf("link-1/" + shared), InodeOf("base/" + shared));
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(failed, 10);
}

TEST_F(RepairTest, PowerCutAtAnyOperationLosesNothing) {
  const std::string root = dir_.Join("live");
  ASSERT_OK(fs().CreateDirectory(root));
  std::filesystem::copy(StorePath(), root + "/store", std::filesystem::copy_options::recursive);
  const std::string shared = DataOf("base", "-t");
  Flip(root + "/store/base/" + shared, 5);
  const std::string damaged = FilesBelow(root + "/store/base")[shared];
  for (const char* name : {"link-1", "link-2"}) {
    ASSERT_OK(fs().RemoveFile(root + "/store/" + name + "/" + shared));
  }
  // It knows of links that were made through it.
  PowerCutFileSystem live(root);
  for (const char* name : {"link-1", "link-2"}) {
    const std::string folder = root + "/store/" + name;
    ASSERT_OK(live.Link(root + "/store/base/" + shared, folder + "/" + shared));
    ASSERT_OK(live.SyncDirectory(folder + "/data"));
  }
  const std::size_t begun = live.op_count();
  ASSERT_OK_AND_ASSIGN(auto other, OpenedCheckpoint::Open(fs(), InCopy("base"), {}));
  ASSERT_OK(RepairOn(live, root + "/store/base", other, {}));
  const std::size_t done = live.op_count();
  Random random(TestSeed());
  for (std::size_t k = begun; k <= done; ++k) {
    for (int i = 0; i < TestScale(2); ++i) {
      const std::string after = dir_.Join("after");
      ASSERT_OK(live.Materialise(k, random, after));
      SCOPED_TRACE("power cut after " + std::to_string(k) + " operations");
      for (const auto& [file, bytes] : FilesBelow(after + "/store")) {
        const auto before = whole_.find(file);
        if (file.starts_with(".") || before == whole_.end()) continue;
        ASSERT_TRUE(bytes == before->second ||
                    (k < done && file.ends_with(shared) && bytes == damaged))
            << file;
      }
      for (const char* name : {"base", "link-1", "link-2"}) {
        ASSERT_TRUE(fs().Exists(after + "/store/" + name + "/" + shared)) << name;
      }
      ASSERT_OK_AND_ASSIGN(auto again, OpenedCheckpoint::Open(fs(), InCopy("base"), {}));
      ASSERT_OK(RepairOn(fs(), after + "/store/base", again, {}));
      for (const char* name : {"base", "link-1", "link-2"}) {
        ASSERT_EQ(
            FilesBelow(after + "/store/" + std::string(name))[shared] == whole_["base/" + shared],
            true)
            << name;
      }
      ASSERT_OK(HostFileSystem().RemoveTree(after));
    }
  }
}

}  // namespace
}  // namespace tensormount
