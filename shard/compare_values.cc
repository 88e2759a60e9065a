// SPDX-License-Identifier: Apache-2.0
// Numerical differences of two buffers of one shape, for `diff --values`.
#include "shard/compare_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "shard/element_values.h"

namespace tensormount {
namespace {

// Number of elements decoded at a time, so few that they fit the first-level cache.
constexpr std::size_t kStep = 512;

// Keeps the larger value, and of equal values the lower position. So the result does not depend on
// the order in which threads finish their blocks.
void Raise(std::optional<ValueMismatch::Largest>& largest, double value, std::uint64_t at) {
  if (!largest || value > largest->value || (value == largest->value && at < largest->at)) {
    largest = ValueMismatch::Largest{.value = value, .at = at};
  }
}

// The distance relative to the larger of the two numbers, so at most 2 (for opposite signs).
double Relative(double distance, double size_a, double size_b) {
  const double size = std::max(size_a, size_b);
  return std::isinf(size) ? 1 : distance / size;  // `size` is not zero, because the numbers differ.
}

// Adds pairs of elements that differ in bits or type to a ValueMismatch.
class Tally {
 public:
  Tally(ValueMismatch& sum, bool same_type) : sum_(sum), same_type_(same_type) {}

  void Reals(double a, double b, std::uint64_t at) {
    if (std::isnan(a) || std::isnan(b)) return Nan(std::isnan(a) && std::isnan(b), at);
    if (a == b) return Equal();
    Differs(std::abs(a - b), std::abs(a), std::abs(b), at);
  }
  void Complex(const double* a, const double* b, std::uint64_t at) {
    const bool nan_a = std::isnan(a[0]) || std::isnan(a[1]);
    const bool nan_b = std::isnan(b[0]) || std::isnan(b[1]);
    if (nan_a || nan_b) return Nan(nan_a && nan_b, at);
    if (a[0] == b[0] && a[1] == b[1]) return Equal();
    // Equal infinities have distance 0; inf - inf would be NaN.
    const double real = a[0] == b[0] ? 0 : a[0] - b[0];
    const double imaginary = a[1] == b[1] ? 0 : a[1] - b[1];
    Differs(std::hypot(real, imaginary), std::hypot(a[0], a[1]), std::hypot(b[0], b[1]), at);
  }
  void Integers(std::int64_t a, std::int64_t b, std::uint64_t at) {
    if (a == b) return Equal();
    Exact(a > b ? Distance(a, b) : Distance(b, a), static_cast<double>(a), static_cast<double>(b),
          at);
  }
  void Unsigned(std::uint64_t a, std::uint64_t b, std::uint64_t at) {
    if (a == b) return Equal();
    Exact(a > b ? a - b : b - a, static_cast<double>(a), static_cast<double>(b), at);
  }

 private:
  // Unsigned, so that INT64_MAX - INT64_MIN (2^64 - 1) fits.
  static std::uint64_t Distance(std::int64_t larger, std::int64_t smaller) {
    return static_cast<std::uint64_t>(larger) - static_cast<std::uint64_t>(smaller);
  }
  void Count(std::uint64_t at) {
    sum_.first = sum_.differing == 0 ? at : std::min(sum_.first, at);
    ++sum_.differing;
  }
  // Counted only within one type, because the bits of two types always differ.
  void Equal() {
    if (same_type_) ++sum_.equal_other_bits;
  }
  void Nan(bool both, std::uint64_t at) {
    if (both) {
      if (same_type_) ++sum_.nan_both;
      return;
    }
    Count(at);
    ++sum_.nan_beside;
  }
  void Differs(double distance, double size_a, double size_b, std::uint64_t at) {
    Count(at);
    Raise(sum_.max_abs, distance, at);
    Raise(sum_.max_rel, Relative(distance, size_a, size_b), at);
  }
  void Exact(std::uint64_t distance, double a, double b, std::uint64_t at) {
    Count(at);
    // The exact distances decide which one is the largest, because several may round to one double.
    const std::uint64_t before = sum_.max_abs_integer.value_or(0);
    if (distance > before || (distance == before && at < sum_.max_abs->at)) {
      sum_.max_abs_integer = distance;
      sum_.max_abs = ValueMismatch::Largest{.value = static_cast<double>(distance), .at = at};
    }
    Raise(sum_.max_rel, Relative(static_cast<double>(distance), std::abs(a), std::abs(b)), at);
  }

