// SPDX-License-Identifier: Apache-2.0
#include "shard/coding.h"

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

auto IsDataLoss(const std::string& why) {
  return testing::AllOf(HasCode(Code::kDataLoss), HasMessage(why));
}

// Everything `write` gives, cut short at each byte: an error, never a value.
template <typename Write, typename Read>
void ExpectNoPrefixReads(Write write, Read read) {
  ByteWriter out;
  write(out);
  for (std::size_t n = 0; n < out.bytes().size(); ++n) {
    ByteReader in(std::string_view(out.bytes()).substr(0, n), "cut");
    EXPECT_EQ(read(in).code(), Code::kDataLoss) << n << " bytes";
  }
}

TEST(CodingTest, DimsOfEveryRankRoundTrip) {
  for (int rank = 0; rank <= kMaxRank; ++rank) {
    Dims dims;
    for (int a = 0; a < rank; ++a) dims.push_back(a % 2 == 0 ? -1 - a : std::int64_t{1} << (3 * a));
    ByteWriter out;
    EncodeDims(out, dims);
    EXPECT_EQ(out.bytes().size(), 1u + 8u * static_cast<unsigned>(rank));
    ByteReader in(out.bytes(), "dims");
    ASSERT_OK_AND_ASSIGN(const Dims read, DecodeDims(in, "dims"));
    EXPECT_EQ(read, dims);
    EXPECT_OK(in.Finish());
  }
  const std::string high(1 + 8 * (kMaxRank + 1), static_cast<char>(kMaxRank + 1));
  ByteReader too_high(high, "dims");
  EXPECT_THAT(DecodeDims(too_high, "the row"),
              IsDataLoss("the row: has " + std::to_string(kMaxRank + 1) + " axes"));
  ExpectNoPrefixReads(
      [](ByteWriter& out) {
        EncodeDims(out, Dims{3, 4});
      },
      [](ByteReader& cut) { return DecodeDims(cut, "dims").status(); });
}

TEST(CodingTest, PositionsOutsideTheirGridsAreRefused) {
  const auto decode = [](const Dims& index, const Dims& grid) {
    ByteWriter out;
    EncodeDims(out, index);
    EncodeDims(out, grid);
    ByteReader in(out.bytes(), "object");
    Dims a;
    Dims b;
    const Status status = DecodeGridPosition(in, "list", "rng", a, b);
    EXPECT_TRUE(!status.ok() || (a == index && b == grid));
    return status;
  };
  EXPECT_OK(decode({}, {}));
  EXPECT_OK(decode({0, 6}, {1, 7}));
  EXPECT_THAT(decode({0, 7}, {1, 7}),
              IsDataLoss("list: object rng: part [0, 7] is not on its grid [1, 7]"));
  EXPECT_THAT(decode({-1}, {4}), IsDataLoss("is not on its grid"));
  EXPECT_THAT(decode({0}, {0}), IsDataLoss("is not on its grid"));
  EXPECT_THAT(decode({0}, {4, 4}), IsDataLoss("index and grid have different numbers of axes"));
}

TEST(CodingTest, RegionsRoundTripAndMustLieInTheirShapes) {
  const Dims shape{4, 6};
  const Box box = Box::Make({1, 2}, {2, 3}).value();
  const Region flat = Region::Flat(box, 1, 4).value();
  for (const Region& region : {Region(box), flat, Region(Box::Make({0, 0}, {0, 6}).value())}) {
    const auto write = [&](ByteWriter& out) { EncodeRegion(out, region); };
    ByteWriter out;
    write(out);
    ByteReader in(out.bytes(), "region");
    ASSERT_OK_AND_ASSIGN(const Region read, DecodeRegion(in, "list", "w", shape));
    EXPECT_EQ(read, region);
    EXPECT_OK(in.Finish());
    ExpectNoPrefixReads(
        write, [&](ByteReader& cut) { return DecodeRegion(cut, "list", "w", shape).status(); });
    ByteReader again(out.bytes(), "region");
    EXPECT_THAT(DecodeRegion(again, "list", "w", Dims{2, 4}),
                IsDataLoss("list: tensor w: a region lies outside of its shape"));
  }
  // Numbers that no encoder writes.
  const auto decode = [&](const std::vector<std::int64_t>& words) {
    ByteWriter out;
    out.U8(words.size() > 4 ? 1 : 0);
    for (const std::int64_t word : words) out.I64(word);
    ByteReader in(out.bytes(), "region");
    return DecodeRegion(in, "list", "w", shape).status();
  };
  constexpr std::int64_t kMost = INT64_MAX;
  EXPECT_OK(decode({1, 2, 2, 3}));
  for (const std::vector<std::int64_t>& odd :
       std::vector<std::vector<std::int64_t>>{{-1, 2, 2, 3},
                                              {1, 2, -2, 3},
                                              {kMost, 2, kMost, 3},
                                              {1, 2, kMost, kMost},
                                              {1, 2, 2, 3, 5, 2},
                                              {1, 2, 2, 3, -1, 2},
                                              {1, 2, 2, 3, kMost, kMost},
                                              {1, 2, 2, 3, 0, -1}}) {
    EXPECT_EQ(decode(odd).code(), Code::kDataLoss) << testing::PrintToString(odd);
  }
}

TEST(CodingTest, TensorsOfUnknownTypesAreUnsupported) {
  ByteWriter out;
  EncodeMeta(out, "w", DType::kF32, Dims{2, 3});
  ByteReader in(out.bytes(), "tensor");
  ASSERT_OK_AND_ASSIGN(const TensorMeta meta, DecodeMeta(in, "list"));
  EXPECT_EQ(meta.key(), "w");
  EXPECT_EQ(meta.shape(), (Dims{2, 3}));
  ByteWriter same;
  EncodeMeta(same, meta);
  EXPECT_EQ(same.bytes(), out.bytes());

  std::string bytes = out.bytes();
  bytes[4 + 1] = '\x7f';  // Behind the key's length and its one byte.
  ByteReader odd(bytes, "tensor");
  EXPECT_EQ(DecodeMeta(odd, "list").status().code(), Code::kUnsupported);
  ExpectNoPrefixReads(
      [](ByteWriter& w) {
        EncodeMeta(w, "w", DType::kF32, Dims{2, 3});
      },
      [](ByteReader& cut) {
        const Status status = DecodeMeta(cut, "list").status();
        return status;
      });
}

}  // namespace
}  // namespace tensormount
