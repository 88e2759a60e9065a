// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_WIDE_SUM_H_
#define TENSORMOUNT_SHARD_WIDE_SUM_H_

#include <cmath>

namespace tensormount {

// A sum that neither overflows nor loses digits: two doubles times a power of two. The order of
// Add() decides about the last bit.
class WideSum {
 public:
  // Adds value * 2^exponent. `value` is finite.
  void Add(double value, int exponent = 0) {
    if (value == 0) return;
    if (sum_ == 0 && rest_ == 0) exponent_ = exponent;
    if (exponent > exponent_) {
      sum_ = std::ldexp(sum_, exponent_ - exponent);
      rest_ = std::ldexp(rest_, exponent_ - exponent);
      exponent_ = exponent;
    } else if (exponent < exponent_) {
      value = std::ldexp(value, exponent - exponent_);
    }
    // Neumaier's sum: what the addition rounds off is kept apart.
    const double next = sum_ + value;
    rest_ += std::abs(sum_) >= std::abs(value) ? (sum_ - next) + value : (value - next) + sum_;
    sum_ = next;
  }
  void Add(const WideSum& other) {
    Add(other.sum_, other.exponent_);
    Add(other.rest_, other.exponent_);
  }

  // The sum is mantissa() * 2^exponent().
  double mantissa() const { return sum_ + rest_; }
  int exponent() const { return exponent_; }
  bool zero() const { return mantissa() == 0; }

  // The sum divided by a number; may be infinite.
  double DividedBy(double divisor) const { return std::ldexp(mantissa() / divisor, exponent_); }
  // The square root; may be infinite.
  double Root() const { return RootOf(mantissa(), exponent_); }
  // The square root of this sum divided by another that is not zero.
  double RootOfRatio(const WideSum& other) const {
    return RootOf(mantissa() / other.mantissa(), exponent_ - other.exponent_);
  }

 private:
  static double RootOf(double value, int exponent) {
    const int odd = exponent & 1;
    return std::ldexp(std::sqrt(std::ldexp(value, odd)), (exponent - odd) / 2);
  }

  double sum_ = 0;
  double rest_ = 0;
  int exponent_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_WIDE_SUM_H_
