// SPDX-License-Identifier: Apache-2.0
#include "shard/safetensors.h"

#include <cstring>

#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::Pair;

// The header with as much data behind it as `data_bytes` says.
Result<SafetensorsHeader> Parse(std::string_view json, std::uint64_t data_bytes) {
  return ParseSafetensorsHeader(json, 8 + json.size() + data_bytes);
}

TEST(SafetensorsTest, ReadsTensorsInDataOrder) {
  const auto header = Parse(R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},)"
                            R"("__metadata__":{"format":"pt","k":"\u00e9"},)"
                            R"("a":{"dtype":"BF16","shape":[3,1],"data_offsets":[0,6]}}   )",
                            14);
  ASSERT_OK(header);
  const auto& h = header.value();
  ASSERT_EQ(h.entries.size(), 2u);
  EXPECT_EQ(h.entries[0].key, "a");
  EXPECT_EQ(h.entries[0].dtype, DType::kBF16);
  EXPECT_EQ(h.entries[0].shape, (Dims{3, 1}));
  EXPECT_EQ(h.entries[1].begin, 6u);
  EXPECT_EQ(h.entries[1].end, 14u);
  EXPECT_THAT(h.metadata, ElementsAre(Pair("format", "pt"), Pair("k", "\xC3\xA9")));
}

// What the reference implementation (0.8) takes.
TEST(SafetensorsTest, AcceptsHeadersOfTheReferenceImplementation) {
  EXPECT_OK(Parse("{}", 0));
  EXPECT_OK(Parse("{}        ", 0));
  EXPECT_OK(Parse(R"({"__metadata__":null})", 0));
  EXPECT_OK(Parse(R"({"__metadata__":{}})", 0));
  EXPECT_OK(Parse(R"({"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1));
  // Fields of a later version.
  EXPECT_OK(Parse(
      R"({"a":{"x":{"y":[1,{"y":2}]},"dtype":"U8","z":[[]],"v":[1],"u":{},"shape":[1],"w":null,)"
      R"("data_offsets":[0,1]}})",
      1));
  // Empty tensors before, between and behind others, whatever their names.
  const auto header = Parse(R"({"z":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},)"
                            R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                            R"("m":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},)"
                            R"("b":{"dtype":"F4","shape":[2,3],"data_offsets":[2,5]}})",
                            5);
  ASSERT_OK(header);
  EXPECT_EQ(header.value().entries[0].key, "z");
  EXPECT_EQ(header.value().entries[3].key, "b");
}

TEST(SafetensorsTest, ReadsEveryTypeOfTheFormat) {
  const std::vector<std::pair<const char*, std::uint64_t>> bits = {
      {"BOOL", 8},        {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"I16", 16}, {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"F8_E4M3FNUZ", 8}, {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},
      {"F8_E5M2FNUZ", 8}, {"U32", 32}, {"F32", 32},    {"C64", 64},    {"F64", 64},
      {"I64", 64},        {"U64", 64}};
  EXPECT_EQ(bits.size(), 22u);
  for (const auto& [name, b] : bits) {
    const std::string json = std::string(R"({"a":{"dtype":")") + name +
                             R"(","shape":[8],"data_offsets":[0,)" + std::to_string(b) + "]}}";
    EXPECT_THAT(Parse(json, b), IsOk()) << name;
  }
}

struct BadCase {
  const char* json;
  std::uint64_t data;
  const char* message;
  Code code = Code::kDataLoss;
};

