// SPDX-License-Identifier: Apache-2.0
// Name maps: their JSON, how they are applied to the keys of a checkpoint, and reads of mapped
// tensors.
#include "index/records/name_binding.h"

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "index/read/checkpoint.h"
#include "index/records/key_pattern.h"
#include "index/records/name_rules.h"
#include "index/records/size_formula.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/random_names.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

constexpr ReadVerify kReadModes[] = {ReadVerify::kOff, ReadVerify::kWholeLeaves,
                                     ReadVerify::kExtendLeaves, ReadVerify::kOnce};

std::string Matched(const std::string& pattern, const std::string& key) {
  const Result<KeyPattern> parsed = KeyPattern::Parse(pattern);
  EXPECT_OK(parsed);
  const auto captures = parsed.value().Match(key);
  if (!captures) return "no";
  std::string text;
  for (const std::string_view capture : *captures) text += std::string(capture) + "|";
  return text;
}

TEST(KeyPattern, MatchesIndicesAndText) {
  EXPECT_EQ(Matched("a.{l}.w", "a.12.w"), "12|");
  EXPECT_EQ(Matched("a.{l}.w", "a.90.w"), "90|");
  EXPECT_EQ(Matched("a.{l}.w", "a.012.w"), "no");
  EXPECT_EQ(Matched("a.{l}.w", "a.x.w"), "no");
  EXPECT_EQ(Matched("a.{l}.w", "a.3000000000.w"), "no");
  EXPECT_EQ(Matched("a.{l}.w", "a.12.w2"), "no");
  EXPECT_EQ(Matched("{s*}.{l}.w", "a.b.7.w"), "a.b|7|");
  EXPECT_EQ(Matched("x{s*}y{t*}", "xyyz"), "|yz|");
  EXPECT_EQ(Matched("{s*}.end", "a.end.end"), "a.end|");
  EXPECT_EQ(Matched("a{{b}}", "a{b}"), "");
  EXPECT_EQ(Matched("whole", "whole"), "");
  EXPECT_EQ(Matched("whole", "whol"), "no");
  EXPECT_EQ(Matched("{s*}", ""), "|");
  for (const std::string wrong : {"", "a{", "a}", "{l}{m}", "{l}.{l}", "{2}", "{a b}", "{}"}) {
    EXPECT_EQ(KeyPattern::Parse(wrong).status().code(), Code::kInvalidArgument) << wrong;
  }
  ASSERT_OK_AND_ASSIGN(const KeyPattern pattern, KeyPattern::Parse("a{{.{l}.{s*}"));
  EXPECT_EQ(pattern.Fill(std::vector<std::string>{"3", "w.b"}), "a{.3.w.b");
}

