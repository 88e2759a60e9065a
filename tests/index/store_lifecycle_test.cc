// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <fcntl.h>
#include <sys/stat.h>
#include <thread>

#include "index/read/derived_index.h"
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

using StoreLifecycleTest = StoreTest;
constexpr Store::GcOptions kAtOnce{.grace = seconds(0)};

// ---- Remove and gc --------------------------------------------------------------------------

TEST_F(StoreLifecycleTest, RemovingHidesAtOnceAndGcDeletesAfterTheGracePeriod) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  const Store store = MakeStore();
  EXPECT_THAT(store.Remove("b"), HasCode(Code::kNotFound));
  ASSERT_OK(store.Remove("a"));
  EXPECT_THAT(store.Remove("a"), HasCode(Code::kNotFound));
  EXPECT_THAT(store.List().value(), IsEmpty());
  const auto young = store.Gc({});
  ASSERT_OK(young);
  EXPECT_THAT(young.value().removed, IsEmpty());
  EXPECT_THAT(young.value().kept, ElementsAre(HasSubstr("too young")));
  const auto dry = store.Gc({.dry_run = true, .grace = seconds(0)});
  ASSERT_OK(dry);
  EXPECT_THAT(dry.value().removed, SizeIs(1));
  EXPECT_GT(dry.value().bytes_freed, 1000u);
  const auto real = store.Gc(kAtOnce);
  ASSERT_OK(real);
  EXPECT_EQ(real.value().removed, dry.value().removed);
  EXPECT_EQ(real.value().bytes_freed, dry.value().bytes_freed);
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

// Frameworks make the directory that they are about to save into, on each rank.
TEST_F(StoreLifecycleTest, EmptyDirectoryDoesNotTakeAName) {
  const Store store = MakeStore();
  for (const IfExists if_exists : {IfExists::kFail, IfExists::kReplace}) {
    const std::string name = if_exists == IfExists::kFail ? "fail" : "replace";
    ASSERT_OK(fs().CreateDirectory(InStore(name)));
    ASSERT_OK(Save(name, DefaultTinySpec(), {.if_exists = if_exists}));
    EXPECT_TRUE(store.FindListing(name).problem.ok());
  }
  EXPECT_THAT(Save("fail", DefaultTinySpec()), HasCode(Code::kAlreadyExists));
  // A directory with a file, a link to an empty directory, and a file keep their names.
  ASSERT_OK(fs().CreateDirectory(InStore("full")));
  WriteWholeFile(InStore("full/mine"), "x");
  ASSERT_OK(fs().CreateDirectory(InStore("elsewhere")));
  ASSERT_EQ(symlink("elsewhere", InStore("link").c_str()), 0);
  WriteWholeFile(InStore("file"), "x");
  for (const IfExists if_exists : {IfExists::kFail, IfExists::kReplace}) {
    for (const char* name : {"full", "link", "file"}) {
      EXPECT_THAT(Save(name, DefaultTinySpec(), {.if_exists = if_exists}),
                  HasCode(Code::kAlreadyExists))
          << name;
    }
  }
  EXPECT_EQ(ReadWholeFile(InStore("full/mine")), "x");
}

// The directory may be made while the save is running.
TEST_F(StoreLifecycleTest, EmptyDirectoryOfALateRankIsReplaced) {
  for (const IfExists if_exists : {IfExists::kFail, IfExists::kReplace}) {
    const std::string name = if_exists == IfExists::kFail ? "fail" : "replace";
    int made = 0;
    ObservedFileSystem late(fs(), [&](const FileEvent& e) {
      if (e.op == FileOp::kRename && e.path.find(".staging/") != std::string::npos &&
          e.path2.ends_with("/" + name) && made++ == 0) {
        EXPECT_OK(fs().CreateDirectory(InStore(name)));
      }
      return Status();
    });
    ASSERT_OK(
        WriteTinyCheckpoint(late, StorePath(), name, DefaultTinySpec(), {.if_exists = if_exists}));
    EXPECT_GT(made, 0);
    EXPECT_TRUE(MakeStore().FindListing(name).problem.ok());
  }
}

