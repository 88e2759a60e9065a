// SPDX-License-Identifier: Apache-2.0
// What a store says and does when parts of it cannot be read, locked, listed or dated.
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <sys/stat.h>
#include <unistd.h>

#include "index/foreign/open_source.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "tests/index/store_test_support.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

using std::chrono::seconds;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr Store::GcOptions kNoGrace{.grace = seconds(0)};

// Fails operations of one kind on paths that end so.
ObservedFileSystem::Before Failing(FileOp op, std::string ending, int err) {
  return [=](const FileEvent& e) {
    return e.op == op && e.path.ends_with(ending) ? Status::FromErrno(err, "injected", e.path)
                                                  : Status();
  };
}

class StoreFaultsTest : public StoreTest {
 protected:
  // COMMIT of a format that this program does not know.
  void MakeNewer(const std::string& name) {
    const std::string path = InStore(name + "/COMMIT");
    std::string bytes = ReadWholeFile(path);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data() + 40, 8);
    std::string copy = bytes.substr(0, length);
    copy[32] = 0x10;
    const Hash128 hash = Xxh3(std::string_view(copy).substr(0, length - 16));
    std::memcpy(copy.data() + length - 16, &hash.low, 8);
    std::memcpy(copy.data() + length - 8, &hash.high, 8);
    copy.resize(bytes.size() / 2, '\0');
    WriteWholeFile(path, copy + copy);
  }
  Store OpenOn(FileSystem& on) {
    auto store = Store::Open(on, StorePath());
    EXPECT_OK(store);
    return std::move(store).value();
  }
};

// ---- latest -----------------------------------------------------------------------------------

TEST_F(StoreFaultsTest, UnreadableNewestCheckpointMakesLatestFail) {
  ASSERT_OK(Save("old", DefaultTinySpec()));
  ASSERT_OK(Save("new", DefaultTinySpec()));
  struct Fault {
    FileOp op;
    int err;
    Code code;
  };
  for (const Fault& fault :
       {Fault{FileOp::kOpenRead, EIO, Code::kDataLoss},
        Fault{FileOp::kOpenRead, EMFILE, Code::kResourceExhausted},
        Fault{FileOp::kOpenRead, EACCES, Code::kPermissionDenied},
        Fault{FileOp::kStat, EIO, Code::kDataLoss}, Fault{FileOp::kRead, EIO, Code::kDataLoss}}) {
    SCOPED_TRACE(std::string(FileOpName(fault.op)) + " " + std::strerror(fault.err));
    ObservedFileSystem failing(fs(), Failing(fault.op, "new/COMMIT", fault.err));
    const Store store = OpenOn(failing);
    EXPECT_THAT(store.Latest(), HasCode(fault.code));
    EXPECT_THAT(store.Latest(), HasMessage("checkpoint new"));
    EXPECT_THAT(ResolveSourcePath(failing, StorePath() + "/latest"), HasCode(fault.code));
    // Saves go on: somebody else's checkpoint must not stop them.
    EXPECT_OK(store.Begin("next", IfExists::kFail));
  }
  MakeNewer("new");
  EXPECT_THAT(MakeStore().Latest(), HasCode(Code::kUnsupported));
}

TEST_F(StoreFaultsTest, DirectoryRemovedDuringAScanIsIgnored) {
  ASSERT_OK(Save("old", DefaultTinySpec()));
  ASSERT_OK(Save("new", DefaultTinySpec()));
  ObservedFileSystem removing(fs(), [&](const FileEvent& e) {
    if (e.op == FileOp::kOpenRead && e.path.ends_with("new/COMMIT")) {
      (void)fs().RemoveTree(InStore("new"));  // Once; then it is gone.
    }
    return Status();
  });
  EXPECT_EQ(OpenOn(removing).Latest().value().name, "old");
}

