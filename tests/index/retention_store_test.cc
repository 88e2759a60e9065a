// SPDX-License-Identifier: Apache-2.0
// Removing by rule: what stays whatever goes wrong, and whoever else is at work.
#include <atomic>
#include <cerrno>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "tensormount/retention.h"
#include "tensormount/store.h"

#include "index/read/checkpoint.h"
#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "tests/index/retained_steps.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

using std::chrono::seconds;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using testing::UnorderedElementsAre;

class RetentionStoreTest : public RetainedStepsTest {
 protected:
  Result<PruneReport> PruneOn(FileSystem& on, const std::string& rules, PruneOptions options = {},
                              std::int64_t now = 0) {
    options.rules = RetentionRules::Parse(rules).value();
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(on, StorePath()));
    return retention::Prune(on, store, options, {.now = now});
  }
  Result<PruneReport> Prune(const std::string& rules, const PruneOptions& options = {},
                            std::int64_t now = 0) {
    return PruneOn(fs(), rules, options, now);
  }
  void Write(const std::string& below, std::string_view text) {
    ASSERT_OK(fs().CreateDirectories(InStore(below.substr(0, below.rfind('/')))));
    WriteWholeFile(InStore(below), text);
  }
  // fsck does not take a file for damaged if the disk does not give it.
  void ExpectUnread(const std::string& below, int error) {
    ObservedFileSystem broken(fs(), [&](const FileEvent& e) {
      const bool fails = e.op == FileOp::kOpenRead && e.path.ends_with(below);
      return fails ? Status::FromErrno(error, "injected", e.path) : Status();
    });
    ASSERT_OK_AND_ASSIGN(const auto findings, Store::Open(broken, StorePath()).value().Fsck({}));
    ASSERT_THAT(findings, SizeIs(1)) << below;
    EXPECT_EQ(findings[0].object, below);
    EXPECT_TRUE(findings[0].unread) << below;
  }
  std::string TensorFileOf(const std::string& name) {
    for (const std::string& file : NamesIn(InStore(name + "/data"))) {
      if (file.ends_with(".bin")) return InStore(name + "/data/" + file);
    }
    ADD_FAILURE();
    return {};
  }
};

const PruneReport::Decision& On(const PruneReport& report, const std::string& name) {
  static const PruneReport::Decision kNone;
  for (const auto& d : report.decisions) {
    if (d.checkpoint == name) return d;
  }
  ADD_FAILURE() << name;
  return kNone;
}

TEST_F(RetentionStoreTest, PruneRemovesUnkeptAndLeavesTheRestWhole) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(6));
  const auto dry = Prune("last=2,every=3", {.dry_run = true});
  ASSERT_OK(dry);
  EXPECT_EQ(dry.value().removed(), 0u);
  EXPECT_FALSE(On(dry.value(), "step-1").kept);
  EXPECT_EQ(On(dry.value(), "step-3").reason, "step 3 is a multiple of 3");
  EXPECT_THAT(Left(), SizeIs(6));
  EXPECT_FALSE(fs().Exists(InStore(".pins"))) << "a dry run makes nothing";

  const auto report = Prune("last=2,every=3");
  ASSERT_OK(report);
  EXPECT_THAT(Left(), ElementsAre("step-3", "step-5", "step-6"));
  EXPECT_EQ(report.value().removed(), 3u);
  EXPECT_EQ(report.value().rules, "last=2,every=3");
  EXPECT_THAT(report.value().failures(), IsEmpty());
  EXPECT_TRUE(HoldsWhole(InStore("step-3"), RetainedStepSpec(3)));
  EXPECT_GT(report.value().bytes_freed, 0u);
  EXPECT_EQ(report.value().bytes_waiting, 0u);
  EXPECT_THAT(MakeStore().Fsck({}).value(), IsEmpty());
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

TEST_F(RetentionStoreTest, PruneWithoutRulesOrPolicyRemovesNothing) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  ASSERT_OK(Prune("policy"));
  ASSERT_OK(Prune(""));
  EXPECT_THAT(Left(), SizeIs(3));
}

TEST_F(RetentionStoreTest, PruneWithoutRulesUsesTheStorePolicy) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(4));
  ASSERT_OK(SetRetentionPolicy(StorePath(), RetentionRules::Parse("last=3").value()));
  ASSERT_OK(SetRetentionPolicy(StorePath(), RetentionRules::Parse("last=2").value()));
  EXPECT_EQ(RetentionPolicy(StorePath()).value()->ToText(), "last=2");
  EXPECT_THAT(MakeStore().Fsck({}).value(), IsEmpty());
  ASSERT_OK(Prune("policy"));
  EXPECT_THAT(Left(), ElementsAre("step-3", "step-4"));
  ASSERT_OK(SetRetentionPolicy(StorePath(), std::nullopt));
  EXPECT_EQ(RetentionPolicy(StorePath()).value(), std::nullopt);
  ASSERT_OK(SetRetentionPolicy(StorePath(), std::nullopt));
  EXPECT_THAT(SetRetentionPolicy(StorePath(), RetentionRules()), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(SetRetentionPolicy(StorePath(), RetentionRules::OfStore()),
              HasCode(Code::kInvalidArgument));
  // Nothing is left of writing it.
  EXPECT_THAT(NamesIn(StorePath()), Not(Contains(HasSubstr("policy"))));
  EXPECT_THAT(MakeStore().Begin("policy.json", IfExists::kFail), HasCode(Code::kInvalidArgument));
}