TEST(SizeFormula, ComputesExactly) {
  const auto value = [](const std::string& text) {
    const Result<SizeFormula> formula = SizeFormula::Parse(text);
    EXPECT_OK(formula);
    return formula.value().Evaluate({{"heads", 32}, {"groups", 8}});
  };
  EXPECT_EQ(value("heads / groups").value(), 4);
  EXPECT_EQ(value("(heads + groups*2) - 1").value(), 47);
  EXPECT_EQ(value("7").value(), 7);
  EXPECT_EQ(value("heads / 7").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(value("heads / 0").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(value("groups - heads").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(value("9223372036854775700 + heads * groups").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(value("heads * 9223372036854775807").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(value("vocab").status().code(), Code::kNotFound);
  for (const std::string wrong : {"", "heads /", "(1", "1)", "2x", "a b", "99999999999999999999"}) {
    EXPECT_EQ(SizeFormula::Parse(wrong).status().code(), Code::kInvalidArgument) << wrong;
  }
}

TEST(NameRules, NameTheRuleAndItsLine) {
  const std::map<std::string, std::string> kWrong = {
      {"[{\"key\": \"a\", \"to\": \"b\"},\n {\"from\": \"a : x\", \"add\": 1, \"to\": \"b : x\"}]",
       "rules[1] (line 2): \"add\": a map moves cells and computes none"},
      {R"({"version": 1, "rules": [{"from": "a : (x", "to": "b"}]})", "rules[0] (line 1): axes"},
      {R"({"version": 1, "rules": [{"from": "a", "to": ["b", "c"]}]})", "needs the axes of each"},
      {R"({"version": 1, "rules": [{"from": "a", "to": "b", "why": 1}]})", "unknown field \"why\""},
      {R"({"version": 1, "rules": [{"from": "{s*}", "to": "b"}]})", "must be in every key"},
      {R"({"version": 1, "rules": [{"from": "a.{l}", "to": "b"}]})", "or among the axes"},
      {R"({"version": 1, "rules": [{"from": "a : x", "to": "b : x", "unused": ["y"]}]})",
       "the rule has no name y"},
      {R"({"version": 1, "rules": [{"from": "a.{l} : l", "to": "b : l"}]})",
       "l is in the key and among the axes"},
      {R"({"version": 2, "rules": []})", "version 2 is not known"},
      {R"({"rules": []})", "\"version\" is missing"},
      {R"({"version": 1})", "\"rules\" is missing"},
      {R"({"version": 1, "rules": [], "others": "maybe"})", "\"others\" must be"},
      {R"({"version": 1, "rules": [], "rules": []})", "occurs twice"},
      {R"({"version": 1, "rules": [], "sizes": {"a b": 1}})", "\"a b\" is not a name"},
      {R"({"version": 1, "rules": [], "numbers": {"n": ["config.a if b"]}})", "number n must be"},
      {R"({"version": 1, "rules": [], "numbers": {"n": ["a"]}})", "number n must be"},
      {"[", "JSON"},
      {"", "does not begin"},
  };
  for (const auto& [json, why] : kWrong) {
    const Status status = NameRules::FromJson(json).status();
    const bool unsupported = json.find("\"add\"") != std::string::npos ||
                             json.find("\"version\": 2") != std::string::npos;
    EXPECT_EQ(status.code(), unsupported ? Code::kUnsupported : Code::kInvalidArgument) << json;
    EXPECT_NE(status.message().find(why), std::string::npos) << json << ": " << status.message();
  }
}

TEST(NameRules, RefuseMoreSizesThanTheirLimit) {
  const auto with_sizes = [](std::size_t count) {
    std::string sizes;
    for (std::size_t i = 0; i < count; ++i) {
      sizes += (i == 0 ? "\"n" : ", \"n") + std::to_string(i) + "\": 1";
    }
    return NameRules::FromJson(R"({"version": 1, "rules": [], "sizes": {)" + sizes + "}}");
  };
  EXPECT_OK(with_sizes(NameRules::kMaxSizes));
  EXPECT_EQ(with_sizes(NameRules::kMaxSizes + 1).status().code(), Code::kInvalidArgument);
}

TEST(NameRules, TakeNumbersThatTheyUse) {
  ASSERT_OK_AND_ASSIGN(
      NameRules rules,
      NameRules::FromJson(R"j({"version": 1, "numbers": {"n": ["config.n"]}, "rules": [
          {"from": "a : (x y)", "to": "b : (y x)", "sizes": {"x": "m + 1"}}]})j"));
  const auto given = [&](const NameMap& map) {
    NameRules copy = rules;
    const Status added = copy.AddGiven(map);
    return added.ok() ? NameRules::CheckGiven(map, {&copy}) : added;
  };
  EXPECT_OK(given({.numbers = {{"n", 1}, {"m", 0}, {"x", 2}, {"y", 3}}}));
  EXPECT_EQ(given({.numbers = {{"n", -1}}}).code(), Code::kInvalidArgument);
  const Status unused = given({.numbers = {{"z", 1}}});
  EXPECT_NE(unused.message().find("no rule uses the number z; known are: m, n, x, y"),
            std::string::npos)
      << unused.message();
  // Also those of "counts" and "when".
  ASSERT_OK_AND_ASSIGN(rules, NameRules::FromJson(R"j({"version": 1, "counts": {"l": "layers"},
      "rules": [{"from": "a.{l}", "to": "b.{l}", "when": {"known": 1}}]})j"));
  EXPECT_OK(given({.numbers = {{"layers", 1}, {"known", 1}}}));
}

// A checkpoint of bytes: each tensor is one shard, cut at random.
class NameBindingTest : public testing::Test {
 protected:
  void Build(const std::vector<RandomTensor>& tensors) {
    BuildSpec spec;
    spec.writers = static_cast<int>(random_.Int(1, 4));
    spec.page_hashes = random_.OneIn(2);
    spec.tensors = tensors;
    for (const RandomTensor& tensor : tensors) {
      spec.partitions.push_back(RandomPartition(random_, tensor.shape, spec.writers));
    }
    spec.objects = {{"rng", {0}, {2}, "first"}, {"rng", {1}, {2}, "second"}};
    spec.common = {{"step", std::int64_t{7}}};
    const std::string directory = dir_.Join("c" + std::to_string(built_++));
    ASSERT_OK(BuildCheckpoint(HostFileSystem(), directory, spec));
    ASSERT_OK_AND_ASSIGN(
        stored_, OpenedCheckpoint::Open(HostFileSystem(), directory, OpenedCheckpoint::Options()));
  }
  void BuildKeys(const std::map<std::string, Dims>& shapes) {
    std::vector<RandomTensor> tensors;
    for (const auto& [key, shape] : shapes) {
      tensors.push_back({key, DType::kU8, shape,
                         random_.Bytes(static_cast<std::size_t>(*CheckedProduct(shape)))});
    }
    Build(tensors);
  }

  Result<std::shared_ptr<OpenedCheckpoint>> Map(const std::string& json,
                                                const AxisSizes& numbers = {}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(NameRules rules, NameRules::FromJson(json));
    rules.numbers = numbers;
    return OpenedCheckpoint::Mapped(stored_, rules);
  }
  // "key [shape], …" of all mapped tensors, or the error.
  std::string Shown(const std::string& json, const AxisSizes& numbers = {}) {
    const auto mapped = Map(json, numbers);
    if (!mapped.ok()) return mapped.status().message();
    std::string text;
    EXPECT_OK(mapped.value()->index().ForEachTensor(0, [&](const TensorEntry& entry) {
      text += (text.empty() ? "" : ", ") + entry.meta.key() + " " + entry.meta.shape().ToString();
      return true;
    }));
    return text;
  }

  TempDir dir_;
  Random random_{TestSeed()};
  int built_ = 0;
  std::shared_ptr<OpenedCheckpoint> stored_;
};

std::string OneRule(const std::string& rule, const std::string& others = "refuse") {
  return R"({"version": 1, "others": ")" + others + R"(", "rules": [)" + rule + "]}";
}

TEST_F(NameBindingTest, UnstacksSplitsAndRenames) {
  BuildKeys({{"layers.fc1", {2, 6, 4}}, {"layers.norm", {2, 4}}, {"emb", {7, 4}}});
  EXPECT_EQ(Shown(R"({"version": 1, "rules": [
      {"from": "layers.fc1 : l (gate + up) d",
       "to": ["m.{l}.gate : gate d", "m.{l}.up : up d"], "sizes": {"gate": "ffn / 2"}},
      {"from": "layers.norm : l d", "to": "m.{l}.norm : d"},
      {"from": "emb : (v + pad) d", "to": "embed : v d", "unused": ["pad"]}]})",
                  {{"ffn", 6}, {"v", 5}}),
            "embed [5, 4], m.0.gate [3, 4], m.0.norm [4], m.0.up [3, 4], m.1.gate [3, 4], "
            "m.1.norm [4], m.1.up [3, 4]");
}

TEST_F(NameBindingTest, SizesOfTheFileAreForAllRules) {
  BuildKeys({{"a", {6}}, {"b", {4}}});
  EXPECT_EQ(Shown(R"j({"version": 1, "sizes": {"n": 2, "other": "unknown"}, "rules": [
      {"from": "a : (n x)", "to": "c : n x"}, {"from": "b : (n x)", "to": "d : n x"}]})j"),
            "c [2, 3], d [2, 2]");
}