// Another one takes its place between two looks: it is neither removed nor damaged.
TEST_F(StoreFaultsTest, CommitReadableOnRetryIsUsed) {
  ASSERT_OK(Save("new", DefaultTinySpec()));
  for (const int err : {ENOENT, ESTALE}) {
    int looks = 0;
    ObservedFileSystem replacing(fs(), [&](const FileEvent& e) {
      const bool missed =
          e.op == FileOp::kOpenRead && e.path.ends_with("new/COMMIT") && looks++ == 0;
      return missed ? Status::FromErrno(err, "injected", e.path) : Status();
    });
    const auto latest = OpenOn(replacing).Latest();
    ASSERT_OK(latest);
    EXPECT_EQ(latest.value().name, "new");
    EXPECT_EQ(looks, 2);
  }
}

// A number that nobody's folder stands for could be given to two saves.
TEST_F(StoreFaultsTest, UnclaimableGenerationIsNotUsed) {
  ASSERT_OK(Save("old", DefaultTinySpec()));
  ObservedFileSystem failing(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kCreateDirectory && e.path.find("/.generations/") != std::string::npos
               ? Status::FromErrno(ENOSPC, "injected", e.path)
               : Status();
  });
  EXPECT_THAT(OpenOn(failing).Begin("new", IfExists::kFail), HasCode(Code::kResourceExhausted));
}

TEST_F(StoreFaultsTest, DamagedCheckpointIsSkippedWithAWarning) {
  ASSERT_OK(Save("old", DefaultTinySpec()));
  ASSERT_OK(Save("bad", DefaultTinySpec()));
  ASSERT_OK(fs().CreateDirectory(InStore("folder")));
  WriteWholeFile(InStore("bad/COMMIT"), "nonsense");
  const auto opened = OpenNamed(fs(), StorePath() + "/latest", {});
  ASSERT_OK(opened);
  EXPECT_EQ(opened.value()->name(), "old");
  EXPECT_THAT(opened.value()->warnings(), ElementsAre(HasSubstr("checkpoint bad was skipped")));
  // COMMIT lost altogether.
  ASSERT_OK(fs().RemoveFile(InStore("bad/COMMIT")));
  const auto again = OpenNamed(fs(), StorePath() + "/latest", {});
  ASSERT_OK(again);
  EXPECT_THAT(again.value()->warnings(), ElementsAre(HasSubstr("checkpoint bad was skipped")));
}

// ---- fsck -------------------------------------------------------------------------------------

TEST_F(StoreFaultsTest, FsckGivesNoRemedyForUnreadableObjects) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  for (const int err : {EIO, EMFILE, EACCES}) {
    for (const char* file : {"a/COMMIT", "a/manifest/coordinator.tmm"}) {
      if (err == EIO && file != std::string("a/COMMIT")) continue;  // That file is damaged.
      SCOPED_TRACE(std::string(file) + ": " + std::strerror(err));
      ObservedFileSystem failing(fs(), Failing(FileOp::kOpenRead, file, err));
      const auto found = OpenOn(failing).Fsck({});
      ASSERT_OK(found);
      ASSERT_THAT(found.value(), SizeIs(1));
      const Store::FsckFinding& f = found.value()[0];
      EXPECT_FALSE(f.damage) << f.problem;
      EXPECT_TRUE(f.unread);
      EXPECT_THAT(f.remedy, Not(HasSubstr("rm")));
      EXPECT_THAT(f.remedy, Not(HasSubstr("save the checkpoint again")));
    }
  }
  MakeNewer("a");
  const auto found = MakeStore().Fsck({});
  ASSERT_OK(found);
  ASSERT_THAT(found.value(), SizeIs(1));
  EXPECT_FALSE(found.value()[0].damage);
  EXPECT_THAT(found.value()[0].remedy, HasSubstr("newer version"));
}

