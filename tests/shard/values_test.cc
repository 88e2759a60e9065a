// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "shard/compare_values.h"
#include "shard/convert.h"
#include "shard/element_values.h"

namespace tensormount {
namespace {

template <typename T>
ValueMismatch Compare(DType type, const std::vector<T>& a, const std::vector<T>& b,
                      std::uint64_t first = 0) {
  ValueMismatch sum;
  const std::size_t items = a.size() * sizeof(T) * 8 / InfoOf(type).bits;
  CompareValues(type, reinterpret_cast<const std::byte*>(a.data()), type,
                reinterpret_cast<const std::byte*>(b.data()), items, first, &sum);
  return sum;
}

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(ElementValues, DecodedSmallFloatsEqualTheirConversion) {
  for (const DType type : {DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2}) {
    const int bits = static_cast<int>(InfoOf(type).bits);
    for (std::uint32_t i = 0; i < 1U << bits; ++i) {
      const auto* raw = reinterpret_cast<const std::byte*>(&i);  // Little-endian.
      double mine = 0;
      double theirs = 0;
      DecodeNumbers(type, raw, 1, &mine);
      (void)ConvertElements(type, raw, DType::kF64, reinterpret_cast<std::byte*>(&theirs), 8, 1);
      ASSERT_TRUE(std::isnan(mine) ? std::isnan(theirs) : mine == theirs)
          << InfoOf(type).name << " " << i;
    }
  }
}

TEST(ElementValues, DecodesTypesWithoutAConversion) {
  const auto value = [](DType type, std::uint8_t bits) {
    double out = 0;
    DecodeNumbers(type, reinterpret_cast<const std::byte*>(&bits), 1, &out);
    return out;
  };
  EXPECT_EQ(value(DType::kF8E8M0, 127), 1);
  EXPECT_EQ(value(DType::kF8E8M0, 130), 8);
  EXPECT_TRUE(std::isnan(value(DType::kF8E8M0, 255)));
  EXPECT_EQ(value(DType::kF8E4M3FNUZ, 0x7F), 240);
  EXPECT_TRUE(std::isnan(value(DType::kF8E4M3FNUZ, 0x80)));
  EXPECT_EQ(value(DType::kF8E5M2FNUZ, 0x7F), 57344);
}

// What is behind the last number is somebody else's.
TEST(ElementValues, DecodeWritesOnlyTheRequestedNumbers) {
  const std::vector<std::byte> zeros(64);
  for (const DType type : {DType::kBool, DType::kU8, DType::kI8, DType::kU16, DType::kI16,
                           DType::kU32, DType::kI32, DType::kI64, DType::kU64, DType::kF16,
                           DType::kBF16, DType::kF32, DType::kF64, DType::kF8E4M3}) {
    std::vector<double> numbers(4, 7);
    DecodeNumbers(type, zeros.data(), 3, numbers.data());
    EXPECT_EQ(numbers, (std::vector<double>{0, 0, 0, 7})) << InfoOf(type).name;
    const NumberKind kind = NumberKindOf(type);
    if (kind != NumberKind::kInteger && kind != NumberKind::kUnsigned) continue;
    std::vector<std::int64_t> integers(4, 7);
    DecodeIntegers(type, zeros.data(), 3, integers.data());
    EXPECT_EQ(integers, (std::vector<std::int64_t>{0, 0, 0, 7})) << InfoOf(type).name;
  }
}

TEST(CompareValues, ReportsCountDistanceAndPlaceOfDifferences) {
  const ValueMismatch d = Compare<float>(DType::kF32, {1, 2, 3, 4}, {1, 2.5, 3, 2}, 100);
  EXPECT_EQ(d.compared, 4U);
  EXPECT_EQ(d.differing, 2U);
  EXPECT_EQ(d.first, 101U);
  EXPECT_EQ(d.max_abs->value, 2);
  EXPECT_EQ(d.max_abs->at, 103U);
  EXPECT_EQ(d.max_rel->value, 0.5);
  EXPECT_EQ(d.max_rel->at, 103U);
  EXPECT_FALSE(d.max_abs_integer);
}

TEST(CompareValues, NanHasNoDistance) {
  const float other = std::bit_cast<float>(std::bit_cast<std::uint32_t>(kNan) ^ 1U);
  const ValueMismatch d =
      Compare<float>(DType::kF32, {kNan, kNan, kNan, 0, 5}, {kNan, other, 1, -0.0F, kNan});
  EXPECT_EQ(d.nan_both, 1U);  // Equal bits are not even looked at.
  EXPECT_EQ(d.nan_beside, 2U);
  EXPECT_EQ(d.equal_other_bits, 1U);
  EXPECT_EQ(d.differing, 2U);
  EXPECT_EQ(d.first, 2U);
  EXPECT_FALSE(d.max_abs) << "nothing that differs has a distance";
}

TEST(CompareValues, OppositeInfinitiesAreInfinitelyFar) {
  const ValueMismatch d = Compare<float>(DType::kF32, {kInf, 1, kInf}, {-kInf, 1, 3});
  EXPECT_EQ(d.differing, 2U);
  EXPECT_EQ(d.max_abs->value, std::numeric_limits<double>::infinity());
  EXPECT_EQ(d.max_abs->at, 0U);
  EXPECT_EQ(d.max_rel->value, 1);
}

TEST(CompareValues, IntegersAreComparedExactly) {
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  const ValueMismatch d = Compare<std::int64_t>(DType::kI64, {big, 7, -big - 1}, {big - 1, 7, big});
  EXPECT_EQ(d.differing, 2U);
  EXPECT_EQ(*d.max_abs_integer, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(d.max_abs->at, 2U);
  const ValueMismatch one = Compare<std::int64_t>(DType::kI64, {big}, {big - 1});
  EXPECT_EQ(*one.max_abs_integer, 1U);
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(*Compare<std::uint64_t>(DType::kU64, {most}, {most - 3}).max_abs_integer, 3U);
}

TEST(CompareValues, ComplexDistanceIsTheAbsoluteValue) {
  const ValueMismatch d = Compare<float>(DType::kC64, {0, 0, 1, kNan}, {3, -4, 1, 2});
  EXPECT_EQ(d.compared, 2U);
  EXPECT_EQ(d.max_abs->value, 5);
  EXPECT_EQ(d.nan_beside, 1U);
}

TEST(CompareValues, ValuesOfDifferentTypesAreCompared) {
  const std::vector<float> a = {1, 2, 0.1F};
  const std::uint16_t b[] = {0x3F80, 0x4000, 0x3DCD};  // bf16: 1, 2, about 0.1.
  ValueMismatch d;
  CompareValues(DType::kF32, reinterpret_cast<const std::byte*>(a.data()), DType::kBF16,
                reinterpret_cast<const std::byte*>(b), 3, 0, &d);
  EXPECT_EQ(d.differing, 1U);
  EXPECT_EQ(d.equal_other_bits, 0U);
  EXPECT_LT(d.max_abs->value, 1e-3);
  EXPECT_TRUE(CanCompareValues(DType::kI8, DType::kF64));
  EXPECT_FALSE(CanCompareValues(DType::kC64, DType::kF64));
  EXPECT_FALSE(CanCompareValues(DType::kF4, DType::kF4));
}

TEST(CompareValues, BlocksMergeInAnyOrder) {
  std::vector<std::int32_t> a(4000);
  std::vector<std::int32_t> b(4000);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<std::int32_t>(i * 7919 % 1013);
    b[i] = i % 3 == 0 ? a[i] : static_cast<std::int32_t>(i * 104729 % 1013);
  }
  const ValueMismatch whole = Compare(DType::kI32, a, b);
  ValueMismatch sum;
  for (const std::size_t begin : {std::size_t{2600}, std::size_t{0}, std::size_t{1000}}) {
    const std::size_t end = begin == 0 ? 1000 : (begin == 1000 ? 2600 : 4000);
    const auto part = [&](const std::vector<std::int32_t>& all) {
      return std::vector<std::int32_t>(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                       all.begin() + static_cast<std::ptrdiff_t>(end));
    };
    sum.Add(Compare(DType::kI32, part(a), part(b), begin));
  }
  EXPECT_GT(whole.differing, 2000U);
  EXPECT_EQ(sum.compared, whole.compared);
  EXPECT_EQ(sum.differing, whole.differing);
  EXPECT_EQ(sum.first, whole.first);
  EXPECT_EQ(sum.max_abs_integer, whole.max_abs_integer);
  EXPECT_EQ(sum.max_abs->at, whole.max_abs->at);
  EXPECT_EQ(sum.max_rel->value, whole.max_rel->value);
  EXPECT_EQ(sum.max_rel->at, whole.max_rel->at);
}

}  // namespace
}  // namespace tensormount