TEST_F(RetentionStoreTest, DamagedOrNewerPolicyRemovesNothing) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  ASSERT_OK(SetRetentionPolicy(StorePath(), RetentionRules::Parse("last=1").value()));
  const std::string good = ReadWholeFile(InStore("policy.json"));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  };
  struct Case {
    std::string text;
    Code code;
  };
  for (const Case& c :
       {Case{"", Code::kDataLoss}, Case{"{", Code::kDataLoss}, Case{"[]", Code::kDataLoss},
        Case{good.substr(0, good.size() / 2), Code::kDataLoss},
        Case{with("\"last=1\"", "\"last=0\""), Code::kDataLoss},
        Case{with("\"last=1\"", "\"newest=1\""), Code::kDataLoss},
        Case{with("\"last=1\"", "\"policy\""), Code::kDataLoss},
        Case{with("\"last=1\"", "7"), Code::kDataLoss},
        Case{with("tensormount-retention", "other"), Code::kDataLoss},
        Case{with("\"version\": 1", "\"version\": 2"), Code::kUnsupported},
        Case{with("\"version\": 1", "\"version\": 0"), Code::kDataLoss},
        Case{with("\"incompatible\": 0", "\"incompatible\": 4"), Code::kUnsupported},
        Case{with("\"read_compatible\": 0", "\"read_compatible\": 1"), Code::kUnsupported},
        Case{std::string(70'000, ' '), Code::kDataLoss}}) {
    SCOPED_TRACE(c.text.substr(0, 300));
    WriteWholeFile(InStore("policy.json"), c.text);
    for (const char* rules : {"policy", "last=1"}) {
      const auto pruned = Prune(rules);
      EXPECT_THAT(pruned, HasCode(c.code));
      EXPECT_THAT(pruned, HasMessage("policy.json"));
    }
    EXPECT_THAT(Left(), SizeIs(3));
    const Status set = SetRetentionPolicy(StorePath(), RetentionRules::Parse("last=2").value());
    const Status cleared = SetRetentionPolicy(StorePath(), std::nullopt);
    if (c.code == Code::kUnsupported) {
      EXPECT_THAT(set, HasCode(c.code));
      EXPECT_THAT(cleared, HasCode(c.code));
      EXPECT_EQ(ReadWholeFile(InStore("policy.json")), c.text);
    } else {
      EXPECT_OK(set);
      EXPECT_OK(cleared);
    }
  }
  WriteWholeFile(InStore("policy.json"), "{");
  EXPECT_THAT(MakeStore().Fsck({}).value(),
              Contains(testing::Field(&Store::FsckFinding::problem,
                                      HasSubstr("nothing is removed by rule"))));
  // One that cannot be read now.
  WriteWholeFile(InStore("policy.json"), good);
  ObservedFileSystem failing(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kOpenRead && e.path.ends_with("policy.json")
               ? Status::FromErrno(EACCES, "injected", e.path)
               : Status();
  });
  EXPECT_THAT(PruneOn(failing, "last=1"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(Left(), SizeIs(3));
  for (const int error : {EACCES, EIO}) ExpectUnread("policy.json", error);
  // Unknown fields and compatible bits are no matter.
  WriteWholeFile(InStore("policy.json"), with("\"compatible\": 0", "\"compatible\": 8, \"x\": 1"));
  EXPECT_OK(Prune("policy"));
  EXPECT_THAT(Left(), SizeIs(1));
}

// ---- The newest -------------------------------------------------------------------------------

TEST_F(RetentionStoreTest, NothingIsRemovedWhenTheNewestFailsVerify) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const std::string file = TensorFileOf("step-3");
  const std::string bytes = ReadWholeFile(file);
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  const auto refused = [&] {
    for (const bool dry : {true, false}) {
      const auto pruned = Prune("last=1", {.dry_run = dry});
      EXPECT_THAT(pruned, HasCode(Code::kDataLoss));
      EXPECT_THAT(pruned, HasMessage("nothing is removed: step-3, the newest"));
    }
    EXPECT_THAT(Left(), SizeIs(3));
  };
  WriteWholeFile(file, bytes.substr(1));
  refused();
  ASSERT_OK(fs().RemoveFile(file));
  refused();
  WriteWholeFile(file, bytes);
  FlipByte(InStore("step-3/index/index.sst"), 100);
  refused();
  FlipByte(InStore("step-3/index/index.sst"), 100);
  EXPECT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-3"));
}

TEST_F(RetentionStoreTest, UnreadableCheckpointsAreKeptAndReported) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(4));
  WriteWholeFile(InStore("step-4/COMMIT"), "nonsense");
  ASSERT_OK(fs().RemoveFile(InStore("step-1/COMMIT")));
  ASSERT_OK(fs().CreateDirectory(InStore("folder")));
  const auto pruned = Prune("last=1");
  ASSERT_OK(pruned);
  EXPECT_THAT(Left(), ElementsAre("folder", "step-1", "step-3", "step-4"));
  EXPECT_THAT(On(pruned.value(), "step-4").reason, HasSubstr("the checkpoint cannot be read"));
  EXPECT_THAT(On(pruned.value(), "step-1").reason, HasSubstr("the checkpoint cannot be read"));
  EXPECT_THAT(pruned.value().decisions, SizeIs(4)) << "a folder is none of them";
  // With nothing that can be read nothing goes.
  WriteWholeFile(InStore("step-3/COMMIT"), "nonsense");
  EXPECT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), SizeIs(4));
}

// Somebody with other rules, or an operator, was at work.
TEST_F(RetentionStoreTest, PruneStopsWhenTheNewestVanishes) {
  for (const bool replaced : {false, true}) {
    ASSERT_OK(fs().RemoveTree(StorePath()));
    ASSERT_NO_FATAL_FAILURE(SaveSteps(5));
    int removals = 0;
    ObservedFileSystem watching(fs(), {}, [&](const FileEvent& e) {
      if (e.op != FileOp::kRename || e.path2.find("/.trash/") == std::string::npos) return;
      if (++removals != 2) return;
      if (replaced) {
        EXPECT_OK(Save("step-5", RetainedStepSpec(9), {.if_exists = IfExists::kReplace}));
      } else {
        EXPECT_OK(MakeStore().Remove("step-5"));
      }
    });
    const auto pruned = PruneOn(watching, "last=1");
    ASSERT_OK(pruned);
    EXPECT_EQ(pruned.value().removed(), 2u);
    EXPECT_THAT(pruned.value().failures(), SizeIs(2));
    EXPECT_THAT(On(pruned.value(), "step-3").failed, HasCode(Code::kStale));
    EXPECT_THAT(Left(), Contains("step-4"));
    EXPECT_EQ(Left().size(), replaced ? 3u : 2u);
  }
}

// ---- Pins -------------------------------------------------------------------------------------