// ext2 after a power cut: the name leads to another inode. What pins held nobody can say, so all
// stays.
TEST_F(StoreFaultsTest, FileInPlaceOfADirectoryIsReportedAndKept) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(Save("b", DefaultTinySpec()));
  ASSERT_OK(MakeStore().Remove("b"));
  ASSERT_OK(fs().RemoveTree(InStore(".pins")));
  WriteWholeFile(InStore(".pins"), "");
  WriteWholeFile(InStore(".derived"), "");
  const auto kept = MakeStore().Gc({.grace = seconds(0)});
  ASSERT_OK(kept);
  EXPECT_THAT(kept.value().failed, Contains(HasSubstr("`tensormount fsck` shows the remedy")));
  EXPECT_THAT(NamesIn(InStore(".trash")), Not(IsEmpty()));
  const auto found = MakeStore().Fsck({});
  ASSERT_OK(found);
  std::vector<std::string> told;
  for (const Store::FsckFinding& f : found.value()) {
    if (f.damage) told.push_back(f.object + ": " + f.remedy);
    // What pins may hold in the trash is not known either.
    EXPECT_EQ(f.unread, f.object.starts_with(".trash/")) << f.object << ": " << f.problem;
  }
  EXPECT_THAT(told, ElementsAre(".derived: remove it: it is recreated when needed",
                                ".pins: remove it, then pin the checkpoints to keep again"));
  ASSERT_OK(fs().RemoveFile(InStore(".pins")));
  ASSERT_OK(fs().RemoveFile(InStore(".derived")));
  const auto gone = MakeStore().Gc({.grace = seconds(0)});
  ASSERT_OK(gone);
  EXPECT_THAT(gone.value().failed, IsEmpty());
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  EXPECT_THAT(MakeStore().Fsck({}).value(), IsEmpty());
}

TEST_F(StoreFaultsTest, EnvironmentErrorsAreNotReportedAsDamage) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  for (const int err : {EMFILE, ENOMEM, ESTALE, EACCES}) {
    for (const FileOp op : {FileOp::kOpenRead, FileOp::kRead, FileOp::kList}) {
      for (const std::string part : {"/data/", "/manifest"}) {
        if (op == FileOp::kList && part == "/data/") continue;
        SCOPED_TRACE(std::string(FileOpName(op)) + part + ": " + std::strerror(err));
        ObservedFileSystem failing(fs(), [&](const FileEvent& event) {
          const bool is_it = event.op == op && event.path.find(part) != std::string::npos;
          return is_it ? Status::FromErrno(err, "injected", event.path) : Status();
        });
        const auto verified = VerifyCheckpoint(failing, InStore("a"), {});
        EXPECT_FALSE(verified.ok());
        EXPECT_NE(verified.status().code(), Code::kStale) << "that is one that was deleted";
        const auto found = OpenOn(failing).Fsck({.read_data = true});
        ASSERT_OK(found);
        ASSERT_THAT(found.value(), SizeIs(1));
        EXPECT_FALSE(found.value()[0].damage) << found.value()[0].problem;
      }
    }
  }
}

TEST_F(StoreFaultsTest, UnlistableDirectoryIsNotTakenForEmpty) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(fs().CreateDirectories(InStore(".derived")));
  for (const std::string folder : {".staging", ".trash", ".derived", ".generations"}) {
    SCOPED_TRACE(folder);
    ObservedFileSystem failing(fs(), Failing(FileOp::kList, folder, EIO));
    const Store store = OpenOn(failing);
    const auto gc = store.Gc(kNoGrace);
    ASSERT_OK(gc);
    EXPECT_THAT(gc.value().failed, ElementsAre(HasSubstr(folder)));
    if (folder == ".generations") continue;  // Fsck does not look there.
    const auto found = store.Fsck({});
    ASSERT_OK(found);
    ASSERT_THAT(found.value(), SizeIs(1));
    EXPECT_EQ(found.value()[0].object, folder);
    EXPECT_TRUE(found.value()[0].unread);
  }
}

TEST_F(StoreFaultsTest, FsckAdvisesRemovingUnexpectedFiles) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  WriteWholeFile(InStore("a/data/notes.txt"), "mine");
  const auto found = MakeStore().Fsck({});
  ASSERT_OK(found);
  ASSERT_THAT(found.value(), SizeIs(1));
  EXPECT_THAT(found.value()[0].remedy, HasSubstr("remove it"));
}

TEST_F(StoreFaultsTest, LostManifestIsReportedOnce) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(fs().RemoveFile(InStore("a/manifest/coordinator.tmm")));
  const auto report = VerifyCheckpoint(fs(), InStore("a"), VerifyOptions{.quick = true});
  ASSERT_OK(report);
  ASSERT_THAT(report.value().damages, SizeIs(1));
  EXPECT_EQ(report.value().damages[0].file, "manifest/coordinator.tmm");
}

