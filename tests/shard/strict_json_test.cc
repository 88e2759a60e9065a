// SPDX-License-Identifier: Apache-2.0
#include "shard/strict_json.h"

#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

TEST(StrictJsonTest, ParsesAnObject) {
  const std::string text = R"( {"a":[1,-2,3.5,null,true],"b":{"c":"x"},"a.b":[]} )";
  const auto json = ParseStrictJson(text);
  ASSERT_OK(json);
  EXPECT_EQ(json.value(), Json::parse(text));
}

TEST(StrictJsonTest, RefusesAmbiguousJson) {
  const std::string nul = std::string("{\"a\":1}") + '\0' + "x";
  const std::map<std::string, std::string> bad = {
      {R"({"a":1,"a":2})", "key 'a' occurs twice"},
      {R"({"x":{"a":1,"b":2,"a":{}}})", "key 'a' occurs twice"},
      {"[1]", "does not begin with '{'"},
      {"", "does not begin with '{'"},
      {"{\"a\":\"\xff\"}", "is not UTF-8"},
      {nul, "contains a NUL byte"},
      {R"({"a":1} {})", "byte 9"},
      {R"({"a":NaN})", "byte"},
      {R"({"a":1,})", "byte 8"},
      {R"({"a":)", "byte"},
  };
  for (const auto& [text, message] : bad) {
    const auto json = ParseStrictJson(text);
    EXPECT_THAT(json, HasCode(Code::kDataLoss)) << text;
    EXPECT_THAT(json, HasMessage(message)) << text;
  }
}

TEST(StrictJsonTest, LimitsDepthAndNumberOfValues) {
  std::string deep = R"({"a":)" + std::string(31, '[') + std::string(31, ']') + "}";
  EXPECT_OK(ParseStrictJson(deep));
  deep = R"({"a":)" + std::string(32, '[') + std::string(32, ']') + "}";
  EXPECT_THAT(ParseStrictJson(deep), HasMessage("nested deeper than 32"));
  EXPECT_THAT(ParseStrictJson(R"({"a":)" + std::string(100'000, '[')), HasCode(Code::kDataLoss));
  // The object, the array and its items.
  EXPECT_OK(ParseStrictJson(R"({"a":[1,2,3]})", {.max_values = 5}));
  EXPECT_THAT(ParseStrictJson(R"({"a":[1,2,3,4]})", {.max_values = 5}),
              HasCode(Code::kResourceExhausted));
}

TEST(StrictJsonTest, DeliversMembersOneByOne) {
  std::string seen;
  const JsonMember note = [&](const std::string& name, Json& value) {
    seen += name + "=" + value.dump() + ";";
    return name == "stop" ? Status(Code::kUnsupported, "enough") : Status();
  };
  const std::string text = R"({"v":1,"t":{"x":[1,2],"y":{"t":{"x":3}},"z":4},"w":{"x":[]}})";
  // What was before the streamed members still counts.
  EXPECT_THAT(ParseStrictJson(R"({"a":[1,2,3,4,5],"t":{"x":1},"b":[1,2,3,4,5]})", "t",
                              [](auto&&...) { return Status(); }, {.max_values = 10}),
              HasCode(Code::kResourceExhausted));
  // Each member has the limit for itself.
  const auto rest = ParseStrictJson(text, "t", note, {.max_values = 6});
  ASSERT_OK(rest);
  EXPECT_EQ(seen, R"(x=[1,2];y={"t":{"x":3}};z=4;)");
  EXPECT_EQ(rest.value(), Json::parse(R"({"v":1,"t":{},"w":{"x":[]}})"));
  EXPECT_THAT(ParseStrictJson(R"({"t":{"x":1,"x":1}})", "t", note),
              HasMessage("key 'x' occurs twice"));
  EXPECT_THAT(ParseStrictJson(R"({"t":{"stop":1,"never":1}})", "t", note),
              HasCode(Code::kUnsupported));
  EXPECT_EQ(seen.find("never"), std::string::npos);
  // Not an object: an ordinary value.
  const auto array = ParseStrictJson(R"({"t":[1]})", "t", note);
  ASSERT_OK(array);
  EXPECT_EQ(array.value(), Json::parse(R"({"t":[1]})"));
}

}  // namespace
}  // namespace tensormount
