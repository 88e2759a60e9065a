// SPDX-License-Identifier: Apache-2.0
// The kinds of numbers, and exact integers, for `cat`, `diff --values` and messages. Doubles are
// decoded in decode_numbers.cc.
#include "shard/element_values.h"

#include <cstring>

namespace tensormount {
namespace {

template <typename T>
void Widen(const std::byte* src, std::size_t count, std::int64_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, src + i * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(value);
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

void DecodeIntegers(DType dtype, const std::byte* src, std::size_t count, std::int64_t* out) {
  switch (dtype) {
    case DType::kBool:
      for (std::size_t i = 0; i < count; ++i) out[i] = src[i] != std::byte{0} ? 1 : 0;
      return;
    case DType::kI8:
      return Widen<std::int8_t>(src, count, out);
    case DType::kU8:
      return Widen<std::uint8_t>(src, count, out);
    case DType::kI16:
      return Widen<std::int16_t>(src, count, out);
    case DType::kU16:
      return Widen<std::uint16_t>(src, count, out);
    case DType::kI32:
      return Widen<std::int32_t>(src, count, out);
    case DType::kU32:
      return Widen<std::uint32_t>(src, count, out);
    case DType::kI64:
      return Widen<std::int64_t>(src, count, out);
    case DType::kU64:
      return Widen<std::uint64_t>(src, count, out);
    default:
      return;  // The caller passes an integer type.
  }
}

}  // namespace tensormount
