// SPDX-License-Identifier: Apache-2.0
// Copies of checkpoints to another store: as the same checkpoints, with links among them, whole or
// not there, and gone on with after whatever interrupted them.
#include "index/store/copy.h"

#include <cerrno>
#include <set>
#include <thread>

#include "index/records/store_paths.h"
#include "index/store/costs.h"
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

constexpr Store::GcOptions kGcAtOnce{.grace = std::chrono::seconds(0),
                                     .staging_age = std::chrono::seconds(0)};

class CopyTest : public SharingStoreTest {
 protected:
  std::string Other() const { return dir_.Join("other"); }
  std::string InOther(const std::string& below) const { return JoinPath(Other(), below); }
  Result<CopyReport> Copy(FileSystem& on, const std::vector<std::string>& names,
                          const CopyOptions& options = {}) {
    std::vector<std::string> sources;
    for (const std::string& name : names) sources.push_back(InStore(name));
    return CopyCheckpoints(on, sources, Other(), options);
  }
  Result<CopyReport> Copy(const std::vector<std::string>& names, const CopyOptions& options = {}) {
    return Copy(fs(), names, options);
  }
  // Byte for byte the same, modes too.
  void ExpectSame(const std::string& name) {
    EXPECT_EQ(FilesBelow(InStore(name)), FilesBelow(InOther(name))) << name;
    ASSERT_OK_AND_ASSIGN(const auto report, VerifyCheckpoint(fs(), InOther(name), {}));
    EXPECT_THAT(report.damages, IsEmpty());
  }
  // What can be seen of it is whole.
  void ExpectNothingHalf() {
    if (!fs().Exists(InOther("store.json"))) return;
    const auto store = Store::Open(fs(), Other());
    ASSERT_OK(store);
    for (const CheckpointListing& c : store.value().List().value()) {
      ASSERT_OK(c.problem);
      ExpectSame(c.name);
    }
  }
  static std::string Inode(const std::string& path) {
    return std::to_string(HostFileSystem().LinkStat(path).value().inode);
  }
};

TEST_F(CopyTest, CopiesEqualTheSourceAndKeepHardLinks) {
  ASSERT_OK_AND_ASSIGN(const CopyReport report, CopyCheckpoints(fs(), {StorePath()}, Other(), {}));
  ASSERT_THAT(report.checkpoints, SizeIs(3));
  EXPECT_EQ(report.destination, Other());
  for (const std::string name : {"base", "link-1", "link-2"}) ExpectSame(name);
  const CopiedCheckpoint& base = report.checkpoints[0];
  const CopiedCheckpoint& last = report.checkpoints[2];
  EXPECT_EQ(base.name, "base");
  EXPECT_EQ(base.bytes_copied, base.bytes);
  EXPECT_EQ(last.name, "link-2");
  EXPECT_EQ(last.files_linked, 3u);
  EXPECT_EQ(last.bytes, last.bytes_copied + last.bytes_linked);
  EXPECT_EQ(last.links_refused, 0u);
  const std::string shared = "data/" + NamesIn(InStore("base/data"))[0];
  EXPECT_EQ(Inode(InOther("base/" + shared)), Inode(InOther("link-2/" + shared)));
  EXPECT_NE(Inode(InOther("base/" + shared)), Inode(InStore("base/" + shared)));
  ASSERT_OK_AND_ASSIGN(const Store other, Store::Open(fs(), Other()));
  EXPECT_EQ(other.Latest().value().name, "link-2");
  EXPECT_EQ(StoreCosts::Of(fs(), MakeStore()).value().stored_bytes(),
            StoreCosts::Of(fs(), other).value().stored_bytes());
  EXPECT_THAT(NamesIn(InOther(".staging")), IsEmpty());
  // Again: all of it is there.
  ASSERT_OK_AND_ASSIGN(const CopyReport again, Copy({"link-1", "base"}));
  for (const CopiedCheckpoint& one : again.checkpoints) {
    EXPECT_TRUE(one.was_there) << one.name;
    EXPECT_EQ(one.bytes_copied, 0u);
  }
  // An earlier run's files are linked too, after they were compared.
  ASSERT_OK(other.Remove("link-2"));
  ASSERT_OK(other.Gc(kGcAtOnce));
  ASSERT_OK_AND_ASSIGN(const CopyReport later, Copy({"link-2"}));
  EXPECT_EQ(later.checkpoints[0].files_linked, 3u);
  ExpectSame("link-2");
}

