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

// The header of a .npy file, version 1.0 (rank 16 always fits), C order, data aligned to 64
// bytes (NumPy's format document, numpy.lib.format). Types under a byte: kUnsupported.
Result<std::string> MakeNpyHeader(DType dtype, const Dims& shape);

// What a .npy file holds, as its first bytes say. Of an array in Fortran order the bytes are those
// of the array with its axes reversed.
struct NpyHeader {
  DType dtype = DType::kU8;
  Dims shape;
  bool fortran_order = false;
  std::uint64_t data_offset = 0;  // Where the elements begin.
};

// Longer headers are refused: NumPy itself stops at 10,000 bytes.
inline constexpr std::uint64_t kMaxNpyHeader = std::uint64_t{1} << 20;
// Magic (6 bytes), version (2), header length: 2 bytes in version 1.0, 4 in 2.0 and 3.0.
inline constexpr std::size_t kNpyPrefix = 12;

// Where the elements begin, from the first kNpyPrefix bytes (version 1.0 needs ten of them).
// kDataLoss: no .npy file; kUnsupported: another version than 1, 2, 3, or over kMaxNpyHeader.
Result<std::uint64_t> NpyDataOffset(std::string_view first_bytes);

// `first_bytes`: at least NpyDataOffset of them. The dictionary is read as the literal that it is,
// not evaluated: exactly the keys descr, fortran_order and shape, each once. kDataLoss where it is
// not that or the shape overflows; kUnsupported, by name, for structured and object types, byte
// orders and kinds that we lack (DTypeFromNpyDescr), ranks over kMaxRank.
Result<NpyHeader> ParseNpyHeader(std::string_view first_bytes);

// An element type as NumPy's array protocol spells it: "<f4", "|u1". ml_dtypes' bfloat16 is "<V2"
// and its float8_e5m2 "<f1"; its other types of one byte are all "<V1", which could be any of them.
// kUnsupported names what it is: "big-endian", "Python objects".
Result<DType> DTypeFromNpyDescr(std::string_view descr);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_NPY_H_
