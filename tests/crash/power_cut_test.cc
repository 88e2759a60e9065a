// SPDX-License-Identifier: Apache-2.0
// Promise 1: what was acknowledged survives a power cut; promise 2: nothing is ever half there.

#include "tests/support/power_cut.h"

#include "tests/crash/crash_support.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

class PowerCutTest : public StoreTest {
 protected:
  // Of the state in dir_/after: what stands under `name`, 0 for nothing, else the seed of CrashSpec
  // that it holds whole; -1 and a failure for anything else.
  int SeedOf(const std::string& store, const std::string& name, std::initializer_list<int> seeds) {
    if (!Visible(store, name)) return 0;
    for (const int seed : seeds) {
      if (HoldsWhole(JoinPath(store, name), CrashSpec(static_cast<std::uint64_t>(seed)))) {
        return seed;
      }
    }
    ADD_FAILURE() << name << ": "
                  << HoldsWhole(JoinPath(store, name),
                                CrashSpec(static_cast<std::uint64_t>(*seeds.begin())))
                         .message();
    return -1;
  }
};

TEST_F(PowerCutTest, AcknowledgedSavesSurviveAndNothingIsPartial) {
  ASSERT_OK(fs().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  const std::string path = dir_.Join("live/deep/store");
  const auto save = [&](const std::string& name, std::uint64_t seed, IfExists if_exists) {
    return WriteTinyCheckpoint(live, path, name, CrashSpec(seed),
                               {.if_exists = if_exists, .rows_in_memory = 0});
  };
  // One history, with the number of operations at each acknowledgement.
  ASSERT_OK(save("a", 10, IfExists::kFail));
  const std::size_t saved_a = live.op_count();
  ASSERT_OK(save("b", 20, IfExists::kFail));
  const std::size_t saved_b = live.op_count();
  ASSERT_OK(save("a", 30, IfExists::kReplace));
  const std::size_t replaced_a = live.op_count();
  const auto store = Store::Open(live, path);
  ASSERT_OK(store);
  ASSERT_OK(store.value().Remove("b"));
  const std::size_t removed_b = live.op_count();
  const auto aborted = store.value().Begin("c", IfExists::kFail);
  ASSERT_OK(aborted);
  ASSERT_OK(WriteTinyStaging(live, aborted.value(), CrashSpec(40)));
  const std::size_t begun_c = live.op_count();
  ASSERT_THAT(store.value().AbortOrDecide(aborted.value()), IsOkAndHolds(Verdict::kAborted));
  const std::size_t aborted_c = live.op_count();
  ASSERT_OK(store.value().Gc(kGcAll));
  ASSERT_OK(live.CompareWithDisk());

  Random random(TestSeed());
  const int tries = TestScale(6);
  for (std::size_t k = 0; k <= live.op_count(); ++k) {
    for (int i = 0; i < tries; ++i) {
      const std::string after = dir_.Join("after");
      ASSERT_OK(live.Materialise(k, random, after));
      SCOPED_TRACE("power cut after " + std::to_string(k) + " operations, the last " +
                   (k == 0 ? std::string("none") : live.Describe(k - 1)));
      const std::string cut = JoinPath(after, "deep/store");
      const int a = SeedOf(cut, "a", {10, 30});
      const int b = SeedOf(cut, "b", {20});
      ASSERT_GE(a, 0);
      ASSERT_GE(b, 0);
      if (k >= saved_a) {
        ASSERT_NE(a, 0);
      }
      if (k <= saved_b) {
        ASSERT_NE(a, 30);
      }
      if (k >= replaced_a) {
        ASSERT_EQ(a, 30);
      }
      if (k >= saved_b && k <= replaced_a) {
        ASSERT_EQ(b, 20);
      }
      if (k >= removed_b) {
        ASSERT_EQ(b, 0);
      }
      ASSERT_FALSE(Visible(cut, "c"));
      const auto reopened = Store::Open(fs(), cut);
      if (k >= saved_a) {
        ASSERT_OK(reopened);
      }
      if (reopened.ok()) {
        ASSERT_TRUE(NothingHalf(reopened.value()));
        if (k >= aborted_c || k < begun_c) {
          // An abort that was told to somebody is never undone.
          Staging c = aborted.value();
          c.store = cut;
          const std::string below = c.directory.substr(path.size());
          ASSERT_FALSE(Visible(cut, below.substr(1)) && k >= aborted_c);
        }
      }
      if (k % 7 == 0) {
        ASSERT_NO_FATAL_FAILURE(ExpectNextSaveWorksAndGcCleans(cut, "a"));
      }
      ASSERT_OK(fs().RemoveTree(after));
    }
  }
}

// Also of a checkpoint that was removed and freed before the power went: its folder claims it.
TEST_F(PowerCutTest, AcknowledgedGenerationIsNeverReused) {
  ASSERT_OK(fs().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  const std::string path = dir_.Join("live/store");
  ASSERT_OK(WriteTinyCheckpoint(live, path, "a", CrashSpec(1), {}));
  ASSERT_OK(WriteTinyCheckpoint(live, path, "b", CrashSpec(2), {}));
  const auto store = Store::Open(live, path);
  ASSERT_OK(store);
  const auto listed = store.value().List();
  ASSERT_OK(listed);
  std::uint64_t highest = 0;
  for (const CheckpointListing& c : listed.value()) highest = std::max(highest, c.generation);
  ASSERT_OK(store.value().Remove("b"));
  ASSERT_OK(store.value().Gc(kGcAll));
  Random random(TestSeed());
  for (int i = 0; i < TestScale(20); ++i) {
    const std::string after = dir_.Join("after");
    ASSERT_OK(live.Materialise(live.op_count(), random, after));
    const auto again = Store::Open(fs(), JoinPath(after, "store"));
    ASSERT_OK(again);
    const auto begun = again.value().Begin("c", IfExists::kFail);
    ASSERT_OK(begun);
    EXPECT_GT(begun.value().generation, highest);
    ASSERT_OK(fs().RemoveTree(after));
  }
}

}  // namespace
}  // namespace tensormount
