// SPDX-License-Identifier: Apache-2.0
// Who removes beside who pins, saves and copies: what was answered holds.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <thread>

#include <nlohmann/json.hpp>

#include "tensormount/retention.h"
#include "tensormount/store.h"

#include "index/records/store_paths.h"
#include "index/store/copy.h"
#include "index/store/pins.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "tests/index/retained_steps.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

using Every = RetentionRules::Every;

class RemovalTest : public RetainedStepsTest {
 protected:
  Result<PruneReport> Prune(FileSystem& on, const std::string& rules,
                            const retention::PruneContext& whom = {}) {
    PruneOptions options;
    options.rules = RetentionRules::Parse(rules).value();
    return retention::Prune(on, Store::Open(on, StorePath()).value(), options, whom);
  }
};

// Another one may have begun after it and be there before it.
TEST_F(RemovalTest, SaveDoesNotRemoveItsOwnCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const auto pruned = Prune(fs(), "last=1", {.saved = UuidOf("step-2")});
  ASSERT_OK(pruned);
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
  EXPECT_EQ(pruned.value().decisions[1].reason, "saved just now");
}

// Those of a program were never a text.
TEST_F(RemovalTest, InvalidRulesOfAProgramRemoveNothing) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const auto refused = [&](const RetentionRules& rules) {
    for (const bool dry_run : {true, false}) {
      EXPECT_THAT(PruneCheckpoints(StorePath(), {.rules = rules, .dry_run = dry_run}),
                  HasCode(Code::kInvalidArgument));
    }
  };
  for (const std::uint64_t hours : {std::uint64_t{1} << 60, std::uint64_t{5124095576030432},
                                    std::numeric_limits<std::uint64_t>::max(), std::uint64_t{0}}) {
    RetentionRules rules;
    rules.keep_every = {{.count = hours, .unit = Every::Unit::kHours}};
    refused(rules);
  }
  RetentionRules best;
  best.keep_best = {{.metric = "", .highest = true, .count = 1}};
  refused(best);
  best.keep_best = {{.metric = "loss", .highest = true, .count = 0}};
  refused(best);
  RetentionRules both = RetentionRules::OfStore();
  both.keep_last = 1;
  refused(both);
  EXPECT_THAT(Left(), SizeIs(2));
}

TEST_F(RemovalTest, OversizedPolicyIsNotWritten) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(1));
  ASSERT_OK(SetRetentionPolicy(StorePath(), RetentionRules::Parse("last=2").value()));
  RetentionRules rules;
  for (int i = 0; i < 20'000; ++i) rules.keep_every.push_back({.count = 7});
  EXPECT_THAT(SetRetentionPolicy(StorePath(), rules), HasCode(Code::kInvalidArgument));
  rules = RetentionRules();
  rules.keep_best = {{.metric = "lo\xffss", .highest = false, .count = 1}};
  EXPECT_THAT(SetRetentionPolicy(StorePath(), rules), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(RetentionPolicy(StorePath()).value()->ToText(), "last=2");
}

// Pinned between the look and the rename: `pin` said that it is held.
TEST_F(RemovalTest, RemoveHonorsAPinSetDuringTheRename) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  std::thread pinning;
  Status pinned(Code::kInternal, "not yet");
  ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
    if (e.op != FileOp::kRename || !e.path.ends_with("/step-1")) return Status();
    pinning = std::thread([&] { pinned = PinCheckpoint(InStore("step-1")).status(); });
    while (!pins::Find(fs(), StorePath(), UuidOf("step-1"), 1).value()) std::this_thread::yield();
    return Status();
  });
  const Status removed = Store::Open(racing, StorePath()).value().Remove("step-1");
  pinning.join();
  EXPECT_OK(pinned);
  EXPECT_THAT(removed, HasCode(Code::kPermissionDenied));
  EXPECT_THAT(removed.message(), HasSubstr("unpin it first"));
  EXPECT_TRUE(HoldsWhole(InStore("step-1"), RetainedStepSpec(1)));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  ASSERT_OK(MakeStore().Remove("step-1", {.force = true}));
}

