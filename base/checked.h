// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CHECKED_H_
#define TENSORMOUNT_BASE_CHECKED_H_

#include <concepts>
#include <cstdint>
#include <optional>
#include <utility>

namespace tensormount {

// Arithmetic on numbers that came from outside: nullopt where the exact result does not fit T.
//
// The rule: what was read from a file, a message or a caller is added and multiplied with these
// until it is known to be within something real (a file, a shape that Box::Make took). From there
// on plain operators are right, and say that the check was made. A sum that wraps is not only a
// wrong number: it passes every comparison that was to keep it out.
//
//   const auto end = CheckedAdd(record.offset, record.length);
//   if (!end || *end > file_size) return DataLoss(...);
//   // From here on record.offset + record.length is a position of the file.
//
// Both operands have the type of the result: a sum of an int64 and a uint64 would be converted by
// the language before anybody could look at it.
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
// The same number as another type, where that has it: no truncation, no change of sign.
template <std::integral To, std::integral From>
constexpr std::optional<To> CheckedCast(From v) {
  if (!std::in_range<To>(v)) return std::nullopt;
  return static_cast<To>(v);
}

// A byte position or count where coordinates are wanted, which are signed (Dims, Box). Only for
// what lies within a checked shape or a file: both end below 2^63, so the value stays as it is.
constexpr std::int64_t Signed(std::uint64_t v) { return static_cast<std::int64_t>(v); }

// Whether [offset, offset + length) lies inside [0, size). The one form of this test: written as
// `offset + length <= size` it is true for lengths near 2^64.
constexpr bool RangeWithin(unsigned long long offset, unsigned long long length,
                           unsigned long long size) {
  return offset <= size && length <= size - offset;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CHECKED_H_