TEST_F(StoreFaultsTest, FsckRecreatesALostSuperblock) {
  EXPECT_THAT(Store::FsckFolder(fs(), dir_.path(), {}), HasCode(Code::kNotFound));
  ObservedFileSystem unlisted(fs(), Failing(FileOp::kList, dir_.path(), EACCES));
  EXPECT_THAT(Store::Open(unlisted, dir_.path()), HasMessage("not a store (no store.json)"));
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec));
  ASSERT_OK(fs().RemoveTree(InStore(".generations")));  // As brought by `cp` of a checkpoint.
  for (const bool lost : {true, false}) {
    SCOPED_TRACE(lost);
    ASSERT_OK(fs().RemoveFile(InStore("store.json")));
    if (!lost) WriteWholeFile(InStore("store.json"), "{\"form");
    const auto found = Store::FsckFolder(fs(), StorePath(), {});
    ASSERT_OK(found);
    ASSERT_THAT(found.value(), SizeIs(1));
    EXPECT_EQ(found.value()[0].object, "store.json");
    EXPECT_TRUE(found.value()[0].damage);
    EXPECT_THAT(found.value()[0].remedy, HasSubstr("--rebuild"));
    EXPECT_THAT(Store::Open(fs(), StorePath()), Not(IsOk()));
    const auto mended = Store::FsckFolder(fs(), StorePath(), {.rebuild = true});
    ASSERT_OK(mended);
    EXPECT_TRUE(mended.value()[0].repaired) << mended.value()[0].remedy;
    ASSERT_OK(Store::Open(fs(), StorePath()));
    EXPECT_TRUE(HoldsWhole(InStore("a"), spec));
  }
  // A newer format is no damage, and what cannot be read is left alone.
  ObservedFileSystem failing(fs(), Failing(FileOp::kRead, "store.json", EIO));
  EXPECT_THAT(Store::FsckFolder(failing, StorePath(), {.rebuild = true}), Not(IsOk()));
}

// ---- locks ------------------------------------------------------------------------------------

TEST_F(StoreFaultsTest, WithoutLocksReadersWorkAndGcKeepsCheckpoints) {
  for (const int err : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
    SCOPED_TRACE(std::strerror(err));
    const TinySpec spec = DefaultTinySpec();
    ASSERT_OK(Save("a", spec));
    ObservedFileSystem none(fs(), Failing(FileOp::kLock, "COMMIT", err));
    EXPECT_TRUE(HoldsWhole(none, InStore("a"), spec));
    const Store store = OpenOn(none);
    ASSERT_OK(store.Remove("a"));
    const auto kept = store.Gc(kNoGrace);
    ASSERT_OK(kept);
    EXPECT_THAT(kept.value().kept, ElementsAre(HasSubstr("--grace")));
    EXPECT_THAT(kept.value().failed, IsEmpty());
    const auto asked = store.Gc({.grace = seconds(0), .trust_grace = true});
    ASSERT_OK(asked);
    EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  }
  // What is no lack of locks is an error.
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ObservedFileSystem failing(fs(), Failing(FileOp::kLock, "COMMIT", EIO));
  EXPECT_THAT(OpenedCheckpoint::Open(failing, InStore("a"), {}), HasCode(Code::kDataLoss));
}

// ---- rm ---------------------------------------------------------------------------------------

// A rename that happens and is answered with an error, as over NFS.
class LyingRename : public ObservedFileSystem {
 public:
  LyingRename() : ObservedFileSystem(HostFileSystem(), {}) {}
  Status RenameNoReplace(const std::string& from, const std::string& to) override {
    TENSORMOUNT_RETURN_IF_ERROR(ObservedFileSystem::RenameNoReplace(from, to));
    return Status::FromErrno(EIO, "rename", from);
  }
};