// What cannot be moved back is said, and never taken for a removal that went well.
TEST_F(RemovalTest, PinnedCheckpointLeftInTrashIsReported) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  for (const bool by_rule : {true, false}) {
    const Uuid uuid = UuidOf("step-1");
    ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
      const bool in_trash = e.path.find("/.trash/") != std::string::npos;
      if (e.op == FileOp::kRename && in_trash) return Status::FromErrno(EIO, "rename", e.path);
      if (e.op != FileOp::kRename || !e.path.ends_with("/step-1")) return Status();
      WriteWholeFile(InStore(".pins/" + uuid.ToString()), "held by whoever wrote this");
      return Status();
    });
    if (by_rule) {
      const auto pruned = Prune(racing, "last=2");
      ASSERT_OK(pruned);
      EXPECT_THAT(pruned.value().decisions[2].failed, HasCode(Code::kUnknown));
      EXPECT_THAT(pruned.value().decisions[2].failed.message(), HasSubstr("it is in .trash"));
    } else {
      EXPECT_THAT(Store::Open(racing, StorePath()).value().Remove("step-1"),
                  HasCode(Code::kUnknown));
    }
    EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
    ASSERT_OK(
        store_moves::PutBack(fs(), StorePath(), "step-1", InStore(".trash/" + uuid.ToString())));
    ASSERT_OK(UnpinCheckpoint(InStore("step-1")));
  }
}

TEST_F(RemovalTest, RefusedRemovalLeavesNothingBehind) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(1));
  ASSERT_OK(fs().CreateDirectory(InStore("folder")));
  EXPECT_THAT(MakeStore().Remove("folder"), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(MakeStore().Remove("nothing"), HasCode(Code::kNotFound));
  EXPECT_FALSE(fs().Exists(InStore(".pins")));
}

// Whoever removes may be slow to see the pin and move it back: a disk syncs when it likes.
TEST_F(RemovalTest, PinWaitsForARunningRemoval) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const Uuid uuid = UuidOf("step-1");
  std::unique_ptr<File> lock = pins::Lock(fs(), StorePath(), 1).value();
  bool moved = false;
  ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
    // Right before the pin has its name.
    if (e.op != FileOp::kRename || moved) return Status();
    moved = true;
    return store_moves::MoveToTrash(fs(), StorePath(), InStore("step-1"), "").status();
  });
  std::thread back([&] {
    std::this_thread::sleep_for(milliseconds(700));
    EXPECT_OK(
        store_moves::PutBack(fs(), StorePath(), "step-1", InStore(".trash/" + uuid.ToString())));
    lock.reset();
  });
  const auto pinned =
      pins::Pin(racing, Store::Open(racing, StorePath()).value(), "step-1", {.reason = "late"});
  back.join();
  EXPECT_OK(pinned);
  EXPECT_TRUE(moved);
}

// Also where a filesystem cannot exchange two names.
TEST_F(RemovalTest, NewPinReplacesAllEarlierPins) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(1));
  ObservedFileSystem plain(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kExchange ? Status(Code::kUnsupported, "exchange") : Status();
  });
  const Store store = Store::Open(plain, StorePath()).value();
  const std::int64_t now = HostFileSystem().NowSeconds();
  for (int days = 9; days >= 1; --days) {
    ASSERT_OK(pins::Pin(plain, store, "step-1",
                        {.reason = std::to_string(days), .expires = now + days * 86400}));
    const auto all = ListPins(StorePath());
    ASSERT_OK(all);
    ASSERT_THAT(all.value(), SizeIs(1));
    EXPECT_EQ(all.value()[0].reason, std::to_string(days));
    EXPECT_EQ(all.value()[0].expires, now + days * 86400);
  }
  EXPECT_THAT(NamesIn(InStore(".pins")), SizeIs(1));
}

TEST_F(RemovalTest, UnreadablePinsPreventRemoval) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  WriteWholeFile(InStore(".pins"), "a file");
  EXPECT_THAT(MakeStore().Remove("step-1"), HasCode(Code::kDataLoss));
  EXPECT_THAT(Prune(fs(), "last=1"), HasCode(Code::kAlreadyExists));
  EXPECT_THAT(Left(), SizeIs(2));
  // What is listed says that it does not know.
  const auto listed = ListCheckpoints(StorePath());
  ASSERT_OK(listed);
  EXPECT_THAT(listed.value()[0].pins_read, HasCode(Code::kDataLoss));
  ASSERT_OK(fs().RemoveFile(InStore(".pins")));
  EXPECT_OK(ListCheckpoints(StorePath()).value()[0].pins_read);
}

