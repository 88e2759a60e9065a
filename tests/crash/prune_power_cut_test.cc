// SPDX-License-Identifier: Apache-2.0
// A power cut at any moment of removing by rule: what is kept is there and whole, what was
// acknowledged holds, and a pin or a policy is the old one or the new one.

#include "index/store/pins.h"
#include "index/store/retention.h"
#include "tests/crash/crash_support.h"
#include "tests/support/power_cut.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

class PrunePowerCutTest : public StoreTest {};

TEST_F(PrunePowerCutTest, KeptCheckpointsSurviveWhole) {
  ASSERT_OK(fs().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  const std::string path = dir_.Join("live/store");
  for (std::uint64_t i = 1; i <= 5; ++i) {
    ASSERT_OK(WriteTinyCheckpoint(live, path, "step-" + std::to_string(i), CrashSpec(i), {}));
  }
  const auto store = Store::Open(live, path);
  ASSERT_OK(store);
  const std::size_t saved = live.op_count();
  const auto pinned = pins::Pin(live, store.value(), "step-1", {.reason = "one"});
  ASSERT_OK(pinned);
  const std::size_t pinned_one = live.op_count();
  ASSERT_OK(pins::WritePolicy(live, path, RetentionRules::Parse("last=2").value()));
  const std::size_t policy_two = live.op_count();
  ASSERT_OK(pins::WritePolicy(live, path, RetentionRules::Parse("last=1").value()));
  const std::size_t policy_one = live.op_count();
  ASSERT_OK(pins::Pin(live, store.value(), "step-1", {.reason = "other"}));
  const std::size_t pinned_other = live.op_count();
  const auto pruned = retention::Prune(live, store.value(), {});
  ASSERT_OK(pruned);
  ASSERT_EQ(pruned.value().removed(), 3u);
  const std::size_t removed = live.op_count();
  ASSERT_OK(store.value().Gc(kGcAll));
  ASSERT_OK(live.CompareWithDisk());

  Random random(TestSeed());
  for (std::size_t k = saved; k <= live.op_count(); ++k) {
    for (int i = 0; i < TestScale(2); ++i) {
      const std::string after = dir_.Join("after");
      ASSERT_OK(live.Materialise(k, random, after));
      SCOPED_TRACE("power cut after " + std::to_string(k) + " operations, the last " +
                   live.Describe(k - 1));
      const std::string cut = JoinPath(after, "store");
      const auto reopened = Store::Open(fs(), cut);
      ASSERT_OK(reopened);
      ASSERT_TRUE(NothingHalf(reopened.value()));
      for (std::uint64_t step = 1; step <= 5; ++step) {
        const std::string name = "step-" + std::to_string(step);
        const bool there = Visible(cut, name);
        if (step == 1 || step == 5 || k <= pinned_other) {
          ASSERT_TRUE(there) << name;
        }
        if (step != 1 && step != 5 && k >= removed) {
          ASSERT_FALSE(there) << name;
        }
        if (there) {
          ASSERT_TRUE(HoldsWhole(JoinPath(cut, name), CrashSpec(step)));
        }
      }
      const auto pins = pins::ReadAll(fs(), cut, 1);
      ASSERT_OK(pins);
      if (k >= pinned_one) {
        ASSERT_EQ(pins.value().size(), 1u);
        const PinnedCheckpoint& pin = pins.value().begin()->second;
        ASSERT_EQ(pin.problem, "");
        ASSERT_TRUE(pin.reason == "other" || (pin.reason == "one" && k < pinned_other));
      }
      const auto policy = pins::ReadPolicy(fs(), cut);
      ASSERT_OK(policy);
      if (k >= policy_two) {
        ASSERT_TRUE(policy.value().has_value());
        const std::string text = policy.value()->ToText();
        ASSERT_TRUE(text == "last=1" || (text == "last=2" && k < policy_one)) << text;
      }
      // It goes on from there.
      if (k % 5 == 0) {
        ASSERT_OK(retention::Prune(fs(), reopened.value(),
                                   {.rules = RetentionRules::Parse("last=1").value()}));
        ASSERT_TRUE(Visible(cut, "step-5"));
        ASSERT_EQ(Visible(cut, "step-1"), k >= pinned_one || !pins.value().empty());
        ASSERT_FALSE(Visible(cut, "step-3"));
      }
      ASSERT_OK(fs().RemoveTree(after));
    }
  }
}

}  // namespace
}  // namespace tensormount