TEST_F(NameBindingTest, NumbersOfAConfigFit63Bits) {
  BuildKeys({{"a", {6}}});
  ASSERT_OK_AND_ASSIGN(
      NameRules rules,
      NameRules::FromJson(R"j({"version": 1, "numbers": {"n": ["config.n"]}, "rules": [
          {"from": "a : (n x)", "to": "c : n x"}]})j"));
  ASSERT_OK(rules.AddGiven({.config = R"({"model_type": "m", "n": 9223372036854775808})"}));
  const Status status = OpenedCheckpoint::Mapped(stored_, rules).status();
  EXPECT_NE(status.message().find("n is not known (looked for config.n)"), std::string::npos)
      << status.message();
}

TEST_F(NameBindingTest, AliasesAreRefusedWhereTheyCannotBe) {
  BuildKeys({{"a", {2}}, {"b", {2}}});
  EXPECT_EQ(Shown(OneRule(R"({"alias": "c", "of": "a"})", "keep")), "a [2], b [2], c [2]");
  EXPECT_NE(Shown(OneRule(R"({"alias": "b", "of": "a"})", "keep")).find("would both be called b"),
            std::string::npos);
  EXPECT_EQ(Shown(OneRule(R"({"alias": "b", "of": "a", "optional": true})", "keep")),
            "a [2], b [2]");
  EXPECT_EQ(Shown(OneRule(R"({"alias": "c", "of": "a", "optional": true},
                             {"alias": "c", "of": "b", "optional": true})",
                          "keep")),
            "a [2], b [2], c [2]");
  EXPECT_EQ(Map(OneRule(R"({"alias": "c", "of": "x"})", "keep")).status().code(),
            Code::kInvalidArgument);
  // An object must not get the name of a tensor.
  EXPECT_NE(Shown(OneRule(R"({"key": "rng", "to": "a"})", "keep"))
                .find("object rng and a tensor would both be called a"),
            std::string::npos);
}

