// SPDX-License-Identifier: Apache-2.0
#include "tensormount/common_value.h"

#include <bit>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "index/records/common_state.h"
#include "index/records/record_coding.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using Kind = CommonValue::Kind;
using testing::HasSubstr;

auto FailsWith(Code code, const std::string& message) {
  return testing::AllOf(HasCode(code), HasMessage(message));
}

CommonDict Dict(std::map<CommonKey, CommonValue> items) { return CommonDict{std::move(items)}; }
CommonList List(std::vector<CommonValue> items) { return CommonList{std::move(items)}; }
CommonTuple Tuple(std::vector<CommonValue> items) { return CommonTuple{std::move(items)}; }
CommonKey Key(const char* text) { return std::string(text); }
CommonKey Key(std::int64_t number) { return number; }

double OfBits(std::uint64_t bits) { return std::bit_cast<double>(bits); }

std::string Encoded(const CommonValue& value) {
  ByteWriter out;
  EncodeCommon(out, value);
  return std::move(out.bytes());
}

Result<CommonValue> Decoded(std::string_view bytes) {
  ByteReader in(bytes, "test");
  Result<CommonValue> value = DecodeCommon(in, "test");
  if (!value.ok()) return value;
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return value;
}

std::string DifferenceOf(const CommonValue& a, const CommonValue& b) {
  const auto found = FirstDifference(a, b);
  return found ? found->path + ": " + found->what : "";
}

CommonKey RandomKey(Random& random) {
  switch (random.Int(0, 5)) {
    case 0:
      return random.Int(-2, 2);
    case 1:
      return static_cast<std::int64_t>(random.Next());
    case 2:
      return random.OneIn(2) ? std::string("$float") : "$" + random.Bytes(2);
    case 3:
      return random.Bytes(static_cast<std::size_t>(random.Int(0, 3)));
    default:
      return "key " + std::to_string(random.Int(0, 9));
  }
}

CommonValue RandomTree(Random& random, int depth) {
  switch (random.Int(0, depth > 0 ? 11 : 7)) {
    case 0:
      return CommonNone();
    case 1:
      return random.OneIn(2);
    case 2:
      return static_cast<std::int64_t>(random.Next()) >> random.Int(0, 63);
    case 3:
      return random.Next() | (std::uint64_t{1} << 63);
    case 4:
      return OfBits(random.Next());
    case 5: {
      // Exponents of all ones are rare among random bits.
      const std::uint64_t special = (random.Next() & 0x800fffffffffffff) | 0x7ff0000000000000;
      return OfBits(random.OneIn(2) ? special & 0xfff0000000000000 : special);
    }
    case 6:
      return random.OneIn(2) ? random.Bytes(static_cast<std::size_t>(random.Int(0, 9)))
                             : std::string("\u00fcml\u00e4ut \"\\\n") + '\0';
    case 7:
      return CommonBytes{random.Bytes(static_cast<std::size_t>(random.Int(0, 9)))};
    case 8: {
      CommonList list;
      for (std::int64_t n = random.Int(0, 4); n > 0; --n) {
        list.items.push_back(RandomTree(random, depth - 1));
      }
      return list;
    }
    case 9: {
      CommonTuple tuple;
      for (std::int64_t n = random.Int(0, 4); n > 0; --n) {
        tuple.items.push_back(RandomTree(random, depth - 1));
      }
      return tuple;
    }
    default: {
      CommonDict dict;
      for (std::int64_t n = random.Int(0, 4); n > 0; --n) {
        dict.items.insert_or_assign(RandomKey(random), RandomTree(random, depth - 1));
      }
      return dict;
    }
  }
}

CommonValue Nested(int containers) {
  CommonValue value = 1;
  for (int i = 0; i < containers; ++i) {
    switch (i % 3) {
      case 0:
        value = List({std::move(value)});
        break;
      case 1:
        value = Tuple({std::move(value)});
        break;
      default:
        value = Dict({{Key(7), std::move(value)}});
        break;
    }
  }
  return value;
}

