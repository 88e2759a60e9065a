// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DTYPE_H_
#define TENSORMOUNT_DTYPE_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Element types. The numbers are stored on disk (docs/format.md): never reuse or renumber. Elements
// are stored in little-endian order. Types below one byte are packed without gaps, so such a tensor
// must have a whole number of bytes.
enum class DType : std::uint8_t {
  kBool = 1,
  kI8 = 2,
  kU8 = 3,
  kI16 = 4,
  kU16 = 5,
  kI32 = 6,
  kU32 = 7,
  kI64 = 8,
  kU64 = 9,
  kF16 = 10,
  kBF16 = 11,
  kF32 = 12,
  kF64 = 13,
  kF8E4M3 = 14,  // float8_e4m3fn
  kF8E5M2 = 15,
  kF8E8M0 = 16,  // Scale factors, float8_e8m0fnu.
  kF8E4M3FNUZ = 17,
  kF8E5M2FNUZ = 18,
  kF6E2M3 = 19,  // 6 bits an element.
  kF6E3M2 = 20,
  kF4 = 21,    // float4_e2m1fn, 4 bits an element.
  kC64 = 22,   // Two f32.
  kC128 = 23,  // Two f64.
};

// The names of an element type in all systems. Empty: that system has no such type. `numpy` is a
// NumPy name, or with `numpy_is_ml_dtypes` a name of the package ml_dtypes.
struct DTypeInfo {
  DType dtype;
  std::string_view name;         // tensormount's name, as in schema.json and `ls -l`: "bf16".
  std::uint32_t bits;            // Bits of one element.
  std::string_view safetensors;  // "BF16"
  std::string_view torch;        // "torch.bfloat16"
  std::string_view numpy;        // "bfloat16"
  bool numpy_is_ml_dtypes;
  std::string_view npy_descr;  // In .npy headers: "<f4", or "<V2" for types of ml_dtypes.
};

// All element types, sorted by number. The span refers to static data.
TENSORMOUNT_EXPORT std::span<const DTypeInfo> AllDTypes();
// The properties of `dtype`, which must be an enumerator; for external numbers use DTypeFromNumber.
TENSORMOUNT_EXPORT const DTypeInfo& InfoOf(DType dtype);
// The element type of a number from outside. kUnsupported for a number that this version does not
// know (a newer version may).
TENSORMOUNT_EXPORT Result<DType> DTypeFromNumber(std::uint8_t number);
// Accepts tensormount's name and the other systems' names. The message of kUnsupported has the
// unknown name.
TENSORMOUNT_EXPORT Result<DType> DTypeFromName(std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_DTYPE_H_