  ValueMismatch& sum_;
  const bool same_type_;
};

// The kind in which elements of both types are compared; kNone if they are incomparable. An exact
// kind is used only if both types have it: a u64 and another integer, or an integer and a float,
// are compared as doubles.
NumberKind ComparedAs(DType a, DType b) {
  const NumberKind kind_a = NumberKindOf(a);
  const NumberKind kind_b = NumberKindOf(b);
  if (kind_a == kind_b) return kind_a;
  for (const NumberKind kind : {NumberKind::kNone, NumberKind::kComplex}) {
    if (kind_a == kind || kind_b == kind) return NumberKind::kNone;
  }
  return NumberKind::kReal;
}

}  // namespace

void ValueMismatch::Add(const ValueMismatch& other) {
  if (other.differing > 0) first = differing == 0 ? other.first : std::min(first, other.first);
  compared += other.compared;
  differing += other.differing;
  nan_beside += other.nan_beside;
  nan_both += other.nan_both;
  equal_other_bits += other.equal_other_bits;
  if (other.max_abs_integer) {
    const std::uint64_t before = max_abs_integer.value_or(0);
    if (*other.max_abs_integer > before ||
        (*other.max_abs_integer == before && other.max_abs->at < max_abs->at)) {
      max_abs_integer = other.max_abs_integer;
      max_abs = other.max_abs;
    }
  } else if (other.max_abs) {
    Raise(max_abs, other.max_abs->value, other.max_abs->at);
  }
  if (other.max_rel) Raise(max_rel, other.max_rel->value, other.max_rel->at);
}

bool CanCompareValues(DType a, DType b) { return ComparedAs(a, b) != NumberKind::kNone; }

void CompareValues(DType type_a, const std::byte* a, DType type_b, const std::byte* b,
                   std::size_t count, std::uint64_t first, ValueMismatch* sum) {
  const NumberKind kind = ComparedAs(type_a, type_b);
  const std::size_t item_a = InfoOf(type_a).bits / 8;
  const std::size_t item_b = InfoOf(type_b).bits / 8;
  const bool same_type = type_a == type_b;
  Tally tally(*sum, same_type);
  sum->compared += count;
  // Twice kStep, because a complex element is two numbers. 24 KiB of stack in all.
  double reals_a[2 * kStep];
  double reals_b[2 * kStep];
  std::int64_t integers_a[kStep];
  std::int64_t integers_b[kStep];
  for (std::size_t done = 0; done < count; done += kStep) {
    const std::size_t n = std::min(kStep, count - done);
    const std::byte* at_a = a + done * item_a;
    const std::byte* at_b = b + done * item_b;
    // Fast path: most parts of similar tensors are equal.
    if (same_type && std::memcmp(at_a, at_b, n * item_a) == 0) continue;
    const auto differs = [&](std::size_t i) {
      return !same_type || std::memcmp(at_a + i * item_a, at_b + i * item_b, item_a) != 0;
    };
    if (kind == NumberKind::kInteger || kind == NumberKind::kUnsigned) {
      DecodeIntegers(type_a, at_a, n, integers_a);
      DecodeIntegers(type_b, at_b, n, integers_b);
    } else {
      DecodeNumbers(type_a, at_a, n, reals_a);
      DecodeNumbers(type_b, at_b, n, reals_b);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (!differs(i)) continue;
      const std::uint64_t at = first + done + i;
      switch (kind) {
        case NumberKind::kReal:
          tally.Reals(reals_a[i], reals_b[i], at);
          break;
        case NumberKind::kComplex:
          tally.Complex(reals_a + 2 * i, reals_b + 2 * i, at);
          break;
        case NumberKind::kInteger:
          tally.Integers(integers_a[i], integers_b[i], at);
          break;
        case NumberKind::kUnsigned:
          tally.Unsigned(static_cast<std::uint64_t>(integers_a[i]),
                         static_cast<std::uint64_t>(integers_b[i]), at);
          break;
        case NumberKind::kNone:
          break;
      }
    }
  }
}

}  // namespace tensormount
