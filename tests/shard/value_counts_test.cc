// SPDX-License-Identifier: Apache-2.0
#include "shard/value_counts.h"

#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "shard/element_values.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

// Half of the dtypes' values are zero, infinite, NaN, or the smallest or largest magnitude.
std::string RandomElements(Random& rnd, std::size_t bytes) {
  std::string data = rnd.Bytes(bytes);
  const int kind = static_cast<int>(rnd.Int(0, 4));
  if (kind == 0) return data;
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    switch (rnd.Int(0, 40 * kind)) {
      case 0:
        std::memset(data.data() + i, 0, 8);
        break;
      case 1:
        std::memset(data.data() + i, 0xff, 8);
        break;
      case 2:
        for (int j = 0; j < 8; j += 2) std::memcpy(data.data() + i + j, "\x80\x7f", 2);  // bf16 inf
        break;
      case 3:
        for (int j = 0; j < 8; j += 2) std::memcpy(data.data() + i + j, "\x00\xfc", 2);  // f16 -inf
        break;
      case 4:
        std::memcpy(data.data() + i, "\x00\x00\x00\x00\x00\x00\xf0\x7f", 8);  // f64 inf
        break;
      case 5:
        std::memcpy(data.data() + i, "\x00\x00\x80\xff\x00\x00\x00\x80", 8);  // f32 -inf, -0
        break;
      case 6:
        std::memcpy(data.data() + i, "\x80\x80\x7c\xfc\x7f\xff\x00\x80", 8);  // f8
        break;
      default:
        break;
    }
  }
  return data;
}

// The counts by the definition, and the largest magnitude as a number; -1 if no value is finite.
std::pair<ValueCounts, double> ByDefinition(DType dtype, const std::string& data) {
  ValueCounts counts;
  double largest = -1;
  std::vector<double> numbers;
  if (dtype == DType::kF4) {
    constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (const char c : data) {
      numbers.push_back(kValues[c & 7]);
      numbers.push_back(kValues[(c >> 4) & 7]);
    }
  } else {
    const std::size_t elements = data.size() * 8 / InfoOf(dtype).bits;
    numbers.resize(static_cast<std::size_t>(ValuesIn(dtype, elements)));
    DecodeNumbers(dtype, reinterpret_cast<const std::byte*>(data.data()), elements, numbers.data());
    // DecodeNumbers takes every bool that is not zero for one; its bits are counted.
    if (dtype == DType::kBool) {
      for (std::size_t i = 0; i < elements; ++i) numbers[i] = static_cast<unsigned char>(data[i]);
    }
  }
  for (const double x : numbers) {
    if (x == 0) ++counts.zeros;
    if (std::isnan(x)) ++counts.nan;
    if (std::isinf(x)) ++(x > 0 ? counts.posinf : counts.neginf);
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  }
  return {counts, largest};
}

TEST(ValueCountsTest, EveryTypeIsCountedAsByItsDefinition) {
  Random rnd(TestSeed());
  for (const DTypeInfo& info : AllDTypes()) {
    if (!CanCount(info.dtype)) {
      EXPECT_EQ(info.bits, 6u) << info.name;
      continue;
    }
    for (int round = 0; round < 30; ++round) {
      const std::size_t width = std::max<std::size_t>(1, info.bits / 8);
      const auto elements = static_cast<std::size_t>(rnd.Int(0, round < 20 ? 100 : 9'000));
      const std::string data = RandomElements(rnd, elements * width);
      const auto [expected, largest] = ByDefinition(info.dtype, data);
      ValueCounter counter(info.dtype);
      // In pieces that end anywhere in an element.
      for (std::size_t at = 0; at < data.size();) {
        const auto n = static_cast<std::size_t>(
            rnd.Int(0, std::min<std::int64_t>(static_cast<std::int64_t>(data.size() - at), 6'000)));
        counter.Update(data.data() + at, n);
        at += n;
      }
      const ValueCounts counts = counter.Take();
      const std::string where = std::string(info.name) + " of " + std::to_string(elements);
      EXPECT_EQ(counts.zeros, expected.zeros) << where;
      EXPECT_EQ(counts.nan, expected.nan) << where;
      EXPECT_EQ(counts.posinf, expected.posinf) << where;
      EXPECT_EQ(counts.neginf, expected.neginf) << where;
      if (largest >= 0) {
        EXPECT_EQ(AbsmaxOf(info.dtype, counts.absmax_bits), largest) << where;
      } else {
        EXPECT_EQ(counts.absmax_bits, 0u) << where;
      }
      EXPECT_EQ(counter.Take(), ValueCounts()) << where;
    }
  }
}

TEST(ValueCountsTest, LongRunsOfOneValueDoNotOverflow) {
  for (const DType dtype : {DType::kU8, DType::kF8E4M3FNUZ, DType::kF4, DType::kF16}) {
    for (const char byte : {'\0', '\x80', '\xff'}) {
      const std::string data(100'000, byte);
      const auto [expected, largest] = ByDefinition(dtype, data);
      ValueCounter counter(dtype);
      counter.Update(data.data(), data.size());
      const ValueCounts counts = counter.Take();
      EXPECT_EQ(counts.zeros, expected.zeros);
      EXPECT_EQ(counts.nan, expected.nan);
    }
  }
}

TEST(ValueCountsTest, IntegersHaveExactMagnitudes) {
  const std::int64_t lowest = INT64_MIN;
  ValueCounter counter(DType::kI64);
  counter.Update(&lowest, sizeof(lowest));
  const ValueCounts counts = counter.Take();
  EXPECT_EQ(counts.absmax_bits, std::uint64_t{1} << 63);
  EXPECT_EQ(AbsmaxText(DType::kI64, 1, counts), "9223372036854775808");
}

TEST(ValueCountsTest, TextsAreTheShortestThatReadBack) {
  const float third = 0.1F;
  ValueCounter counter(DType::kF32);
  counter.Update(&third, sizeof(third));
  EXPECT_EQ(AbsmaxText(DType::kF32, 1, counter.Take()), "0.1");
  EXPECT_EQ(AbsmaxText(DType::kF32, 2, {.nan = 1, .posinf = 1}), "");
  EXPECT_EQ(DescribeNonfinite({.nan = 3}), "3 NaN");
  EXPECT_EQ(DescribeNonfinite({.posinf = 1, .neginf = 1}), "2 infinite");
  EXPECT_EQ(DescribeNonfinite({.nan = 3, .neginf = 1}), "3 NaN and 1 infinite");
}

TEST(ValueCountsTest, RowsReadBack) {
  const std::vector<std::optional<ValueCounts>> all = {
      ValueCounts{},
      ValueCounts{.zeros = 7, .absmax_bits = ~std::uint64_t{0}},
      ValueCounts{.zeros = 1, .nan = 2, .posinf = 3, .neginf = 4, .absmax_bits = 5},
      std::nullopt,
  };
  for (const auto& counts : all) {
    std::vector<Hash128> row;
    AppendCountsRow(counts, row);
    const auto read = DecodeCountsRow(row);
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(read->counts, counts);
    EXPECT_EQ(read->hashes, row.size());
    row.pop_back();
    EXPECT_FALSE(DecodeCountsRow(row).has_value());
  }
  EXPECT_FALSE(DecodeCountsRow(std::vector<Hash128>{{~std::uint64_t{0}, 1}}).has_value());
}

}  // namespace
}  // namespace tensormount