TEST_F(RetentionStoreTest, PinnedCheckpointIsKeptUntilUnpinned) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const auto pin = PinCheckpoint(InStore("step-1"), {.reason = "for the paper"});
  ASSERT_OK(pin);
  EXPECT_EQ(pin.value().uuid, UuidOf("step-1").ToString());
  EXPECT_THAT(pin.value().by, HasSubstr("user "));
  EXPECT_THAT(NamesIn(InStore(".pins")), ElementsAre(pin.value().uuid));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
  EXPECT_THAT(MakeStore().Fsck({}).value(), IsEmpty());
  // By uuid, whatever its name is.
  ASSERT_OK(fs().RenameNoReplace(InStore("step-1"), InStore("first")));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("first", "step-3"));
  EXPECT_THAT(MakeStore().Remove("first"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(RemoveCheckpoint(InStore("first")), HasMessage("for the paper"));
  ASSERT_OK(UnpinCheckpoint(InStore("first")));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-3"));
}

TEST_F(RetentionStoreTest, PinnedCheckpointNeedsForceToRemoveOrReplace) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ASSERT_OK(PinCheckpoint(InStore("step-1"), {.reason = "for the paper"}));
  EXPECT_THAT(MakeStore().Remove("step-1"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(MakeStore().Begin("step-1", IfExists::kReplace), HasCode(Code::kPermissionDenied));
  // Which one it is cannot be read: the name of the pin serves.
  WriteWholeFile(InStore("step-1/COMMIT"), "nonsense");
  EXPECT_THAT(MakeStore().Remove("step-1"), HasCode(Code::kPermissionDenied));
  EXPECT_OK(MakeStore().Remove("step-1", {.force = true}));
  // With its pin, where that can be told.
  ASSERT_OK(PinCheckpoint(InStore("step-2")));
  EXPECT_OK(MakeStore().Remove("step-2", {.force = true}));
  EXPECT_THAT(Left(), IsEmpty());
  ASSERT_OK(MakeStore().Gc({.grace = seconds(0), .staging_age = seconds(-1)}));
  EXPECT_THAT(NamesIn(InStore(".pins")), ElementsAre(".lock"));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

TEST_F(RetentionStoreTest, PinsAreChangedListedAndRemoved) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  EXPECT_THAT(ListPins(StorePath()).value(), IsEmpty());
  EXPECT_THAT(PinCheckpoint(InStore("none")), HasCode(Code::kNotFound));
  EXPECT_THAT(UnpinCheckpoint(InStore("step-1")), HasCode(Code::kNotFound));
  EXPECT_THAT(PinCheckpoint(InStore("step-1"), {.expires = -1}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(PinCheckpoint(InStore("step-1"), {.reason = std::string(5000, 'x')}),
              HasCode(Code::kInvalidArgument));
  ASSERT_OK(PinCheckpoint(InStore("step-1"), {.reason = "a", .expires = 4'000'000'000}));
  ASSERT_OK(PinCheckpoint(InStore("step-1"), {.reason = "b"}));
  const auto pins = ListPins(StorePath());
  ASSERT_OK(pins);
  ASSERT_THAT(pins.value(), SizeIs(1));
  EXPECT_EQ(pins.value()[0].reason, "b");
  EXPECT_EQ(pins.value()[0].expires, 0);
  EXPECT_EQ(pins.value()[0].name, "step-1");
  EXPECT_THAT(ListCheckpoints(StorePath()).value()[0].pinned, true);
  EXPECT_THAT(ListCheckpoints(StorePath()).value()[1].pinned, false);
  ASSERT_OK(UnpinCheckpoint(InStore("step-1")));
  EXPECT_THAT(ListPins(StorePath()).value(), IsEmpty());
  EXPECT_OK(MakeStore().Remove("step-1"));
}

TEST_F(RetentionStoreTest, ExpiredPinDoesNotPreventRemoval) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  ASSERT_OK(PinCheckpoint(InStore("step-1"), {.expires = 4'000'000'000}));
  ASSERT_OK(PinCheckpoint(InStore("step-2"), {.expires = 4'000'000'000}));
  ASSERT_OK(Prune("last=1", {}, 3'999'999'999));
  EXPECT_THAT(Left(), SizeIs(3));
  const auto dry = Prune("last=1", {.dry_run = true}, 4'000'000'000);
  EXPECT_THAT(On(dry.value(), "step-1").reason, HasSubstr("expired 2096-10-02"));
  // A clock that runs back makes it hold again.
  ASSERT_OK(Prune("last=1", {}, 1));
  EXPECT_THAT(Left(), SizeIs(3));
  ASSERT_OK(Prune("last=1", {}, 4'000'000'000));
  EXPECT_THAT(Left(), ElementsAre("step-3"));
}

TEST_F(RetentionStoreTest, UnreadablePinPreventsRemoval) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const std::string uuid = UuidOf("step-1").ToString();
  ASSERT_OK(PinCheckpoint(InStore("step-1"), {.expires = 1}));
  const std::string good = ReadWholeFile(InStore(".pins/" + uuid));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  };
  for (const std::string& text :
       {std::string(), std::string("{}"), good.substr(0, 20),
        with("\"version\": 1", "\"version\": 2"), with("\"expires\": 1", "\"expires\": 1.5"),
        with("\"expires\": 1", "\"expires\": \"1\""),
        with("\"expires\": 1", "\"expires\": 18446744073709551615"),
        with(uuid, std::string(32, '0')), with("tensormount-pin", "other")}) {
    SCOPED_TRACE(text);
    WriteWholeFile(InStore(".pins/" + uuid), text);
    const auto pruned = Prune("last=1");
    ASSERT_OK(pruned);
    EXPECT_THAT(On(pruned.value(), "step-1").reason,
                HasSubstr("the pin cannot be read, so it does not expire"));
    EXPECT_THAT(MakeStore().Remove("step-1"), HasCode(Code::kPermissionDenied));
    EXPECT_THAT(ListPins(StorePath()).value()[0].problem, Not(IsEmpty()));
    EXPECT_THAT(MakeStore().Fsck({}).value(),
                Contains(testing::Field(&Store::FsckFinding::object, ".pins/" + uuid)));
  }
  ExpectUnread(".pins/" + uuid, EIO);
  // A second one beside it that is over changes nothing; nor does a folder in its place.
  WriteWholeFile(InStore(".pins/" + uuid + ".01234567"), good);
  ASSERT_OK(Prune("last=1"));
  ASSERT_OK(fs().RemoveFile(InStore(".pins/" + uuid)));
  ASSERT_OK(fs().CreateDirectory(InStore(".pins/" + uuid)));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), SizeIs(2));
  // Pins that cannot be listed: nobody knows what they hold.
  ObservedFileSystem failing(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kList && e.path.ends_with(".pins")
               ? Status::FromErrno(EACCES, "injected", e.path)
               : Status();
  });
  EXPECT_THAT(PruneOn(failing, "last=1"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(Left(), SizeIs(2));
  ASSERT_OK(fs().RemoveDirectory(InStore(".pins/" + uuid)));
  ASSERT_OK(UnpinCheckpoint(InStore("step-1")));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-2"));
}

// Where files cannot be exchanged a pin that is changed holds at every moment.
TEST_F(RetentionStoreTest, PinHoldsDuringChangeWithoutExchange) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const Uuid uuid = UuidOf("step-1");
  int looks = 0;
  ObservedFileSystem nfs(fs(), [&](const FileEvent& e) {
    if (e.path.find("/.pins/") != std::string::npos && looks > 0) {
      EXPECT_TRUE(pins::Find(fs(), StorePath(), uuid, 1).value().has_value());
      ++looks;
    }
    return e.op == FileOp::kExchange ? Status::FromErrno(EINVAL, "injected", e.path) : Status();
  });
  ObservedFileSystem unsupported(nfs, [](const FileEvent& e) {
    return e.op == FileOp::kExchange ? Status(Code::kUnsupported, "injected") : Status();
  });
  const auto store = Store::Open(unsupported, StorePath());
  ASSERT_OK(pins::Pin(unsupported, store.value(), "step-1", {.reason = "a"}));
  looks = 1;
  ASSERT_OK(pins::Pin(unsupported, store.value(), "step-1", {.reason = "b"}));
  EXPECT_GT(looks, 3);
  const auto found = pins::Find(fs(), StorePath(), uuid, 1);
  EXPECT_EQ(found.value()->reason, "b");
  ASSERT_OK(pins::Unpin(unsupported, store.value(), "step-1"));
  EXPECT_THAT(ListPins(StorePath()).value(), IsEmpty());
  looks = 0;
  // The policy too can be changed there.
  ASSERT_OK(pins::WritePolicy(unsupported, StorePath(), RetentionRules::Parse("last=1").value()));
  ASSERT_OK(pins::WritePolicy(unsupported, StorePath(), RetentionRules::Parse("last=2").value()));
  EXPECT_EQ(RetentionPolicy(StorePath()).value()->ToText(), "last=2");
}

// Pinned between the last look and the rename: it comes back, and who pinned it is told the truth.
TEST_F(RetentionStoreTest, CheckpointPinnedDuringRemovalIsMovedBack) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  std::thread pinning;
  std::atomic<bool> pinned = false;
  ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
    if (e.op != FileOp::kRename || !e.path.ends_with("/step-1") || pinning.joinable()) {
      return Status();
    }
    // The pin is durable before the rename; its look back comes whenever it comes.
    pinning =
        std::thread([&] { pinned = PinCheckpoint(InStore("step-1"), {.reason = "now"}).ok(); });
    while (!pins::Find(fs(), StorePath(), UuidOf("step-1"), 1).value()) std::this_thread::yield();
    return Status();
  });
  const auto pruned = PruneOn(racing, "last=1");
  pinning.join();
  ASSERT_OK(pruned);
  EXPECT_TRUE(pinned);
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
  EXPECT_TRUE(On(pruned.value(), "step-1").kept);
  EXPECT_FALSE(On(pruned.value(), "step-1").removed);
  EXPECT_THAT(On(pruned.value(), "step-1").reason, HasSubstr("pinned (now)"));
  EXPECT_TRUE(HoldsWhole(InStore("step-1"), RetainedStepSpec(1)));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

// Pinned before its turn: it is not even moved.
TEST_F(RetentionStoreTest, CheckpointPinnedBeforeItsTurnIsNotMoved) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  bool moved = false;
  ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
    if (e.op != FileOp::kRename) return Status();
    if (e.path.ends_with("/step-1")) {
      EXPECT_OK(PinCheckpoint(InStore("step-2")));
    }
    moved = moved || e.path.ends_with("/step-2");
    return Status();
  });
  const auto pruned = PruneOn(racing, "last=1");
  ASSERT_OK(pruned);
  EXPECT_TRUE(On(pruned.value(), "step-2").kept);
  EXPECT_FALSE(moved);
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
}

// What a crash between the rename and the way back leaves, gc moves back, or keeps and names.
TEST_F(RetentionStoreTest, GcMovesBackPinnedCheckpoints) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ASSERT_OK(PinCheckpoint(InStore("step-1")));
  const Uuid uuid = UuidOf("step-1");
  ASSERT_OK(MakeStore()
                .RemoveUnlessHeld("step-1", uuid,
                                  [](const Uuid&) { return std::optional<std::string>(); })
                .status);
  const auto remedy = [&] {
    for (const auto& finding : MakeStore().Fsck({}).value()) {
      if (finding.object == ".trash/" + uuid.ToString()) return finding.remedy;
    }
    return std::string("none");
  };
  EXPECT_EQ(remedy(), "gc moves it back to step-1 where that name is free");
  // The name is taken, or it may only be looked at: then it stays where it is.
  ASSERT_OK(fs().CreateDirectory(InStore("step-1")));
  auto kept = MakeStore().Gc({.grace = seconds(0)});
  ASSERT_OK(kept);
  EXPECT_THAT(kept.value().kept,
              ElementsAre(AllOf(HasSubstr("it is pinned"), HasSubstr("move it back to a name"))));
  ASSERT_OK(fs().RemoveDirectory(InStore("step-1")));
  ASSERT_OK(MakeStore().Gc({.dry_run = true, .grace = seconds(0)}));
  EXPECT_THAT(Left(), ElementsAre("step-2"));
  // Of two that hold it one may be damaged: people choose.
  std::filesystem::copy(InStore(".trash/" + uuid.ToString()), InStore(".trash/other"),
                        std::filesystem::copy_options::recursive);
  ASSERT_OK(MakeStore().Gc({.grace = seconds(0)}));
  EXPECT_THAT(Left(), ElementsAre("step-2"));
  std::filesystem::remove_all(InStore(".trash/other"));
  kept = MakeStore().Gc({.grace = seconds(0)});
  ASSERT_OK(kept);
  EXPECT_THAT(kept.value().kept, ElementsAre(HasSubstr("moved back to step-1")));
  EXPECT_TRUE(HoldsWhole(InStore("step-1"), RetainedStepSpec(1)));
  EXPECT_EQ(remedy(), "none");
}

// A disk without room for one more name in .trash: the marks there give way.
TEST_F(RetentionStoreTest, RemovalWorksWithoutFreeSpace) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(5));
  int room = 2;
  ObservedFileSystem full(
      fs(),
      [&](const FileEvent& e) {
        const std::string& made = e.op == FileOp::kRename ? e.path2 : e.path;
        const bool makes = e.op == FileOp::kRename || e.op == FileOp::kCreate;
        return makes && made.find("/.trash/") != std::string::npos && room == 0
                   ? Status::FromErrno(ENOSPC, "injected", made)
                   : Status();
      },
      [&](const FileEvent& e) {
        const std::string& made = e.op == FileOp::kRename ? e.path2 : e.path;
        if (made.find("/.trash/") == std::string::npos) return;
        if (e.op == FileOp::kRename || e.op == FileOp::kCreate) --room;
        if (e.op == FileOp::kRemoveFile) ++room;
      });
  ASSERT_OK(PruneOn(full, "last=3"));
  EXPECT_THAT(Left(), ElementsAre("step-3", "step-4", "step-5"));
  const Status removed = Store::Open(full, StorePath()).value().Remove("step-3");
  EXPECT_EQ(removed.ToErrno(), ENOSPC) << "nothing is left to give way";
  EXPECT_THAT(Left(), SizeIs(3));
}

// What a power cut leaves of a save that is over keeps nothing in .trash.
TEST_F(RetentionStoreTest, DamagedBaseRecordKeepsNothingInTrash) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const Staging staging = Written(MakeStore(), "step-3", RetainedStepSpec(3));
  WriteWholeFile(JoinPath(staging.directory, "BASE"), std::string(33, '\0'));
  ASSERT_OK(MakeStore().Remove("step-1"));
  const auto report = MakeStore().Gc({.grace = seconds(0)});
  ASSERT_OK(report);
  EXPECT_THAT(report.value().failed, IsEmpty());
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

// A removal that took another one than it meant, and died before it saw that.
TEST_F(RetentionStoreTest, CheckpointOfAnInterruptedRemovalIsRestored) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  const Uuid first = UuidOf("step-1");
  const Uuid second = UuidOf("step-2");
  const std::string entry = ".trash/" + first.ToString();
  ASSERT_OK(fs().RenameNoReplace(InStore("step-2"), InStore(entry)));
  WriteWholeFile(InStore(entry + ".since"), "step-2");
  std::string told;
  for (const auto& finding : MakeStore().Fsck({}).value()) told += finding.problem + finding.remedy;
  EXPECT_THAT(told, HasSubstr("it is checkpoint " + second.ToString()));
  EXPECT_THAT(told, HasSubstr("gc moves it back to step-2"));
  ASSERT_OK(MakeStore().Gc({}));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-2"));
  EXPECT_THAT(NamesIn(InStore(".trash")), IsEmpty());
}

TEST_F(RetentionStoreTest, GcRemovesOnlyPinsAndMarksOfGoneCheckpoints) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ASSERT_OK(PinCheckpoint(InStore("step-1")));
  const Store store = MakeStore();
  const Staging staging = Written(store, "step-3", RetainedStepSpec(3));
  ASSERT_OK(pins::MarkEphemeral(fs(), StorePath(), staging.uuid, staging.name));
  const std::string gone(32, 'a');
  Write(".pins/" + gone, "{}");
  Write(".ephemeral/" + gone, "");
  Write(".pins/.half", "");
  SetMtime(InStore(".pins/.half"), 1);
  EXPECT_OK(store.Gc({.dry_run = true}));
  EXPECT_THAT(NamesIn(InStore(".pins")), SizeIs(3));
  // While one cannot be read, the pin may be its.
  const std::string commit = ReadWholeFile(InStore("step-2/COMMIT"));
  WriteWholeFile(InStore("step-2/COMMIT"), "nonsense");
  const Store::GcOptions old{.staging_age = seconds(-1)};
  ASSERT_OK(store.Gc(old));
  EXPECT_THAT(NamesIn(InStore(".pins")), Contains(gone));
  WriteWholeFile(InStore("step-2/COMMIT"), commit);
  // One that came a moment ago may be of a checkpoint that is still on its way.
  ASSERT_OK(store.Gc({}));
  EXPECT_THAT(NamesIn(InStore(".pins")), Contains(gone));
  // So may one of a copy that is under way, however old it is.
  ASSERT_OK(fs().CreateDirectory(InStore(".staging/.copy-" + gone)));
  ASSERT_OK(store.Gc({}));
  Store::GcReport swept;
  pins::Sweep(fs(), store, old, swept);
  EXPECT_THAT(NamesIn(InStore(".pins")), Contains(gone));
  ASSERT_OK(fs().RemoveDirectory(InStore(".staging/.copy-" + gone)));
  const auto report = MakeStore().Gc({.staging_age = seconds(86400)});
  ASSERT_OK(report);
  pins::Sweep(fs(), store, old, swept);
  EXPECT_THAT(swept.removed, Contains(".pins/" + gone));
  EXPECT_THAT(NamesIn(InStore(".pins")),
              UnorderedElementsAre(".lock", UuidOf("step-1").ToString()));
  EXPECT_THAT(NamesIn(InStore(".ephemeral")), ElementsAre(staging.uuid.ToString()));
}

// ---- Saves under way --------------------------------------------------------------------------

TEST_F(RetentionStoreTest, BaseOfARunningSaveIsKept) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(4));
  const Store store = MakeStore();
  const Staging staging = Written(store, "next", RetainedStepSpec(9));
  const std::string base = ".staging/" + staging.directory.substr(staging.directory.rfind('/') + 1);
  Write(base + "/BASE", UuidOf("step-1").ToString() + "\n" + UuidOf("step-2").ToString() + "\n");
  const auto pruned = Prune("last=1");
  ASSERT_OK(pruned);
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-2", "step-4"));
  EXPECT_THAT(On(pruned.value(), "step-1").reason, HasSubstr(base));
  // One that nobody understands may mean any of them.
  for (const char* text : {"nonsense\n", "0123\n", "\n"}) {
    Write(base + "/BASE", text);
    EXPECT_THAT(Prune("last=1"), HasCode(Code::kDataLoss)) << text;
    EXPECT_THAT(Prune("last=1"), HasMessage("BASE"));
  }
  EXPECT_THAT(Left(), SizeIs(3));
  Write(base + "/BASE", UuidOf("step-2").ToString() + "\n");
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-4"));
  // A publish takes it away, and then rules hold again.
  ASSERT_OK(store.Publish(staging, TinyCoordinator(RetainedStepSpec(9)), {}));
  EXPECT_TRUE(HoldsWhole(InStore("next"), RetainedStepSpec(9)));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("next"));
}

