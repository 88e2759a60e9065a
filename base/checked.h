// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CHECKED_H_
#define TENSORMOUNT_BASE_CHECKED_H_

#include <concepts>
#include <cstdint>
#include <optional>
#include <utility>

namespace tensormount {

// Arithmetic on untrusted numbers: nullopt if the exact result does not fit T.
//
// The rule: use these for numbers from a file, a message or a caller until they are known to be
// within bounds (a file, a shape accepted by Box::Make); from then on use plain operators. An
// overflowed sum passes the very comparison that should refuse it.
//
//   const auto end = CheckedAdd(record.offset, record.length);
//   if (!end || *end > file_size) return DataLoss(...);
//   // From here on record.offset + record.length is a position of the file.
//
// Both operands have the type of the result, because C++ would silently convert in a sum of int64
// and uint64.
template <std::integral T>
constexpr std::optional<T> CheckedAdd(T a, T b) {
  T r;
  if (__builtin_add_overflow(a, b, &r)) return std::nullopt;
  return r;
}
template <std::integral T>
constexpr std::optional<T> CheckedMul(T a, T b) {
  T r;
  if (__builtin_mul_overflow(a, b, &r)) return std::nullopt;
  return r;
}
// The value `v` as another type, if that type can represent it.
template <std::integral To, std::integral From>
constexpr std::optional<To> CheckedCast(From v) {
  if (!std::in_range<To>(v)) return std::nullopt;
  return static_cast<To>(v);
}

// Converts a byte position or count to a signed coordinate (Dims, Box). Only for numbers within a
// checked shape or a file, which are below 2^63.
constexpr std::int64_t Signed(std::uint64_t v) { return static_cast<std::int64_t>(v); }

// Whether [offset, offset + length) lies inside [0, size). Always use this: `offset + length <=
// size` overflows for lengths near 2^64.
constexpr bool RangeWithin(unsigned long long offset, unsigned long long length,
                           unsigned long long size) {
  return offset <= size && length <= size - offset;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CHECKED_H_