TEST(CommonValue, ConvertsFromCppTypesByKind) {
  EXPECT_EQ(CommonValue().kind(), Kind::kNone);
  EXPECT_EQ(CommonValue(true).kind(), Kind::kBool);
  EXPECT_EQ(CommonValue(1).kind(), Kind::kInt);
  EXPECT_EQ(CommonValue(1u).kind(), Kind::kInt);
  EXPECT_EQ(CommonValue(std::uint64_t{1} << 62).kind(), Kind::kInt);
  EXPECT_EQ(CommonValue(std::uint64_t{1} << 63).kind(), Kind::kUnsigned);
  EXPECT_EQ(CommonValue(1.0).kind(), Kind::kFloat);
  EXPECT_EQ(CommonValue("text").kind(), Kind::kString);
  EXPECT_EQ(CommonValue(CommonBytes{"x"}).kind(), Kind::kBytes);
  EXPECT_EQ(CommonValue(Tuple({1})).kind_name(), "tuple");
  EXPECT_EQ(CommonValue(std::uint64_t{1} << 62), CommonValue(std::int64_t{1} << 62));
}

TEST(CommonValue, EqualityKeepsKindsAndBitsApart) {
  const double nan = OfBits(0x7ff8000000000000);
  const std::vector<CommonValue> distinct = {CommonNone(),
                                             false,
                                             0,
                                             0.0,
                                             -0.0,
                                             nan,
                                             OfBits(0x7ff8000000000001),
                                             "",
                                             "0",
                                             CommonBytes{""},
                                             std::uint64_t{1} << 63,
                                             std::numeric_limits<std::int64_t>::min(),
                                             List({}),
                                             Tuple({}),
                                             Dict({}),
                                             List({1}),
                                             Tuple({1}),
                                             List({1.0}),
                                             Dict({{Key(1), 1}}),
                                             Dict({{Key("1"), 1}})};
  std::set<std::string> encodings;
  std::set<std::string> texts;
  for (std::size_t i = 0; i < distinct.size(); ++i) {
    for (std::size_t j = 0; j < distinct.size(); ++j) {
      EXPECT_EQ(distinct[i] == distinct[j], i == j) << i << " " << j;
      EXPECT_EQ(DifferenceOf(distinct[i], distinct[j]).empty(), i == j) << i << " " << j;
    }
    encodings.insert(Encoded(distinct[i]));
    texts.insert(CommonToJson(distinct[i]));
  }
  EXPECT_EQ(encodings.size(), distinct.size());
  EXPECT_EQ(texts.size(), distinct.size());
}

TEST(CommonValue, RandomTreesRoundTripInBothEncodings) {
  Random random(TestSeed());
  for (int i = TestScale(1500); i > 0; --i) {
    const CommonValue value = RandomTree(random, 4);
    ASSERT_OK(CheckCommon(value));
    const std::string bytes = Encoded(value);
    ASSERT_OK_AND_ASSIGN(const CommonValue decoded, Decoded(bytes));
    ASSERT_EQ(DifferenceOf(value, decoded), "");
    ASSERT_EQ(Encoded(decoded), bytes);
    const std::string text = CommonToJson(value);
    const Result<CommonValue> read = CommonFromJson(text);
    ASSERT_OK(read) << text;
    ASSERT_EQ(DifferenceOf(value, read.value()), "") << text;
    ASSERT_TRUE(value == read.value()) << text;
    ASSERT_EQ(CommonToJson(read.value()), text);
  }
}

TEST(CommonValue, DamagedEncodingsAreRefusedOrCanonical) {
  Random random(TestSeed() + 1);
  for (int i = TestScale(300); i > 0; --i) {
    std::string bytes = Encoded(RandomTree(random, 3));
    for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
      ASSERT_THAT(Decoded(std::string_view(bytes).substr(0, cut)), HasCode(Code::kDataLoss));
    }
    for (int flips = 0; flips < 8; ++flips) {
      const auto at =
          static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(bytes.size()) - 1));
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.Int(0, 7)));
      // Whatever is taken is the one encoding of some value.
      if (const Result<CommonValue> value = Decoded(bytes); value.ok()) {
        ASSERT_EQ(Encoded(value.value()), bytes);
      }
    }
  }
}