TEST_F(StoreFaultsTest, UnsyncedRemovalReturnsUnknown) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(Save("b", DefaultTinySpec()));
  ASSERT_OK(Save("c", DefaultTinySpec()));
  ObservedFileSystem failing(fs(), Failing(FileOp::kSyncDirectory, ".trash", EIO));
  const Status removed = OpenOn(failing).Remove("a");
  EXPECT_THAT(removed, HasCode(Code::kUnknown));
  EXPECT_THAT(removed, HasMessage("removed, but a power failure may undo it"));
  EXPECT_FALSE(fs().Exists(InStore("a")));
  LyingRename lying;
  EXPECT_OK(OpenOn(lying).Remove("b"));
  EXPECT_FALSE(fs().Exists(InStore("b")));
  ObservedFileSystem refusing(fs(), Failing(FileOp::kRename, "c", EACCES));
  EXPECT_THAT(OpenOn(refusing).Remove("c"), HasCode(Code::kPermissionDenied));
  EXPECT_TRUE(fs().Exists(InStore("c")));
}

// ---- gc ---------------------------------------------------------------------------------------

TEST_F(StoreFaultsTest, GcKeepsUnreadableStagings) {
  const Store store = MakeStore();
  const Staging staging = Written(store, "slow", DefaultTinySpec());
  SetMtimes(staging.directory, HostFileSystem().NowSeconds() - 90000);
  WriteWholeFile(JoinPath(staging.directory, "data/more.bin"), "now");
  SetMtime(JoinPath(staging.directory, "data"), HostFileSystem().NowSeconds() - 90000);
  // The only sign of life cannot be seen.
  for (const char* what : {"data/more.bin", "slow", "UUID"}) {
    SCOPED_TRACE(what);
    ObservedFileSystem failing(fs(), [&](const FileEvent& e) {
      const bool hit = e.path.ends_with(what) ||
                       (what == std::string("slow") && e.path.ends_with(staging.ShortId()));
      return hit && e.op == FileOp::kStat ? Status::FromErrno(EIO, "stat", e.path) : Status();
    });
    const auto report = OpenOn(failing).Gc(kNoGrace);
    ASSERT_OK(report);
    EXPECT_THAT(report.value().failed, SizeIs(1));
    EXPECT_TRUE(fs().Exists(staging.directory));
  }
}

TEST_F(StoreFaultsTest, RemovedCheckpointWhoseCommitIsNotAFileIsFreed) {
  const auto make = std::array<std::function<void(const std::string&)>, 3>{
      [](const std::string& path) { ASSERT_EQ(mkdir(path.c_str(), 0755), 0); },
      [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0644), 0); },
      [](const std::string& path) { ASSERT_EQ(symlink("/nowhere", path.c_str()), 0); }};
  for (const auto& made : make) {
    ASSERT_OK(Save("a", DefaultTinySpec()));
    const Store store = MakeStore();
    ASSERT_OK(fs().RemoveFile(InStore("a/COMMIT")));
    made(InStore("a/COMMIT"));
    ASSERT_OK(store.Remove("a"));
    const auto report = store.Gc(kNoGrace);
    ASSERT_OK(report);
    EXPECT_THAT(report.value().kept, IsEmpty());
    EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  }
}

TEST_F(StoreFaultsTest, CommittedCheckpointIsNeverMarkedAborted) {
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("step", spec));
  const Store store = MakeStore();
  const Staging staging = Written(store, "step", spec, IfExists::kReplace);
  const Uuid replaced = store.Latest().value().uuid;
  // Its publisher exchanges between the look of gc and its rename.
  bool published = false;
  ObservedFileSystem between(fs(), [&](const FileEvent& e) {
    if (e.op == FileOp::kRename && !published) {
      published = true;
      EXPECT_OK(fs().Exchange(staging.directory, InStore("step")));
    }
    return Status();
  });
  const auto moved = store_moves::MoveToTrash(between, store.path(), staging.directory,
                                              store_paths::kAbortedSuffix);
  ASSERT_OK(moved);
  EXPECT_EQ(moved.value(), store.path() + "/.trash/" + replaced.ToString());
}