TEST_F(NameBindingTest, TheWayBackHasOneFormOfEachRule) {
  const std::string json = R"({"version": 1, "others": "keep", "rules": [
      {"from": "l[.{l}].w : [l] a b", "to": "m.{l}.w : a b"},
      {"alias": "n.{l}.w", "of": "m.{l}.w"}]})";
  ASSERT_OK_AND_ASSIGN(const NameRules rules, NameRules::FromJson(json));
  BuildKeys({{"m.0.w", {2, 3}}, {"m.1.w", {2, 3}}, {"n.0.w", {2, 3}}, {"n.1.w", {2, 3}}});
  const auto shown = [&](bool layers) {
    const auto mapped = OpenedCheckpoint::Mapped(stored_, rules.Inverse(layers));
    std::string text = mapped.status().message();
    if (!mapped.ok()) return text;
    EXPECT_OK(mapped.value()->index().ForEachTensor(0, [&](const TensorEntry& entry) {
      text += entry.meta.key() + entry.meta.shape().ToString() + " ";
      return true;
    }));
    return text;
  };
  EXPECT_EQ(shown(false), "l.w[2, 2, 3] ");
  EXPECT_EQ(shown(true), "l.0.w[2, 3] l.1.w[2, 3] ");
  BuildKeys({{"other", {2}}});
  for (const bool layers : {false, true}) {
    EXPECT_NE(shown(layers).find("needs m.{l}.w, which is not stored"), std::string::npos);
  }
}

TEST_F(NameBindingTest, StoredKeysAreThoseOfTheBytes) {
  BuildKeys({{"l.0", {2, 2}}, {"l.1", {2, 2}}, {"l.2", {2, 2}}, {"w", {3}}});
  ASSERT_OK_AND_ASSIGN(const auto mapped, Map(OneRule(R"({"from": "l.{l} : a b", "to": "s : l b a"},
                                      {"from": "w", "to": "v"})")));
  const auto keys = [](const OpenedCheckpoint& checkpoint, const std::string& key,
                       std::size_t most) -> std::vector<std::string> {
    const auto entry = checkpoint.index().Find(key);
    EXPECT_OK(entry);
    const auto found = checkpoint.StoredKeysOf(entry.value().ordinal, most);
    EXPECT_OK(found);
    return found.value();
  };
  using Keys = std::vector<std::string>;
  EXPECT_EQ(keys(*mapped, "s", 9), (Keys{"l.0", "l.1", "l.2"}));
  EXPECT_EQ(keys(*mapped, "s", 2), (Keys{"l.0", "l.1"}));
  EXPECT_EQ(keys(*mapped, "v", 9), Keys{"w"});
  EXPECT_EQ(keys(*stored_, "w", 9), Keys{"w"});
}

TEST_F(NameBindingTest, WholeModelsHaveAllIndices) {
  const auto shown = [&](const std::string& more) {
    return Shown(R"({"version": 1, "numbers": {"layers": ["config.n"], "n": 0},
                     "counts": {"l": "layers"}, )" +
                 more + R"("rules": [
        {"from": "a[.{l}] : [l] x", "to": "m.{l}.a : x"},
        {"from": "b.{l}", "to": "m.{l}.b", "optional": true}]})");
  };
  BuildKeys({{"a", {2, 3}}, {"b.0", {4}}, {"b.1", {4}}});
  EXPECT_EQ(shown(""), "m.0.a [3], m.0.b [4], m.1.a [3], m.1.b [4]");
  EXPECT_EQ(shown(R"("needs": ["m.{l}.b", ["c", "b.{l}"]], )"),
            "m.0.a [3], m.0.b [4], m.1.a [3], m.1.b [4]");
  EXPECT_NE(shown(R"("needs": [["c", "d"]], )").find("no stored tensor belongs to c or d"),
            std::string::npos);
  BuildKeys({{"a", {2, 3}}, {"b.1", {4}}});
  EXPECT_NE(shown("").find("1 tensors would be called m.{l}.b, but their indices need 2"),
            std::string::npos)
      << shown("");
  BuildKeys({{"a", {2, 3}}, {"b.0", {4}}});
  EXPECT_NE(shown("").find("m.{l}.b has 1 layers, and a has 2"), std::string::npos) << shown("");
  BuildKeys({{"a.0", {3}}, {"a.2", {3}}});
  EXPECT_NE(shown("").find("2 tensors would be called m.{l}.a"), std::string::npos) << shown("");
  BuildKeys({{"a", {2, 3}}});
  EXPECT_EQ(shown(""), "m.0.a [3], m.1.a [3]");
}