TEST_F(StoreLifecycleTest, GracePeriodStartsAtTheRemoval) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  SetMtimes(InStore("a"), 1000);
  const Store store = MakeStore();
  ASSERT_OK(store.Remove("a"));
  ASSERT_OK(store.Gc({}));
  ASSERT_THAT(NamesIn(InStore(".trash")), SizeIs(2));
  SetMtime(InStore(".trash/" + NamesIn(InStore(".trash"))[1]), HostFileSystem().NowSeconds() - 61);
  ASSERT_OK(store.Gc({}));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

TEST_F(StoreLifecycleTest, GcKeepsCheckpointsThatAreOpen) {
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec));
  const Store store = MakeStore();
  auto opened = OpenedCheckpoint::Open(fs(), InStore("a"), {});
  ASSERT_OK(opened);
  ASSERT_OK(store.Remove("a"));
  const auto kept = store.Gc(kAtOnce);
  ASSERT_OK(kept);
  EXPECT_THAT(kept.value().kept, ElementsAre(HasSubstr("still being read")));
  EXPECT_THAT(kept.value().removed, IsEmpty());
  opened = Status(Code::kCancelled, "closed");
  ASSERT_OK(store.Gc(kAtOnce));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

TEST_F(StoreLifecycleTest, TwoCopiesWithOneUuidCanBeRemoved) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  const Store store = MakeStore();
  ASSERT_EQ(std::system(("cp -r " + InStore("a") + " " + InStore("b")).c_str()), 0);
  ASSERT_OK(store.Remove("a"));
  ASSERT_OK(store.Remove("b"));
  EXPECT_THAT(NamesIn(InStore(".trash")), SizeIs(4));
  ASSERT_OK(store.Gc(kAtOnce));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

// Shows one folder of .trash under the inode of a live checkpoint, as after a crash on a filesystem
// without a journal.
class TwoNames : public ObservedFileSystem {
 public:
  TwoNames(std::string seen, std::string is)
      : ObservedFileSystem(HostFileSystem(), {}), seen_(std::move(seen)), is_(std::move(is)) {}
  Result<FileInfo> LinkStat(const std::string& path) override {
    return ObservedFileSystem::LinkStat(path == seen_ ? is_ : path);
  }

 private:
  std::string seen_;
  std::string is_;
};

TEST_F(StoreLifecycleTest, TrashEntryThatIsALiveCheckpointIsKept) {
  ASSERT_OK(Save("dead", DefaultTinySpec()));
  ASSERT_OK(Save("live", DefaultTinySpec()));
  ASSERT_OK(MakeStore().Remove("dead"));
  const std::string entry = InStore(".trash/" + NamesIn(InStore(".trash"))[0]);
  TwoNames crashed(entry, InStore("live"));
  const auto store = Store::Open(crashed, StorePath());
  ASSERT_OK(store);
  const auto report = store.value().Gc(kAtOnce);
  ASSERT_OK(report);
  EXPECT_THAT(report.value().kept, ElementsAre(HasSubstr("the same directory as checkpoint live")));
  EXPECT_TRUE(fs().Exists(JoinPath(entry, "COMMIT")));
}

TEST_F(StoreLifecycleTest, GcRemovesOnlyAbandonedStagings) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging old = Written(store, "old", spec);
  const Staging young = Written(store, "young", spec);
  ASSERT_OK(fs().CreateDirectory(InStore(".staging/empty.12345678")));  // Died in Begin.
  SetMtimes(old.directory, HostFileSystem().NowSeconds() - 90000);
  SetMtimes(InStore(".staging/empty.12345678"), HostFileSystem().NowSeconds() - 90000);
  const auto report = store.Gc(kAtOnce);
  ASSERT_OK(report);
  EXPECT_THAT(NamesIn(InStore(".staging")), ElementsAre("young." + young.ShortId()));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  // Whoever wakes up late cannot publish it, and is told the truth while it can be known.
  EXPECT_THAT(store.Publish(old, TinyCoordinator(spec), {}), HasCode(Code::kStale));
  EXPECT_THAT(store.AbortOrDecide(old), HasCode(Code::kUnknown));
  EXPECT_OK(store.Publish(young, TinyCoordinator(spec), {}));
}

