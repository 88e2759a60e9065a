// SPDX-License-Identifier: Apache-2.0
// The table of element types: one table row has all properties of a type. Numbers are stored on
// disk (tensormount/dtype.h has them); table rows are added at the end and never change.
#include "tensormount/dtype.h"

#include <array>
#include <string>

namespace tensormount {
namespace {

// Ordered by number, so that InfoOf is an index. Names as in safetensors 0.8, torch 2.9, NumPy 2
// and ml_dtypes 0.5. torch has no type for a single fp4 or fp6 element (its float4_e2m1fn_x2 is
// two), safetensors no complex128. NumPy writes ml_dtypes' kinds as raw bytes ("<V2"); its "<f1"
// for float8_e5m2 cannot be read back, so we write "<V1" there, too.
constexpr std::array<DTypeInfo, 23> kTable = {{
    {DType::kBool, "bool", 8, "BOOL", "torch.bool", "bool", false, "|b1"},
    {DType::kI8, "i8", 8, "I8", "torch.int8", "int8", false, "|i1"},
    {DType::kU8, "u8", 8, "U8", "torch.uint8", "uint8", false, "|u1"},
    {DType::kI16, "i16", 16, "I16", "torch.int16", "int16", false, "<i2"},
    {DType::kU16, "u16", 16, "U16", "torch.uint16", "uint16", false, "<u2"},
    {DType::kI32, "i32", 32, "I32", "torch.int32", "int32", false, "<i4"},
    {DType::kU32, "u32", 32, "U32", "torch.uint32", "uint32", false, "<u4"},
    {DType::kI64, "i64", 64, "I64", "torch.int64", "int64", false, "<i8"},
    {DType::kU64, "u64", 64, "U64", "torch.uint64", "uint64", false, "<u8"},
    {DType::kF16, "f16", 16, "F16", "torch.float16", "float16", false, "<f2"},
    {DType::kBF16, "bf16", 16, "BF16", "torch.bfloat16", "bfloat16", true, "<V2"},
    {DType::kF32, "f32", 32, "F32", "torch.float32", "float32", false, "<f4"},
    {DType::kF64, "f64", 64, "F64", "torch.float64", "float64", false, "<f8"},
    {DType::kF8E4M3, "f8_e4m3", 8, "F8_E4M3", "torch.float8_e4m3fn", "float8_e4m3fn", true, "<V1"},
    {DType::kF8E5M2, "f8_e5m2", 8, "F8_E5M2", "torch.float8_e5m2", "float8_e5m2", true, "<V1"},
    {DType::kF8E8M0, "f8_e8m0", 8, "F8_E8M0", "torch.float8_e8m0fnu", "float8_e8m0fnu", true,
     "<V1"},
    {DType::kF8E4M3FNUZ, "f8_e4m3fnuz", 8, "F8_E4M3FNUZ", "torch.float8_e4m3fnuz",
     "float8_e4m3fnuz", true, "<V1"},
    {DType::kF8E5M2FNUZ, "f8_e5m2fnuz", 8, "F8_E5M2FNUZ", "torch.float8_e5m2fnuz",
     "float8_e5m2fnuz", true, "<V1"},
    {DType::kF6E2M3, "f6_e2m3", 6, "F6_E2M3", "", "float6_e2m3fn", true, ""},
    {DType::kF6E3M2, "f6_e3m2", 6, "F6_E3M2", "", "float6_e3m2fn", true, ""},
    {DType::kF4, "f4", 4, "F4", "", "float4_e2m1fn", true, ""},
    {DType::kC64, "c64", 64, "C64", "torch.complex64", "complex64", false, "<c8"},
    {DType::kC128, "c128", 128, "", "torch.complex128", "complex128", false, "<c16"},
}};

// InfoOf uses the number as an index, so a misplaced row would make it return another type.
constexpr bool InOrder() {
  for (std::size_t i = 0; i < kTable.size(); ++i) {
    if (static_cast<std::size_t>(kTable[i].dtype) != i + 1) return false;
  }
  return true;
}
static_assert(InOrder());

}  // namespace

std::span<const DTypeInfo> AllDTypes() { return kTable; }

const DTypeInfo& InfoOf(DType dtype) { return kTable[static_cast<std::size_t>(dtype) - 1]; }

Result<DType> DTypeFromNumber(std::uint8_t number) {
  if (number == 0 || number > kTable.size()) {
    return Status(Code::kUnsupported, "element type number " + std::to_string(number) +
                                          " is not known to this version");
  }
  return static_cast<DType>(number);
}

Result<DType> DTypeFromName(std::string_view name) {
  if (!name.empty()) {
    for (const DTypeInfo& d : kTable) {
      if (name == d.name || name == d.safetensors || name == d.torch || name == d.numpy) {
        return d.dtype;
      }
    }
  }
  return Status(Code::kUnsupported,
                "element type '" + std::string(name.substr(0, 64)) + "' is not known");
}

}  // namespace tensormount