TEST_F(NameBindingTest, BracketsStandForStackedAndSingleLayers) {
  const std::string json =
      OneRule(R"({"from": "layers[.{l}].w : [l] a b", "to": "m.{l}.w : a b"})");
  BuildKeys({{"layers.w", {2, 3, 4}}});
  EXPECT_EQ(Shown(json), "m.0.w [3, 4], m.1.w [3, 4]");
  BuildKeys({{"layers.0.w", {3, 4}}, {"layers.1.w", {3, 4}}});
  EXPECT_EQ(Shown(json), "m.0.w [3, 4], m.1.w [3, 4]");
  BuildKeys({{"other", {3, 4}}});
  EXPECT_NE(Shown(json).find("no rule matches tensor other"), std::string::npos);
  const std::string keep =
      OneRule(R"({"from": "layers[.{l}].w : [l] a b", "to": "m.{l}.w : a b"})", "keep");
  EXPECT_NE(Shown(keep).find("which is not stored"), std::string::npos);
  BuildKeys({{"a[0]", {3, 4}}});
  EXPECT_EQ(Shown(OneRule(R"({"from": "a[[0]] : a b", "to": "b : b a"})")), "b [4, 3]");
  EXPECT_NE(Shown(OneRule(R"({"from": "a[0 : a b", "to": "b : b a"})")).find("do not match"),
            std::string::npos);
  EXPECT_NE(Shown(OneRule(R"({"from": "a[0] : a b]", "to": "b : b a"})")).find("do not match"),
            std::string::npos);
  // In lists, too.
  const std::string joined =
      OneRule(R"j({"from": ["a[.{l}] : [l] x", "b[.{l}] : [l] y"], "to": "m.{l} : (x + y)"})j");
  BuildKeys({{"a", {2, 3}}, {"b", {2, 4}}});
  EXPECT_EQ(Shown(joined), "m.0 [7], m.1 [7]");
  BuildKeys({{"a.0", {3}}, {"b.0", {4}}});
  EXPECT_EQ(Shown(joined), "m.0 [7]");
}

TEST_F(NameBindingTest, KeepsWhatListsOfRulesDid) {
  BuildKeys({{"model.a", {2}}, {"model.b", {2}}, {"opt.a", {2}}, {"other", {2}}});
  EXPECT_EQ(Shown(R"([{"key": "model.a", "to": "first"}, {"prefix": "model.", "to": "m."},
                      {"drop": "opt.*"}])"),
            "first [2], m.b [2], other [2]");
  EXPECT_EQ(Shown(R"([{"match": "*.a", "to": "a.*"}, {"drop": "rng"}])"),
            "a.model [2], a.opt [2], model.b [2], other [2]");
  ASSERT_OK_AND_ASSIGN(const auto mapped, Map(R"([{"key": "rng", "to": "states"}])"));
  ASSERT_OK_AND_ASSIGN(const auto parts, mapped->index().ObjectParts("states"));
  ASSERT_EQ(parts.size(), 2u);
  std::string bytes(6, '?');
  ASSERT_OK(mapped->ReadObject(parts[1], 0, bytes.data(), bytes.size()));
  EXPECT_EQ(bytes, "second");
  EXPECT_EQ(mapped->index().ObjectParts("rng").status().code(), Code::kNotFound);
  ASSERT_OK_AND_ASSIGN(const CommonValue step, mapped->index().CommonRecord("step"));
  EXPECT_EQ(step, CommonValue(std::int64_t{7}));
}