TEST_F(StoreLifecycleTest, OldStagingStillWrittenToIsNotAbandoned) {
  const Store store = MakeStore();
  const Staging staging = Written(store, "slow", DefaultTinySpec());
  SetMtimes(staging.directory, HostFileSystem().NowSeconds() - 90000);
  WriteWholeFile(JoinPath(staging.directory, "data/more.bin"), "now");
  ASSERT_OK(store.Gc(kAtOnce));
  EXPECT_TRUE(fs().Exists(staging.directory));
}

TEST_F(StoreLifecycleTest, GcClearsDerivedClaimsAndOtherLeftovers) {
  const auto saved = Save("a", DefaultTinySpec());
  ASSERT_OK(saved);
  ASSERT_OK(Save("b", DefaultTinySpec()));
  ASSERT_OK(Save("c", DefaultTinySpec()));
  const Store store = MakeStore();
  ASSERT_OK(fs().CreateDirectories(InStore(".derived/" + saved.value().info.uuid.ToString())));
  const std::string gone = Uuid::Random().ToString();
  ASSERT_OK(fs().CreateDirectories(InStore(".derived/" + gone + "/index")));
  WriteWholeFile(InStore(".store.json.1234abcd"), "{}");
  SetMtime(InStore(".store.json.1234abcd"), HostFileSystem().NowSeconds() - 601);
  WriteWholeFile(InStore(".policy.json.1234abcd"), "somebody writes it");
  WriteWholeFile(InStore(".trash/lonely.since"), "");
  const auto report = store.Gc(kAtOnce);
  ASSERT_OK(report);
  EXPECT_THAT(report.value().removed, ElementsAre(".store.json.1234abcd", ".derived/" + gone,
                                                  ".generations/1", ".generations/2"));
  EXPECT_THAT(NamesIn(InStore(".derived")), ElementsAre(saved.value().info.uuid.ToString()));
  EXPECT_THAT(NamesIn(InStore(".generations")), ElementsAre("3"));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  EXPECT_EQ(Save("d", DefaultTinySpec()).value().info.generation, 4u);
  // While some checkpoint cannot be read, a derived folder may be its.
  ASSERT_OK(fs().CreateDirectories(InStore(".derived/" + gone)));
  WriteWholeFile(InStore("b/COMMIT"), "");
  EXPECT_THAT(store.Gc(kAtOnce).value().kept, Contains(HasSubstr(gone)));
}

// A power cut on a filesystem without a journal: the folder of a claim shows what was deleted, and
// what is in it are second names of files.
TEST_F(StoreLifecycleTest, NonemptyGenerationClaimIsRemoved) {
  for (const char* name : {"a", "b", "c"}) ASSERT_OK(Save(name, DefaultTinySpec()));
  ASSERT_OK(fs().CreateDirectories(InStore(".generations/1/data")));
  const std::string file = NamesIn(InStore("c/data"))[0];
  ASSERT_OK(fs().Link(InStore("c/data/" + file), InStore(".generations/1/data/" + file)));
  const Store store = MakeStore();
  std::string told;
  for (const auto& finding : store.Fsck({}).value()) told += finding.object + " ";
  EXPECT_THAT(told, HasSubstr(".generations/1"));
  const auto report = store.Gc(kAtOnce);
  ASSERT_OK(report);
  EXPECT_THAT(report.value().failed, IsEmpty());
  EXPECT_THAT(NamesIn(InStore(".generations")), ElementsAre("3"));
  EXPECT_TRUE(fs().Exists(InStore("c/data/" + file)));
}

