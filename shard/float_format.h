// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_FLOAT_FORMAT_H_
#define TENSORMOUNT_SHARD_FLOAT_FORMAT_H_

#include <cstdint>

// The encoding of binary floats, for conversions at load (convert.cc) and for decoding values
// (decode_numbers.cc). Sign, exponent and fraction, from the highest bit down, with e the exponent
// field and f the fraction field:
//
//   e > 0   (1 + f / 2^fraction_bits) * 2^(e - bias)
//   e = 0   (0 + f / 2^fraction_bits) * 2^(1 - bias)    subnormal
//
// except for the codes of FloatFormat::specials. f8_e8m0 is not covered: it has neither sign nor
// fraction.

namespace tensormount {

struct FloatFormat {
  // Codes that are not finite numbers. kIeee: the highest exponent is infinity (fraction zero) or
  // NaN. kNanAllOnes ("fn"): no infinities, and only all ones are NaN. kNanMinusZero ("fnuz"): no
  // infinities, and the code of minus zero is NaN. kNone: every code is a finite number.
  enum class Specials : std::uint8_t { kIeee, kNanAllOnes, kNanMinusZero, kNone };

  int exponent_bits;
  int fraction_bits;
  Specials specials = Specials::kIeee;

  constexpr int bits() const { return 1 + exponent_bits + fraction_bits; }
  // The IEEE bias; one more in the fnuz types.
  constexpr int bias() const {
    return (1 << (exponent_bits - 1)) - (specials == Specials::kNanMinusZero ? 0 : 1);
  }
  constexpr bool has_infinity() const { return specials == Specials::kIeee; }
  constexpr std::uint64_t exponent_mask() const { return (std::uint64_t{1} << exponent_bits) - 1; }
  constexpr std::uint64_t fraction_mask() const { return (std::uint64_t{1} << fraction_bits) - 1; }
};

inline constexpr FloatFormat kF64Format{11, 52};
inline constexpr FloatFormat kF32Format{8, 23};
inline constexpr FloatFormat kBF16Format{8, 7};
inline constexpr FloatFormat kF16Format{5, 10};
inline constexpr FloatFormat kF8E5M2Format{5, 2};
inline constexpr FloatFormat kF8E4M3Format{4, 3, FloatFormat::Specials::kNanAllOnes};
inline constexpr FloatFormat kF8E5M2FNUZFormat{5, 2, FloatFormat::Specials::kNanMinusZero};
inline constexpr FloatFormat kF8E4M3FNUZFormat{4, 3, FloatFormat::Specials::kNanMinusZero};
inline constexpr FloatFormat kF6E2M3Format{2, 3, FloatFormat::Specials::kNone};
inline constexpr FloatFormat kF6E3M2Format{3, 2, FloatFormat::Specials::kNone};
inline constexpr FloatFormat kF4Format{2, 1, FloatFormat::Specials::kNone};

// An exact number: significand * 2^exponent. It represents every float and every integer of up to
// 64 bits, so conversions through it round only once, at the end.
struct ExactNumber {
  enum class Kind : std::uint8_t { kFinite, kInfinity, kNaN } kind = Kind::kFinite;
  bool negative = false;
  std::uint64_t significand = 0;
  int exponent = 0;
};

// Decodes the lowest bits() of `bits`. A template, so that masks and shifts are constants: loads
// decode billions of elements.
template <FloatFormat F>
constexpr ExactNumber DecodeExact(std::uint64_t bits) {
  using Kind = ExactNumber::Kind;
  ExactNumber x;
  x.negative = (bits >> (F.bits() - 1) & 1) != 0;
  const std::uint64_t exponent = (bits >> F.fraction_bits) & F.exponent_mask();
  const std::uint64_t fraction = bits & F.fraction_mask();
  switch (F.specials) {
    case FloatFormat::Specials::kIeee:
      if (exponent == F.exponent_mask()) x.kind = fraction == 0 ? Kind::kInfinity : Kind::kNaN;
      break;
    case FloatFormat::Specials::kNanAllOnes:
      if (exponent == F.exponent_mask() && fraction == F.fraction_mask()) x.kind = Kind::kNaN;
      break;
    case FloatFormat::Specials::kNanMinusZero:
      if (x.negative && exponent == 0 && fraction == 0) x.kind = Kind::kNaN;
      break;
    case FloatFormat::Specials::kNone:
      break;
  }
  if (x.kind != Kind::kFinite) return x;
  if (exponent == 0) {
    x.significand = fraction;
    x.exponent = 1 - F.bias() - F.fraction_bits;
  } else {
    x.significand = fraction | (std::uint64_t{1} << F.fraction_bits);
    x.exponent = static_cast<int>(exponent) - F.bias() - F.fraction_bits;
  }
  return x;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_FLOAT_FORMAT_H_