// Sealed stay sealed, whatever the mode of others; nothing else of the store is carried along.
TEST_F(CopyTest, CopyKeepsSealedModesAndCopiesNothingElse) {
  ASSERT_OK(Copy({"link-1"}));
  for (const auto& [file, bytes] : FilesBelow(InOther("link-1"))) {
    const auto mode = fs().LinkStat(InOther("link-1/" + file)).value().mode & 0777;
    EXPECT_EQ((mode & 0222) == 0, file.starts_with("data/")) << file;
  }
  EXPECT_THAT(NamesIn(Other()),
              ElementsAre(".generations", ".staging", ".trash", "link-1", "store.json"));
}

TEST_F(CopyTest, LatestNeverGoesBack) {
  ASSERT_OK(Copy({"link-2"}));
  ASSERT_OK_AND_ASSIGN(const Store other, Store::Open(fs(), Other()));
  ASSERT_OK(Copy({"base"}));
  EXPECT_EQ(other.Latest().value().name, "link-2") << "an older one does not become it";
  // The next save comes after all that was copied, also when the copy is gone.
  ASSERT_OK(other.Remove("link-2"));
  ASSERT_OK(other.Gc(kGcAtOnce));
  EXPECT_EQ(WriteTinyCheckpoint(fs(), Other(), "own", StepSpec(5)).value().info.generation, 4u);
  // A higher one there already: its claim stays the highest.
  ASSERT_OK(Copy({"link-2"}));
  EXPECT_EQ(other.Latest().value().name, "own");
  EXPECT_EQ(WriteTinyCheckpoint(fs(), Other(), "own-2", StepSpec(6)).value().info.generation, 5u);
}