TEST_F(RemovalTest, PinThatIsADirectoryCanBeRemoved) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const std::string pin = InStore(".pins/" + UuidOf("step-1").ToString());
  ASSERT_OK(fs().CreateDirectories(pin + "/below"));
  EXPECT_THAT(MakeStore().Remove("step-1"), HasCode(Code::kPermissionDenied));
  EXPECT_OK(UnpinCheckpoint(InStore("step-1")));
  EXPECT_FALSE(fs().Exists(pin));
  ASSERT_OK(fs().CreateDirectories(pin + "/below"));
  EXPECT_OK(MakeStore().Remove("step-1", {.force = true}));
  EXPECT_FALSE(fs().Exists(pin));
}

TEST_F(RemovalTest, SymlinkToACheckpointCannotBePinned) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(1));
  std::filesystem::create_directory_symlink(InStore("step-1"), InStore("linked"));
  EXPECT_THAT(PinCheckpoint(InStore("linked")), HasCode(Code::kInvalidArgument));
}

// The disk is full, and that is why somebody prunes.
TEST_F(RemovalTest, PruneWorksOnAFullDisk) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  ObservedFileSystem full(fs(), [this](const FileEvent& e) {
    if (fs().Exists(e.path)) return Status();
    const bool makes = e.op == FileOp::kCreateDirectory || e.op == FileOp::kOpenShared ||
                       e.op == FileOp::kCreate || e.op == FileOp::kWrite;
    return makes ? Status::FromErrno(ENOSPC, "write", e.path) : Status();
  });
  ASSERT_OK(Prune(full, "last=2"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
  ASSERT_OK(Store::Open(full, StorePath()).value().Remove("step-2"));
  EXPECT_THAT(Left(), ElementsAre("step-3"));
}

// A number that is none is no reason to wait for ever.
TEST_F(RemovalTest, LockTimeoutOfNanDoesNotWaitForever) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(1));
  const auto held = pins::Lock(fs(), StorePath(), 0);
  ASSERT_OK(held);
  EXPECT_THAT(pins::Lock(fs(), StorePath(), std::numeric_limits<double>::quiet_NaN()),
              HasCode(Code::kBusy));
}

TEST_F(RemovalTest, UnreadableCheckpointIsReported) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  WriteWholeFile(InStore("step-3/COMMIT"), "");
  const auto pruned = Prune(fs(), "last=1");
  ASSERT_OK(pruned);
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
  ASSERT_THAT(pruned.value().decisions, SizeIs(3));
  EXPECT_TRUE(pruned.value().decisions[2].unread);
  EXPECT_FALSE(pruned.value().decisions[1].unread);
  EXPECT_EQ(retention::PruneJson(pruned.value())["checkpoints"][2]["unread"], true);
}

// Whoever gave an ephemeral one a second name wants to keep it, under that one.
TEST_F(RemovalTest, CopyOfAnEphemeralCheckpointIsKept) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const Uuid uuid = UuidOf("step-1");
  ASSERT_OK(pins::MarkEphemeral(fs(), StorePath(), uuid, "step-1"));
  std::filesystem::copy(InStore("step-1"), InStore("twin"),
                        std::filesystem::copy_options::recursive);
  ASSERT_OK(Prune(fs(), "last=9"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "twin"));
  EXPECT_THAT(pins::ReadEphemeral(fs(), StorePath()).value(), IsEmpty());
  ASSERT_OK(Prune(fs(), "last=9"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "twin"));
  // Older programs did not say which name it is: then none of several.
  WriteWholeFile(InStore(".ephemeral/" + uuid.ToString()), "");
  std::filesystem::copy(InStore("twin"), InStore("triplet"),
                        std::filesystem::copy_options::recursive);
  ASSERT_OK(Prune(fs(), "last=9"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "triplet", "twin"));
  std::filesystem::remove_all(InStore("triplet"));
  ASSERT_OK(Prune(fs(), "last=9"));
  EXPECT_THAT(Left(), ElementsAre("step-2"));
}

