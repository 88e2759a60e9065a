// SPDX-License-Identifier: Apache-2.0
// What rules say and decide, beside a plain model of docs/steps.md.
#include <algorithm>
#include <limits>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "index/store/retention.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount::retention {
namespace {

using Unit = RetentionRules::Every::Unit;
using testing::ElementsAre;
using testing::HasSubstr;

RetentionRules Rules(std::string_view text) {
  const auto parsed = RetentionRules::Parse(text);
  EXPECT_OK(parsed);
  return parsed.ok() ? parsed.value() : RetentionRules();
}

Candidate Named(const std::string& name, std::uint64_t generation) {
  Candidate c;
  c.name = name;
  c.uuid = {0, generation};
  c.generation = generation;
  return c;
}
MetricValue Number(long double x) { return {.number = x, .problem = {}}; }
MetricValue NoNumber(std::string why) { return {.number = {}, .problem = std::move(why)}; }

// The names that stay, the newest first.
std::vector<std::string> Stay(const RetentionRules& rules,
                              const std::vector<Candidate>& candidates) {
  std::vector<std::string> names;
  for (const auto& d : Decide(rules, candidates)) {
    EXPECT_FALSE(d.reason.empty()) << d.checkpoint;
    if (d.kept) names.push_back(d.checkpoint);
  }
  return names;
}
std::string WhyOf(const RetentionRules& rules, const std::vector<Candidate>& candidates,
                  const std::string& name) {
  for (const auto& d : Decide(rules, candidates)) {
    if (d.checkpoint == name) return (d.kept ? "stays: " : "goes: ") + d.reason;
  }
  return "is not there";
}

TEST(RetentionRulesTest, RuleTextsRoundTrip) {
  const RetentionRules rules = Rules(
      "last=3,every=1000,every=6h,every=5-generations,best=eval.loss:min:2,best=a\\,b\\\\:x:max:1");
  EXPECT_EQ(rules.keep_last, 3u);
  EXPECT_THAT(rules.keep_every, ElementsAre(RetentionRules::Every{1000, Unit::kSteps},
                                            RetentionRules::Every{6, Unit::kHours},
                                            RetentionRules::Every{5, Unit::kGenerations}));
  EXPECT_THAT(rules.keep_best, ElementsAre(RetentionRules::Best{"eval.loss", false, 2},
                                           RetentionRules::Best{"a,b\\:x", true, 1}));
  EXPECT_EQ(Rules(rules.ToText()), rules);
  EXPECT_TRUE(Rules("").empty());
  EXPECT_EQ(Rules("policy"), RetentionRules::OfStore());
  EXPECT_EQ(RetentionRules::OfStore().ToText(), "policy");
}

TEST(RetentionRulesTest, ErrorNamesTheInvalidRule) {
  for (const char* text : {"last",
                           "last=",
                           "last=0",
                           "last=-1",
                           "last=3x",
                           "last=3,last=4",
                           "every=",
                           "every=0",
                           "every=h",
                           "every=1.5h",
                           "every=200000000h",
                           "every=5-gen",
                           "best=",
                           "best=loss",
                           "best=loss:min",
                           "best=:min:1",
                           "best=loss:least:1",
                           "best=loss:min:0",
                           "best=loss:min:x",
                           "keep=3",
                           ",",
                           "last=3,",
                           "policy,last=3",
                           "last=18446744073709551616",
                           " last=3"}) {
    EXPECT_THAT(RetentionRules::Parse(text), HasCode(Code::kInvalidArgument)) << text;
    EXPECT_THAT(RetentionRules::Parse(text), HasMessage("rule \"")) << text;
  }
}

TEST(RetentionRulesTest, RandomTextsParseOrFail) {
  Random random(TestSeed());
  const std::string alphabet = "last=every,best:min:1234567890h-generations\\.policy";
  for (int i = 0; i < TestScale(20'000); ++i) {
    std::string text;
    for (auto n = random.Int(0, 30); n > 0; --n) {
      text +=
          alphabet[static_cast<std::size_t>(random.Int(0, static_cast<int>(alphabet.size()) - 1))];
    }
    const auto parsed = RetentionRules::Parse(text);
    if (parsed.ok()) {
      EXPECT_EQ(Rules(parsed.value().ToText()), parsed.value()) << text;
    }
  }
}

TEST(RetentionRulesTest, StepIsTheLastNumberInTheName) {
  EXPECT_EQ(StepOf("step-1000"), 1000u);
  EXPECT_EQ(StepOf("epoch-2-step-0010.final"), 10u);
  EXPECT_EQ(StepOf("7"), 7u);
  EXPECT_EQ(StepOf("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(StepOf("18446744073709551616"), std::nullopt);
  EXPECT_EQ(StepOf("final"), std::nullopt);
  EXPECT_EQ(StepOf(""), std::nullopt);
}

TEST(RetentionRulesTest, NoRulesKeepAllCheckpoints) {
  EXPECT_THAT(Stay({}, {Named("a", 1), Named("b", 2)}), ElementsAre("b", "a"));
}

TEST(RetentionRulesTest, NewestCheckpointIsAlwaysKept) {
  std::vector<Candidate> all = {Named("step-1", 1), Named("step-2", 2), Named("step-3", 3)};
  EXPECT_THAT(Stay(Rules("every=2"), all), ElementsAre("step-3", "step-2"));
  all[2].ephemeral = true;
  EXPECT_THAT(Stay(Rules("every=2"), all), ElementsAre("step-3", "step-2"));
  // By generation, then uuid, then name, in which no two are equal.
  all[1].generation = 3;
  all[1].uuid = {0, 4};
  EXPECT_THAT(Stay(Rules("every=5"), all), ElementsAre("step-2"));
}

TEST(RetentionRulesTest, UnreadableCheckpointsAreKeptAndNotCounted) {
  std::vector<Candidate> all = {Named("a", 1), Named("b", 2), Named("c", 3)};
  all[2].problem = Status(Code::kDataLoss, "COMMIT is damaged");
  EXPECT_THAT(Stay(Rules("last=1"), all), ElementsAre("b", "c"));
  EXPECT_THAT(WhyOf(Rules("last=1"), all, "c"), HasSubstr("COMMIT is damaged"));
  for (Candidate& c : all) c.problem = Status(Code::kDataLoss, "damaged");
  EXPECT_THAT(Stay(Rules("last=1"), all), ElementsAre("a", "b", "c"));
}

TEST(RetentionRulesTest, PinnedAndBaseCheckpointsAreKept) {
  std::vector<Candidate> all = {Named("a", 1), Named("b", 2), Named("c", 3), Named("d", 4)};
  all[0].pinned = "pinned (for the paper)";
  all[1].base_of = ".staging/e.01234567";
  all[2].expired_pin = "pinned, expired 1970-01-02 00:00 UTC";
  EXPECT_THAT(Stay(Rules("last=1"), all), ElementsAre("d", "b", "a"));
  EXPECT_THAT(WhyOf(Rules("last=1"), all, "a"), HasSubstr("for the paper"));
  EXPECT_THAT(WhyOf(Rules("last=1"), all, "b"), HasSubstr(".staging/e.01234567"));
  EXPECT_EQ(WhyOf(Rules("last=1"), all, "c"),
            "goes: no rule keeps it (pinned, expired 1970-01-02 00:00 UTC)");
}

TEST(RetentionRulesTest, EphemeralCheckpointsAreRemovedAndNotCounted) {
  std::vector<Candidate> all = {Named("a", 1), Named("b", 2), Named("c", 3), Named("d", 4)};
  all[1].ephemeral = all[2].ephemeral = true;
  EXPECT_THAT(Stay({}, all), ElementsAre("d", "a"));
  EXPECT_THAT(Stay(Rules("last=2"), all), ElementsAre("d", "a"));
  EXPECT_EQ(WhyOf({}, all, "c"), "goes: ephemeral, and d was saved after it");
  all[2].pinned = "pinned";
  EXPECT_THAT(Stay({}, all), ElementsAre("d", "c", "a"));
}

TEST(RetentionRulesTest, BestRuleKeepsBestAndUnmeasuredCheckpoints) {
  std::vector<Candidate> all;
  const auto add = [&](const std::string& name, MetricValue value) {
    all.push_back(Named(name, all.size() + 1));
    all.back().metrics = {std::move(value)};
  };
  add("low", Number(0.5L));
  add("tie", Number(0.7L));
  add("nan", NoNumber("has a loss that is NaN"));
  add("tie2", Number(0.7L));
  add("high", Number(std::numeric_limits<long double>::infinity()));
  add("none", NoNumber("has no loss"));
  add("unread", Number(0));
  all.back().opened = Status(Code::kDataLoss, "its index is damaged");
  add("newest", Number(9));
  EXPECT_THAT(Stay(Rules("best=loss:min:1"), all),
              ElementsAre("newest", "unread", "none", "nan", "low"));
  EXPECT_THAT(Stay(Rules("best=loss:min:2"), all),
              ElementsAre("newest", "unread", "none", "tie2", "nan", "tie", "low"));
  EXPECT_THAT(WhyOf(Rules("best=loss:min:2"), all, "tie"), HasSubstr("(tied)"));
  EXPECT_THAT(WhyOf(Rules("best=loss:min:2"), all, "nan"), HasSubstr("NaN"));
  EXPECT_THAT(WhyOf(Rules("best=loss:min:2"), all, "unread"), HasSubstr("its index is damaged"));
  EXPECT_THAT(Stay(Rules("best=loss:max:1"), all),
              ElementsAre("newest", "unread", "none", "high", "nan"));
  // More than there are.
  EXPECT_THAT(Stay(Rules("best=loss:max:100"), all), testing::SizeIs(8));
}

// 64-bit integers are compared exactly.
TEST(RetentionRulesTest, LargeIntegersAreComparedExactly) {
  std::vector<Candidate> all = {Named("a", 1), Named("b", 2), Named("c", 3)};
  all[0].metrics = {Number(static_cast<long double>(std::numeric_limits<std::int64_t>::max()))};
  all[1].metrics = {Number(static_cast<long double>(std::numeric_limits<std::int64_t>::max() - 1))};
  all[2].metrics = {Number(0)};
  EXPECT_THAT(Stay(Rules("best=n:max:1"), all), ElementsAre("c", "a"));
}

TEST(RetentionRulesTest, ClockJumpLosesNoCheckpoint) {
  std::vector<Candidate> all;
  // A clock that jumped ahead by years, and back to before all of them.
  for (const std::int64_t created :
       std::vector<std::int64_t>{7200, 7300, 10900, 4'000'000'000, 10950, -5, -3700, 10960}) {
    all.push_back(Named(std::to_string(all.size()), all.size() + 1));
    all.back().created = created;
  }
  EXPECT_THAT(Stay(Rules("every=1h"), all), ElementsAre("7", "6", "5", "4", "3", "2", "1"));
  // Extremes do not overflow.
  all[3].created = std::numeric_limits<std::int64_t>::min();
  all[4].created = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT(Stay(Rules("every=100000000h"), all), testing::Contains("7"));
}

// ---- The model --------------------------------------------------------------------------------

bool Later(const Candidate& a, const Candidate& b) {
  return std::tie(a.generation, a.uuid, a.name) > std::tie(b.generation, b.uuid, b.name);
}

// Word by word what docs/steps.md says, with a look at all others for each.
bool ModelKeeps(const RetentionRules& rules, const std::vector<Candidate>& all,
                const Candidate& c) {
  if (!c.problem.ok() || !c.pinned.empty() || !c.base_of.empty()) return true;
  if (c.derived) return true;
  std::vector<const Candidate*> later;  // That count, of a higher generation, each once.
  bool newest = true;
  for (const Candidate& other : all) {
    if (!other.problem.ok() || other.derived || !Later(other, c)) continue;
    newest = false;
    const bool known = other.uuid == c.uuid || std::ranges::any_of(later, [&](const Candidate* o) {
                         return o->uuid == other.uuid;
                       });
    if (!other.ephemeral && !known) later.push_back(&other);
  }
  if (newest) return true;
  if (c.ephemeral) return false;
  if (rules.empty()) return true;
  if (later.size() < rules.keep_last) return true;
  for (const auto& every : rules.keep_every) {
    switch (every.unit) {
      case Unit::kSteps: {
        const auto step = StepOf(c.name);
        if (!step || *step % every.count == 0) return true;
        break;
      }
      case Unit::kGenerations: {
        const bool last = std::ranges::none_of(later, [&](const Candidate* o) {
          return o->generation / every.count == c.generation / every.count;
        });
        if (last) return true;
        break;
      }
      case Unit::kHours: {
        if (!c.opened.ok()) return true;
        const Candidate* next = nullptr;
        for (const Candidate* o : later) {
          if (o->opened.ok() && (next == nullptr || Later(*next, *o))) next = o;
        }
        const auto stretch = [&](const Candidate& x) {
          const auto length = static_cast<std::int64_t>(every.count) * 3600;
          std::int64_t n = x.created / length;
          while (n * length > x.created) --n;
          return n;
        };
        if (next == nullptr || stretch(*next) != stretch(c)) return true;
        break;
      }
    }
  }
  for (std::size_t i = 0; i < rules.keep_best.size(); ++i) {
    if (!c.opened.ok() || !c.metrics[i].number) return true;
    std::uint64_t better = 0;
    std::set<Uuid> seen;
    for (const Candidate& o : all) {
      if (!o.problem.ok() || o.ephemeral || o.derived || !o.opened.ok() || !o.metrics[i].number) {
        continue;
      }
      if (!seen.insert(o.uuid).second) continue;
      const bool is = rules.keep_best[i].highest ? *o.metrics[i].number > *c.metrics[i].number
                                                 : *o.metrics[i].number < *c.metrics[i].number;
      better += is ? 1 : 0;
    }
    if (better < rules.keep_best[i].count) return true;
  }
  return false;
}

RetentionRules RandomRules(Random& random) {
  RetentionRules rules;
  if (random.OneIn(2)) rules.keep_last = static_cast<std::uint64_t>(random.Int(1, 6));
  while (random.OneIn(2)) {
    rules.keep_every.push_back(
        {static_cast<std::uint64_t>(random.Int(1, 9)), static_cast<Unit>(random.Int(0, 2))});
  }
  while (random.OneIn(3)) {
    rules.keep_best.push_back({"m", random.OneIn(2), static_cast<std::uint64_t>(random.Int(1, 5))});
  }
  return rules;
}

TEST(RetentionRulesTest, DecisionsMatchTheModel) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(1500); ++i) {
    const RetentionRules rules = RandomRules(random);
    std::vector<Candidate> all;
    for (auto n = random.Int(0, 24); n > 0; --n) {
      Candidate& c = all.emplace_back();
      c.name = random.OneIn(9) ? "final" + std::string(static_cast<std::size_t>(n), 'x')
                               : "step-" + std::to_string(random.Int(0, 40)) + "." +
                                     std::string(static_cast<std::size_t>(n), 'y');
      c.generation = static_cast<std::uint64_t>(random.Int(1, 30));
      c.uuid = {0, static_cast<std::uint64_t>(random.Int(0, 1000) * 100 + n)};
      c.derived = random.OneIn(9);
      if (random.OneIn(12)) c.problem = Status(Code::kDataLoss, "damaged");
      c.ephemeral = random.OneIn(8);
      if (random.OneIn(12)) c.pinned = "pinned";
      if (random.OneIn(20)) c.base_of = "staging";
      if (random.OneIn(12)) c.opened = Status(Code::kDataLoss, "damaged");
      c.created = random.Int(-20'000, 60'000);
      for (std::size_t m = 0; m < rules.keep_best.size(); ++m) {
        c.metrics.push_back(random.OneIn(6) ? NoNumber("has no m")
                                            : Number(static_cast<long double>(random.Int(0, 6))));
      }
    }
    // Copies under other names.
    for (std::size_t copied = all.size(), a = 0; a < copied; ++a) {
      if (!random.OneIn(6)) continue;
      Candidate copy = all[a];
      copy.name = "copy-" + std::to_string(random.Int(0, 40)) + copy.name;
      copy.ephemeral = false;
      all.push_back(std::move(copy));
    }
    random.Shuffle(all);
    const auto decisions = Decide(rules, all);
    ASSERT_EQ(decisions.size(), all.size());
    for (const auto& d : decisions) {
      const auto c = std::ranges::find_if(all, [&](const Candidate& x) {
        return x.name == d.checkpoint && x.uuid.ToString() == d.uuid;
      });
      ASSERT_NE(c, all.end());
      EXPECT_EQ(d.kept, ModelKeeps(rules, all, *c))
          << rules.ToText() << ": " << d.checkpoint << " of generation " << d.generation << ": "
          << d.reason;
      EXPECT_FALSE(d.reason.empty());
      EXPECT_FALSE(d.removed);
    }
    if (testing::Test::HasFailure()) return;
    // What stays once, stays when the others are gone: rules agree with themselves.
    std::vector<Candidate> left;
    for (const Candidate& c : all) {
      if (ModelKeeps(rules, all, c)) left.push_back(c);
    }
    for (const auto& d : Decide(rules, left)) {
      EXPECT_TRUE(d.kept) << rules.ToText() << ": " << d.checkpoint << ": " << d.reason;
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace tensormount::retention
