// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_ELEMENT_VALUES_H_
#define TENSORMOUNT_SHARD_ELEMENT_VALUES_H_

#include <cstddef>
#include <cstdint>

#include "tensormount/dtype.h"

namespace tensormount {

// Reading is all that is done here: conversion at load, which must also round, is convert.h.

// How elements of a type are looked at as numbers. Every element type has a kind; a type that is
// added to the table and forgotten here does not compile.
enum class NumberKind : std::uint8_t {
  kReal,      // Floats: every value is a double, exactly.
  kInteger,   // bool and integers that a signed 64-bit one holds.
  kUnsigned,  // u64.
  kComplex,   // Two reals.
  kNone,      // Under a byte: how they are packed differs from program to program.
};
NumberKind NumberKindOf(DType dtype);

// `count` packed elements at `src` (no alignment needed) as doubles: exact but for integers past
// 2^53, which become the nearest. Complex elements give two doubles each, the real part first.
// Not for kNone.
void DecodeNumbers(DType dtype, const std::byte* src, std::size_t count, double* out);

// The same exactly, for kInteger and, as the same 64 bits, kUnsigned.
void DecodeIntegers(DType dtype, const std::byte* src, std::size_t count, std::int64_t* out);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_ELEMENT_VALUES_H_
