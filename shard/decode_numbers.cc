// SPDX-License-Identifier: Apache-2.0
// Decodes elements of every dtype to doubles (element_values.h), by integer arithmetic that
// compilers turn into vector instructions. `diff --stats` and `stats --full` decode billions.
#include <bit>
#include <cstring>
#include <limits>

#include "shard/element_values.h"
#include "shard/float_format.h"
#include "shard/vector_code.h"

namespace tensormount {
namespace {

template <typename T>
T LoadNumber(const std::byte* src, std::size_t i) {
  T value;
  std::memcpy(&value, src + i * sizeof(T), sizeof(T));
  return value;
}

// A float of at most 16 bits. Its exponent and fraction are moved to their place in a float, whose
// exponent is then corrected. The fraction of a subnormal number is added to a power of two that is
// subtracted again, so that no float here is subnormal: some programs turn those off.
template <FloatFormat F>
double DecodeFloat(std::uint32_t code) {
  constexpr int kShift = kF32Format.fraction_bits - F.fraction_bits;
  constexpr auto kRebias = static_cast<std::uint32_t>(kF32Format.bias() - F.bias());
  constexpr std::uint32_t kSign = 1U << (F.bits() - 1);
  constexpr std::uint32_t kAllOnes = kSign - 1;
  constexpr std::uint32_t kInfinity = static_cast<std::uint32_t>(F.exponent_mask())
                                      << F.fraction_bits;
  constexpr std::uint32_t kF32Infinity = 0x7f800000U;
  constexpr std::uint32_t kF32Nan = 0x7fc00000U;
  const std::uint32_t magnitude = code & kAllOnes;
  const std::uint32_t moved = magnitude << kShift;
  constexpr std::uint32_t kPower = (kRebias + 1) << kF32Format.fraction_bits;
  const float small = std::bit_cast<float>(moved + kPower) - std::bit_cast<float>(kPower);
  // Masks, because compilers make branches of conditions here.
  const std::uint32_t is_small = 0U - std::uint32_t{magnitude < (1U << F.fraction_bits)};
  std::uint32_t bits = (std::bit_cast<std::uint32_t>(small) & is_small) |
                       ((moved + (kRebias << kF32Format.fraction_bits)) & ~is_small);
  if (F.specials == FloatFormat::Specials::kIeee) {
    bits |= kF32Infinity & (0U - std::uint32_t{magnitude >= kInfinity});
  } else if (F.specials == FloatFormat::Specials::kNanAllOnes) {
    bits |= kF32Nan & (0U - std::uint32_t{magnitude == kAllOnes});
  } else if (F.specials == FloatFormat::Specials::kNanMinusZero) {
    bits |= kF32Nan & (0U - std::uint32_t{code == kSign});
  }
  bits |= (code & kSign) << (kF32Format.bits() - F.bits());
  return static_cast<double>(std::bit_cast<float>(bits));
}

template <FloatFormat F, typename Bits>
void DecodeFloats(const std::byte* src, std::size_t count, double* __restrict out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = DecodeFloat<F>(LoadNumber<Bits>(src, i));
}

template <typename T>
void DecodeByCast(const std::byte* src, std::size_t count, double* __restrict out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<double>(LoadNumber<T>(src, i));
}

// The bits of 2^52 + x are 2^52's with x in the lowest bits. (Vector instructions convert signed
// integers only.)
void DecodeU32(const std::byte* src, std::size_t count, double* __restrict out) {
  constexpr std::uint64_t kTwo52 = 0x4330000000000000U;
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = std::bit_cast<double>(kTwo52 | LoadNumber<std::uint32_t>(src, i)) -
             std::bit_cast<double>(kTwo52);
  }
}

// The values of f8_e8m0 are powers of two, 2^(code - 127), and NaN for all ones.
void DecodeScales(const std::byte* src, std::size_t count, double* __restrict out) {
  constexpr auto kRebias = static_cast<std::uint64_t>(kF64Format.bias() - 127);
  constexpr std::uint64_t kNan = 0x7ff8000000000000U;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t code = LoadNumber<std::uint8_t>(src, i);
    out[i] = std::bit_cast<double>(code == 255 ? kNan : (code + kRebias) << 52);
  }
}

