// SPDX-License-Identifier: Apache-2.0
// Promise 5 and the arbiter: what happens when somebody else acts between any two operations.

#include <functional>
#include <optional>

#include "tests/crash/crash_support.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

constexpr int kMaxRaceOps = 2000;

class PublishRaceTest : public StoreTest, public testing::WithParamInterface<bool> {
 protected:
  // A file system that does `act` once, before operation k.
  std::unique_ptr<ObservedFileSystem> ActingBefore(int k, std::function<void()> act) {
    op_ = 0;
    acted_ = false;
    return std::make_unique<ObservedFileSystem>(fs(), [this, k, act](const FileEvent& e) {
      if (op_++ == k) {
        acted_ = true;
        where_ = std::string(FileOpName(e.op)) + " " + e.path;
        act();
      }
      return Status();
    });
  }

  int op_ = 0;
  bool acted_ = false;
  std::string where_;
};

TEST_P(PublishRaceTest, ArbiterVerdictMatchesPublishResultAndDisk) {
  const bool replace = GetParam();
  const IfExists if_exists = replace ? IfExists::kReplace : IfExists::kFail;
  const Store store = MakeStore();
  const TinySpec old_spec = CrashSpec(1);
  const TinySpec spec = CrashSpec(20);
  int aborted = 0;
  int committed = 0;
  for (int k = 0;; ++k) {
    ASSERT_LT(k, kMaxRaceOps);
    std::optional<Uuid> replaced;
    if (replace) {
      const auto old = Save("step", old_spec);
      ASSERT_OK(old);
      replaced = old.value().info.uuid;
    }
    const Staging staging = Written(store, "step", spec, if_exists);
    Result<Verdict> verdict = Status(Code::kInternal, "not asked");
    const auto hooked = ActingBefore(k, [&] { verdict = store.AbortOrDecide(staging); });
    const auto through = Store::Open(*hooked, StorePath());
    ASSERT_OK(through);
    const auto published =
        through.value().Publish(staging, TinyCoordinator(spec), {.if_exists = if_exists});
    SCOPED_TRACE("before operation " + std::to_string(k) + " " + where_ + ": " +
                 published.status().ToString());
    if (acted_) {
      ASSERT_OK(verdict);
      if (verdict.value() == Verdict::kCommitted) {
        ++committed;
        ASSERT_OK(published);
      } else {
        ++aborted;
        ASSERT_THAT(published, HasCode(Code::kStale));
      }
    } else {
      ASSERT_OK(published);
    }
    // Asked again, by anybody, it is the same.
    const auto again = store.AbortOrDecide(staging);
    ASSERT_THAT(again, IsOkAndHolds(published.ok() ? Verdict::kCommitted : Verdict::kAborted));
    ASSERT_TRUE(NothingHalf(store));
    if (published.ok()) {
      ASSERT_TRUE(HoldsWhole(InStore("step"), spec));
      if (replaced) {
        ASSERT_TRUE(HoldsWhole(InStore(".trash/" + replaced->ToString()), old_spec));
      }
    } else if (replaced) {
      ASSERT_TRUE(HoldsWhole(InStore("step"), old_spec));
    } else {
      ASSERT_FALSE(Visible(StorePath(), "step"));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "step"));
    if (!acted_) break;
  }
  EXPECT_GT(aborted, 20);
  EXPECT_GE(committed, 2);
}

