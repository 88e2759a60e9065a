// SPDX-License-Identifier: Apache-2.0
// Conversion between number types by value, with one rounding: each source element becomes an exact
// sign, significand and exponent, which are rounded to the target, to nearest with ties to even.
// This is slower than a cast, but the result is the same on every machine. Faster instructions with
// the same result are used for the pairs of types in kByHardware.
#include "shard/convert.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "shard/float_format.h"

namespace tensormount {
namespace {

// The bits of NaN: a quiet NaN (the highest bit of the fraction is set), or all ones if the format
// has no infinity.
template <FloatFormat F>
constexpr std::uint64_t NanOf() {
  const std::uint64_t exponent = F.exponent_mask() << F.fraction_bits;
  return F.has_infinity() ? exponent | (std::uint64_t{1} << (F.fraction_bits - 1))
                          : exponent | F.fraction_mask();
}
// The bits that stand for overflow: infinity, or NaN if the format has no infinity.
template <FloatFormat F>
constexpr std::uint64_t OverflowOf() {
  return F.has_infinity() ? F.exponent_mask() << F.fraction_bits : NanOf<F>();
}

template <FloatFormat F>
std::uint64_t Encode(const ExactNumber& x) {
  const std::uint64_t sign = x.negative ? std::uint64_t{1} << (F.bits() - 1) : 0;
  if (x.kind == ExactNumber::Kind::kNaN) return sign | NanOf<F>();
  if (x.kind == ExactNumber::Kind::kInfinity) return sign | OverflowOf<F>();
  if (x.significand == 0) return sign;
  // The exponent of the result's last place: that of a normal number with the same first bit, but
  // at least that of subnormal numbers.
  const int first = 63 - std::countl_zero(x.significand) + x.exponent;
  const int lowest = 1 - F.bias() - F.fraction_bits;
  const int place = std::max(first - F.fraction_bits, lowest);
  const int drop = place - x.exponent;  // Bits of the significand below the last place.
  // If 64 or more bits are dropped, `rounded` stays zero, because the significand is less than half
  // of the last place. (A 64-bit integer is never that far below the last place.)
  std::uint64_t rounded = 0;
  if (drop <= 0) {
    rounded = x.significand << -drop;
  } else if (drop < 64) {
    rounded = x.significand >> drop;
    const std::uint64_t rest = x.significand & ((std::uint64_t{1} << drop) - 1);
    const std::uint64_t half = std::uint64_t{1} << (drop - 1);
    if (rest > half || (rest == half && (rounded & 1) != 0)) ++rounded;
  }
  // Adding `rounded` to the exponent field lets a carry out of the fraction raise the exponent:
  // subnormal numbers become normal, and the largest number overflows.
  const std::uint64_t magnitude =
      (static_cast<std::uint64_t>(place - lowest) << F.fraction_bits) + rounded;
  if (magnitude >= OverflowOf<F>()) return sign | OverflowOf<F>();
  return sign | magnitude;
}

template <typename T>
T LoadElement(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}
template <typename T>
void Store(std::byte* p, T v) {
  std::memcpy(p, &v, sizeof(T));
}

template <FloatFormat F, typename Bits>
struct FloatType {
  static constexpr FloatFormat kFormat = F;
  using Storage = Bits;
};

// Calls fn with a value of the C++ type for `dtype`; returns false if there is none. Two nested
// calls, one for each type, choose one of 15 * 15 loops with constant formats before the first
// element.
template <typename Fn>
bool WithType(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kBool:
      fn(bool{});
      return true;
    case DType::kI8:
      fn(std::int8_t{});
      return true;
    case DType::kU8:
      fn(std::uint8_t{});
      return true;
    case DType::kI16:
      fn(std::int16_t{});
      return true;
    case DType::kU16:
      fn(std::uint16_t{});
      return true;
    case DType::kI32:
      fn(std::int32_t{});
      return true;
    case DType::kU32:
      fn(std::uint32_t{});
      return true;
    case DType::kI64:
      fn(std::int64_t{});
      return true;
    case DType::kU64:
      fn(std::uint64_t{});
      return true;
    case DType::kF16:
      fn(FloatType<kF16Format, std::uint16_t>{});
      return true;
    case DType::kBF16:
      fn(FloatType<kBF16Format, std::uint16_t>{});
      return true;
    case DType::kF32:
      fn(FloatType<kF32Format, std::uint32_t>{});
      return true;
    case DType::kF64:
      fn(FloatType<kF64Format, std::uint64_t>{});
      return true;
    case DType::kF8E4M3:
      fn(FloatType<kF8E4M3Format, std::uint8_t>{});
      return true;
    case DType::kF8E5M2:
      fn(FloatType<kF8E5M2Format, std::uint8_t>{});
      return true;
    default:
      return false;
  }
}

template <typename T>
inline constexpr bool kIsFloat = !std::is_integral_v<T>;

bool IsFloat(DType dtype) {
  bool is = false;
  (void)WithType(dtype, [&]<typename T>(T) { is = kIsFloat<T>; });
  return is;
}
bool IsKnown(DType dtype) {
  return WithType(dtype, [](auto) {});
}

// Whether hardware converts From to To in one instruction with our rounding, or integer arithmetic
// does so in a few: bf16 is the upper half of f32, so a shift widens it, and adding 0x7fff and the
// lowest kept bit rounds to nearest, ties to even. NaNs are handled separately: the addition could
// carry into infinity or the sign, and processors disagree on the payload.
template <typename From, typename To>
inline constexpr bool kByHardware = false;
using F32Type = FloatType<kF32Format, std::uint32_t>;
using F64Type = FloatType<kF64Format, std::uint64_t>;
using BF16Type = FloatType<kBF16Format, std::uint16_t>;
template <>
inline constexpr bool kByHardware<F32Type, F64Type> = true;
template <>
inline constexpr bool kByHardware<F64Type, F32Type> = true;
template <>
inline constexpr bool kByHardware<BF16Type, F32Type> = true;
template <>
inline constexpr bool kByHardware<F32Type, BF16Type> = true;

template <typename From, typename To>
typename To::Storage FloatToFloat(typename From::Storage bits) {
  if constexpr (std::is_same_v<From, BF16Type> && std::is_same_v<To, F32Type>) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
    return nan ? (wide & 0x80000000u) | 0x7fc00000u : wide;
  } else if constexpr (std::is_same_v<From, F32Type> && std::is_same_v<To, BF16Type>) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      return static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | 0x7fc0u);
    }
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  } else if constexpr (kByHardware<From, To>) {
    using FromFloat = std::conditional_t<sizeof(bits) == 4, float, double>;
    using ToFloat = std::conditional_t<sizeof(bits) == 4, double, float>;
    const auto value = static_cast<ToFloat>(std::bit_cast<FromFloat>(bits));
    if (value != value) {  // All NaNs of one sign get the same bits.
      const std::uint64_t sign = bits >> (From::kFormat.bits() - 1);
      return static_cast<typename To::Storage>(sign << (To::kFormat.bits() - 1) |
                                               NanOf<To::kFormat>());
    }
    return std::bit_cast<typename To::Storage>(value);
  } else {
    return static_cast<typename To::Storage>(Encode<To::kFormat>(DecodeExact<From::kFormat>(bits)));
  }
}

