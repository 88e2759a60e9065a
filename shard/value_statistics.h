// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_VALUE_STATISTICS_H_
#define TENSORMOUNT_SHARD_VALUE_STATISTICS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "tensormount/dtype.h"

#include "shard/wide_sum.h"

namespace tensormount {

// Statistics of the values of a tensor, and of the change from one tensor to another
// (docs/numbers.md). A complex number counts as two values.
//
// Sums are formed in blocks of kBlockValues consecutive values in row-major order, and the results
// of blocks are added in order. So the last bit depends neither on the sharding nor on the number
// of threads. A sum of n values is exact to some 1e-14 of the sum of their magnitudes.

inline constexpr std::size_t kBlockValues = 65536;

// Holds the sum of 2^63 integers of 64 bits.
__extension__ using Int128 = __int128;
std::string DecimalText(Int128 value);

// The values that a dtype stores: f32 and f64 for complex numbers, otherwise the dtype itself.
DType ValueDType(DType dtype);
// The values in one element: 2 for complex numbers, otherwise 1.
inline std::uint64_t ValuesPerElement(DType dtype) { return ValueDType(dtype) == dtype ? 1 : 2; }
// The elements of a block.
inline std::uint64_t BlockElements(DType dtype) { return kBlockValues / ValuesPerElement(dtype); }
bool IsIntegerDType(DType dtype);

// The values of one block.
struct BlockStatistics {
  std::uint64_t count = 0;
  std::uint64_t zeros = 0;  // Of both signs.
  std::uint64_t subnormals = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  // Of the finite values. Without any, `min` is infinity and `max` is minus infinity.
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  // The sum is sum * 2^exponent, that of the squares is squares * 2^(2 * exponent).
  double sum = 0;
  double squares = 0;
  int exponent = 0;
  // Exact, for integer types only.
  Int128 integer_sum = 0;
  Int128 integer_min = 0;
  Int128 integer_max = 0;

  bool operator==(const BlockStatistics&) const = default;
};
// `count` values, at most kBlockValues, of a type for which ValueDType(dtype) == dtype.
BlockStatistics MeasureBlock(DType dtype, const std::byte* src, std::size_t count);

// The values of a tensor, or of several.
struct ValueSums {
  std::uint64_t count = 0;
  std::uint64_t zeros = 0;
  std::uint64_t subnormals = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  WideSum sum;
  WideSum squares;
  Int128 integer_sum = 0;
  Int128 integer_min = 0;
  Int128 integer_max = 0;

  // Blocks are added in order.
  void Add(const BlockStatistics& block);
  std::uint64_t finite() const { return count - nan - posinf - neginf; }
};

// The change of the values of one block, from `a` to `b`.
struct BlockChange {
  std::uint64_t count = 0;
  std::uint64_t changed = 0;     // Values with other bits; of different dtypes: other values.
  std::uint64_t non_finite = 0;  // Values that are NaN or infinite on a side: in no sum.
  double max_abs = 0;            // The largest |b - a|; may be infinite.
  std::uint64_t max_abs_integer = 0;
  // sum_abs * 2^change_exponent is the sum of |b - a|; the exponent of the squares is twice that.
  double sum_abs = 0;
  double squares = 0;
  int change_exponent = 0;
  // The sums of a * a, b * b and a * b are these times 2^(2 * a_exponent), 2^(2 * b_exponent) and
  // 2^(a_exponent + b_exponent).
  double a_squares = 0;
  double b_squares = 0;
  double products = 0;
  int a_exponent = 0;
  int b_exponent = 0;

  bool operator==(const BlockChange&) const = default;
};
// `count` values, at most kBlockValues, of types for which ValueDType(dtype) == dtype. Differences
// of two integers are exact, unless only one of the types is u64: these are compared as doubles.
BlockChange MeasureChange(DType type_a, const std::byte* a, DType type_b, const std::byte* b,
                          std::size_t count);

// Whether the values of two types can be compared: not complex numbers with others.
inline bool CanMeasureChange(DType a, DType b) {
  return ValuesPerElement(a) == ValuesPerElement(b);
}
// Whether BlockChange::max_abs_integer is the exact largest difference.
bool HasIntegerChange(DType a, DType b);

// The change of a tensor, or of several.
struct ValueChange {
  std::uint64_t count = 0;
  std::uint64_t changed = 0;
  std::uint64_t non_finite = 0;
  double max_abs = 0;
  std::uint64_t max_abs_integer = 0;
  WideSum sum_abs;
  WideSum squares;
  WideSum a_squares;
  WideSum b_squares;
  WideSum products;

  // Blocks, or tensors, are added in order.
  void Add(const BlockChange& block);
  void Add(const ValueChange& other);

  std::uint64_t finite() const { return count - non_finite; }
  double changed_share() const;
  double mean_abs() const;
  // |b - a| / |a| with Euclidean norms: 0 if nothing changed, infinite if only `a` is zero.
  double l2_change() const;
  // 1 if both are zero, 0 if one is.
  double cosine() const;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_VALUE_STATISTICS_H_
