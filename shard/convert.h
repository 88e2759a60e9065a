// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_CONVERT_H_
#define TENSORMOUNT_SHARD_CONVERT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tensormount/dtype.h"
#include "tensormount/status.h"

namespace tensormount {

// Conversion of elements to another type, for loads that request it.
//
//   floats (f64, f32, bf16, f16, f8e5m2, f8e4m3)  to each other: the nearest value, ties to even.
//       NaN stays NaN and keeps its sign; infinities stay, and overflow becomes infinity (NaN in
//       f8e4m3, which has none). Underflow becomes zero with its sign.
//   integers and bool  to floats: the nearest value, rounded once from the exact integer.
//   integers and bool  to each other: the same value, where the type has it.
//
// Everything else is unsupported: floats to integers would lose data silently.

// Ok (also for equal types, even those that ConvertElements does not support), or kUnsupported "f32
// cannot be converted to i8".
Status CanConvert(DType from, DType to);

struct UnfitElement {
  std::size_t position = 0;  // Index of the element.
  std::string value;         // In decimal.
};
// Converts `count` packed elements at `src` to elements `dst_step` bytes apart (may be negative).
// Returns nullopt, or the first integer that does not fit, after converting the elements before it.
// Requires CanConvert. Any alignment; the memories must not overlap.
std::optional<UnfitElement> ConvertElements(DType from, const std::byte* src, DType to,
                                            std::byte* dst, std::int64_t dst_step,
                                            std::size_t count);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_CONVERT_H_
