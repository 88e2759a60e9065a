// SPDX-License-Identifier: Apache-2.0
// Decodes elements to numbers, for `cat`, `diff --values` and messages. Supports every dtype of at
// least one byte, also those for which C++ has no type.
#include "shard/element_values.h"

#include <bit>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "shard/float_format.h"

namespace tensormount {
namespace {

template <FloatFormat F>
float DecodeSmall(std::uint64_t bits) {
  const ExactNumber x = DecodeExact<F>(bits);
  if (x.kind == ExactNumber::Kind::kNaN) return std::numeric_limits<float>::quiet_NaN();
  const float size = x.kind == ExactNumber::Kind::kInfinity
                         ? std::numeric_limits<float>::infinity()
                         : std::ldexp(static_cast<float>(x.significand), x.exponent);
  return x.negative ? -size : size;
}

template <FloatFormat F>
std::vector<float> Table() {
  std::vector<float> table(std::size_t{1} << F.bits());
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = DecodeSmall<F>(i);
  return table;
}

// The values of f8_e8m0: powers of two, 2^(bits - 127), and NaN for all ones. The lowest, 2^-127,
// is subnormal as a float and exact.
std::vector<float> ScaleTable() {
  std::vector<float> table(256);
  for (int e = 0; e < 255; ++e) table[static_cast<std::size_t>(e)] = std::ldexp(1.0F, e - 127);
  table[255] = std::numeric_limits<float>::quiet_NaN();
  return table;
}

// Tables of every value of f16 and of the 8-bit floats, because millions are decoded (diff
// --values) and decoding one calls ldexp. 256 KiB for f16, one KiB for each of the others; made on
// first use.
const std::vector<float>& TableOf(DType dtype) {
  static const std::vector<float> f16 = Table<kF16Format>();
  static const std::vector<float> e4m3 = Table<kF8E4M3Format>();
  static const std::vector<float> e5m2 = Table<kF8E5M2Format>();
  static const std::vector<float> e4m3fnuz = Table<kF8E4M3FNUZFormat>();
  static const std::vector<float> e5m2fnuz = Table<kF8E5M2FNUZFormat>();
  static const std::vector<float> e8m0 = ScaleTable();
  switch (dtype) {
    case DType::kF16:
      return f16;
    case DType::kF8E4M3:
      return e4m3;
    case DType::kF8E5M2:
      return e5m2;
    case DType::kF8E4M3FNUZ:
      return e4m3fnuz;
    case DType::kF8E5M2FNUZ:
      return e5m2fnuz;
    case DType::kF8E8M0:
      return e8m0;
    // Other types have no table; a new type must be added above or here.
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF4:
    case DType::kC64:
    case DType::kC128:
      break;
  }
  std::abort();  // The caller passed a wrong type.
}

template <typename T>
T LoadAt(const std::byte* src, std::size_t i) {
  T value;
  std::memcpy(&value, src + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T, typename Out>
void Widen(const std::byte* src, std::size_t count, Out* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<Out>(LoadAt<T>(src, i));
}

template <typename Bits>
void LookUp(DType dtype, const std::byte* src, std::size_t count, double* out) {
  const std::vector<float>& table = TableOf(dtype);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<double>(table[LoadAt<Bits>(src, i)]);
}

// Widens integers and bools; returns false for other types.
template <typename Out>
bool WidenIntegers(DType dtype, const std::byte* src, std::size_t count, Out* out) {
  switch (dtype) {
    case DType::kBool:
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = LoadAt<std::uint8_t>(src, i) != 0 ? Out{1} : Out{0};
      }
      return true;
    case DType::kI8:
      Widen<std::int8_t>(src, count, out);
      return true;
    case DType::kU8:
      Widen<std::uint8_t>(src, count, out);
      return true;
    case DType::kI16:
      Widen<std::int16_t>(src, count, out);
      return true;
    case DType::kU16:
      Widen<std::uint16_t>(src, count, out);
      return true;
    case DType::kI32:
      Widen<std::int32_t>(src, count, out);
      return true;
    case DType::kU32:
      Widen<std::uint32_t>(src, count, out);
      return true;
    case DType::kI64:
      Widen<std::int64_t>(src, count, out);
      return true;
    case DType::kU64:
      Widen<std::uint64_t>(src, count, out);
      return true;
    default:
      return false;
  }
}

}  // namespace

NumberKind NumberKindOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
      return NumberKind::kInteger;
    case DType::kU64:
      return NumberKind::kUnsigned;
    case DType::kC64:
    case DType::kC128:
      return NumberKind::kComplex;
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF4:
      return NumberKind::kNone;
    // No default, so that a new type that is missing here does not compile.
    case DType::kF64:
    case DType::kF32:
    case DType::kBF16:
    case DType::kF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0:
      return NumberKind::kReal;
  }
  return NumberKind::kNone;
}

void DecodeNumbers(DType dtype, const std::byte* src, std::size_t count, double* out) {
  switch (dtype) {
    case DType::kF64:
      std::memcpy(out, src, count * sizeof(double));
      return;
    case DType::kC128:
      std::memcpy(out, src, count * 2 * sizeof(double));
      return;
    case DType::kF32:
      Widen<float>(src, count, out);
      return;
    case DType::kC64:
      Widen<float>(src, count * 2, out);
      return;
    case DType::kBF16:
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = static_cast<std::uint32_t>(LoadAt<std::uint16_t>(src, i)) << 16;
        out[i] = static_cast<double>(std::bit_cast<float>(bits));
      }
      return;
    case DType::kF16:
      LookUp<std::uint16_t>(dtype, src, count, out);
      return;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0:
      LookUp<std::uint8_t>(dtype, src, count, out);
      return;
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
      (void)WidenIntegers(dtype, src, count, out);
      return;
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF4:
      assert(false);  // kNone: the caller must check NumberKindOf first.
  }
}

void DecodeIntegers(DType dtype, const std::byte* src, std::size_t count, std::int64_t* out) {
  (void)WidenIntegers(dtype, src, count, out);  // The caller passes an integer type.
}

}  // namespace tensormount