TEST_F(CopyTest, ErrorNamesTheInvalidCopy) {
  EXPECT_THAT(CopyCheckpoints(fs(), {InStore("base")}, StorePath(), {}),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(CopyCheckpoints(fs(), {InStore("base")}, InStore("base/deeper"), {}),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Copy({"nothing"}), HasCode(Code::kNotFound));
  EXPECT_THAT(CopyCheckpoints({InStore("base")}, "s3://a/b", {}), HasCode(Code::kUnsupported));
  EXPECT_FALSE(fs().Exists(Other()));
  // Names: another's, and its own under another one.
  ASSERT_OK(WriteTinyCheckpoint(fs(), Other(), "link-1", StepSpec(7)));
  EXPECT_THAT(Copy({"link-1"}), HasCode(Code::kAlreadyExists));
  ASSERT_OK(Copy({"link-2"}));
  ASSERT_EQ(rename(InOther("link-2").c_str(), InOther("renamed").c_str()), 0);
  EXPECT_THAT(Copy({"link-2"}), HasMessage("renamed"));
  ASSERT_OK(fs().CreateDirectory(InOther("base")));
  EXPECT_THAT(Copy({"base"}), HasCode(Code::kAlreadyExists));
  // Of several those that can be copied are.
  ASSERT_OK(Save("new", StepSpec(8)));
  ASSERT_OK_AND_ASSIGN(const CopyReport report, Copy({"new", "link-1"}));
  ASSERT_THAT(report.checkpoints, SizeIs(2));
  EXPECT_THAT(report.checkpoints[0].status, HasCode(Code::kAlreadyExists));
  EXPECT_OK(report.checkpoints[1].status);
  ExpectSame("new");
}

TEST_F(CopyTest, DamagedSourceIsNamedAndNothingIsPublished) {
  const auto files = FilesBelow(InStore("link-1"));
  for (const auto& [file, bytes] : files) {
    SCOPED_TRACE(file);
    const std::string path = InStore("link-1/" + file);
    const std::string good = ReadWholeFile(path);
    FlipByte(path, good.size() / 2);
    if (file != "COMMIT") {
      const auto copied = Copy({"link-1"});
      EXPECT_THAT(copied, HasCode(Code::kDataLoss));
      EXPECT_THAT(copied, HasMessage(file));
      EXPECT_FALSE(fs().Exists(InOther("link-1")));
    }
    FlipByte(path, good.size() / 2);
    // Missing, and short.
    if (file == "COMMIT") continue;
    ASSERT_EQ(rename(path.c_str(), (path + ".away").c_str()), 0);
    EXPECT_THAT(Copy({"link-1"}), HasCode(Code::kDataLoss));
    ASSERT_EQ(rename((path + ".away").c_str(), path.c_str()), 0);
  }
  // One copy of the commit record: a copy of it would be another file.
  FlipByte(InStore("link-1/COMMIT"), 50);
  EXPECT_THAT(Copy({"link-1"}), HasCode(Code::kDataLoss));
  FlipByte(InStore("link-1/COMMIT"), 50);
  EXPECT_FALSE(fs().Exists(InOther("link-1")));
  ASSERT_OK(Copy({"link-1"}));
  ExpectSame("link-1");
}

// What the destination has is compared before it is relied on.
TEST_F(CopyTest, DamagedDestinationFileIsNotLinked) {
  ASSERT_OK(Copy({"base"}));
  const std::string shared = "data/" + NamesIn(InOther("base/data"))[0];
  FlipByte(InOther("base/" + shared), 9);
  ASSERT_OK_AND_ASSIGN(const CopyReport report, Copy({"link-1"}));
  EXPECT_EQ(report.checkpoints[0].files_linked, 2u);
  EXPECT_THAT(report.checkpoints[0].warnings, ElementsAre(HasSubstr(shared)));
  ExpectSame("link-1");
}

TEST_F(CopyTest, WritableDestinationFileIsNotLinked) {
  ASSERT_OK(Copy({"base"}));
  const std::string shared = "data/" + NamesIn(InOther("base/data"))[0];
  ASSERT_EQ(chmod(InOther("base/" + shared).c_str(), 0644), 0);
  ASSERT_OK_AND_ASSIGN(const CopyReport report, Copy({"link-1"}));
  EXPECT_EQ(report.checkpoints[0].files_linked, 2u);
  EXPECT_THAT(report.checkpoints[0].warnings, ElementsAre(HasSubstr("not sealed")));
  ExpectSame("link-1");
}

TEST_F(CopyTest, RefusedHardLinksAreCopiedAndReported) {
  for (const int err : {EXDEV, EMLINK, EPERM, EOPNOTSUPP, EDQUOT}) {
    SCOPED_TRACE(err);
    ObservedFileSystem refusing(fs(), [&](const FileEvent& e) {
      return e.op == FileOp::kLink ? Status::FromErrno(err, "link", e.path) : Status();
    });
    ASSERT_OK_AND_ASSIGN(const CopyReport report, Copy(refusing, {"base", "link-1"}));
    EXPECT_EQ(report.checkpoints[1].files_linked, 0u);
    EXPECT_EQ(report.checkpoints[1].links_refused, 3u);
    EXPECT_NE(report.checkpoints[1].refusal, "");
    ExpectSame("link-1");
    ASSERT_OK(fs().RemoveTree(Other()));
  }
}

TEST_F(CopyTest, AdoptedCheckpointIsRefused) {
  const Store store = MakeStore();
  WriteWholeFile(dir_.Join("foreign.bin"), std::string(64, 'x'));
  ASSERT_OK_AND_ASSIGN(const Staging staging, store.Begin("adopted", IfExists::kFail));
  Inventory writer;
  writer.info.uuid = staging.uuid;
  ASSERT_OK_AND_ASSIGN(const FileInfo info, fs().Stat(dir_.Join("foreign.bin")));
  writer.files.push_back({.name = "foreign.bin",
                          .placement = Placement::kForeign,
                          .length = 64,
                          .root = {},
                          .mtime_seconds = info.mtime_seconds,
                          .mtime_nanoseconds = info.mtime_nanoseconds});
  ASSERT_OK_AND_ASSIGN(TensorMeta meta, TensorMeta::Make("w", DType::kU8, {64}));
  TensorRecord tensor(std::move(meta));
  ChunkRecord chunk;
  chunk.region = Region(Box::Make({0}, {64}).value());
  chunk.length = 64;
  chunk.has_hash = false;
  tensor.extents.Append(chunk);
  writer.tensors.push_back(std::move(tensor));
  writer.info.self_contained = false;
  writer.info.root = dir_.path();
  ASSERT_OK_AND_ASSIGN(const std::string manifest, EncodeManifest(writer, {}));
  ASSERT_OK(fs().WriteFileDurably(JoinPath(staging.directory, "manifest/adopted.tmm"), manifest));
  Inventory coordinator;
  coordinator.info.root = dir_.path();
  coordinator.info.self_contained = false;
  ASSERT_OK(store.Publish(staging, coordinator, {}));
  EXPECT_THAT(Copy({"adopted"}), HasCode(Code::kUnsupported));
  EXPECT_FALSE(fs().Exists(InOther("adopted")));
}

// The source goes while it is copied: renamed to the trash it is read to the end; deleted by force
// it is named.
TEST_F(CopyTest, SourceRemovedDuringTheCopyIsReadOrReported) {
  bool once = false;
  const auto at_the_first_byte = [&](const std::function<void()>& what) {
    once = false;
    return CopyOptions{.watch = [&, what](std::uint64_t, std::uint64_t) {
      if (!std::exchange(once, true)) what();
      return Status();
    }};
  };
  const auto before = FilesBelow(InStore("link-1"));
  ASSERT_OK(Copy({"link-1"}, at_the_first_byte([&] {
                   EXPECT_OK(MakeStore().Remove("link-1"));
                   EXPECT_OK(MakeStore().Gc(kGcAtOnce));
                 })));
  EXPECT_TRUE(once);
  EXPECT_EQ(FilesBelow(InOther("link-1")), before);
  EXPECT_THAT(
      Copy({"link-2"}, at_the_first_byte([&] { EXPECT_OK(fs().RemoveTree(InStore("link-2"))); })),
      HasCode(Code::kStale));
  EXPECT_FALSE(fs().Exists(InOther("link-2")));
  EXPECT_TRUE(once);
}

// Ends at any byte: the next one goes on, and takes what is whole.
TEST_F(CopyTest, InterruptedCopyIsResumed) {
  std::uint64_t calls = 0;
  ASSERT_OK(Copy({"base", "link-1"}, {.watch = [&](std::uint64_t, std::uint64_t) {
                   ++calls;
                   return Status();
                 }}));
  ASSERT_OK(fs().RemoveTree(Other()));
  for (std::uint64_t stop = 0; stop < calls; ++stop) {
    SCOPED_TRACE(stop);
    std::uint64_t at = 0;
    const auto cut = Copy({"base", "link-1"}, {.watch = [&](std::uint64_t, std::uint64_t) {
                            return at++ == stop ? Status(Code::kCancelled, "enough") : Status();
                          }});
    ASSERT_THAT(cut, HasCode(Code::kCancelled));
    ExpectNothingHalf();
    ASSERT_OK_AND_ASSIGN(const CopyReport report, Copy({"base", "link-1"}));
    if (stop + 3 > calls) {
      EXPECT_GT(report.checkpoints[1].files_kept, 0u);
    }
    ExpectSame("base");
    ExpectSame("link-1");
    EXPECT_THAT(NamesIn(InOther(".staging")), IsEmpty());
    ASSERT_OK(fs().RemoveTree(Other()));
  }
}

// What stands in the staging is not believed.
TEST_F(CopyTest, DamagedStagingFilesAreCopiedAgain) {
  std::uint64_t uuid_calls = 0;
  const auto stop = [&](std::uint64_t done, std::uint64_t total) {
    ++uuid_calls;
    return done + 9000 > total ? Status(Code::kCancelled, "enough") : Status();
  };
  ASSERT_THAT(Copy({"base"}, {.watch = stop}), HasCode(Code::kCancelled));
  const auto stagings = NamesIn(InOther(".staging"));
  ASSERT_THAT(stagings, ElementsAre(HasSubstr(".copy-")));
  const std::string inner = InOther(".staging/" + stagings[0] + "/checkpoint");
  const auto data = NamesIn(JoinPath(inner, "data"));
  ASSERT_THAT(data, SizeIs(3));
  FlipByte(JoinPath(inner, "data/" + data[0]), 100);
  WriteWholeFile(JoinPath(inner, "data/stranger"), "x");
  WriteWholeFile(InOther(".staging/" + stagings[0] + "/part-1"), "half");
  ASSERT_OK(fs().CreateDirectory(JoinPath(inner, "folder")));
  ASSERT_OK_AND_ASSIGN(const CopyReport report, Copy({"base"}));
  EXPECT_EQ(report.checkpoints[0].files_kept + report.checkpoints[0].files_copied,
            report.checkpoints[0].files);
  EXPECT_GE(report.checkpoints[0].files_kept, 2u);
  ExpectSame("base");
}

TEST_F(CopyTest, GcRemovesAbandonedCopiesOnly) {
  const Store::GcOptions old{.grace = std::chrono::seconds(0),
                             .staging_age = std::chrono::seconds(86400)};
  const auto collect = [&](const Store::GcOptions& how) {
    return Store::Open(fs(), Other()).value().Gc(how).value();
  };
  bool kept = false;
  const auto stop = [&](std::uint64_t done, std::uint64_t) {
    if (done == 0) return Status();
    SetMtimes(InOther(".staging"), 1000);
    kept = !collect(old).kept.empty();
    return Status(Code::kCancelled, "enough");
  };
  ASSERT_THAT(Copy({"base"}, {.watch = stop}), HasCode(Code::kCancelled));
  EXPECT_TRUE(kept) << "somebody copies into it";
  ASSERT_THAT(NamesIn(InOther(".staging")), SizeIs(1));
  ASSERT_OK_AND_ASSIGN(const auto findings, Store::Open(fs(), Other()).value().Fsck({}));
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings[0].problem, HasSubstr("a copy that"));
  EXPECT_FALSE(findings[0].damage);
  SetMtimes(InOther(".staging"), 1000);
  EXPECT_THAT(collect(old).failed, IsEmpty());
  EXPECT_THAT(NamesIn(InOther(".staging")), IsEmpty());
  EXPECT_THAT(NamesIn(InOther(".trash")), IsEmpty());
}