// A power cut may lose the highest claim, if it was not synced, and keep the removal of lower ones.
TEST_F(StoreLifecycleTest, GcSyncsTheHighestClaimBeforeItRemovesLowerOnes) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  // A save that has begun has claimed 2, and has not synced it.
  ASSERT_OK(MakeStore().Begin("b", IfExists::kFail));
  ASSERT_THAT(NamesIn(InStore(".generations")), ElementsAre("1", "2"));
  bool synced = false;
  bool removed = false;
  ObservedFileSystem watched(fs(), [&](const FileEvent& e) {
    if (e.op == FileOp::kSyncDirectory && e.path == InStore(".generations")) synced = true;
    if (e.op == FileOp::kRemoveDirectory && e.path == InStore(".generations/1")) {
      removed = true;
      EXPECT_TRUE(synced);
    }
    return Status();
  });
  ASSERT_OK_AND_ASSIGN(const Store store, Store::Open(watched, StorePath()));
  ASSERT_OK(store.Gc(kAtOnce));
  EXPECT_TRUE(removed);
  EXPECT_THAT(NamesIn(InStore(".generations")), ElementsAre("2"));
}

TEST_F(StoreLifecycleTest, GcFinishesAReplacementWhosePublisherDied) {
  const TinySpec old_spec = DefaultTinySpec(1);
  const auto old = Save("step", old_spec);
  ASSERT_OK(old);
  bool exchanged = false;
  ObservedFileSystem dying(
      fs(),
      [&](const FileEvent& e) {
        return exchanged && e.op != FileOp::kSyncDirectory ? Status(Code::kUnavailable, "dead")
                                                           : Status();
      },
      [&](const FileEvent& e) { exchanged = exchanged || e.op == FileOp::kExchange; });
  ASSERT_OK(WriteTinyCheckpoint(dying, StorePath(), "step", DefaultTinySpec(2),
                                {.if_exists = IfExists::kReplace}));
  ASSERT_THAT(NamesIn(InStore(".staging")), SizeIs(1));
  ASSERT_OK(MakeStore().Gc({}));
  EXPECT_THAT(NamesIn(InStore(".staging")), IsEmpty());
  EXPECT_TRUE(HoldsWhole(InStore(".trash/" + old.value().info.uuid.ToString()), old_spec));
}

// ---- The arbiter ------------------------------------------------------------------------------

TEST_F(StoreLifecycleTest, AnAbortedSaveCannotBePublished) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store, "step", spec);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(store.AbortOrDecide(staging), IsOkAndHolds(Verdict::kAborted));
  }
  const auto late = store.Publish(staging, TinyCoordinator(spec), {});
  EXPECT_THAT(late, HasCode(Code::kStale));
  EXPECT_THAT(late, HasMessage("aborted"));
  EXPECT_THAT(store.List().value(), IsEmpty());
  // The same save in a new job.
  EXPECT_OK(Save("step", spec));
  EXPECT_THAT(store.AbortOrDecide(staging), IsOkAndHolds(Verdict::kAborted));
}

TEST_F(StoreLifecycleTest, APublishedSaveIsCommittedForGood) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store, "step", spec);
  ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {}));
  EXPECT_THAT(store.AbortOrDecide(staging), IsOkAndHolds(Verdict::kCommitted));
  EXPECT_TRUE(HoldsWhole(InStore("step"), spec));
  // Replaced since, or removed: it was committed all the same.
  ASSERT_OK(Save("step", DefaultTinySpec(2), {.if_exists = IfExists::kReplace}));
  EXPECT_THAT(store.AbortOrDecide(staging), IsOkAndHolds(Verdict::kCommitted));
  EXPECT_TRUE(HoldsWhole(InStore("step"), DefaultTinySpec(2)));
}

// Else the next save may get the inode of a folder that is deleted in memory only, and lose its
// data/ to a repair after a power cut, where there is no journal.
TEST_F(StoreLifecycleTest, GcSyncsTheStoreAfterDeleting) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  ASSERT_OK(Save("b", DefaultTinySpec(2)));
  std::vector<std::string> order;
  ObservedFileSystem watch(fs(), {}, [&](const FileEvent& e) {
    if (e.op == FileOp::kRemoveDirectory || e.op == FileOp::kRemoveFile) order.push_back("deleted");
    if (e.op == FileOp::kSyncDirectory) order.push_back("synced " + e.path);
  });
  const auto store = Store::Open(watch, StorePath());
  ASSERT_OK(store);
  // Nothing but the claim of a generation.
  ASSERT_OK(store.value().Gc({}));
  const std::string synced = "synced " + store.value().path();
  EXPECT_THAT(order,
              ElementsAre(synced + "/.generations/2", synced + "/.generations", "deleted", synced));
}