TEST_F(NameBindingTest, RefusesWhatDoesNotCoverEveryCellOnce) {
  BuildKeys({{"w", {6, 4}}, {"w2", {6, 4}}, {"e.0", {3}}, {"e.1", {3}}, {"e.3", {3}}});
  const std::map<std::string, std::string> kWrong = {
      {R"({"from": "w : (a + b) d", "to": "x : a d", "sizes": {"a": 2}})",
       "no tensor under \"to\" has the cells of b, d"},
      {R"({"from": "w : a d", "to": "x : (a + b) d", "sizes": {"b": 2}})",
       "no tensor under \"from\" has the cells of b, d"},
      {R"({"from": "w : a d", "to": ["x : a d", "y : d a"]})", "occur twice on one side"},
      {R"({"from": "w : (a b) d", "to": "x : (b a) d"})", "the size of a does not follow"},
      {R"({"from": "w : (a b) d", "to": "x : (b a) d", "sizes": {"a": 4}})",
       "it has 6 cells, which does not fit (a b)"},
      {R"({"from": "w : (a b) d", "to": "x : (b a) d", "sizes": {"a": "heads"}})",
       "heads is not known: give it by --set heads=NUMBER"},
      {R"({"from": "w : a d", "to": "x : a d", "when": {"tied": 1}})",
       "tied is not known: give it by --set tied=NUMBER"},
      {R"({"from": "e.{i} : d", "to": "e : i d"})",
       "3 tensors match e.{i}, but their indices need 4"},
      {R"({"from": "missing : a", "to": "x : a"})", "needs missing, which is not stored"},
      {R"({"from": ["w : a d", "missing : b d"], "to": "x : (a + b) d"})",
       "needs missing beside w, which is not stored"},
      {R"({"from": "w : a", "to": "x : a"})", "has 2 axes, and \"a\" names 1"},
      {R"({"from": "w : a d", "to": "w2 : d a"})", "w2 and w would both be called w2"},
      {R"({"alias": "x", "of": "y"})", "no tensor is called y"},
  };
  for (const auto& [rule, why] : kWrong) {
    const std::string shown = Shown(OneRule(rule, "keep"));
    EXPECT_NE(shown.find(why), std::string::npos) << rule << ": " << shown;
  }
  EXPECT_NE(Shown(OneRule(R"({"key": "w", "to": "x"})")).find("no rule matches tensor e.0"),
            std::string::npos);
  // Optional rules may be without a match.
  EXPECT_EQ(Shown(OneRule(R"({"from": "missing : a", "to": "x : a", "optional": true},
                             {"drop": "e.*"}, {"alias": "w3", "of": "w2"},
                             {"alias": "w", "of": "w2", "optional": true})",
                          "keep")),
            "w [6, 4], w2 [6, 4], w3 [6, 4]");
}

TEST_F(NameBindingTest, RefusesAnAxisThatIsAlsoInTheKey) {
  BuildKeys({{"w.0", {3, 4}}, {"w.1", {3, 4}}, {"w.2", {3, 4}}, {"v", {6, 4}}});
  // The side without axes has those of the other one.
  EXPECT_NE(Shown(OneRule(R"({"from": "w.{l}", "to": "x : l a"})", "keep"))
                .find("l is in the key and among the axes"),
            std::string::npos);
  EXPECT_NE(Shown(OneRule(R"({"from": "v : l a", "to": "x.{l}"})", "keep"))
                .find("l is in the key and among the axes"),
            std::string::npos);
}

TEST_F(NameBindingTest, BoundsTheWorkOfHostileRules) {
  std::string key = "w";
  std::string pattern = "w";
  std::string axes;
  for (int i = 0; i < 20; ++i) {
    key += ".0";
    pattern += ".{i" + std::to_string(i) + "}";
    axes += " i" + std::to_string(i);
  }
  BuildKeys({{key, {3}}, {"a", {2, 3}}});
  EXPECT_NE(Shown(OneRule("{\"from\": \"" + pattern + " : a\", \"to\": \"x : (" + axes + " a)\"}"))
                .find("more than 16 captures"),
            std::string::npos);
  std::string sizes;
  for (int i = 0; i < 300; ++i) {
    sizes += (i > 0 ? ", \"" : "\"") + ("s" + std::to_string(i)) + "\": 1";
  }
  EXPECT_NE(Shown(OneRule(R"({"from": "a : x y", "to": "b : y x", "sizes": {)" + sizes + "}}"))
                .find("more than 256 names"),
            std::string::npos);
  EXPECT_EQ(KeyPattern::Parse("a{i}0.w").status().code(), Code::kInvalidArgument);
  // A padded size that no tensor may have.
  const std::string huge = Shown(OneRule(R"({"from": "a : x y", "to": "b : (x + p) y",
      "sizes": {"p": 4611686018427387904}, "unused": ["p"]})",
                                         "keep"));
  EXPECT_NE(huge.find("rules[0] (line 1)"), std::string::npos) << huge;
  EXPECT_EQ(
      Shown(OneRule(
                R"({"from": "a : x y", "to": "b : (x (1 + p)) y", "sizes": {"p": 1125899906842623},
      "unused": ["p"]})",
                "keep"))
          .find("b ["),
      0u);
}