TEST_F(StoreFaultsTest, FutureTimestampsDoNotKeepTrashForever) {
  const Store store = MakeStore();
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(store.Remove("a"));
  ASSERT_THAT(NamesIn(InStore(".trash")), SizeIs(2));
  const std::string mark = InStore(".trash/" + NamesIn(InStore(".trash"))[1]);
  SetMtime(mark, HostFileSystem().NowSeconds() + 5 * 365 * 86400ll);
  ASSERT_OK(store.Gc({}));
  const auto now = fs().LinkStat(mark);
  ASSERT_OK(now);
  EXPECT_LE(now.value().mtime_seconds, HostFileSystem().NowSeconds() + 10)
      << "its grace begins anew";
  SetMtime(mark, -1000);
  ASSERT_OK(store.Gc({}));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());

  const Staging staging = Written(store, "b", DefaultTinySpec());
  SetMtimes(staging.directory, HostFileSystem().NowSeconds() + 5 * 365 * 86400ll);
  const auto kept = store.Gc({});
  ASSERT_OK(kept);
  EXPECT_THAT(kept.value().kept, Contains(HasSubstr("in the future")));
  ASSERT_OK(store.Gc({.grace = seconds(0), .staging_age = seconds(0)}));
  EXPECT_THAT(NamesIn(InStore(".staging")), IsEmpty());
}

// Shows other time stamps than the filesystem can hold.
class OddClock : public ObservedFileSystem {
 public:
  explicit OddClock(std::int64_t shown) : ObservedFileSystem(HostFileSystem(), {}), shown_(shown) {}
  Result<FileInfo> LinkStat(const std::string& path) override {
    auto info = ObservedFileSystem::LinkStat(path);
    if (!info.ok()) return info;
    FileInfo odd = info.value();
    odd.mtime_seconds = shown_;
    return odd;
  }

 private:
  std::int64_t shown_;
};

TEST_F(StoreFaultsTest, AgesDoNotOverflow) {
  const Store store = MakeStore();
  const Staging staging = Written(store, "b", DefaultTinySpec());
  OddClock last(std::numeric_limits<std::int64_t>::max());
  ASSERT_OK(OpenOn(last).Gc({}));
  EXPECT_TRUE(fs().Exists(staging.directory));
  OddClock first(std::numeric_limits<std::int64_t>::min());
  ASSERT_OK(OpenOn(first).Gc({}));
  EXPECT_FALSE(fs().Exists(staging.directory)) << "older than everything";
}

// ---- publish ----------------------------------------------------------------------------------

TEST_F(StoreFaultsTest, PublishKeepsFilesThatALaterSaveCouldInherit) {
  const TinySpec spec = DefaultTinySpec();
  bool visible = false;
  std::vector<std::string> removed;
  ObservedFileSystem watched(fs(), {}, [&](const FileEvent& e) {
    visible = visible || (e.op == FileOp::kRename && e.path2.ends_with("/step"));
    if (visible && (e.op == FileOp::kRemoveFile || e.op == FileOp::kRemoveDirectory)) {
      removed.push_back(e.path);
    }
  });
  const auto store = Store::OpenOrCreate(watched, StorePath());
  ASSERT_OK(store);
  constexpr std::array<std::string_view, 2> kFolders = {"journal", "done"};
  const auto staging = store.value().BeginShared("step", kFolders);
  ASSERT_OK(staging);
  ASSERT_OK(WriteTinyStaging(watched, staging.value(), spec));
  WriteWholeFile(JoinPath(staging.value().directory, "data/superseded.bin"), "old");
  ASSERT_OK(store.value().Publish(staging.value(), TinyCoordinator(spec), {.shared = true}));
  EXPECT_TRUE(visible);
  EXPECT_THAT(removed, IsEmpty());
  EXPECT_TRUE(HoldsWhole(InStore("step"), spec));
  // Gc does, once it is old enough to be on the disk.
  ASSERT_OK(MakeStore().Gc({}));
  EXPECT_TRUE(fs().Exists(InStore("step/journal")));
  ASSERT_OK(MakeStore().Gc(kNoGrace));
  EXPECT_THAT(NamesIn(InStore("step")), ElementsAre("COMMIT", "data", "index", "manifest"));
  EXPECT_FALSE(fs().Exists(InStore("step/data/superseded.bin")));
  EXPECT_TRUE(HoldsWhole(InStore("step"), spec));
}

}  // namespace
}  // namespace tensormount