TEST_F(RetentionStoreTest, ParentOfAMountSaveIsKept) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(1));
  const auto shared = MakeStore().BeginShared("mounted", {});
  ASSERT_OK(shared);
  ASSERT_OK(Save("step-2", RetainedStepSpec(2)));
  ASSERT_OK(Save("step-3", RetainedStepSpec(3)));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
  const std::string file = ".staging/mounted/staging.json";
  const std::string text = ReadWholeFile(InStore(file));
  WriteWholeFile(InStore(file), text.substr(0, 40));
  EXPECT_THAT(Prune("last=1"), HasMessage("staging.json"));
  WriteWholeFile(InStore(file), text);
  ASSERT_OK(MakeStore().AbortOrDecide(shared.value()));
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-3"));
}

// ---- Ephemeral --------------------------------------------------------------------------------

TEST_F(RetentionStoreTest, EphemeralCheckpointIsRemovedAfterALaterSave) {
  const Store store = MakeStore();
  const auto ephemeral = [&](const std::string& name) {
    const Staging staging = Written(store, name, RetainedStepSpec(1));
    ASSERT_OK(pins::MarkEphemeral(fs(), StorePath(), staging.uuid, staging.name));
    ASSERT_OK(store.Publish(staging, TinyCoordinator(RetainedStepSpec(1)), {}));
  };
  ASSERT_OK(Save("step-1", RetainedStepSpec(1)));
  ASSERT_NO_FATAL_FAILURE(ephemeral("step-2"));
  ASSERT_OK(Prune(""));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-2"));
  ASSERT_NO_FATAL_FAILURE(ephemeral("step-3"));
  ASSERT_OK(Prune(""));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
  EXPECT_THAT(NamesIn(InStore(".ephemeral")), SizeIs(1)) << "the mark went with it";
  ASSERT_OK(Save("step-4", RetainedStepSpec(4)));
  // A newer one that does not verify removes none.
  const std::string file = TensorFileOf("step-4");
  const std::string bytes = ReadWholeFile(file);
  ASSERT_OK(fs().RemoveFile(file));
  EXPECT_THAT(Prune(""), HasMessage("step-4"));
  WriteWholeFile(file, bytes);
  ASSERT_OK(Prune(""));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-4"));
  EXPECT_THAT(MakeStore().Fsck({}).value(),
              Not(Contains(testing::Field(&Store::FsckFinding::object, ".ephemeral"))));
}