TEST(CommonValue, NonCanonicalEncodingsAreRefused) {
  const auto u32 = [](std::uint32_t n) {
    ByteWriter out;
    out.U32(n);
    return std::move(out.bytes());
  };
  const auto bytes = [](std::initializer_list<int> list) {
    std::string text;
    for (const int b : list) text += static_cast<char>(b);
    return text;
  };
  const std::string none = bytes({5});
  const auto refused = [](const std::string& encoded, const std::string& why) {
    EXPECT_THAT(Decoded(encoded), FailsWith(Code::kDataLoss, why));
  };
  refused(bytes({10}), "unknown kind of value 10");
  refused(bytes({0, 2}), "a bool value is neither 0 nor 1");
  refused(bytes({9}) + std::string(8, '\1'),
          "a value is stored as unsigned, although it fits a signed integer");
  refused(bytes({6}) + u32(5) + none, "the number of items exceeds");
  refused(bytes({7}) + u32(0xFFFFFFFF) + none, "the number of items exceeds");
  refused(bytes({8}) + u32(1) + bytes({4}) + u32(1) + "a" + none, "unknown kind of key 4");
  const std::string a = bytes({3}) + u32(1) + "a" + none;
  const std::string b = bytes({3}) + u32(1) + "b" + none;
  const std::string one = bytes({1, 1, 0, 0, 0, 0, 0, 0, 0}) + none;
  EXPECT_OK(Decoded(bytes({8}) + u32(3) + one + a + b));
  refused(bytes({8}) + u32(2) + b + a, "not in order");
  refused(bytes({8}) + u32(2) + a + a, "not in order");
  refused(bytes({8}) + u32(2) + a + one, "not in order");
  refused(bytes({3}) + u32(0xFFFFFFFF) + "a", "test");
}

// Sizes: limits_test.cc.
TEST(CommonValue, DepthIsLimitedInEveryEncoding) {
  const CommonValue deepest = Nested(kMaxCommonDepth);
  ASSERT_OK(CheckCommon(deepest));
  EXPECT_THAT(Decoded(Encoded(deepest)), IsOkAndHolds(deepest));
  EXPECT_THAT(CommonFromJson(CommonToJson(deepest)), IsOkAndHolds(deepest));
  EXPECT_THAT(CheckCommon(deepest, 1),
              FailsWith(Code::kInvalidArgument, "more than 63 levels deep"));
  const CommonValue deeper = Nested(kMaxCommonDepth + 1);
  EXPECT_THAT(CheckCommon(deeper), FailsWith(Code::kInvalidArgument, "more than 64 levels deep"));
  EXPECT_THAT(Decoded(Encoded(deeper)), FailsWith(Code::kDataLoss, "more than 64 levels deep"));
  EXPECT_THAT(CommonFromJson(CommonToJson(deeper)), HasCode(Code::kInvalidArgument));
  // Megabytes of brackets cost no stack.
  EXPECT_THAT(CommonFromJson(std::string(5'000'000, '[')),
              FailsWith(Code::kInvalidArgument, "too deeply"));
  std::string lists;
  for (int i = 0; i < 1'000'000; ++i) lists += std::string("\6\1\0\0\0", 5);
  EXPECT_THAT(Decoded(lists), HasCode(Code::kDataLoss));
}

// docs/format.md, "common.json", row by row.
TEST(CommonJson, WritesEveryValueInItsCanonicalForm) {
  const auto is = [](const CommonValue& value, const std::string& text) {
    EXPECT_EQ(CommonToJson(value), text);
    EXPECT_THAT(CommonFromJson(text), IsOkAndHolds(value)) << text;
  };
  is(CommonNone(), "null");
  is(true, "true");
  is(false, "false");
  is(std::int64_t{9007199254740993}, "9007199254740993");
  is(std::numeric_limits<std::int64_t>::min(), "-9223372036854775808");
  is(std::numeric_limits<std::int64_t>::max(), "9223372036854775807");
  is(std::numeric_limits<std::uint64_t>::max(), "18446744073709551615");
  is(0.1, "0.1");
  is(1.0, "1.0");
  is(-0.0, "-0.0");
  is(1e22, "1e+22");
  is(5e-324, "5e-324");
  is(HUGE_VAL, R"({"$float":"inf"})");
  is(-HUGE_VAL, R"({"$float":"-inf"})");
  is(OfBits(0x7ff8000000000000), R"({"$float":"nan","bits":"7ff8000000000000"})");
  is(OfBits(0xfff4000000000abc), R"({"$float":"nan","bits":"fff4000000000abc"})");
  is("t\u00e9xt \"\n", R"("t)"
                       "\u00e9"
                       R"(xt \"\n")");
  is(std::string("a\0b", 3), R"("a\u0000b")");
  is("\xff"
     "A",
     R"({"$string":"ff41"})");
  is(CommonBytes{std::string("\0\1\xff", 3)}, R"({"$bytes":"0001ff"})");
  is(CommonBytes{""}, R"({"$bytes":""})");
  is(List({1, List({})}), "[1,[]]");
  is(Tuple({1, Tuple({})}), R"({"$tuple":[1,{"$tuple":[]}]})");
  is(Dict({}), "{}");
  is(Dict({{Key("lr"), 0.1}, {Key("a$"), 1}}), R"({"a$":1,"lr":0.1})");
  is(Dict({{Key("$x"), 1}, {Key(std::int64_t{0}), "a"}}), R"({"$dict":[[0,"a"],["$x",1]]})");
  is(Dict({{Key("$float"), "inf"}}), R"({"$dict":[["$float","inf"]]})");
  is(Dict({{Key("\xff"), 1}}), R"({"$dict":[[{"$string":"ff"},1]]})");
  // Only what must be is tagged, at every level on its own.
  is(Dict({{Key("a"), Dict({{Key(-1), List({Dict({{Key("b"), 1}})})}})}}),
     R"({"a":{"$dict":[[-1,[{"b":1}]]]}})");
}

