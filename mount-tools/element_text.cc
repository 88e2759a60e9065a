// SPDX-License-Identifier: Apache-2.0
#include "mount-tools/element_text.h"

#include <cmath>
#include <limits>

#include <fmt/core.h>

#include "base/coding.h"

namespace tensormount::tools {
namespace {

// What the bits of a small float mean. `finite_only`: no infinities, and NaN is all ones (fn) or
// minus zero (fnuz).
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  enum class Specials { kIeee, kNanAllOnes, kNanMinusZero } specials;
};

float DecodeSmallFloat(std::uint32_t bits, const SmallFloat& f) {
  const int total = 1 + f.exponent_bits + f.mantissa_bits;
  const std::uint32_t sign = bits >> (total - 1) & 1;
  const std::uint32_t exponent = bits >> f.mantissa_bits & ((1U << f.exponent_bits) - 1);
  const std::uint32_t mantissa = bits & ((1U << f.mantissa_bits) - 1);
  const std::uint32_t max_exponent = (1U << f.exponent_bits) - 1;
  const std::uint32_t max_mantissa = (1U << f.mantissa_bits) - 1;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  switch (f.specials) {
    case SmallFloat::Specials::kIeee:
      if (exponent == max_exponent) {
        if (mantissa != 0) return kNan;
        return sign != 0 ? -INFINITY : INFINITY;
      }
      break;
    case SmallFloat::Specials::kNanAllOnes:
      if (exponent == max_exponent && mantissa == max_mantissa) return kNan;
      break;
    case SmallFloat::Specials::kNanMinusZero:
      if (sign != 0 && exponent == 0 && mantissa == 0) return kNan;
      break;
  }
  const float value = exponent == 0
                          ? std::ldexp(static_cast<float>(mantissa), 1 - f.bias - f.mantissa_bits)
                          : std::ldexp(static_cast<float>(mantissa + (1U << f.mantissa_bits)),
                                       static_cast<int>(exponent) - f.bias - f.mantissa_bits);
  return sign != 0 ? -value : value;
}

template <typename T>
std::string Number(const std::byte* p) {
  return fmt::format("{}", LoadLittle<T>(p));
}

std::string Complex(double imaginary, const std::string& r, const std::string& i) {
  return r + (std::signbit(imaginary) ? "" : "+") + i + "j";
}

}  // namespace

std::string ElementText(DType dtype, const std::byte* p) {
  using S = SmallFloat::Specials;
  switch (dtype) {
    case DType::kBool:
      return LoadLittle<std::uint8_t>(p) != 0 ? "true" : "false";
    case DType::kI8:
      return fmt::format("{}", static_cast<int>(LoadLittle<std::int8_t>(p)));
    case DType::kU8:
      return fmt::format("{}", static_cast<int>(LoadLittle<std::uint8_t>(p)));
    case DType::kI16:
      return Number<std::int16_t>(p);
    case DType::kU16:
      return Number<std::uint16_t>(p);
    case DType::kI32:
      return Number<std::int32_t>(p);
    case DType::kU32:
      return Number<std::uint32_t>(p);
    case DType::kI64:
      return Number<std::int64_t>(p);
    case DType::kU64:
      return Number<std::uint64_t>(p);
    case DType::kF32:
      return Number<float>(p);
    case DType::kF64:
      return Number<double>(p);
    case DType::kF16:
      return fmt::format("{}",
                         DecodeSmallFloat(LoadLittle<std::uint16_t>(p), {5, 10, 15, S::kIeee}));
    case DType::kBF16:
      return fmt::format("{}",
                         DecodeSmallFloat(LoadLittle<std::uint16_t>(p), {8, 7, 127, S::kIeee}));
    case DType::kF8E4M3:
      return fmt::format("{}",
                         DecodeSmallFloat(LoadLittle<std::uint8_t>(p), {4, 3, 7, S::kNanAllOnes}));
    case DType::kF8E5M2:
      return fmt::format("{}", DecodeSmallFloat(LoadLittle<std::uint8_t>(p), {5, 2, 15, S::kIeee}));
    case DType::kF8E4M3FNUZ:
      return fmt::format(
          "{}", DecodeSmallFloat(LoadLittle<std::uint8_t>(p), {4, 3, 8, S::kNanMinusZero}));
    case DType::kF8E5M2FNUZ:
      return fmt::format(
          "{}", DecodeSmallFloat(LoadLittle<std::uint8_t>(p), {5, 2, 16, S::kNanMinusZero}));
    case DType::kF8E8M0: {
      const int e = LoadLittle<std::uint8_t>(p);
      return e == 255 ? "nan" : fmt::format("{}", std::ldexp(1.0, e - 127));
    }
    case DType::kC64:
      return Complex(LoadLittle<float>(p + 4), Number<float>(p), Number<float>(p + 4));
    case DType::kC128:
      return Complex(LoadLittle<double>(p + 8), Number<double>(p), Number<double>(p + 8));
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF4:
      break;
  }
  return "?";
}

}  // namespace tensormount::tools