TEST_P(PublishRaceTest, VerdictHoldsWhenPublishHappensDuringIt) {
  const bool replace = GetParam();
  const IfExists if_exists = replace ? IfExists::kReplace : IfExists::kFail;
  const Store store = MakeStore();
  const TinySpec spec = CrashSpec(20);
  for (int k = 0;; ++k) {
    ASSERT_LT(k, kMaxRaceOps);
    if (replace) {
      ASSERT_OK(Save("step", CrashSpec(1)));
    }
    const Staging staging = Written(store, "step", spec, if_exists);
    Result<Store::Published> published = Status(Code::kInternal, "not run");
    const auto hooked = ActingBefore(k, [&] {
      published = store.Publish(staging, TinyCoordinator(spec), {.if_exists = if_exists});
    });
    const auto through = Store::Open(*hooked, StorePath());
    ASSERT_OK(through);
    const auto verdict = through.value().AbortOrDecide(staging);
    SCOPED_TRACE("before operation " + std::to_string(k) + " " + where_);
    ASSERT_OK(verdict);
    if (acted_ && published.ok()) {
      ASSERT_EQ(verdict.value(), Verdict::kCommitted);
      ASSERT_TRUE(HoldsWhole(InStore("step"), spec));
    } else {
      ASSERT_EQ(verdict.value(), Verdict::kAborted);
      if (acted_) {
        ASSERT_THAT(published, HasCode(Code::kStale));
      }
    }
    ASSERT_THAT(store.AbortOrDecide(staging), IsOkAndHolds(verdict.value()));
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "step"));
    if (!acted_) break;
  }
}

INSTANTIATE_TEST_SUITE_P(New, PublishRaceTest, testing::Values(false),
                         [](const auto&) { return std::string("Name"); });
INSTANTIATE_TEST_SUITE_P(Replace, PublishRaceTest, testing::Values(true),
                         [](const auto&) { return std::string("Name"); });

TEST_F(PublishRaceTest, ArbiterFilesTheReplacedCheckpointUnderItsUuid) {
  const Store store = MakeStore();
  const TinySpec old_spec = CrashSpec(1);
  const TinySpec spec = CrashSpec(20);
  const auto old = Save("step", old_spec);
  ASSERT_OK(old);
  const Staging staging = Written(store, "step", spec, IfExists::kReplace);
  // Between its look and its rename the save is published, by somebody who dies after the exchange
  // and leaves the replaced checkpoint at the place of the staging.
  bool acted = false;
  bool exchanged = false;
  ObservedFileSystem dying(
      fs(),
      [&](const FileEvent& e) {
        return exchanged && e.op != FileOp::kSyncDirectory ? Status(Code::kUnavailable, "dead")
                                                           : Status();
      },
      [&](const FileEvent& e) { exchanged = exchanged || e.op == FileOp::kExchange; });
  ObservedFileSystem slow(fs(), [&](const FileEvent& e) {
    if (e.op == FileOp::kRename && !acted) {
      acted = true;
      EXPECT_OK(Store::Open(dying, StorePath())
                    .value()
                    .Publish(staging, TinyCoordinator(spec), {.if_exists = IfExists::kReplace}));
    }
    return Status();
  });
  EXPECT_THAT(Store::Open(slow, StorePath()).value().AbortOrDecide(staging),
              IsOkAndHolds(Verdict::kCommitted));
  EXPECT_TRUE(acted && exchanged);
  EXPECT_TRUE(HoldsWhole(InStore("step"), spec));
  EXPECT_TRUE(HoldsWhole(InStore(".trash/" + old.value().info.uuid.ToString()), old_spec));
}

TEST_F(PublishRaceTest, RemovalOfTheNewCheckpointKeepsItsCommitVerdict) {
  const Store store = MakeStore();
  const TinySpec spec = CrashSpec(20);
  for (int k = 0;; ++k) {
    ASSERT_LT(k, kMaxRaceOps);
    ASSERT_OK(Save("step", CrashSpec(1)));
    const Staging staging = Written(store, "step", spec, IfExists::kReplace);
    const auto hooked = ActingBefore(k, [&] {
      EXPECT_OK(store.Publish(staging, TinyCoordinator(spec), {.if_exists = IfExists::kReplace}));
    });
    const auto through = Store::Open(*hooked, StorePath());
    ASSERT_OK(through);
    ASSERT_OK(through.value().Remove("step"));
    SCOPED_TRACE("before operation " + std::to_string(k) + " " + where_);
    ASSERT_THAT(store.AbortOrDecide(staging),
                IsOkAndHolds(acted_ ? Verdict::kCommitted : Verdict::kAborted));
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "step"));
    if (!acted_) break;
  }
}

