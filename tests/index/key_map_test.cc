// SPDX-License-Identifier: Apache-2.0
#include "tensormount/key_map.h"

#include <chrono>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/require.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

KeyMap Map(std::string_view json) {
  auto map = KeyMap::FromJson(json);
  EXPECT_THAT(map, IsOk()) << json;
  return map.ok() ? std::move(map).value() : KeyMap();
}

TEST(KeyMapTest, EveryKindOfRuleApplies) {
  const KeyMap map = Map(R"([
    {"key": "lm_head.weight", "to": "output.weight"},
    {"prefix": "model.", "to": "decoder."},
    {"match": "layers.*.attn.*", "to": "blocks.*.self_attention.*"},
    {"drop": "optimizer.*"}])");
  EXPECT_EQ(map.rules().size(), 4u);
  EXPECT_EQ(map.Apply("lm_head.weight"), "output.weight");
  EXPECT_EQ(map.Apply("lm_head.weight2"), "lm_head.weight2");
  EXPECT_EQ(map.Apply("model.norm"), "decoder.norm");
  EXPECT_EQ(map.Apply("a.model.norm"), "a.model.norm");
  EXPECT_EQ(map.Apply("layers.12.attn.q.weight"), "blocks.12.self_attention.q.weight");
  EXPECT_EQ(map.Apply("layers.12.mlp.w"), "layers.12.mlp.w");
  EXPECT_EQ(map.Apply("optimizer.m/w"), "");
  EXPECT_EQ(map.Apply("optimizer"), "optimizer");
}

TEST(KeyMapTest, FirstMatchWinsAndIsAppliedOnce) {
  const KeyMap map = Map(R"([{"key": "a", "to": "b"}, {"prefix": "a", "to": "c"},
                             {"key": "b", "to": "d"}, {"drop": "*"}])");
  EXPECT_EQ(map.Apply("a"), "b");
  EXPECT_EQ(map.Apply("ab"), "cb");
  EXPECT_EQ(map.Apply("b"), "d");
  EXPECT_EQ(map.Apply("z"), "");
}

TEST(KeyMapTest, StarsMatchAsLittleAsPossible) {
  EXPECT_EQ(Map(R"([{"match": "*.*", "to": "*|*"}])").Apply("a.b.c"), "a|b.c");
  EXPECT_EQ(Map(R"([{"match": "*.w", "to": "W *"}])").Apply("a.w.w"), "W a.w");
  EXPECT_EQ(Map(R"([{"match": "a*b*b", "to": "<*><*>"}])").Apply("abcbb"), "<><cb>");
  EXPECT_EQ(Map(R"([{"match": "a*a", "to": "<*>"}])").Apply("a"), "a");  // Ends do not overlap.
  EXPECT_EQ(Map(R"([{"match": "a*a", "to": "<*>"}])").Apply("aa"), "<>");
  EXPECT_EQ(Map(R"([{"match": "w", "to": "v"}])").Apply("ww"), "ww");
  // '*' crosses '/', and '?' and '[' mean themselves.
  EXPECT_EQ(Map(R"([{"match": "x[*]?", "to": "y*"}])").Apply("x[1/2]?"), "y1/2");
}

TEST(KeyMapTest, ErrorNamesTheInvalidRule) {
  const std::pair<const char*, const char*> cases[] = {
      {"nonsense", "not JSON"},
      {"{}", "a list"},
      {"[3]", "rule 1: expected an object"},
      {R"([{"drop": "a"}, {"to": "b"}])", "rule 2: expected one of key, prefix, match and drop"},
      {R"([{"key": "a"}])", "rule 1: \"to\" is missing"},
      {R"([{"key": "a", "to": 1}])", "rule 1: \"to\" must be a string"},
      {R"([{"key": "a", "to": "b", "form": "c"}])", "unknown field \"form\""},
      {R"([{"key": "a", "prefix": "b", "to": "c"}])",
       "expected only one of key, prefix, match and drop"},
      {R"([{"key": "a", "key": "b", "to": "c"}])", "\"key\" occurs twice"},
      {R"([{"drop": "a", "to": "b"}])", "drop takes no"},
      {R"([{"key": "", "to": "b"}])", "empty"},
      {R"([{"key": "a", "to": ""}])", "rule 1: \"to\""},
      {R"([{"match": "a*b*", "to": "c*"}])", "\"a*b*\" has 2 '*' and \"c*\" has 1"},
  };
  for (const auto& [json, message] : cases) {
    const auto map = KeyMap::FromJson(json);
    ASSERT_THAT(map, HasCode(Code::kInvalidArgument)) << json;
    EXPECT_THAT(map.status().message(), HasSubstr(message)) << json;
  }
}

TEST(KeyMapTest, CollisionsNameBothKeys) {
  const KeyMap map = Map(R"([{"prefix": "model.", "to": ""}])");
  const std::vector<std::string> keys = {"a", "b", "model.b"};
  const auto names = map.ApplyToAll(keys);
  ASSERT_THAT(names, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(names.status().message(), HasSubstr("b and model.b would both be called b"));
}

TEST(KeyMapTest, RulesThatGiveInvalidKeysAreRefused) {
  const KeyMap strip = Map(R"([{"prefix": "model.", "to": ""}])");
  const std::vector<std::string> empty = {"model."};
  const auto names = strip.ApplyToAll(empty);
  ASSERT_THAT(names, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(names.status().message(), HasSubstr("model. becomes \"\""));
  const KeyMap grow = Map(R"([{"prefix": "k", "to": ")" + std::string(100, 'x') + R"("}])");
  const std::vector<std::string> longest = {"k" + std::string(2000, 'y')};
  EXPECT_THAT(grow.ApplyToAll(longest), HasCode(Code::kInvalidArgument));
}

TEST(KeyMapTest, DroppedKeysDoNotCollide) {
  const KeyMap map = Map(R"([{"drop": "opt.*"}, {"key": "w", "to": "opt.w"}])");
  const std::vector<std::string> keys = {"opt.a", "opt.b", "opt.w", "w"};
  const auto names = map.ApplyToAll(keys);
  ASSERT_THAT(names, IsOk());
  EXPECT_THAT(names.value(), ElementsAre("", "", "", "opt.w"));
}

TEST(KeyMapTest, EmptyMapChangesNothing) {
  const std::vector<std::string> keys = {"a", "b"};
  const auto names = KeyMap().ApplyToAll(keys);
  ASSERT_THAT(names, IsOk());
  EXPECT_EQ(names.value(), keys);
  EXPECT_TRUE(Map("[]").empty());
}

TEST(KeyMapTest, ManyStarsMatchInPolynomialTime) {
  std::string stars;
  for (int i = 0; i < 200; ++i) stars += "a*";
  const KeyMap map = Map(R"([{"drop": ")" + stars + R"(b"}])");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(map.Apply(std::string(2000, 'a')), std::string(2000, 'a'));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

}  // namespace
}  // namespace tensormount
