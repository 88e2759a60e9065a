// SPDX-License-Identifier: Apache-2.0
#include "shard/npy.h"

#include <algorithm>

namespace tensormount {

Result<std::string> MakeNpyHeader(DType dtype, const Dims& shape) {
  const DTypeInfo& info = InfoOf(dtype);
  if (info.npy_descr.empty()) {
    return Status(Code::kUnsupported, "element type " + std::string(info.name) +
                                          " has no form in .npy files, which hold whole bytes");
  }
  std::string dict =
      "{'descr': '" + std::string(info.npy_descr) + "', 'fortran_order': False, 'shape': (";
  for (int a = 0; a < shape.rank(); ++a) {
    if (a > 0) dict += ' ';
    dict += std::to_string(shape[a]);
    if (a + 1 < shape.rank() || shape.rank() == 1) dict += ',';
  }
  dict += "), }";
  // NumPy leaves room for the first extent to grow to 21 digits; so the same array has the same
  // bytes whoever wrote it.
  if (shape.rank() > 0) {
    const std::size_t digits = std::to_string(shape[0]).size();
    dict.append(21 - std::min<std::size_t>(digits, 21), ' ');
  }
  constexpr std::size_t kPrefix = 10;  // Magic, version, length.
  constexpr std::size_t kAlign = 64;
  // 1 to 64 spaces, as NumPy does. Rank 16 stays far below the 65,535 bytes of version 1.0.
  dict.append(kAlign - (kPrefix + dict.size() + 1) % kAlign, ' ');
  dict += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(dict.size() & 0xFF);
  header += static_cast<char>(dict.size() >> 8);
  return header + dict;
}

}  // namespace tensormount