// ---- Values and dates -------------------------------------------------------------------------

TEST_F(RetentionStoreTest, MetricsAreFoundInTheCommonState) {
  const auto save = [&](const std::string& name, std::map<std::string, CommonValue> common) {
    TinySpec spec = RetainedStepSpec(1);
    spec.common = std::move(common);
    ASSERT_OK(Save(name, spec));
  };
  CommonDict eval;
  eval.items["loss"] = 0.25;
  ASSERT_NO_FATAL_FAILURE(save("nested", {{"eval", eval}}));
  ASSERT_NO_FATAL_FAILURE(save("flat", {{"eval.loss", 0.5}}));
  ASSERT_NO_FATAL_FAILURE(save("whole", {{"eval.loss", 1}}));
  ASSERT_NO_FATAL_FAILURE(save("worse", {{"eval.loss", 2.0}}));
  ASSERT_NO_FATAL_FAILURE(save("nan", {{"eval.loss", std::numeric_limits<double>::quiet_NaN()}}));
  ASSERT_NO_FATAL_FAILURE(save("text", {{"eval.loss", "low"}}));
  ASSERT_NO_FATAL_FAILURE(save("truth", {{"eval.loss", true}}));
  ASSERT_NO_FATAL_FAILURE(save("none", {{"iteration", 3}}));
  CommonDict list;
  list.items["loss"] = CommonList{{7.0, 0.1}};
  ASSERT_NO_FATAL_FAILURE(save("list", {{"eval", list}}));
  ASSERT_NO_FATAL_FAILURE(save("newest", {{"eval.loss", 3.0}}));
  const auto dry = Prune("best=eval.loss:min:2", {.dry_run = true});
  ASSERT_OK(dry);
  for (const char* name : {"nested", "flat", "nan", "text", "truth", "none", "list", "newest"}) {
    EXPECT_TRUE(On(dry.value(), name).kept) << name;
  }
  EXPECT_FALSE(On(dry.value(), "whole").kept);
  EXPECT_FALSE(On(dry.value(), "worse").kept);
  EXPECT_EQ(On(dry.value(), "none").reason, "the checkpoint has no eval.loss");
  EXPECT_EQ(On(dry.value(), "text").reason,
            "the checkpoint has a value of eval.loss that is not a number: string");
  EXPECT_THAT(On(dry.value(), "nan").reason, HasSubstr("NaN"));
  const auto third = Prune("best=eval.loss[1]:min:1", {.dry_run = true});
  EXPECT_THAT(On(third.value(), "list").reason, HasSubstr("lowest eval.loss[1]"));
}