template <typename From, typename To>
std::optional<UnfitElement> Convert(const std::byte* src, std::byte* dst, std::int64_t step,
                                    std::size_t count) {
  if constexpr (kIsFloat<From>) {
    if constexpr (kIsFloat<To>) {
      using Bits = typename From::Storage;
      for (std::size_t i = 0; i < count; ++i, src += sizeof(Bits), dst += step) {
        Store(dst, FloatToFloat<From, To>(LoadElement<Bits>(src)));
      }
    }
    return std::nullopt;  // CanConvert refuses floats to integers.
  } else {
    // A bool is read as a byte and not as a C++ bool, because bytes other than 0 and 1 may be
    // stored. They count as true.
    using Source = std::conditional_t<std::is_same_v<From, bool>, std::uint8_t, From>;
    for (std::size_t i = 0; i < count; ++i, src += sizeof(Source), dst += step) {
      Source value = LoadElement<Source>(src);
      if constexpr (std::is_same_v<From, bool>) value = value != 0 ? 1 : 0;
      if constexpr (kIsFloat<To>) {
        // An integer is its own significand. The negation is unsigned, so that INT64_MIN works.
        ExactNumber x;
        x.negative = std::cmp_less(value, 0);
        const auto wide = static_cast<std::uint64_t>(value);
        x.significand = x.negative ? std::uint64_t{0} - wide : wide;
        Store(dst, static_cast<typename To::Storage>(Encode<To::kFormat>(x)));
      } else if constexpr (std::is_same_v<To, bool>) {
        if (!std::cmp_equal(value, 0) && !std::cmp_equal(value, 1)) {
          return UnfitElement{i, std::to_string(value)};
        }
        Store(dst, static_cast<std::uint8_t>(value));
      } else {
        if (!std::in_range<To>(value)) return UnfitElement{i, std::to_string(value)};
        Store(dst, static_cast<To>(value));
      }
    }
    return std::nullopt;
  }
}

}  // namespace

Status CanConvert(DType from, DType to) {
  if (from == to) return {};
  if (IsKnown(from) && IsKnown(to) && (!IsFloat(from) || IsFloat(to))) return {};
  return Status(Code::kUnsupported, std::string(InfoOf(from).name) + " cannot be converted to " +
                                        std::string(InfoOf(to).name));
}

std::optional<UnfitElement> ConvertElements(DType from, const std::byte* src, DType to,
                                            std::byte* dst, std::int64_t dst_step,
                                            std::size_t count) {
  std::optional<UnfitElement> unfit;
  (void)WithType(from, [&]<typename From>(From) {
    (void)WithType(to,
                   [&]<typename To>(To) { unfit = Convert<From, To>(src, dst, dst_step, count); });
  });
  return unfit;
}

}  // namespace tensormount