TEST_F(RemovalTest, CheckpointWithTwoNamesCountsOnce) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(4));
  std::filesystem::copy(InStore("step-4"), InStore("best"),
                        std::filesystem::copy_options::recursive);
  ASSERT_OK(Prune(fs(), "last=2"));
  EXPECT_THAT(Left(), ElementsAre("best", "step-3", "step-4"));
}

// A save that replaces a checkpoint moves it from its name to .staging, behind the back of whoever
// has looked there already.
TEST_F(RemovalTest, PinSweepKeepsPinsOfCheckpointsMovedToTrash) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ASSERT_OK(PinCheckpoint(InStore("step-1")));
  const Uuid uuid = UuidOf("step-1");
  bool moved = false;
  // After the list of .trash was read: before the checkpoints are.
  ObservedFileSystem after(fs(), [&](const FileEvent& e) {
    if (e.op == FileOp::kList && e.path == StorePath() && !moved) {
      moved = true;
      return store_moves::MoveToTrash(fs(), StorePath(), InStore("step-1"), "").status();
    }
    return Status();
  });
  const Store store = Store::Open(after, StorePath()).value();
  Store::GcReport report;
  pins::Sweep(after, store, {.staging_age = std::chrono::seconds(-1)}, report);
  EXPECT_TRUE(moved);
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_TRUE(pins::Find(fs(), StorePath(), uuid, 1).value().has_value());
}

// ---- Space, and other runs -----------------------------------------------------------------

// A run with room for three checkpoints, whatever it saves.
TEST_F(RemovalTest, PrunedCheckpointIsFreedUnlessItIsRead) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  auto reader = OpenedCheckpoint::Open(fs(), InStore("step-1"), {});
  ASSERT_OK(reader);
  auto pruned = Prune(fs(), "last=1");
  ASSERT_OK(pruned);
  EXPECT_GT(pruned.value().bytes_freed, 0u) << "step-2";
  EXPECT_GT(pruned.value().bytes_waiting, 0u);
  EXPECT_THAT(pruned.value().waiting, ElementsAre("step-1: still being read"));
  EXPECT_THAT(NamesIn(InStore(".trash")), SizeIs(2));
  EXPECT_TRUE(HoldsWhole(InStore(".trash/" + NamesIn(InStore(".trash"))[0]), RetainedStepSpec(1)));
  reader.value().reset();
  ASSERT_OK(MakeStore().Gc({.grace = std::chrono::seconds(0)}));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
  // Without locks nobody can tell.
  ASSERT_OK(Save("step-4", RetainedStepSpec(4)));
  ObservedFileSystem without(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kLock ? Status::FromErrno(ENOSYS, "flock", e.path) : Status();
  });
  pruned = Prune(without, "last=1");
  ASSERT_OK(pruned);
  EXPECT_EQ(pruned.value().bytes_freed, 0u);
  EXPECT_THAT(pruned.value().waiting, Each(HasSubstr("no locks")));
  EXPECT_THAT(pruned.value().waiting, Not(IsEmpty()));
}

TEST_F(RemovalTest, MatchLimitsRulesToOneRun) {
  for (int i = 1; i <= 3; ++i) {
    ASSERT_OK(Save("a-" + std::to_string(i), RetainedStepSpec(1)));
    ASSERT_OK(Save("b-" + std::to_string(i), RetainedStepSpec(1)));
  }
  ASSERT_OK(Prune(fs(), "match=a-*,last=2"));
  EXPECT_THAT(Left(), ElementsAre("a-2", "a-3", "b-1", "b-2", "b-3"));
  const auto dry = retention::Prune(
      fs(), MakeStore(),
      {.rules = RetentionRules::Parse("last=1,match=b-?").value(), .dry_run = true});
  ASSERT_OK(dry);
  EXPECT_EQ(dry.value().rules, "match=b-?,last=1");
  std::string other_run;
  std::string goes;
  for (const auto& d : dry.value().decisions) {
    if (d.checkpoint == "a-2") other_run = d.reason;
    if (!d.kept) goes += d.checkpoint + " ";
  }
  EXPECT_EQ(other_run, "the name does not match b-?");
  EXPECT_EQ(goes, "b-2 b-1 ");
  ASSERT_OK(Prune(fs(), "last=1,match=none-*"));
  EXPECT_THAT(Left(), SizeIs(5));
  for (const char* wrong : {"match=a-*", "match=", "match=a,match=b,last=1"}) {
    EXPECT_THAT(RetentionRules::Parse(wrong), HasCode(Code::kInvalidArgument)) << wrong;
  }
  EXPECT_EQ(RetentionRules::Parse(R"(match=a\,b,last=1)").value().match, "a,b");
}