// What an aborted save leaves: folders, which gc deletes, and no data.
TEST_F(StoreLifecycleTest, AbortedSaveLosesOnlyItsFilesAtOnce) {
  const Store store = MakeStore();
  const Staging staging = Written(store, "step", DefaultTinySpec());
  ASSERT_OK(store.AbortOrDecide(staging));
  const std::string entry = StorePath() + "/.trash/" + staging.uuid.ToString() + ".aborted";
  ASSERT_FALSE(NamesIn(entry + "/data").empty());
  std::vector<std::string> order;
  ObservedFileSystem watch(fs(), {}, [&](const FileEvent& e) {
    if (e.op == FileOp::kRemoveDirectory) order.push_back("folder deleted");
    if (e.op == FileOp::kSyncDirectory) order.push_back("synced " + e.path);
  });
  store_moves::DeleteData(watch, entry);
  EXPECT_THAT(NamesIn(entry + "/data"), IsEmpty());
  EXPECT_THAT(order, ElementsAre("synced " + entry + "/data"));
}

// What is renamed into place, and what is synced after the last rename, in order.
class SyncsOfMovesTest : public StoreLifecycleTest, public testing::WithParamInterface<bool> {
 protected:
  // A filesystem like btrfs where the parameter says so, and like any other where not.
  class Watched : public ObservedFileSystem {
   public:
    Watched(FileSystem& base, bool themselves, std::vector<std::string>& synced)
        : ObservedFileSystem(base, {},
                             [&synced](const FileEvent& e) {
                               if (e.op == FileOp::kRename || e.op == FileOp::kExchange)
                                 synced.clear();
                               if (e.op == FileOp::kSyncDirectory) synced.push_back(e.path);
                             }),
          themselves_(themselves) {}
    bool CanSyncOnlyMovedFolder(const std::string&) override { return themselves_; }

   private:
    bool themselves_;
  };

  std::vector<std::string> synced_;
  Watched watched_{fs(), GetParam(), synced_};
};
INSTANTIATE_TEST_SUITE_P(All, SyncsOfMovesTest, testing::Bool());

// The claim of the generation, too: its block may be one of a deleted directory (torture, T 12).
TEST_P(SyncsOfMovesTest, PublishSyncsTheMovedDirectories) {
  const auto store = Store::OpenOrCreate(watched_, StorePath());
  ASSERT_OK(store);
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store.value(), "step", spec);
  ASSERT_OK(store.value().Publish(staging, TinyCoordinator(spec), {}));
  const std::string root = store.value().path();
  if (GetParam()) {
    EXPECT_THAT(synced_,
                ElementsAre(root + "/step", root + "/.generations/1", root + "/.generations"));
  } else {
    EXPECT_THAT(synced_, ElementsAre(root, root + "/.staging", root + "/.generations/1",
                                     root + "/.generations"));
  }
}

TEST_P(SyncsOfMovesTest, ReplacementSyncsTheMovedDirectories) {
  ASSERT_OK(Save("step", DefaultTinySpec()));
  // What is replaced stays where it is, so that the exchange is the last move.
  ObservedFileSystem stays(watched_, [](const FileEvent& e) {
    return e.op == FileOp::kRename && e.path2.find("/.trash/") != std::string::npos
               ? Status::FromErrno(EIO, "rename", e.path)
               : Status();
  });
  const auto store = Store::Open(stays, StorePath());
  ASSERT_OK(store);
  const TinySpec spec = DefaultTinySpec(2);
  const Staging staging = Written(store.value(), "step", spec, IfExists::kReplace);
  ASSERT_OK(
      store.value().Publish(staging, TinyCoordinator(spec), {.if_exists = IfExists::kReplace}));
  const std::string root = store.value().path();
  if (GetParam()) {
    EXPECT_THAT(synced_,
                ElementsAre(root + "/step", root + "/.generations/2", root + "/.generations"));
  } else {
    EXPECT_THAT(synced_, ElementsAre(root, root + "/.staging", root + "/.generations/2",
                                     root + "/.generations"));
  }
}

