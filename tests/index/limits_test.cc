// SPDX-License-Identifier: Apache-2.0
// Inputs at the size limits of the readers. Inputs of many megabytes take half a minute each under
// a sanitizer and reach no code that small ones do not reach, so this program is built without one.
#include <cstddef>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/common_value.h"

#include "index/archives/pickle.h"
#include "index/records/common_state.h"
#include "index/records/record_coding.h"
#include "shard/safetensors.h"
#include "tests/adopt/bytes.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

TEST(CommonValueLimits, SizeIsLimitedInEveryEncoding) {
  const auto fails_with = [](Code code, const std::string& message) {
    return testing::AllOf(HasCode(code), HasMessage(message));
  };
  EXPECT_OK(CheckCommon(std::string(kMaxCommonBytes - 5, 'x')));
  EXPECT_THAT(CheckCommon(std::string(kMaxCommonBytes - 4, 'x')),
              fails_with(Code::kInvalidArgument, "has 67108865 bytes, at most 67108864"));
  CommonList many;
  many.items.resize(kMaxCommonNodes);
  EXPECT_THAT(CheckCommon(std::move(many)), fails_with(Code::kInvalidArgument, "4194305 nested values"));
  ByteWriter nones;
  nones.U8(static_cast<std::uint8_t>(CommonValue::Kind::kList));
  nones.U32(kMaxCommonNodes);
  nones.bytes().append(kMaxCommonNodes, '\5');
  ByteReader in(nones.bytes(), "test");
  EXPECT_THAT(DecodeCommon(in, "test"), fails_with(Code::kDataLoss, "too large"));
}

TEST(SafetensorsLimits, LongStringsAreNotCopied) {
  const auto parse = [](const std::string& json) {
    return ParseSafetensorsHeader(json, 8 + json.size()).status();
  };
  const auto with = [](const std::string& value) {
    return R"({"__metadata__":{"a":")" + value + "\"}}";
  };
  constexpr std::size_t kLimit = std::size_t{16} << 20;
  EXPECT_THAT(parse(with(std::string(kLimit + 1, 'x'))), HasCode(Code::kUnsupported));
  // A quote that is hidden does not end a string; one behind two backslashes does.
  EXPECT_THAT(parse(with(std::string(kLimit - 4, 'x') + R"(\"yyyyyyyyyyyyyyyy)")),
              HasCode(Code::kUnsupported));
  EXPECT_OK(parse(with(std::string(kLimit - 4, 'x') + R"(\\)")));
  EXPECT_THAT(parse("{\"" + std::string(kLimit + 1, 'x')), HasCode(Code::kUnsupported));
  std::string many = R"({"__metadata__":{)";
  for (int i = 0; i < 3; ++i) {
    many +=
        (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"" + std::string(12 << 20, 'y') + '"';
  }
  EXPECT_THAT(parse(many + "}}"), HasCode(Code::kUnsupported));
}

// Tuples that fit beside the stack, that no longer do, and what is between: an answer each time.
TEST(PickleLimits, TupleOverTheMemoryLimitIsRefused) {
  int refused = 0;
  for (std::size_t n = 1 << 19; n <= std::size_t{6} << 20; n += 1 << 18) {
    const auto parsed = pickle::Parse(Pickle("(" + std::string(n, 'N') + "t"));
    if (!parsed.ok()) {
      EXPECT_THAT(parsed, HasCode(Code::kResourceExhausted)) << n;
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace tensormount