TEST_F(NameBindingTest, KeepsObjectsAndLayerNamesThatNoRuleMatches) {
  BuildKeys({{"w", {2, 3}}});
  ASSERT_OK_AND_ASSIGN(const auto mapped, Map(OneRule(R"({"key": "w", "to": "x"})")));
  ASSERT_OK_AND_ASSIGN(const auto parts, mapped->index().ObjectParts("rng"));
  EXPECT_EQ(parts.size(), 2u);
}

TEST_F(NameBindingTest, ALostTensorOfAStackIsAnError) {
  BuildKeys({{"l.0.w", {3}}, {"l.1.w", {3}}});
  ASSERT_OK_AND_ASSIGN(const NameRules rules,
                       NameRules::FromJson(OneRule(R"({"from": "l.{l}.w : a", "to": "x : l a"})")));
  ASSERT_OK(NameBinding::Bind(stored_->index(), rules));
  const std::vector<std::string> lost = {"l.2.w"};
  const Status status = NameBinding::Bind(stored_->index(), rules, lost).status();
  EXPECT_EQ(status.code(), Code::kDataLoss) << status.message();
  EXPECT_NE(status.message().find("needs tensor l.2.w beside l.0.w"), std::string::npos);
  // Another layer's tensors are there without it.
  const std::string one_layer =
      OneRule(R"j({"from": "l.{l}.w : (a b)", "to": "m.{l} : (b a)", "sizes": {"a": 1}})j");
  ASSERT_OK_AND_ASSIGN(const NameRules single, NameRules::FromJson(one_layer));
  ASSERT_OK(NameBinding::Bind(stored_->index(), single, lost));
}

TEST_F(NameBindingTest, RefusesMoreTensorsThanItsLimit) {
  BuildKeys({{"empty", {std::int64_t{1} << 40, 0}}});
  EXPECT_NE(
      Shown(OneRule(R"({"from": "empty : l d", "to": "x.{l} : d"})")).find("more than 4194304"),
      std::string::npos);
}