TEST(SafetensorsTest, EveryRuleIsChecked) {
  const std::vector<BadCase> cases = {
      {"", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{\"a\xFF\":1}", 0, "not UTF-8"},
      {"{} x", 0, "JSON, byte"},
      {"{", 0, "JSON, byte"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},})", 1, "JSON, byte"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "key 'a' occurs twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__' occurs twice"},
      {R"({"__metadata__":{"x":"1","x":"2"}})", 0, "key 'x' occurs twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
       "field 'dtype' occurs twice"},
      {R"({"__metadata__":{"x":1}})", 0, "__metadata__ holds a number"},
      {R"({"__metadata__":{"x":{}}})", 0, "__metadata__ holds an object"},
      {R"({"__metadata__":"x"})", 0, "__metadata__ holds a string"},
      {R"({"__metadata__":{"x":null}})", 0, "__metadata__ holds null"},
      {R"({"a":7})", 0, "'a' is a number, not an object"},
      {R"({"a":[]})", 0, "'a' is an array, not an object"},
      {R"({"a":null})", 0, "'a' is null, not an object"},
      {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "'a': no dtype"},
      {R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "'a': no shape"},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, "'a': no data_offsets"},
      {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype is a number"},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "shape holds a number"},
      {R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1, "shape holds a string"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "a negative number"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "not whole"},
      {R"({"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}})", 1, "not whole"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "shape holds an array"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "not two numbers"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "not two numbers"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":{"begin":0}}})", 1,
       "data_offsets hold an object"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,true]}})", 1, "a boolean"},
      {R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", 1,
       "does not fit 64 bits"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}})", 1,
       "overflows"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "overflows"},
      {R"({"a":{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0,
       "overflows"},
      {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "whole bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "end before they begin"},
      {R"({"a":{"dtype":"U16","shape":[2],"data_offsets":[0,2]}})", 2,
       "bytes 0 to 2, but shape [2] of U16 takes 4"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "'b': bytes 1 to 3 overlap tensor 'a'"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
       5, "'b': bytes 3 to 5 leave a gap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "leave a gap"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1,
       "reach past the end of the data"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 3, "1 bytes are left over"},
      {"{}", 1, "1 bytes are left over"},
      {R"({"a":{"dtype":"F3","shape":[1],"data_offsets":[0,1]}})", 1, "'a': dtype 'F3'",
       Code::kUnsupported},
      {R"({"a":{"dtype":"float32","shape":[1],"data_offsets":[0,4]}})", 4, "dtype 'float32'",
       Code::kUnsupported},
      {R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})",
       1, "more than 16 axes", Code::kUnsupported},
  };
  for (const BadCase& c : cases) {
    SCOPED_TRACE(c.json);
    const auto header = Parse(c.json, c.data);
    EXPECT_THAT(header, HasCode(c.code));
    EXPECT_THAT(header, HasMessage(c.message));
  }
}

TEST(SafetensorsTest, NulInTheHeaderIsRefused) {
  EXPECT_THAT(Parse(std::string_view("{}\0{}", 5), 0), HasMessage("NUL"));
}

TEST(SafetensorsTest, HeaderLongerThanTheFileIsRefused) {
  EXPECT_THAT(ParseSafetensorsHeader("{}", 9), HasMessage("do not fit in a file of 9"));
  EXPECT_OK(ParseSafetensorsHeader("{}", 10));
}

TEST(SafetensorsTest, TruncatedFilesAreRefused) {
  TempDir dir;
  const auto read = [&](std::string_view bytes) {
    WriteWholeFile(dir.Join("f"), bytes);
    auto file = HostFileSystem().OpenRead(dir.Join("f"));
    return ReadSafetensorsHeader(*file.value());
  };
  EXPECT_THAT(read("1234567"), HasMessage("too short for the header length"));
  EXPECT_THAT(read(std::string_view("\x03\0\0\0\0\0\0\0{}", 10)), HasMessage("do not fit"));
  EXPECT_THAT(read(std::string(8, '\xFF')), HasMessage("the format allows 100000000"));
  EXPECT_THAT(read(std::string_view("\x01\xE1\xF5\x05\0\0\0\0{}", 10)),
              HasMessage("100000001 bytes, the format allows"));
  EXPECT_THAT(read(std::string_view("\x02\0\0\0\0\0\0\0{ ", 10)), HasMessage(dir.Join("f")));
  EXPECT_OK(read(std::string_view("\x02\0\0\0\0\0\0\0{}", 10)));
}