// Whoever says how a save ended has made it durable himself.
TEST_P(SyncsOfMovesTest, VerdictSyncsTheMovedDirectories) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  const Staging staging = Written(store, "step", spec);
  ASSERT_OK(store.Publish(staging, TinyCoordinator(spec), {}));
  const auto seen = Store::Open(watched_, StorePath());
  ASSERT_OK(seen);
  EXPECT_THAT(seen.value().AbortOrDecide(staging), IsOkAndHolds(Verdict::kCommitted));
  if (GetParam()) {
    EXPECT_THAT(synced_, ElementsAre(store.path() + "/step"));
  } else {
    EXPECT_THAT(synced_, ElementsAre(store.path(), store.path() + "/.staging"));
  }
  ObservedFileSystem failing(watched_, [](const FileEvent& e) {
    return e.op == FileOp::kSyncDirectory ? Status::FromErrno(EIO, "fsync", e.path) : Status();
  });
  EXPECT_THAT(Store::Open(failing, StorePath()).value().AbortOrDecide(staging),
              HasCode(Code::kUnknown));
}

TEST_P(SyncsOfMovesTest, AbortAndRemovalSyncTheMovedDirectories) {
  const auto store = Store::OpenOrCreate(watched_, StorePath());
  ASSERT_OK(store);
  const std::string root = store.value().path();
  const std::string trash = root + "/.trash";
  const Staging staging = Written(store.value(), "aborted", DefaultTinySpec());
  EXPECT_THAT(store.value().AbortOrDecide(staging), IsOkAndHolds(Verdict::kAborted));
  if (GetParam()) {
    EXPECT_THAT(synced_, ElementsAre(trash + "/" + staging.uuid.ToString() + ".aborted"));
  } else {
    EXPECT_THAT(synced_, ElementsAre(trash, root + "/.staging"));
  }
  ASSERT_OK(Save("step", DefaultTinySpec()));
  ASSERT_OK(store.value().Remove("step"));
  if (GetParam()) {
    EXPECT_THAT(synced_, ElementsAre(testing::StartsWith(trash + "/")));
  } else {
    EXPECT_THAT(synced_, ElementsAre(trash, root));
  }
}

TEST_P(SyncsOfMovesTest, NewParentOfADirectoryMovedOnIsSynced) {
  const std::string from = dir_.Join("from");
  const std::string to = dir_.Join("to");
  ASSERT_OK(fs().CreateDirectory(from));
  ASSERT_OK(fs().CreateDirectory(to));
  ASSERT_OK(watched_.SyncMovedFolder(JoinPath(to, "gone"), to, from));
  // `to` alone: all of its filesystem, which an observer sees as this.
  EXPECT_THAT(synced_, Contains(to));
  EXPECT_EQ(synced_.size(), GetParam() ? 1u : 2u);
}

TEST_F(StoreLifecycleTest, UnreadableStoreGivesAnUnknownVerdict) {
  const Store store = MakeStore();
  const Staging staging = Written(store, "step", DefaultTinySpec());
  ObservedFileSystem gone(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kOpenRead && !e.path.ends_with("store.json")
               ? Status::FromErrno(EIO, "open", e.path)
               : Status();
  });
  const auto blind = Store::Open(gone, StorePath());
  ASSERT_OK(blind);
  const auto verdict = blind.value().AbortOrDecide(staging);
  EXPECT_THAT(verdict, HasCode(Code::kUnknown));
  EXPECT_THAT(verdict, HasMessage("cannot be read"));
}