TEST_F(CopyTest, ConcurrentCopiesHaveOneWinner) {
  // A second one while the first is at work.
  bool asked = false;
  ASSERT_OK(Copy({"base"}, {.watch = [&](std::uint64_t, std::uint64_t) {
                   if (!std::exchange(asked, true)) {
                     EXPECT_THAT(Copy({"base"}), HasCode(Code::kBusy));
                   }
                   return Status();
                 }}));
  EXPECT_TRUE(asked);
  ExpectSame("base");
  // And as it comes.
  for (int round = 0; round < TestScale(30); ++round) {
    ASSERT_OK(fs().RemoveTree(Other()));
    std::vector<Status> ended(3);
    std::vector<std::thread> threads;
    for (Status& status : ended) {
      threads.emplace_back([&] { status = Copy({"link-1"}).status(); });
    }
    for (std::thread& thread : threads) thread.join();
    int good = 0;
    for (const Status& status : ended) {
      good += status.ok();
      if (!status.ok()) {
        EXPECT_THAT(status, HasCode(Code::kBusy));
      }
    }
    EXPECT_GE(good, 1);
    ExpectSame("link-1");
  }
}

// Where moved folders do not sync themselves both ends of a rename are synced.
class BothEndsFileSystem : public ObservedFileSystem {
 public:
  using ObservedFileSystem::ObservedFileSystem;
  bool CanSyncOnlyMovedFolder(const std::string&) override { return false; }
};