TEST_F(PublishRaceTest, ClaimedGenerationIsNotReusedAfterGc) {
  const Store store = MakeStore();
  for (const bool first : {true, false}) {
    std::vector<std::uint64_t> others;
    bool acted = false;
    ObservedFileSystem slow(fs(), [&](const FileEvent& e) {
      if (e.op == FileOp::kCreateDirectory && e.path.find(".generations/") != std::string::npos &&
          !acted) {
        acted = true;
        for (int i = 0; i < 3; ++i) {
          others.push_back(store.Begin("other", IfExists::kFail).value().generation);
        }
        EXPECT_OK(store.Gc({}));
      }
      return Status();
    });
    const auto mine = Store::Open(slow, StorePath()).value().Begin("mine", IfExists::kFail);
    ASSERT_OK(mine);
    EXPECT_TRUE(acted);
    EXPECT_THAT(others, testing::Each(testing::Lt(mine.value().generation))) << first;
  }
}

TEST_F(PublishRaceTest, ConcurrentPublisherAtAnyMomentLeavesOneWinner) {
  const Store store = MakeStore();
  const TinySpec mine = CrashSpec(20);
  const TinySpec theirs = CrashSpec(30);
  int lost = 0;
  for (int k = 0;; ++k) {
    ASSERT_LT(k, kMaxRaceOps);
    const Staging a = Written(store, "step", mine);
    const Staging b = Written(store, "step", theirs);
    Result<Store::Published> other = Status(Code::kInternal, "not run");
    const auto hooked =
        ActingBefore(k, [&] { other = store.Publish(b, TinyCoordinator(theirs), {}); });
    const auto through = Store::Open(*hooked, StorePath());
    ASSERT_OK(through);
    const auto published = through.value().Publish(a, TinyCoordinator(mine), {});
    SCOPED_TRACE("before operation " + std::to_string(k) + " " + where_);
    if (acted_) {
      ASSERT_NE(published.ok(), other.ok());
      ASSERT_THAT(published.ok() ? other : published, HasCode(Code::kAlreadyExists));
    }
    lost += published.ok() ? 0 : 1;
    ASSERT_TRUE(HoldsWhole(InStore("step"), published.ok() ? mine : theirs));
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "step"));
    if (!acted_) break;
  }
  EXPECT_GT(lost, 20);
}

TEST_F(PublishRaceTest, ParentOrReplacedCheckpointMayVanishAtAnyMoment) {
  const Store store = MakeStore();
  const TinySpec spec = CrashSpec(20);
  for (int k = 0;; ++k) {
    ASSERT_LT(k, kMaxRaceOps);
    ASSERT_OK(Save("step", CrashSpec(1)));
    const Staging staging = Written(store, "step", spec, IfExists::kReplace);
    const auto hooked = ActingBefore(k, [&] {
      // What a person does; gone at once, without .trash.
      EXPECT_OK(fs().RemoveTree(InStore("step")));
    });
    const auto through = Store::Open(*hooked, StorePath());
    ASSERT_OK(through);
    const auto published =
        through.value().Publish(staging, TinyCoordinator(spec), {.if_exists = IfExists::kReplace});
    SCOPED_TRACE("before operation " + std::to_string(k) + " " + where_ + ": " +
                 published.status().ToString());
    ASSERT_OK(published);
    // After the rename it was the new one that was removed.
    if (Visible(StorePath(), "step")) {
      ASSERT_TRUE(HoldsWhole(InStore("step"), spec));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(StorePath(), "step"));
    if (!acted_) break;
  }
}

}  // namespace
}  // namespace tensormount