TEST_F(RemovalTest, UnknownMetricIsReported) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const auto pruned = Prune(fs(), "last=1,best=nothing.of.it:min:1");
  ASSERT_OK(pruned);
  EXPECT_THAT(Left(), SizeIs(3));
  EXPECT_THAT(pruned.value().notes, ElementsAre(AllOf(HasSubstr("best=nothing.of.it:min:1"),
                                                      HasSubstr("all of them are kept"))));
}

// ---- Copies -----------------------------------------------------------------------------------

TEST_F(RemovalTest, SymlinkToTheSourceIsNotACopy) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const std::string other = dir_.Join("other");
  ASSERT_OK(Store::OpenOrCreate(fs(), other));
  std::filesystem::create_directory_symlink(InStore("step-1"), other + "/step-1");
  const auto copied = CopyCheckpoints(fs(), {StorePath()}, other, {});
  ASSERT_OK(copied);
  ASSERT_THAT(copied.value().checkpoints, SizeIs(2));
  EXPECT_THAT(copied.value().checkpoints[0].status, HasCode(Code::kAlreadyExists));
  EXPECT_THAT(copied.value().checkpoints[0].status.message(), HasSubstr("symbolic link"));
  EXPECT_OK(copied.value().checkpoints[1].status);
}

// A backup of a store beside one who prunes it.
TEST_F(RemovalTest, CheckpointRemovedDuringStoreCopyIsSkipped) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const std::string other = dir_.Join("other");
  const auto removing = [&](bool& removed) {
    return [&](const FileEvent& e) {
      // The first file of step-1 is written.
      if (e.op == FileOp::kWrite && e.path.find("/.copy-") != std::string::npos && !removed) {
        removed = true;
        return MakeStore().Remove("step-2");
      }
      return Status();
    };
  };
  bool removed = false;
  ObservedFileSystem racing(fs(), removing(removed));
  const auto copied = CopyCheckpoints(racing, {StorePath()}, other, {});
  ASSERT_OK(copied);
  EXPECT_TRUE(removed);
  ASSERT_THAT(copied.value().checkpoints, SizeIs(2));
  for (const CopiedCheckpoint& one : copied.value().checkpoints) EXPECT_OK(one.status) << one.name;
  // One that was named is missed.
  ASSERT_OK(Save("step-2", RetainedStepSpec(2)));
  removed = false;
  ObservedFileSystem again(fs(), removing(removed));
  const auto named =
      CopyCheckpoints(again, {InStore("step-1"), InStore("step-2")}, dir_.Join("third"), {});
  ASSERT_OK(named);
  EXPECT_OK(named.value().checkpoints[0].status);
  EXPECT_THAT(named.value().checkpoints[1].status, HasCode(Code::kStale));
  EXPECT_THAT(named.value().checkpoints[1].status.message(), HasSubstr("removed while"));
}

TEST_F(RemovalTest, UnreadableCheckpointDoesNotStopTheCopy) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ObservedFileSystem closed(fs(), [&](const FileEvent& e) {
    const bool of_it = e.op == FileOp::kOpenRead && e.path.starts_with(InStore("step-1/data"));
    return of_it ? Status::FromErrno(EACCES, "open", e.path) : Status();
  });
  ObservedFileSystem below(closed, [&](const FileEvent& e) {
    const bool of_it =
        e.op == FileOp::kOpenRead && e.path.find("step-1/manifest") != std::string::npos;
    return of_it ? Status::FromErrno(EACCES, "open", e.path) : Status();
  });
  const auto copied = CopyCheckpoints(below, {StorePath()}, dir_.Join("other"), {});
  ASSERT_OK(copied);
  ASSERT_THAT(copied.value().checkpoints, SizeIs(2));
  EXPECT_THAT(copied.value().checkpoints[0].status, HasCode(Code::kPermissionDenied));
  EXPECT_OK(copied.value().checkpoints[1].status);
}