TEST_F(NameBindingTest, WholeTensorsKeepTheirDigestsAndExtents) {
  BuildKeys({{"a", {6, 4}}, {"b", {6, 4}}});
  ASSERT_OK_AND_ASSIGN(const auto mapped, Map(OneRule(R"({"from": "a : x y", "to": "z.a : x y"},
                                      {"from": "b : x y", "to": "b : y x"})")));
  ASSERT_OK_AND_ASSIGN(const TensorEntry stored, stored_->index().Find("a"));
  ASSERT_OK_AND_ASSIGN(const TensorEntry whole, mapped->index().Find("z.a"));
  EXPECT_EQ(whole.digest, stored.digest);
  EXPECT_TRUE(whole.has_digest);
  EXPECT_EQ(whole.chunks, stored.chunks);
  EXPECT_EQ(whole.mtime, stored.mtime);
  ASSERT_OK_AND_ASSIGN(const auto extents, mapped->Extents(whole));
  EXPECT_EQ(extents->size(), stored.chunks);
  ASSERT_OK_AND_ASSIGN(const TensorEntry transposed, mapped->index().Find("b"));
  EXPECT_FALSE(transposed.has_digest);
  EXPECT_EQ(transposed.meta.shape(), (Dims{4, 6}));
  ASSERT_OK_AND_ASSIGN(const auto none, mapped->Extents(transposed));
  EXPECT_EQ(none->size(), 0u);
  EXPECT_EQ(mapped->index().tensor_bytes(), 48u);

  // Through one more name map.
  ASSERT_OK_AND_ASSIGN(
      const NameRules more,
      NameRules::FromJson(R"([{"key": "b", "to": "c"}, {"drop": ")" + whole.meta.key() + R"("}])"));
  ASSERT_OK_AND_ASSIGN(const auto over, OpenedCheckpoint::Mapped(mapped, more));
  EXPECT_EQ(&over->stored(), &mapped->stored());
  ASSERT_OK_AND_ASSIGN(const TensorEntry renamed, over->index().Find("c"));
  ASSERT_OK_AND_ASSIGN(const auto keys, over->StoredKeysOf(renamed.ordinal, 9));
  ASSERT_OK_AND_ASSIGN(const auto direct, mapped->StoredKeysOf(transposed.ordinal, 9));
  EXPECT_EQ(keys, direct);
  // Names of what has no cells.
  ASSERT_OK_AND_ASSIGN(const auto names, Map(R"([{"key": "a", "to": "z.a"}, {"drop": "x"}])"));
  ASSERT_OK_AND_ASSIGN(const auto twice, OpenedCheckpoint::Mapped(names, more));
  EXPECT_EQ(names->ShownNameOf("a"), "z.a");
  EXPECT_EQ(twice->ShownNameOf("a"), "");
  EXPECT_EQ(twice->ShownNameOf("b"), "c");
  EXPECT_FALSE(names->LeavesOut("a"));
  EXPECT_TRUE(twice->LeavesOut("a"));
  EXPECT_TRUE(twice->LeavesOut("x"));
  EXPECT_FALSE(twice->LeavesOut("b"));
}

TEST_F(NameBindingTest, RefusesElementsBelowOneByte) {
  Build({{"w", DType::kF4, {4, 4}, random_.Bytes(8)}});
  EXPECT_NE(Shown(OneRule(R"({"from": "w : a b", "to": "w : b a"})"))
                .find("elements below one byte cannot be mapped"),
            std::string::npos);
  EXPECT_EQ(Shown(OneRule(R"({"from": "w", "to": "x"})")), "x [4, 4]");
}

// Every operation, nested at random, against cells with labels.
TEST_F(NameBindingTest, RandomRulesReadWhatTheirLabelsSay) {
  const int rounds = TestScale(300);
  for (int round = 0; round < rounds; ++round) {
    const RandomRule rule = MakeRandomRule(random_, "t.");
    SCOPED_TRACE(rule.Json());
    ASSERT_NO_FATAL_FAILURE(Build(rule.stored));
    ASSERT_OK_AND_ASSIGN(const auto mapped, Map(rule.Json()));
    ASSERT_EQ(mapped->index().tensor_count(), rule.mapped.size());
    for (const RandomTensor& tensor : rule.mapped) {
      SCOPED_TRACE(tensor.key);
      ASSERT_OK_AND_ASSIGN(const TensorEntry entry, mapped->index().Find(tensor.key));
      ASSERT_EQ(entry.meta.shape(), tensor.shape);
      ASSERT_EQ(entry.meta.dtype(), tensor.dtype);
      for (const ReadVerify mode : kReadModes) {
        std::string got(tensor.bytes.size(), '?');
        ReadStats stats;
        ASSERT_OK(mapped->ReadBytes(entry, 0, got.data(), got.size(), mode, &stats));
        ASSERT_EQ(got, tensor.bytes);
        if (rule.unused.empty() && mode == ReadVerify::kExtendLeaves) {
          ASSERT_EQ(stats.bytes_by_leaf, got.size());
        }
        const auto size = static_cast<std::int64_t>(tensor.bytes.size());
        const auto at = static_cast<std::size_t>(random_.Int(0, size));
        const auto n =
            static_cast<std::size_t>(random_.Int(0, size - static_cast<std::int64_t>(at)));
        std::string part(n, '?');
        ASSERT_OK(mapped->ReadBytes(entry, at, part.data(), n, mode, nullptr));
        ASSERT_EQ(part, tensor.bytes.substr(at, n)) << at << "+" << n;
        ASSERT_OK_AND_ASSIGN(const auto ranges, mapped->MapBytes(entry, at, n, ReadVerify::kOff));
        if (!ranges.empty()) {
          std::string joined;
          for (const auto& range : ranges) {
            joined.append(reinterpret_cast<const char*>(range.data), range.size);
          }
          ASSERT_EQ(joined, part);
        }
      }
      for (const auto& mine : RandomRequest(random_, tensor.shape, 2, true)) {
        for (const Region& region : mine) {
          ShardMemory out = MakeShardMemory(random_, tensor, region, false);
          Crc64 digest = 1;
          ASSERT_OK(
              mapped->Read(entry, region, out.view, ReadVerify::kExtendLeaves, nullptr, &digest));
          ASSERT_EQ(CellsOf(tensor, out), OracleBytes(tensor, region)) << region.ToString();
          if (region.volume() == *CheckedProduct(tensor.shape) && !region.is_flat()) {
            ASSERT_EQ(digest, Crc64Bitwise(0, tensor.bytes.data(), tensor.bytes.size()));
          }
        }
      }
      ASSERT_OK_AND_ASSIGN(const auto run, mapped->FileRunOf(entry));
      if (run) {
        ASSERT_OK_AND_ASSIGN(const auto file, mapped->OpenFile(run->file));
        std::string raw(tensor.bytes.size(), '?');
        ASSERT_OK(file->ReadExactAt(run->offset, raw.data(), raw.size()));
        ASSERT_EQ(raw, tensor.bytes);
      }
    }
  }
}

}  // namespace
}  // namespace tensormount