// Where there are no locks another copy may find the checkpoint published, and remove the folder
// that the rename has left: that removal is made durable by a sync of the folder above.
TEST_F(CopyTest, StagingRemovedByAnotherCopyDoesNotFailPublish) {
  std::string removed;
  std::vector<std::string> synced;
  BothEndsFileSystem watched(
      fs(),
      [&](const FileEvent& e) {
        const std::string parent = e.path.substr(0, e.path.rfind('/'));
        if (e.op == FileOp::kSyncDirectory && removed.empty() && fs().Exists(InOther("base")) &&
            parent == InOther(".staging")) {
          removed = e.path;
          EXPECT_OK(fs().RemoveTree(e.path));
        }
        return Status();
      },
      [&](const FileEvent& e) {
        if (e.op == FileOp::kSyncDirectory && !removed.empty()) synced.push_back(e.path);
      });
  ASSERT_OK(Copy(watched, {"base"}));
  EXPECT_THAT(removed, HasSubstr(".copy-"));
  ASSERT_GE(synced.size(), 2u);
  EXPECT_EQ(synced[0], Other());
  EXPECT_EQ(synced[1], InOther(".staging"));
  ExpectSame("base");
}

// If that folder still exists, a failed sync of it is reported.
TEST_F(CopyTest, FailedStagingSyncIsNotReportedAsDurable) {
  BothEndsFileSystem watched(fs(), [&](const FileEvent& e) {
    const std::string parent = e.path.substr(0, e.path.rfind('/'));
    const bool here = e.op == FileOp::kSyncDirectory && fs().Exists(InOther("base")) &&
                      parent == InOther(".staging");
    return here ? Status::FromErrno(ENOENT, "sync", e.path) : Status();
  });
  EXPECT_THAT(Copy(watched, {"base"}), HasCode(Code::kUnknown));
}

// Each operation fails in turn, once and from then on, with one of three errors: what is to be seen
// is whole, the source is as it was, and the next copy ends well.
class CopyFaultsTest : public CopyTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Once, CopyFaultsTest, testing::Values(false, true));

