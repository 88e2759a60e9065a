// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CHECKED_H_
#define TENSORMOUNT_BASE_CHECKED_H_

#include <concepts>
#include <optional>
#include <utility>

namespace tensormount {

// Arithmetic on numbers that came from outside: nullopt where the exact result does not fit T.
//
// The rule: what was read from a file, a message or a caller is added and multiplied with these
// until it is known to be within something real (a file, a shape that Box::Make took). From there
// on plain operators are right, and say that the check was made. A sum that wraps is not only a
// wrong number: it passes every comparison that was to keep it out.
template <std::integral T>
constexpr std::optional<T> CheckedAdd(T a, T b) {
  T r;
  if (__builtin_add_overflow(a, b, &r)) return std::nullopt;
  return r;
}
template <std::integral T>
constexpr std::optional<T> CheckedSub(T a, T b) {
  T r;
  if (__builtin_sub_overflow(a, b, &r)) return std::nullopt;
  return r;
}
template <std::integral T>
constexpr std::optional<T> CheckedMul(T a, T b) {
  T r;
  if (__builtin_mul_overflow(a, b, &r)) return std::nullopt;
  return r;
}
template <std::integral To, std::integral From>
constexpr std::optional<To> CheckedCast(From v) {
  if (!std::in_range<To>(v)) return std::nullopt;
  return static_cast<To>(v);
}

// Whether [offset, offset + length) lies inside [0, size). The one form of this test: written as
// `offset + length <= size` it is true for lengths near 2^64.
constexpr bool RangeWithin(unsigned long long offset, unsigned long long length,
                           unsigned long long size) {
  return offset <= size && length <= size - offset;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CHECKED_H_
