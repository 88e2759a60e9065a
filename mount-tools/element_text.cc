// SPDX-License-Identifier: Apache-2.0
// Converts elements to text for `cat`.
#include "mount-tools/element_text.h"

#include <cmath>

#include <fmt/core.h>

#include "base/coding.h"
#include "shard/element_values.h"

namespace tensormount::tools {
namespace {

template <typename T>
std::string NumberText(const std::byte* p) {
  return fmt::format("{}", LoadLittle<T>(p));
}

// A complex number as Python writes it: "1+2j". The imaginary part always has a sign, even if it is
// zero or NaN.
std::string Complex(double imaginary, const std::string& r, const std::string& i) {
  return r + (std::signbit(imaginary) ? "" : "+") + i + "j";
}

}  // namespace

std::string ElementText(DType dtype, const std::byte* p) {
  switch (dtype) {
    case DType::kBool:
      return LoadLittle<std::uint8_t>(p) != 0 ? "true" : "false";
    // A u64 may exceed std::int64_t, to which other integers are decoded below.
    case DType::kU64:
      return NumberText<std::uint64_t>(p);
    case DType::kF32:
      return NumberText<float>(p);
    case DType::kF64:
      return NumberText<double>(p);
    case DType::kC64:
      return Complex(LoadLittle<float>(p + 4), NumberText<float>(p), NumberText<float>(p + 4));
    case DType::kC128:
      return Complex(LoadLittle<double>(p + 8), NumberText<double>(p), NumberText<double>(p + 8));
    default:
      break;
  }
  switch (NumberKindOf(dtype)) {
    case NumberKind::kInteger: {
      std::int64_t value = 0;
      DecodeIntegers(dtype, p, 1, &value);
      return fmt::format("{}", value);
    }
    case NumberKind::kReal: {
      // An f32 holds every float of 16 bits or less exactly, and is printed with fewer digits than
      // a double.
      double value = 0;
      DecodeNumbers(dtype, p, 1, &value);
      return fmt::format("{}", static_cast<float>(value));
    }
    default:
      return "?";
  }
}

}  // namespace tensormount::tools