TEST(SafetensorsTest, WrittenHeadersRoundTrip) {
  std::vector<SafetensorsEntry> entries = {
      {"b\"\\\n\x01", DType::kF32, {2, 3}, 0, 0},
      {"a\xC3\xA9", DType::kF4, {3, 2}, 0, 0},
      {"none", DType::kU8, {0}, 0, 0},
      {"one", DType::kI64, {}, 0, 0},
  };
  const std::map<std::string, std::string> metadata = {{"k", "v\t"}, {"", "\"x\""}};
  for (const std::uint64_t alignment : {8u, 64u, 4096u}) {
    const auto bytes = MakeSafetensorsHeader(entries, metadata, alignment);
    ASSERT_OK(bytes);
    EXPECT_EQ(bytes.value().size() % alignment, 0u);
    EXPECT_EQ(entries[1].begin, 24u);
    EXPECT_EQ(entries[3].end, 35u);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.value().data(), 8);
    EXPECT_EQ(length, bytes.value().size() - 8);
    const auto header = ParseSafetensorsHeader(std::string_view(bytes.value()).substr(8),
                                               bytes.value().size() + 35);
    ASSERT_OK(header);
    EXPECT_EQ(header.value().metadata, metadata);
    EXPECT_EQ(header.value().data_offset, bytes.value().size());
    ASSERT_EQ(header.value().entries.size(), entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      EXPECT_EQ(header.value().entries[i].key, entries[i].key);
      EXPECT_EQ(header.value().entries[i].dtype, entries[i].dtype);
      EXPECT_EQ(header.value().entries[i].shape, entries[i].shape);
      EXPECT_EQ(header.value().entries[i].begin, entries[i].begin);
    }
  }
}

TEST(SafetensorsTest, RefusesToWriteInvalidHeaders) {
  const auto make = [](std::vector<SafetensorsEntry> entries, std::uint64_t alignment = 8) {
    return MakeSafetensorsHeader(entries, {}, alignment);
  };
  EXPECT_THAT(make({{"a", DType::kC128, {1}, 0, 0}}), HasCode(Code::kUnsupported));
  EXPECT_THAT(make({{"a", DType::kU8, {}, 0, 0}, {"a", DType::kU8, {}, 0, 0}}),
              HasMessage("'a': occurs twice"));
  EXPECT_THAT(make({{"__metadata__", DType::kU8, {}, 0, 0}}), HasMessage("reserved"));
  EXPECT_THAT(make({{"\xFF", DType::kU8, {}, 0, 0}}), HasMessage("not UTF-8"));
  EXPECT_THAT(make({{"a", DType::kF4, {3}, 0, 0}}), HasMessage("whole bytes"));
  EXPECT_THAT(make({}, 12), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(make({}, 4), HasCode(Code::kInvalidArgument));
  EXPECT_OK(make({}));
  std::vector<SafetensorsEntry> none;
  EXPECT_THAT(MakeSafetensorsHeader(none, {{"big", std::string(100'000'000, 'x')}}),
              HasMessage("the format allows"));
}

// Damaged headers are refused or understood; nothing else may happen.
TEST(SafetensorsPropertyTest, DamagedHeadersAreRefusedOrConsistent) {
  std::vector<SafetensorsEntry> entries = {{"w", DType::kF32, {2, 3}, 0, 0},
                                           {"v", DType::kBF16, {4}, 0, 0}};
  const std::string good = MakeSafetensorsHeader(entries, {{"format", "pt"}}, 8).value().substr(8);
  Random rnd(TestSeed());
  for (int i = 0; i < TestScale(20'000); ++i) {
    std::string bad = good;
    for (std::int64_t n = rnd.Int(1, 3); n > 0; --n) {
      const auto at = static_cast<std::size_t>(rnd.Int(0, static_cast<int>(bad.size()) - 1));
      if (rnd.OneIn(3)) {
        bad.erase(at, 1);
      } else if (rnd.OneIn(2)) {
        bad[at] = rnd.Pick<char>({'{', '}', '[', ']', '"', ',', ':', '0', '9', '-', '\\', ' '});
      } else {
        bad[at] = static_cast<char>(rnd.Next());
      }
    }
    const auto header = Parse(bad, 32);
    if (!header.ok()) {
      EXPECT_TRUE(header.status().code() == Code::kDataLoss ||
                  header.status().code() == Code::kUnsupported);
      continue;
    }
    std::uint64_t at = 0;
    for (const SafetensorsEntry& e : header.value().entries) {
      EXPECT_EQ(e.begin, at);
      at = e.end;
    }
    EXPECT_EQ(at, 32u);
  }
}

}  // namespace
}  // namespace tensormount
