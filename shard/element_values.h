// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_ELEMENT_VALUES_H_
#define TENSORMOUNT_SHARD_ELEMENT_VALUES_H_

#include <cstddef>
#include <cstdint>

#include "tensormount/dtype.h"

namespace tensormount {

// The functions of this file only decode; conversion at load, which also rounds, is in convert.h.

// The kind of number of an element type. Every type has one: NumberKindOf does not compile if a new
// type is missing there.
enum class NumberKind : std::uint8_t {
  kReal,      // Floats: a double represents every value exactly.
  kInteger,   // bool and integers that fit a signed 64-bit integer.
  kUnsigned,  // u64.
  kComplex,   // Two reals.
  kNone,      // Below one byte: programs differ in their packing, so no single element is shown.
};
NumberKind NumberKindOf(DType dtype);

// Decodes `count` packed elements at `src` (any alignment) to doubles: exact except for integers
// beyond 2^53, which are rounded to the nearest. Complex elements give two doubles each, the real
// part first. Elements below one byte are taken from the lowest bits of a byte first, as ml_dtypes
// and torch pack them.
void DecodeNumbers(DType dtype, const std::byte* src, std::size_t count, double* out);

// The codes of elements below one byte, one in each byte of `out`, in the order of DecodeNumbers.
void UnpackCodes(DType dtype, const std::byte* src, std::size_t count, std::uint8_t* out);

// Decodes integers exactly. For kUnsigned the results are the signed integers with the same 64
// bits.
void DecodeIntegers(DType dtype, const std::byte* src, std::size_t count, std::int64_t* out);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_ELEMENT_VALUES_H_