TEST_F(RemovalTest, CopyWithoutSourcesIsRefused) {
  EXPECT_THAT(CopyCheckpoints(fs(), {}, dir_.Join("other"), {}), HasCode(Code::kInvalidArgument));
  EXPECT_FALSE(fs().Exists(dir_.Join("other")));
}

// ---- What readers kept in .trash --------------------------------------------------------------

TEST_F(RemovalTest, LaterPruneFreesWhatAReaderKept) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  auto reader = OpenedCheckpoint::Open(fs(), InStore("step-1"), {});
  ASSERT_OK(reader);
  const auto first = Prune(fs(), "last=1");
  ASSERT_OK(first);
  EXPECT_THAT(first.value().waiting, ElementsAre(HasSubstr("still being read")));
  // It is still being read, and nothing else is to be removed.
  ASSERT_OK(Prune(fs(), "last=1"));
  EXPECT_THAT(NamesIn(InStore(".trash")), SizeIs(2));
  reader.value().reset();
  PruneOptions dry;
  dry.rules = RetentionRules::Parse("last=1").value();
  dry.dry_run = true;
  ASSERT_OK(retention::Prune(fs(), MakeStore(), dry));
  EXPECT_THAT(NamesIn(InStore(".trash")), SizeIs(2));
  const auto later = Prune(fs(), "last=1");
  ASSERT_OK(later);
  EXPECT_GT(later.value().bytes_freed, 0u);
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

// `rm` promises gc's grace period. A mark of an abandoned save or of a pinned checkpoint is no
// removed checkpoint.
TEST_F(RemovalTest, PruneLeavesInTrashWhatIsNotItsOwn) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const std::string removed = InStore(".trash/" + UuidOf("step-1").ToString());
  ASSERT_OK(MakeStore().Remove("step-1"));
  const std::string aborted = InStore(".trash/" + Uuid::Random().ToString() + ".aborted");
  ASSERT_OK(fs().CreateDirectory(aborted));
  ASSERT_OK(Prune(fs(), "last=9"));
  EXPECT_TRUE(fs().Exists(removed));
  SetMtime(removed + ".since", fs().NowSeconds() - 61);
  SetMtime(aborted, fs().NowSeconds() - 100'000);
  ASSERT_OK(Prune(fs(), "last=9"));
  EXPECT_FALSE(fs().Exists(removed));
  EXPECT_TRUE(fs().Exists(aborted));
}

// After its deadline a save begins no deletion but one.
TEST_F(RemovalTest, FreeingWhatReadersKeptTakesBoundedTime) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(5));
  std::vector<std::shared_ptr<OpenedCheckpoint>> readers;
  for (int i = 1; i <= 4; ++i) {
    auto reader = OpenedCheckpoint::Open(fs(), InStore("step-" + std::to_string(i)), {});
    ASSERT_OK(reader);
    readers.push_back(std::move(reader).value());
  }
  ASSERT_OK(Prune(fs(), "last=1"));
  const auto left = [&] {
    return std::ranges::count_if(NamesIn(InStore(".trash")),
                                 [](const std::string& name) { return name.size() == 32; });
  };
  EXPECT_EQ(left(), 4);
  readers.clear();
  ASSERT_OK(Prune(fs(), "last=1", {.free_for = std::chrono::seconds(0)}));
  EXPECT_EQ(left(), 3);
  ASSERT_OK(Prune(fs(), "last=1"));
  EXPECT_EQ(left(), 0);
}

TEST_F(RemovalTest, MessageOfAFullDiskTellsWhatTrashHolds) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ASSERT_OK(MakeStore().Remove("step-1"));
  const Status full = Status::FromErrno(ENOSPC, "write", "x");
  const Status told = retention::WithTrashHint(fs(), StorePath(), full);
  EXPECT_THAT(told.message(), AllOf(HasSubstr(full.message()), HasSubstr("of removed checkpoints"),
                                    HasSubstr("`tensormount gc ")));
  // Layers that add it twice say it once.
  EXPECT_EQ(retention::WithTrashHint(fs(), StorePath(), told).message(), told.message());
}

}  // namespace
}  // namespace tensormount