TEST(CommonJson, ReadsHandwrittenJson) {
  EXPECT_THAT(CommonFromJson(" { \"a\" : [ 1 , 2.5e0 ] } "),
              IsOkAndHolds(CommonValue(Dict({{Key("a"), List({1, 2.5})}}))));
  EXPECT_THAT(CommonFromJson(R"({"$float":"nan"})"),
              IsOkAndHolds(CommonValue(OfBits(0x7ff8000000000000))));
  EXPECT_THAT(CommonFromJson(R"({"$dict":[["a",1]]})"),
              IsOkAndHolds(CommonValue(Dict({{Key("a"), 1}}))));
}

TEST(CommonJson, ErrorNamesThePlaceOfTheJsonFault) {
  const auto refused = [](const std::string& text, const std::string& why) {
    EXPECT_THAT(CommonFromJson(text), FailsWith(Code::kInvalidArgument, why)) << text;
  };
  refused("", "byte 1");
  refused("[1,", "byte 4");
  refused("{\"a\":1} 2", "byte 9");
  refused("nan", "byte");
  refused("\"\xff\"", "byte 2");
  refused("1e999", "byte");
  refused("18446744073709551616", "the integer 18446744073709551616 does not fit in 64 bits");
  refused("{\"a\":[0,-9223372036854775809]}", "a[1]: the integer -9223372036854775809");
  refused(R"({"a":1,"a":1})", "key a occurs twice");
  refused(R"({"x":{"$dict":[[1,0],[1,0]]}})", "x: key {1} occurs twice");
  refused(R"({"x":[{"$what":1}]})", "x[0]: unknown tag \"$what\"");
  refused(R"({"$tuple":[],"a":1})", "must be the only key");
  refused(R"({"a":1,"$tuple":[]})", "must be the only key");
  refused(R"({"$tuple":[],"$bytes":""})", "must be the only key");
  refused(R"({"$tuple":1})", "$tuple must be an array");
  refused(R"({"$tuple":{"$tuple":[]}})", "$tuple must be an array");
  refused(R"({"$bytes":"abc"})", "$bytes must be an even number of hex digits");
  refused(R"({"$bytes":"AB"})", "$bytes must be an even number of hex digits");
  refused(R"({"$bytes":1})", "$bytes must be an even number of hex digits");
  refused(R"({"$string":"61"})", "$string is only for text that is not UTF-8");
  refused(R"({"$float":"1.0"})", "$float must be");
  refused(R"({"$float":"inf","bits":"7ff0000000000000"})", "$float must be");
  refused(R"({"$float":"nan","bits":"7ff0000000000000"})", "do not encode a NaN");
  refused(R"({"$float":"nan","bits":"7ff8"})", "do not encode a NaN");
  refused(R"({"$float":"nan","more":1})", "$float must be");
  refused(R"({"$float":"nan","bits":"7ff8000000000000","more":1})", "must be the only key");
  refused(R"({"$dict":{}})", "$dict must be an array of [key, value] pairs");
  refused(R"({"$dict":[[1]]})", "$dict must be an array of [key, value] pairs");
  refused(R"({"$dict":[[1,2,3]]})", "$dict must be an array of [key, value] pairs");
  refused(R"({"$dict":[[1.0,2]]})", "a key of $dict is a float");
  refused(R"({"$dict":[[9223372036854775808,2]]})", "a key of $dict is a unsigned");
}

