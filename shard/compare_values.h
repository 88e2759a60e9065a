// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COMPARE_VALUES_H_
#define TENSORMOUNT_SHARD_COMPARE_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "tensormount/dtype.h"

namespace tensormount {

// How far two tensors of one shape are from each other. Positions count elements of the row-major
// order. Adding up blocks in any order gives the same.
struct ValueMismatch {
  std::uint64_t compared = 0;          // Elements.
  std::uint64_t differing = 0;         // Other values; NaN beside a number is one.
  std::uint64_t nan_beside = 0;        // Of these: NaN on one side. They have no distance.
  std::uint64_t nan_both = 0;          // Equal as NaN, with other bits: not differing.
  std::uint64_t equal_other_bits = 0;  // Equal numbers with other bits (zeros of either sign).
  std::uint64_t first = 0;             // The first one of `differing`.

  // Of the differing ones that have a distance; nullopt: there are none.
  struct Largest {
    double value = 0;
    std::uint64_t at = 0;  // The first element that has it.
  };
  std::optional<Largest> max_abs;
  // |a - b| over the larger of |a| and |b|; 1 where that is infinite.
  std::optional<Largest> max_rel;
  // max_abs exactly, where both types are integers.
  std::optional<std::uint64_t> max_abs_integer;

  // Adds what was found in other elements of the same two tensors. Largest distances that are equal
  // are told at the lower position, which is what makes the order of adding without effect.
  void Add(const ValueMismatch& other);
};

// Whether values of these types can be compared: not complex with real ones, not types under a
// byte.
bool CanCompareValues(DType a, DType b);

// `count` packed elements on each side, the first being number `first`, added to `*sum`. Integers
// are compared exactly (u64 beside a signed type, and integers beside floats, as nearest doubles),
// everything else as doubles, which hold every value; a complex distance is that in the plane.
void CompareValues(DType type_a, const std::byte* a, DType type_b, const std::byte* b,
                   std::size_t count, std::uint64_t first, ValueMismatch* sum);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COMPARE_VALUES_H_
