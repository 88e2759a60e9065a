// SPDX-License-Identifier: Apache-2.0
#include "shard/value_statistics.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "shard/element_values.h"
#include "shard/float_format.h"
#include "shard/vector_code.h"

namespace tensormount {
namespace {

constexpr double kMostDouble = std::numeric_limits<double>::max();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();

template <typename T>
const std::byte* BytesAt(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

double ExactValueOf(const ExactNumber& x) {
  if (x.kind == ExactNumber::Kind::kNaN) return std::numeric_limits<double>::quiet_NaN();
  const double size = x.kind == ExactNumber::Kind::kInfinity
                          ? std::numeric_limits<double>::infinity()
                          : std::ldexp(static_cast<double>(x.significand), x.exponent);
  return x.negative ? -size : size;
}

// All codes of a format, packed.
std::vector<std::byte> AllCodes(int bits) {
  const std::size_t count = std::size_t{1} << bits;
  std::vector<std::byte> raw(count * static_cast<std::size_t>(bits) / 8);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t bit = 0; bit < static_cast<std::size_t>(bits); ++bit) {
      const std::size_t at = i * static_cast<std::size_t>(bits) + bit;
      if ((i >> bit & 1) != 0) raw[at / 8] |= std::byte{1} << static_cast<int>(at % 8);
    }
  }
  return raw;
}

template <FloatFormat F>
void ExpectDecodesEveryCode(DType dtype) {
  const std::vector<std::byte> raw = AllCodes(F.bits());
  const std::size_t count = std::size_t{1} << F.bits();
  std::vector<double> decoded(count);
  DecodeNumbers(dtype, raw.data(), count, decoded.data());
  for (std::size_t i = 0; i < count; ++i) {
    const double exact = ExactValueOf(DecodeExact<F>(i));
    ASSERT_TRUE(std::isnan(exact)
                    ? std::isnan(decoded[i])
                    : exact == decoded[i] && std::signbit(exact) == std::signbit(decoded[i]))
        << InfoOf(dtype).name << " " << i << ": " << decoded[i] << ", not " << exact;
  }
}

// With and without AVX2.
template <typename Fn>
void InBothForms(const Fn& fn) {
  const bool uses = UsesAvx2();
  for (const bool avx2 : {false, uses}) {
    UsesAvx2() = avx2;
    fn();
  }
}

TEST(DecodeNumbers, EveryCodeOfASmallFloatHasItsExactValue) {
  InBothForms([] {
    ExpectDecodesEveryCode<kF16Format>(DType::kF16);
    ExpectDecodesEveryCode<kBF16Format>(DType::kBF16);
    ExpectDecodesEveryCode<kF8E5M2Format>(DType::kF8E5M2);
    ExpectDecodesEveryCode<kF8E4M3Format>(DType::kF8E4M3);
    ExpectDecodesEveryCode<kF8E5M2FNUZFormat>(DType::kF8E5M2FNUZ);
    ExpectDecodesEveryCode<kF8E4M3FNUZFormat>(DType::kF8E4M3FNUZ);
    ExpectDecodesEveryCode<kF6E2M3Format>(DType::kF6E2M3);
    ExpectDecodesEveryCode<kF6E3M2Format>(DType::kF6E3M2);
    ExpectDecodesEveryCode<kF4Format>(DType::kF4);
  });
}

TEST(DecodeNumbers, ScalesAndUnsignedIntegersAreExact) {
  InBothForms([] {
    const std::vector<std::byte> codes = AllCodes(8);
    std::vector<double> scales(256);
    DecodeNumbers(DType::kF8E8M0, codes.data(), 256, scales.data());
    for (int i = 0; i < 255; ++i) {
      ASSERT_EQ(scales[static_cast<std::size_t>(i)], std::ldexp(1.0, i - 127));
    }
    ASSERT_TRUE(std::isnan(scales[255]));
    const std::vector<std::uint32_t> integers = {0, 1, 0x7fffffffU, 0x80000000U, 0xffffffffU};
    std::vector<double> decoded(integers.size());
    DecodeNumbers(DType::kU32, BytesAt(integers), integers.size(), decoded.data());
    for (std::size_t i = 0; i < integers.size(); ++i) ASSERT_EQ(decoded[i], integers[i]);
  });
}

// Random bits of every dtype: the results with and without AVX2 are equal to the last bit.
TEST(ValueStatistics, BothFormsOfTheCodeGiveTheSameBits) {
  std::mt19937_64 random(7);
  std::vector<std::uint64_t> raw_a(9000);
  std::vector<std::uint64_t> raw_b(9000);
  for (std::size_t i = 0; i < raw_a.size(); ++i) {
    // The exponents are near 1: the sums of random bits are infinite.
    raw_a[i] = (random() & 0x800fffffffffffffU) | ((1000 + random() % 40) << 52);
    raw_b[i] = random() % 3 == 0 ? raw_a[i] : raw_a[i] ^ random() >> 40;
  }
  raw_a[17] = 0x7ff0000000000000U;
  for (const DTypeInfo& info : AllDTypes()) {
    const DType dtype = ValueDType(info.dtype);
    const std::size_t count = 8500;
    std::vector<BlockStatistics> blocks;
    std::vector<BlockChange> changes;
    InBothForms([&] {
      blocks.push_back(MeasureBlock(dtype, BytesAt(raw_a), count));
      changes.push_back(MeasureChange(dtype, BytesAt(raw_a), dtype, BytesAt(raw_b), count));
    });
    EXPECT_EQ(blocks[0].count, count);
    EXPECT_TRUE(blocks[0] == blocks[1]) << info.name;
    EXPECT_GT(changes[0].changed, 0U) << info.name;
    EXPECT_TRUE(changes[0] == changes[1]) << info.name;
  }
}

ValueSums MeasureDoubles(const std::vector<double>& values) {
  ValueSums sum;
  for (std::size_t at = 0; at < values.size(); at += kBlockValues) {
    const std::size_t n = std::min(kBlockValues, values.size() - at);
    sum.Add(MeasureBlock(DType::kF64, BytesAt(values) + at * 8, n));
  }
  return sum;
}

TEST(ValueStatistics, HugeAndTinyDoublesNeitherOverflowNorVanish) {
  ValueSums huge = MeasureDoubles(std::vector<double>(200000, 1e300));
  EXPECT_NEAR(huge.squares.Root() / (std::sqrt(200000.0) * 1e300), 1, 1e-14);
  EXPECT_NEAR(huge.sum.DividedBy(200000) / 1e300, 1, 1e-14);
  ValueSums largest = MeasureDoubles({kMostDouble, kMostDouble, -kMostDouble, kMostDouble});
  EXPECT_EQ(largest.sum.DividedBy(4), kMostDouble / 2);
  EXPECT_TRUE(std::isinf(largest.squares.Root()));
  ValueSums tiny = MeasureDoubles({kTiny, 3 * kTiny, 0, -0.0, 4 * kTiny});
  EXPECT_EQ(tiny.zeros, 2U);
  EXPECT_EQ(tiny.subnormals, 3U);
  EXPECT_EQ(tiny.squares.Root(), 5 * kTiny);  // The square root of 26, rounded.
  // A block of each kind.
  std::vector<double> mixed(kBlockValues, 1e-300);
  mixed.resize(2 * kBlockValues, 2.0);
  mixed.resize(3 * kBlockValues, -1e300);
  ValueSums all = MeasureDoubles(mixed);
  EXPECT_NEAR(all.squares.Root() / (256 * 1e300), 1, 1e-14);
  EXPECT_EQ(all.min, -1e300);
  EXPECT_EQ(all.max, 2.0);
}

TEST(ValueStatistics, IntegerSumsAndExtremesAreExact) {
  const std::vector<std::int64_t> values(1000, std::numeric_limits<std::int64_t>::min());
  const BlockStatistics low = MeasureBlock(DType::kI64, BytesAt(values), values.size());
  EXPECT_EQ(DecimalText(low.integer_sum), "-9223372036854775808000");
  EXPECT_EQ(DecimalText(low.integer_min), "-9223372036854775808");
  const std::vector<std::uint64_t> high_values(1000, ~std::uint64_t{0});
  const BlockStatistics high = MeasureBlock(DType::kU64, BytesAt(high_values), high_values.size());
  EXPECT_EQ(DecimalText(high.integer_sum), "18446744073709551615000");
  EXPECT_EQ(DecimalText(high.integer_max), "18446744073709551615");
  ValueSums sum;
  sum.Add(low);
  const std::vector<std::int64_t> more = {-1, 5};
  sum.Add(MeasureBlock(DType::kI64, BytesAt(more), 2));
  EXPECT_EQ(DecimalText(sum.integer_sum), "-9223372036854775807996");
  EXPECT_EQ(sum.integer_max, 5);
  const std::vector<std::uint8_t> positive = {7, 5};
  ValueSums small;
  small.Add(MeasureBlock(DType::kU8, BytesAt(positive), 2));
  EXPECT_EQ(small.integer_min, 5);
  EXPECT_EQ(small.integer_sum, 12);
}

ValueChange ChangeOf(const std::vector<double>& a, const std::vector<double>& b) {
  ValueChange change;
  change.Add(MeasureChange(DType::kF64, BytesAt(a), DType::kF64, BytesAt(b), a.size()));
  return change;
}

TEST(ValueStatistics, ChangesOfHugeAndTinyDoublesAreFinite) {
  const ValueChange huge = ChangeOf({1e300, -1e300, 1e300}, {1e300, -1e300, 2e300});
  EXPECT_EQ(huge.changed, 1U);
  EXPECT_EQ(huge.max_abs, 1e300);
  EXPECT_NEAR(huge.l2_change(), 1 / std::sqrt(3.0), 1e-15);
  EXPECT_NEAR(huge.cosine(), 4 / std::sqrt(18.0), 1e-15);
  // Differences that are no double.
  const ValueChange over = ChangeOf({kMostDouble, kMostDouble}, {-kMostDouble, kMostDouble});
  EXPECT_TRUE(std::isinf(over.max_abs));
  EXPECT_EQ(over.mean_abs(), kMostDouble);
  EXPECT_NEAR(over.l2_change(), std::sqrt(2.0), 1e-15);
  EXPECT_EQ(over.cosine(), 0);
  // A change that is far smaller than the values.
  const ValueChange fine = ChangeOf({1, 0}, {1, 1e-250});
  EXPECT_NEAR(fine.l2_change() / 1e-250, 1, 1e-15);
  const ValueChange apart = ChangeOf({1e300}, {1e-300});
  EXPECT_EQ(apart.cosine(), 1);
  EXPECT_EQ(ChangeOf({0, 0}, {0, 2}).l2_change(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(ChangeOf({kTiny}, {3 * kTiny}).l2_change(), 2);
}

TEST(ValueStatistics, ValuesOfOtherTypesAreComparedAfterDecoding) {
  const std::vector<float> a = {1, 2, NAN, INFINITY, -0.0F, 3};
  const std::vector<double> b = {1, 2.5, NAN, INFINITY, 0.0, NAN};
  const BlockChange change = MeasureChange(DType::kF32, BytesAt(a), DType::kF64, BytesAt(b), 6);
  EXPECT_EQ(change.changed, 2U);
  EXPECT_EQ(change.non_finite, 3U);
  EXPECT_EQ(change.max_abs, 0.5);
  const std::vector<std::int64_t> big = {std::numeric_limits<std::int64_t>::min(), 1 << 30};
  const std::vector<std::int32_t> small = {std::numeric_limits<std::int32_t>::max(), 1 << 30};
  const BlockChange exact =
      MeasureChange(DType::kI64, BytesAt(big), DType::kI32, BytesAt(small), 2);
  EXPECT_EQ(exact.changed, 1U);
  EXPECT_EQ(exact.max_abs_integer, (std::uint64_t{1} << 63) + 0x7fffffffU);
  const std::vector<std::uint64_t> low = {3};
  const std::vector<std::uint64_t> high = {~std::uint64_t{0}};
  EXPECT_EQ(MeasureChange(DType::kU64, BytesAt(high), DType::kU64, BytesAt(low), 1).max_abs_integer,
            ~std::uint64_t{0} - 3);
}

TEST(WideSum, KeepsWhatAdditionsRoundOff) {
  WideSum sum;
  sum.Add(1e100);
  for (int i = 0; i < 1000; ++i) sum.Add(1);
  sum.Add(-1e100);
  EXPECT_EQ(sum.DividedBy(1), 1000);
  WideSum wide;
  wide.Add(1, 2000);
  wide.Add(1, -2000);
  EXPECT_EQ(wide.RootOfRatio(wide), 1);
  EXPECT_TRUE(std::isinf(wide.DividedBy(1)));
  WideSum odd;
  odd.Add(2, -3);
  EXPECT_EQ(odd.Root(), 0.5);
  EXPECT_EQ(DecimalText(0), "0");
}

}  // namespace
}  // namespace tensormount
