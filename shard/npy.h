// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_NPY_H_
#define TENSORMOUNT_SHARD_NPY_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

namespace tensormount {

// Makes the header of a .npy file, version 1.0 (16 axes always fit), C order, data aligned to 64
// bytes (NumPy's format document, numpy.lib.format). Types below one byte: kUnsupported.
Result<std::string> MakeNpyHeader(DType dtype, const Dims& shape);

// A parsed header of a .npy file. If `fortran_order`, the bytes are those of the array with its
// axes reversed.
struct NpyHeader {
  DType dtype = DType::kU8;
  Dims shape;
  bool fortran_order = false;
  std::uint64_t data_offset = 0;  // Offset of the first element.
};

// Largest accepted header in bytes (NumPy's own limit is 10,000).
inline constexpr std::uint64_t kMaxNpyHeader = std::uint64_t{1} << 20;
// Magic (6 bytes), version (2), header length: 2 bytes in version 1.0, 4 in 2.0 and 3.0.
inline constexpr std::size_t kNpyPrefix = 12;

// The offset of the elements, from the first kNpyPrefix bytes (version 1.0 needs ten of them).
// kDataLoss: not a .npy file; kUnsupported: a version other than 1, 2, 3, or a header over
// kMaxNpyHeader.
Result<std::uint64_t> NpyDataOffset(std::string_view first_bytes);

// Parses a header. `first_bytes`: at least the first NpyDataOffset bytes of the file. The
// dictionary is parsed, not evaluated: exactly the keys descr, fortran_order and shape, each once.
// kDataLoss if it is malformed or the shape overflows; kUnsupported, with the name, for structured
// and object types, unsupported byte orders and kinds (DTypeFromNpyDescr), and more than kMaxRank
// axes.
Result<NpyHeader> ParseNpyHeader(std::string_view first_bytes);

// Parses an element type of NumPy's array protocol: "<f4", "|u1". ml_dtypes' bfloat16 is "<V2" and
// its float8_e5m2 "<f1"; its other one-byte types are all "<V1", which is ambiguous. kUnsupported
// names the kind: "big-endian", "Python objects".
Result<DType> DTypeFromNpyDescr(std::string_view descr);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_NPY_H_
