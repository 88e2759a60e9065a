// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COMPARE_VALUES_H_
#define TENSORMOUNT_SHARD_COMPARE_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "tensormount/dtype.h"

namespace tensormount {

// Numerical difference of two tensors of one shape. Positions count elements in row-major order.
// Blocks may be added in any order.
struct ValueMismatch {
  std::uint64_t compared = 0;   // Number of elements.
  std::uint64_t differing = 0;  // Elements with different values; NaN and a number differ.
  // Part of `differing`: elements that are NaN on one side only, and so have no distance.
  std::uint64_t nan_beside = 0;
  std::uint64_t nan_both = 0;          // NaN on both sides with other bits; not in `differing`.
  std::uint64_t equal_other_bits = 0;  // Equal numbers with different bits (0.0 and -0.0).
  std::uint64_t first = 0;             // Position of the first differing element.

  // A largest distance (max_abs, max_rel) and its position; nullopt if no element has a distance.
  struct Largest {
    double value = 0;
    std::uint64_t at = 0;  // Position of the first element with this distance.
  };
  std::optional<Largest> max_abs;
  // The relative distance: |a - b| divided by the larger of |a| and |b|; 1 if the larger is
  // infinite.
  std::optional<Largest> max_rel;
  // max_abs without rounding, set if elements that were compared as integers differ.
  std::optional<std::uint64_t> max_abs_integer;

  // Adds the result of other elements of the same two tensors. Equal largest distances keep the
  // lower position, so the order of additions does not matter.
  void Add(const ValueMismatch& other);
};

// Whether values of these types can be compared: not complex with real ones, not types below one
// byte.
bool CanCompareValues(DType a, DType b);

// Compares `count` packed elements, numbered from `first`, and adds the result to `*sum`. Integers
// are compared exactly, except a u64 with another integer type: these, and an integer with a float,
// are compared as the nearest doubles. Floats are compared as doubles, which represent every value.
// The distance of complex numbers is that of points in the plane.
void CompareValues(DType type_a, const std::byte* a, DType type_b, const std::byte* b,
                   std::size_t count, std::uint64_t first, ValueMismatch* sum);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COMPARE_VALUES_H_