// What other programs make of the plain part: Python's json, with 64-bit integers exact.
TEST(CommonJson, PythonReadsPlainValuesExactly) {
  const TempDir dir;
  const std::string path = dir.Join("common.json");
  std::ofstream(path) << CommonToJson(
      Dict({{Key("odd"), std::int64_t{9007199254740993}},
            {Key("least"), std::numeric_limits<std::int64_t>::min()},
            {Key("most"), std::numeric_limits<std::uint64_t>::max()},
            {Key("floats"), List({0.1, 1.0, -0.0, 5e-324, 1.7976931348623157e308})},
            {Key("text"), "\u00fc\U0001F600\n"},
            {Key("nothing"), CommonNone()}}));
  Subprocess python({"python3", "-c", R"(
import json, math, sys
value = json.load(open(sys.argv[1], encoding="utf-8"))
assert value.pop("odd") == 2**53 + 1
assert value.pop("least") == -2**63
assert value.pop("most") == 2**64 - 1
floats = value.pop("floats")
assert [type(f) for f in floats] == [float] * 5, floats
assert floats == [0.1, 1.0, 0.0, 5e-324, sys.float_info.max], floats
assert math.copysign(1, floats[2]) == -1
assert value == {"text": "\u00fc\U0001F600\n", "nothing": None}, value
)",
                     path});
  const ProcessOutcome outcome = python.Wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome;
}

CommonValue Sample() {
  return Dict({{Key("optimizer"),
                Dict({{Key("param_groups"),
                       List({Dict({{Key("lr"), 0.001}, {Key("betas"), Tuple({0.9, 0.999})}})})},
                      {Key(3), "three"},
                      {Key("3"), "text"}})},
               {Key("a.b"), Dict({{Key("quo\"te"), List({1, 2})}})},
               {Key(""), true}});
}