TEST_P(CopyFaultsTest, FaultAtAnyOperationLeavesNoPartialCopy) {
  const auto source = FilesBelow(StorePath());
  bool reached = true;
  int failed = 0;
  for (int k = 0; reached; ++k) {
    int op = 0;
    std::string what;
    ObservedFileSystem faulty(fs(), [&](const FileEvent& e) {
      const int n = op++;
      if (n < k || (n > k && !GetParam())) return Status();
      const int err = k % 3 == 0 ? EIO : k % 3 == 1 ? ENOSPC : EACCES;
      const Status error = Status::FromErrno(err, FileOpName(e.op), e.path);
      if (n == k) what = error.message();
      return error;
    });
    const auto copied = Copy(faulty, {"base", "link-1"});
    reached = !what.empty();
    SCOPED_TRACE("operation " + std::to_string(k) + ": " + what + ": " +
                 copied.status().ToString());
    ASSERT_EQ(FilesBelow(StorePath()), source);
    ASSERT_NO_FATAL_FAILURE(ExpectNothingHalf());
    const bool whole = copied.ok() && copied.value().checkpoints[0].status.ok() &&
                       copied.value().checkpoints[1].status.ok();
    failed += !whole;
    if (whole) {
      ASSERT_TRUE(fs().Exists(InOther("base")) && fs().Exists(InOther("link-1")));
    }
    ASSERT_OK_AND_ASSIGN(const CopyReport again, Copy({"base", "link-1"}));
    for (const CopiedCheckpoint& one : again.checkpoints) ASSERT_OK(one.status);
    ExpectSame("base");
    ExpectSame("link-1");
    ASSERT_FALSE(HasFailure());
    ASSERT_OK(fs().RemoveTree(Other()));
  }
  EXPECT_GT(failed, 50);
}

// A power cut after each operation: what was reported is there whole, nothing is half there, and
// the next copy ends well.
TEST_F(CopyTest, PowerCutAtAnyOperationLeavesNoPartialCopy) {
  ASSERT_OK(fs().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  // The source stands there too, and counts as durable.
  const std::string from = dir_.Join("live/store");
  ASSERT_OK(WriteTinyCheckpoint(live, from, "base", FrozenSpec()));
  ASSERT_OK_AND_ASSIGN(const Store store, Store::Open(live, from));
  ASSERT_OK(SaveSharing(live, store, "link-1", StepSpec(10), "base"));
  const std::size_t begun = live.op_count();
  const std::string to = dir_.Join("live/other");
  ASSERT_OK(CopyCheckpoints(live, {from + "/base"}, to, {}));
  const std::size_t first = live.op_count();
  ASSERT_OK(CopyCheckpoints(live, {from + "/link-1"}, to, {}));
  const std::size_t second = live.op_count();
  std::map<std::string, std::uint64_t> generations;
  for (const CheckpointListing& c : store.List().value()) generations[c.name] = c.generation;
  Random random(TestSeed());
  const int tries = TestScale(4);
  for (std::size_t k = begun; k <= second; ++k) {
    for (int i = 0; i < tries; ++i) {
      const std::string after = dir_.Join("after");
      ASSERT_OK(live.Materialise(k, random, after));
      SCOPED_TRACE("power cut after " + std::to_string(k) + " operations, the last " +
                   live.Describe(k - 1));
      for (const auto& [name, done] : {std::pair{"base", first}, {"link-1", second}}) {
        const std::string copy = JoinPath(after, "other/" + std::string(name));
        if (k >= done) {
          ASSERT_TRUE(fs().Exists(copy)) << name;
          // The claim outlives the copy: the next save gets a higher generation without the copy.
          std::uint64_t claimed = 0;
          for (const std::string& n : NamesIn(JoinPath(after, "other/.generations"))) {
            claimed = std::max<std::uint64_t>(claimed, std::stoull(n));
          }
          ASSERT_GE(claimed, generations.at(name)) << name;
        }
        if (fs().Exists(copy)) {
          ASSERT_EQ(FilesBelow(copy), FilesBelow(JoinPath(from, name))) << name;
        }
      }
      ASSERT_OK(CopyCheckpoints(fs(), {JoinPath(after, "store")}, JoinPath(after, "other"), {}));
      for (const char* name : {"base", "link-1"}) {
        ASSERT_EQ(FilesBelow(JoinPath(after, "other/" + std::string(name))),
                  FilesBelow(JoinPath(from, name)))
            << name;
      }
      ASSERT_OK(HostFileSystem().RemoveTree(after));
    }
  }
}

}  // namespace
}  // namespace tensormount