// Calls fn(codes, number of codes, position of the first) for steps of the elements.
template <typename Fn>
void ForEachUnpacked(DType dtype, const std::byte* src, std::size_t count, const Fn& fn) {
  constexpr std::size_t kStep = 512;
  std::uint8_t codes[kStep];
  const std::size_t bits = InfoOf(dtype).bits;
  for (std::size_t done = 0; done < count; done += kStep) {
    const std::size_t n = std::min(kStep, count - done);
    UnpackCodes(dtype, src + done * bits / 8, n, codes);
    fn(reinterpret_cast<const std::byte*>(codes), n, done);
  }
}

template <FloatFormat F>
void DecodePacked(DType dtype, const std::byte* src, std::size_t count, double* __restrict out) {
  ForEachUnpacked(dtype, src, count, [&](const std::byte* codes, std::size_t n, std::size_t at) {
    DecodeFloats<F, std::uint8_t>(codes, n, out + at);
  });
}

void DecodeAll(DType dtype, const std::byte* src, std::size_t count, double* out) {
  switch (dtype) {
    case DType::kBool:
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = LoadNumber<std::uint8_t>(src, i) != 0 ? 1.0 : 0.0;
      }
      return;
    case DType::kI8:
      return DecodeByCast<std::int8_t>(src, count, out);
    case DType::kU8:
      return DecodeByCast<std::uint8_t>(src, count, out);
    case DType::kI16:
      return DecodeByCast<std::int16_t>(src, count, out);
    case DType::kU16:
      return DecodeByCast<std::uint16_t>(src, count, out);
    case DType::kI32:
      return DecodeByCast<std::int32_t>(src, count, out);
    case DType::kU32:
      return DecodeU32(src, count, out);
    case DType::kI64:
      return DecodeByCast<std::int64_t>(src, count, out);
    case DType::kU64:
      return DecodeByCast<std::uint64_t>(src, count, out);
    case DType::kF16:
      return DecodeFloats<kF16Format, std::uint16_t>(src, count, out);
    case DType::kBF16:
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = std::uint32_t{LoadNumber<std::uint16_t>(src, i)} << 16;
        out[i] = static_cast<double>(std::bit_cast<float>(bits));
      }
      return;
    case DType::kF32:
      return DecodeByCast<float>(src, count, out);
    case DType::kC64:
      return DecodeByCast<float>(src, 2 * count, out);
    case DType::kF64:
      std::memcpy(out, src, count * sizeof(double));
      return;
    case DType::kC128:
      std::memcpy(out, src, 2 * count * sizeof(double));
      return;
    case DType::kF8E4M3:
      return DecodeFloats<kF8E4M3Format, std::uint8_t>(src, count, out);
    case DType::kF8E5M2:
      return DecodeFloats<kF8E5M2Format, std::uint8_t>(src, count, out);
    case DType::kF8E4M3FNUZ:
      return DecodeFloats<kF8E4M3FNUZFormat, std::uint8_t>(src, count, out);
    case DType::kF8E5M2FNUZ:
      return DecodeFloats<kF8E5M2FNUZFormat, std::uint8_t>(src, count, out);
    case DType::kF8E8M0:
      return DecodeScales(src, count, out);
    case DType::kF6E2M3:
      return DecodePacked<kF6E2M3Format>(dtype, src, count, out);
    case DType::kF6E3M2:
      return DecodePacked<kF6E3M2Format>(dtype, src, count, out);
    case DType::kF4:
      return DecodePacked<kF4Format>(dtype, src, count, out);
      // No default, so that a new type that is missing here does not compile.
  }
}

}  // namespace

void DecodeNumbers(DType dtype, const std::byte* src, std::size_t count, double* out) {
  if (UsesAvx2()) {
    RunWithAvx2([&] { DecodeAll(dtype, src, count, out); });
  } else {
    DecodeAll(dtype, src, count, out);
  }
}

void UnpackCodes(DType dtype, const std::byte* src, std::size_t count, std::uint8_t* out) {
  const auto at = [&](std::size_t i) { return std::to_integer<std::uint32_t>(src[i]); };
  if (InfoOf(dtype).bits == 4) {
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = static_cast<std::uint8_t>(at(i / 2) >> (i % 2 * 4) & 0xf);
    }
    return;
  }
  // Four codes of 6 bits in three bytes.
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t bit = i * 6;
    std::uint32_t two = at(bit / 8);
    if (bit % 8 > 2) two |= at(bit / 8 + 1) << 8;
    out[i] = static_cast<std::uint8_t>(two >> bit % 8 & 0x3f);
  }
}

}  // namespace tensormount