TEST_F(StoreLifecycleTest, ManyArbitersAndThePublisherAgree) {
  const Store store = MakeStore();
  const TinySpec spec = DefaultTinySpec();
  int committed = 0;
  for (int round = 0; round < 12; ++round) {
    const std::string name = "step-" + std::to_string(round % 3);
    const Staging staging = Written(store, name, spec, IfExists::kReplace);
    std::vector<int> verdicts(4, -1);
    Result<Store::Published> published = Status(Code::kInternal, "not run");
    {
      std::vector<std::jthread> threads;
      threads.emplace_back([&, round] {
        std::this_thread::sleep_for(std::chrono::microseconds(round % 2 * 500));
        published =
            store.Publish(staging, TinyCoordinator(spec), {.if_exists = IfExists::kReplace});
      });
      for (int& verdict : verdicts) {
        threads.emplace_back([&, round] {
          std::this_thread::sleep_for(std::chrono::microseconds(120 * round));
          const auto v = store.AbortOrDecide(staging);
          EXPECT_OK(v);
          if (v.ok()) verdict = v.value() == Verdict::kCommitted ? 1 : 0;
        });
      }
    }
    const int expected = published.ok() ? 1 : 0;
    committed += expected;
    if (!published.ok()) {
      EXPECT_THAT(published, HasCode(Code::kStale));
    }
    EXPECT_THAT(verdicts, testing::Each(expected)) << "round " << round;
    const auto list = store.List();
    ASSERT_OK(list);
    bool visible = false;
    for (const auto& c : list.value()) visible = visible || c.uuid == staging.uuid;
    EXPECT_EQ(visible, expected == 1);
  }
  std::printf("%d of 12 committed\n", committed);
}

// ---- Fsck ---------------------------------------------------------------------------------------

const Store::FsckFinding* Find(const std::vector<Store::FsckFinding>& all,
                               const std::string& object) {
  for (const auto& f : all) {
    if (f.object == object) return &f;
  }
  return nullptr;
}

TEST_F(StoreLifecycleTest, ACleanStoreHasNoFindings) {
  ASSERT_OK(Save("a", DefaultTinySpec()));
  const auto found = MakeStore().Fsck({.read_data = true});
  ASSERT_OK(found);
  EXPECT_THAT(found.value(), IsEmpty());
}

TEST_F(StoreLifecycleTest, LostIndexIsRebuiltWithTheSameContent) {
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec, {.now = 5000}));
  const auto times = MtimesOf(InStore("a"));
  ASSERT_OK(fs().RemoveFile(InStore("a/index/index.sst")));
  const Store store = MakeStore();
  auto found = store.Fsck({});
  ASSERT_OK(found);
  ASSERT_THAT(found.value(), SizeIs(1));
  EXPECT_FALSE(found.value()[0].repaired);
  EXPECT_THAT(found.value()[0].remedy, HasSubstr("fsck --rebuild"));
  found = store.Fsck({.rebuild = true});
  ASSERT_OK(found);
  ASSERT_THAT(found.value(), SizeIs(1));
  EXPECT_TRUE(found.value()[0].repaired) << found.value()[0].remedy;
  const auto commit = store_moves::ReadCommit(fs(), InStore("a"));
  ASSERT_OK(commit);
  const auto derived = OpenDerivedIndex(fs(), InStore("a"), commit.value().record);
  ASSERT_OK(derived);
  EXPECT_EQ(derived.value()->tensor_count(), spec.tensors.size());
  EXPECT_EQ(derived.value()->Find("layers.0.w").value().mtime, times.at("layers.0.w"));
  // Gc knows whose it is.
  ASSERT_OK(store.Gc(kAtOnce));
  EXPECT_OK(OpenDerivedIndex(fs(), InStore("a"), commit.value().record));
  // And a damaged derived copy is made again.
  WriteWholeFile(InStore(".derived/" + commit.value().record.uuid.ToString() + "/index/index.sst"),
                 "damaged");
  EXPECT_THAT(OpenDerivedIndex(fs(), InStore("a"), commit.value().record), Not(IsOk()));
  ASSERT_OK(store.Fsck({.rebuild = true}));
  EXPECT_OK(OpenDerivedIndex(fs(), InStore("a"), commit.value().record));
}