TEST_F(RetentionStoreTest, NewestOfEachHourIsKeptDespiteClockJumps) {
  const auto save = [&](const std::string& name, std::int64_t now) {
    ASSERT_OK(Save(name, RetainedStepSpec(1), {.now = now}));
  };
  ASSERT_NO_FATAL_FAILURE(save("a", 1'000'000'800));
  ASSERT_NO_FATAL_FAILURE(save("b", 1'000'000'900));
  ASSERT_NO_FATAL_FAILURE(save("c", 2'000'000'000));  // Ahead,
  ASSERT_NO_FATAL_FAILURE(save("d", 1'000'000'950));  // and back.
  ASSERT_NO_FATAL_FAILURE(save("e", 1'000'001'000));
  ASSERT_OK(Prune("every=1h"));
  EXPECT_THAT(Left(), ElementsAre("b", "c", "e"));
}

// ---- Failures ---------------------------------------------------------------------------------

TEST_F(RetentionStoreTest, FailedRemovalIsReportedAndTheNextIsTried) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(4));
  ObservedFileSystem failing(fs(), [](const FileEvent& e) {
    return e.op == FileOp::kRename && e.path.ends_with("/step-2")
               ? Status::FromErrno(EACCES, "injected", e.path)
               : Status();
  });
  const auto pruned = PruneOn(failing, "last=1");
  ASSERT_OK(pruned);
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-4"));
  EXPECT_THAT(On(pruned.value(), "step-2").failed, HasCode(Code::kPermissionDenied));
  EXPECT_FALSE(On(pruned.value(), "step-2").removed);
  EXPECT_THAT(pruned.value().failures(), ElementsAre(HasSubstr("step-2: PERMISSION_DENIED")));
}

TEST_F(RetentionStoreTest, UnsyncedRemovalIsReportedAsUnknown) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  ASSERT_OK(fs().CreateDirectory(InStore(".pins")));
  ObservedFileSystem failing(fs(), [&](const FileEvent& e) {
    return e.op == FileOp::kSyncDirectory && e.path == InStore(".trash")
               ? Status::FromErrno(EIO, "injected", e.path)
               : Status();
  });
  const auto pruned = PruneOn(failing, "last=1");
  ASSERT_OK(pruned);
  if (fs().CanSyncOnlyMovedFolder(StorePath())) GTEST_SKIP() << "syncs other folders here";
  EXPECT_TRUE(On(pruned.value(), "step-1").removed);
  EXPECT_THAT(On(pruned.value(), "step-1").failed, HasCode(Code::kUnknown));
}

// A save took its name between the look and the rename: what was moved is moved back.
TEST_F(RetentionStoreTest, CheckpointThatTookTheNameIsNotRemoved) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  bool done = false;
  ObservedFileSystem racing(fs(), [&](const FileEvent& e) {
    if (e.op == FileOp::kRename && e.path.ends_with("/step-1") && !done) {
      done = true;
      EXPECT_OK(Save("step-1", RetainedStepSpec(8), {.if_exists = IfExists::kReplace}));
    }
    return Status();
  });
  const auto pruned = PruneOn(racing, "last=1");
  ASSERT_OK(pruned);
  EXPECT_TRUE(done);
  EXPECT_TRUE(HoldsWhole(InStore("step-1"), RetainedStepSpec(8)));
  EXPECT_THAT(On(pruned.value(), "step-1").failed, HasCode(Code::kStale));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
}

// Every operation fails once, or answers that there is no such thing: what the rules keep is there
// and whole, whatever the answer is.
TEST_F(RetentionStoreTest, FaultAtAnyOperationLosesNoKeptCheckpoint) {
  const auto fill = [&] {
    ASSERT_OK(fs().RemoveTree(StorePath()));
    ASSERT_NO_FATAL_FAILURE(SaveSteps(5));
    ASSERT_OK(PinCheckpoint(InStore("step-1")));
    const Store store = MakeStore();
    const Staging staging = Written(store, "next", RetainedStepSpec(9));
    WriteWholeFile(staging.directory + "/BASE", UuidOf("step-2").ToString() + "\n");
  };
  constexpr const char* kRules = "last=1";
  int operations = 0;
  ASSERT_NO_FATAL_FAILURE(fill());
  ObservedFileSystem counting(fs(), [&](const FileEvent&) {
    ++operations;
    return Status();
  });
  ASSERT_OK(PruneOn(counting, kRules));
  ASSERT_THAT(Left(), ElementsAre("step-1", "step-2", "step-5"));
  ASSERT_GT(operations, 40);
  int refused = 0;
  Random random(TestSeed());
  for (const int err : {EIO, ENOENT, EACCES}) {
    for (int point = 0; point < operations; ++point) {
      if (random.Int(0, 99) >= TestScale(err == EIO ? 100 : 20)) continue;
      ASSERT_NO_FATAL_FAILURE(fill());
      int seen = 0;
      std::string what;
      ObservedFileSystem failing(fs(), [&](const FileEvent& e) {
        if (seen++ != point) return Status();
        what = std::string(FileOpName(e.op)) + " " + e.path;
        return Status::FromErrno(err, "injected", e.path);
      });
      const auto pruned = PruneOn(failing, kRules);
      SCOPED_TRACE(what + ": " + std::to_string(err) + ": " + pruned.status().ToString());
      refused += pruned.ok() ? 0 : 1;
      const std::vector<std::string> left = Left();
      for (const char* name : {"step-5", "step-1", "step-2"}) EXPECT_THAT(left, Contains(name));
      for (const std::string& name : left) {
        EXPECT_TRUE(HoldsWhole(InStore(name),
                               RetainedStepSpec(static_cast<std::uint64_t>(name.back() - '0'))))
            << name;
      }
      if (!pruned.ok()) {
        EXPECT_THAT(left, SizeIs(5)) << "refused, and all the same";
      }
      if (testing::Test::HasFailure()) return;
    }
  }
  // Where what was removed could not be freed nothing is refused.
  EXPECT_GT(refused, TestScale(operations / 6));
}

// ---- Several at once --------------------------------------------------------------------------

TEST_F(RetentionStoreTest, ConcurrentPruneWaitsOrReturnsBusy) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  auto lock = pins::Lock(fs(), StorePath(), 0);
  ASSERT_OK(lock);
  ASSERT_NE(lock.value(), nullptr);
  EXPECT_THAT(Prune("last=1", {.wait_seconds = 0}), HasCode(Code::kBusy));
  EXPECT_OK(Prune("last=1", {.dry_run = true, .wait_seconds = 0}));
  EXPECT_THAT(Left(), SizeIs(3));
  std::thread release([held = std::move(lock).value()]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    held.reset();
  });
  EXPECT_OK(Prune("last=1", {.wait_seconds = 60}));
  release.join();
  EXPECT_THAT(Left(), SizeIs(1));
}

// With locks and without (hosts that do not see each other's), beside saves: the newest of all that
// was ever published is there in the end, and at every moment something is.
TEST_F(RetentionStoreTest, ConcurrentPrunesKeepTheNewest) {
  const std::vector<std::string> rules = {"last=1",
                                          "every=2",
                                          "every=3",
                                          "best=iteration:min:1",
                                          "best=iteration:max:1,last=2",
                                          "every=3-generations"};
  Random random(TestSeed());
  for (int round = 0; round < TestScale(12); ++round) {
    ASSERT_OK(fs().RemoveTree(StorePath()));
    ASSERT_NO_FATAL_FAILURE(SaveSteps(4));
    const bool locks = random.OneIn(2);
    std::vector<std::uint64_t> seeds = {random.Next(), random.Next(), random.Next()};
    std::atomic<bool> stop = false;
    std::atomic<std::uint64_t> removed = 0;
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::vector<std::string> wrong;
    for (const std::uint64_t seed : seeds) {
      threads.emplace_back([&, seed] {
        Random mine(seed);
        std::atomic<std::uint64_t> events = 0;  // Checkpoints are opened on several threads.
        ObservedFileSystem host(fs(), [&](const FileEvent& e) {
          Random pause(seed + ++events);
          if (pause.OneIn(20)) {
            std::this_thread::sleep_for(std::chrono::microseconds(pause.Int(0, 300)));
          }
          const bool pruner = e.path.ends_with("/.pins/.lock");
          return e.op == FileOp::kLock && pruner && !locks
                     ? Status::FromErrno(ENOLCK, "injected", e.path)
                     : Status();
        });
        while (!stop) {
          const auto pruned = PruneOn(host, mine.Pick(rules), {.wait_seconds = 0});
          if (pruned.ok()) {
            removed += pruned.value().removed();
            continue;
          }
          const Code code = pruned.status().code();
          // Somebody else was at it, or took away what was being verified.
          if (code == Code::kBusy || code == Code::kNotFound || code == Code::kStale) continue;
          const std::lock_guard guard(mutex);
          wrong.push_back(pruned.status().ToString());
        }
      });
    }
    for (int i = 5; i <= 16; ++i) {
      const std::string name = "step-" + std::to_string(i);
      ASSERT_OK(Save(name, RetainedStepSpec(static_cast<std::uint64_t>(i))));
      EXPECT_TRUE(HoldsWhole(InStore(name), RetainedStepSpec(static_cast<std::uint64_t>(i))))
          << name;
      EXPECT_EQ(MakeStore().Latest().value().name, name);
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_THAT(wrong, IsEmpty());
    EXPECT_THAT(Left(), Contains("step-16"));
    EXPECT_TRUE(HoldsWhole(InStore("step-16"), RetainedStepSpec(16)));
    EXPECT_GT(removed, 0u);
    if (testing::Test::HasFailure()) return;
  }
}

// A keeps what it takes for the newest and removes the rest; B does not see that one, and keeps
// another. Neither may remove what the other rests on.
TEST_F(RetentionStoreTest, PruneBlindToTheNewestRemovesNothingOthersKeep) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const auto blind = [&](const std::string& name) {
    return [this, name](const FileEvent& e) {
      return e.op == FileOp::kOpenRead && e.path == InStore(name + "/COMMIT")
                 ? Status::FromErrno(EIO, "injected", e.path)
                 : Status();
    };
  };
  ObservedFileSystem a(fs(), blind("step-2"));
  ObservedFileSystem b(fs(), blind("step-3"));
  ASSERT_OK(PruneOn(b, "last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
  ASSERT_OK(PruneOn(a, "last=1"));
  EXPECT_THAT(Left(), ElementsAre("step-2", "step-3"));
}

TEST_F(RetentionStoreTest, PruneDoesNotDisturbReaders) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(2));
  auto reader = OpenedCheckpoint::Open(fs(), InStore("step-1"), {});
  ASSERT_OK(reader);
  ASSERT_OK(Prune("last=1"));
  EXPECT_THAT(MakeStore().Gc({.grace = seconds(0)}).value().kept,
              ElementsAre(HasSubstr("still being read")));
  const auto entry = reader.value()->index().Find("w");
  std::string got(TinyBytes(RetainedStepSpec(1).tensors[0]).size(), '?');
  ASSERT_OK(reader.value()->ReadBytes(entry.value(), 0, got.data(), got.size(),
                                      ReadVerify::kExtendLeaves, nullptr));
  EXPECT_EQ(got, TinyBytes(RetainedStepSpec(1).tensors[0]));
}

TEST_F(RetentionStoreTest, TrashHintCountsSharedFilesOnce) {
  const auto hint = [&] {
    return retention::WithTrashHint(fs(), StorePath(), Status::FromErrno(ENOSPC, "write", "x"))
        .fields()
        .cause;
  };
  EXPECT_EQ(hint(), "");
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  EXPECT_EQ(hint(), "");
  // A file that two of them share goes with the second.
  const std::string big(3'000'000, 'x');
  WriteWholeFile(InStore("step-1/data/shared"), big);
  ASSERT_OK(fs().Link(InStore("step-1/data/shared"), InStore("step-2/data/shared")));
  ASSERT_OK(MakeStore().Remove("step-1"));
  EXPECT_THAT(hint(), Not(HasSubstr(" MB ")));
  ASSERT_OK(MakeStore().Remove("step-2"));
  EXPECT_THAT(hint(), HasSubstr("holds 3.0 MB"));
  EXPECT_THAT(hint(), HasSubstr("`tensormount gc "));
  EXPECT_EQ(retention::WithTrashHint(fs(), StorePath(), Status(Code::kBusy, "x")).fields().cause,
            "");
}

// ---- For programs -----------------------------------------------------------------------------

TEST_F(RetentionStoreTest, ApiPrunesLikeTheCommand) {
  ASSERT_NO_FATAL_FAILURE(SaveSteps(3));
  const auto listed = ListCheckpoints(StorePath());
  ASSERT_OK(listed);
  ASSERT_THAT(listed.value(), SizeIs(3));
  EXPECT_TRUE(listed.value()[2].latest);
  EXPECT_GT(listed.value()[0].created, 1'000'000'000);
  EXPECT_EQ(listed.value()[0].file_bytes, 128u);
  const auto pruned =
      PruneCheckpoints(StorePath(), {.rules = RetentionRules::Parse("last=2").value()});
  ASSERT_OK(pruned);
  EXPECT_EQ(pruned.value().removed(), 1u);
  ASSERT_OK(RemoveCheckpoint(InStore("step-2")));
  const auto freed = CollectGarbage(StorePath(), {.grace_seconds = 0});
  ASSERT_OK(freed);
  EXPECT_THAT(freed.value().removed, Contains(HasSubstr(".trash/")));
  EXPECT_THAT(Left(), ElementsAre("step-3"));
  EXPECT_THAT(PruneCheckpoints(dir_.Join("none")), HasCode(Code::kNotFound));
}

}  // namespace
}  // namespace tensormount