TEST(CommonPath, FindsByPath) {
  const CommonValue value = Sample();
  EXPECT_THAT(value.At(""), IsOkAndHolds(value));
  EXPECT_THAT(value.At("optimizer.param_groups[0].lr"), IsOkAndHolds(CommonValue(0.001)));
  EXPECT_THAT(value.At("optimizer.param_groups[0].betas(1)"), IsOkAndHolds(CommonValue(0.999)));
  EXPECT_THAT(value.At("optimizer{3}"), IsOkAndHolds(CommonValue("three")));
  EXPECT_THAT(value.At("optimizer.3"), IsOkAndHolds(CommonValue("text")));
  EXPECT_THAT(value.At(R"("a.b"."quo\"te"[1])"), IsOkAndHolds(CommonValue(2)));
  EXPECT_THAT(value.At(R"("")"), IsOkAndHolds(CommonValue(true)));

  const auto missing = [&](const std::string& path, const std::string& why) {
    EXPECT_THAT(value.At(path), FailsWith(Code::kNotFound, why)) << path;
  };
  missing("nothing", "the value is a dict without nothing");
  missing("optimizer.param_groups[1].lr", "optimizer.param_groups is a list without [1]");
  missing("optimizer.param_groups(0)", "optimizer.param_groups is a list without (0)");
  missing("optimizer.param_groups[0].betas[0]", "betas is a tuple without [0]");
  missing("optimizer{4}", "optimizer is a dict without {4}");
  missing("optimizer{3}.x", "optimizer{3} is a string without .x");
  for (const char* path :
       {".", ".a", "optimizer.", "optimizer..x", "optimizer[", "optimizer[]", "optimizer[x]",
        "optimizer[-1]", "optimizer{}", "optimizer{1.0}", "optimizer[99999999999999999999]",
        "\"a.b", "\"a.b\"x", "\"\\", "a\"b"}) {
    EXPECT_FALSE(value.At(path).ok()) << path;
    EXPECT_NE(value.At(path).status().message(), "") << path;
  }
}

TEST(CommonPath, DifferencesAreReadable) {
  const CommonValue a = Sample();
  const auto changed = [&](const std::function<void(CommonDict&)>& change) {
    CommonValue b = a;
    change(*b.get_if<CommonDict>());
    return DifferenceOf(a, b);
  };
  const auto optimizer = [](CommonDict& top) -> CommonDict& {
    return *top.items.at(Key("optimizer")).get_if<CommonDict>();
  };
  const auto group = [&](CommonDict& top) -> CommonDict& {
    return *optimizer(top)
                .items.at(Key("param_groups"))
                .get_if<CommonList>()
                ->items[0]
                .get_if<CommonDict>();
  };
  EXPECT_EQ(DifferenceOf(a, a), "");
  EXPECT_EQ(changed([&](CommonDict& b) { group(b).items[Key("lr")] = 0.01; }),
            "optimizer.param_groups[0].lr: 0.001 and 0.01");
  EXPECT_EQ(changed([&](CommonDict& b) {
              group(b).items[Key("betas")] = Tuple({0.9, 0.99});
            }),
            "optimizer.param_groups[0].betas(1): 0.999 and 0.99");
  EXPECT_EQ(changed([&](CommonDict& b) {
              group(b).items[Key("betas")] = List({0.9, 0.999});
            }),
            "optimizer.param_groups[0].betas: tuple of 2 items and list of 2 items");
  EXPECT_EQ(changed([&](CommonDict& b) { group(b).items[Key("betas")] = Tuple({0.9}); }),
            "optimizer.param_groups[0].betas: has 2 items and 1");
  EXPECT_EQ(changed([&](CommonDict& b) { optimizer(b).items[Key(3)] = CommonNone(); }),
            "optimizer{3}: string \"three\" and none");
  EXPECT_EQ(changed([&](CommonDict& b) { optimizer(b).items.erase(Key(3)); }),
            "optimizer{3}: only in the first");
  EXPECT_EQ(changed([&](CommonDict& b) { b.items[Key("args.fp8")] = 1; }),
            "\"args.fp8\": only in the second");
  EXPECT_EQ(changed([&](CommonDict& b) { b.items[Key("")] = 1; }), "\"\": bool true and int 1");
  EXPECT_EQ(DifferenceOf(1, "1"), ": int 1 and string \"1\"");
  EXPECT_EQ(DifferenceOf(List({1}), List({})), ": has 1 item and 0");
  EXPECT_EQ(DifferenceOf(0.0, -0.0), ": 0.0 and -0.0");
  EXPECT_EQ(DifferenceOf(OfBits(0x7ff8000000000000), HUGE_VAL),
            ": nan (bits 7ff8000000000000) and inf");
  EXPECT_EQ(DifferenceOf(CommonBytes{"ab"}, CommonBytes{"ac"}),
            ": 6162 (2 bytes) and 6163 (2 bytes)");
  // Long ones are cut, around what differs.
  std::string x(1000, 'x');
  std::string y = x;
  y[700] = 'y';
  const std::string text = DifferenceOf(x, y);
  EXPECT_LT(text.size(), 200u) << text;
  EXPECT_THAT(text, HasSubstr("xy"));
  std::string umlauts;
  for (int i = 0; i < 500; ++i) umlauts += "\u00fc";
  EXPECT_EQ(DifferenceOf(umlauts, umlauts + "!").find("\ufffd"), std::string::npos);
}

TEST(CommonState, RecordsSplitIntoSharedContentAndRanks) {
  CommonValues records = {{"lr", 0.5},
                          {"$content", Dict({{Key("model"), "tiny"}})},
                          {"$rank.0", Dict({{Key("seed"), 7}})},
                          {"$rank.12", Dict({})},
                          {"$newer", 1}};
  ASSERT_OK_AND_ASSIGN(const CommonState state, SplitCommonRecords(records));
  EXPECT_EQ(state.values, (CommonValues{{"lr", 0.5}}));
  EXPECT_EQ(*state.content.Find(Key("model")), CommonValue("tiny"));
  ASSERT_EQ(state.ranks.size(), 2u);
  EXPECT_EQ(state.ranks.at(0), (CommonValues{{"seed", 7}}));
  EXPECT_TRUE(state.ranks.at(12).empty());

  const std::pair<const char*, CommonValue> broken[] = {
      {"$content", 1},        {"$rank.0", List({})},           {"$rank.0", Dict({{Key(1), 1}})},
      {"$rank.", Dict({})},   {"$rank.01", Dict({})},          {"$rank.-1", Dict({})},
      {"$rank.1x", Dict({})}, {"$rank.99999999999", Dict({})},
  };
  for (const auto& [name, value] : broken) {
    EXPECT_THAT(SplitCommonRecords({{name, value}}), FailsWith(Code::kDataLoss, name));
  }
  EXPECT_OK(CheckCommonName("a$"));
  EXPECT_THAT(CheckCommonName("$a"), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(CheckCommonName(""), HasCode(Code::kInvalidArgument));
}

}  // namespace
}  // namespace tensormount