// One flipped byte wherever it stands in what fsck rebuilt: never used, made again; and verify and
// fsck agree on what serves.
TEST_F(StoreLifecycleTest, DamagedRebuiltIndexIsRebuiltAgain) {
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(Save("a", spec));
  ASSERT_OK(fs().RemoveFile(InStore("a/index/index.sst")));
  const Store store = MakeStore();
  ASSERT_OK(store.Fsck({.rebuild = true}));
  ASSERT_OK_AND_ASSIGN(const auto commit, store_moves::ReadCommit(fs(), InStore("a")));
  const std::string derived =
      InStore(".derived/" + commit.record.uuid.ToString() + "/index/index.sst");
  const std::string whole = ReadWholeFile(derived);
  const auto verify = [&] { return VerifyCheckpoint(fs(), InStore("a"), {}); };
  ASSERT_OK_AND_ASSIGN(const VerifyReport repaired, verify());
  EXPECT_THAT(repaired.damages, IsEmpty());
  EXPECT_THAT(repaired.warnings, ElementsAre(HasSubstr("using the index that fsck rebuilt")));
  ASSERT_OK_AND_ASSIGN(auto found, store.Fsck({}));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_TRUE(found[0].repaired);
  for (std::size_t byte = 0; byte < whole.size(); byte += whole.size() / 7) {
    std::string flipped = whole;
    flipped[byte] = static_cast<char>(flipped[byte] ^ 0x10);
    WriteWholeFile(derived, flipped);
    ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(fs(), InStore("a"), {}));
    EXPECT_TRUE(opened->index_was_rebuilt()) << byte;
    EXPECT_EQ(opened->index().tensor_count(), spec.tensors.size());
    ASSERT_OK_AND_ASSIGN(const VerifyReport report, verify());
    ASSERT_THAT(report.damages, SizeIs(1)) << byte;
    EXPECT_EQ(report.damages[0].object, "index");
    ASSERT_OK_AND_ASSIGN(found, store.Fsck({}));
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_FALSE(found[0].repaired);
    ASSERT_OK_AND_ASSIGN(found, store.Fsck({.rebuild = true}));
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_TRUE(found[0].repaired) << found[0].remedy;
    ASSERT_OK_AND_ASSIGN(const VerifyReport after, verify());
    EXPECT_THAT(after.damages, IsEmpty());
  }
}

TEST_F(StoreLifecycleTest, FsckReportsDamageCopiesAndLeftovers) {
  const auto saved = Save("a", DefaultTinySpec());
  ASSERT_OK(saved);
  ASSERT_OK(Save("b", DefaultTinySpec()));
  const Store store = MakeStore();
  ASSERT_EQ(std::system(("cp -r " + InStore("a") + " " + InStore("copy")).c_str()), 0);
  const std::string file = InStore("a/data/" + saved.value().info.uuid.Short() + "-t1.bin");
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  std::string bytes = ReadWholeFile(file);
  bytes[100] = static_cast<char>(bytes[100] ^ 1);
  WriteWholeFile(file, bytes);
  WriteWholeFile(InStore("b/COMMIT"), "nonsense");
  ASSERT_OK(store.Begin("c", IfExists::kFail));
  WriteWholeFile(InStore("notes.txt"), "mine");
  const auto quick = store.Fsck({});
  ASSERT_OK(quick);
  EXPECT_EQ(Find(quick.value(), "a"), nullptr);
  const auto found = store.Fsck({.read_data = true});
  ASSERT_OK(found);
  const auto* damaged = Find(found.value(), "a");
  ASSERT_NE(damaged, nullptr);
  EXPECT_TRUE(damaged->damage);
  EXPECT_THAT(damaged->problem, HasSubstr("layers.0.w"));
  const auto* broken = Find(found.value(), "b");
  ASSERT_NE(broken, nullptr);
  EXPECT_TRUE(broken->damage);
  const auto* copy = Find(found.value(), "copy");
  ASSERT_NE(copy, nullptr);
  EXPECT_FALSE(copy->damage);
  const auto* alien = Find(found.value(), "notes.txt");
  ASSERT_NE(alien, nullptr);
  EXPECT_FALSE(alien->damage);
  EXPECT_EQ(std::count_if(found.value().begin(), found.value().end(),
                          [](const auto& f) { return f.object.starts_with(".staging/c."); }),
            1);
}

}  // namespace
}  // namespace tensormount
