// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_ZARR_ARRAY_H_
#define TENSORMOUNT_INDEX_FOREIGN_ZARR_ARRAY_H_

#include <optional>
#include <string>
#include <string_view>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

// .zarray, the metadata of one array of a Zarr hierarchy of version 2 (zarr-specs, "Zarr storage
// specification version 2").

namespace tensormount {

// All chunks have the same extents. A chunk at the end of an axis may exceed the shape, but its
// file has the full size.
struct ZarrArray {
  DType dtype = DType::kU8;
  Dims shape;
  Dims chunks;  // Extents of every chunk, at least 1.
  bool fortran_order = false;
  char separator = '.';  // The character between the numbers in the name of a chunk.
  // The value of elements in missing chunks, as JSON text; nullopt if it is null.
  std::optional<std::string> fill_value;

  // The number of chunks along each axis.
  Dims Grid() const;
};

// Parses .zarray. `raw_is_bf16`: "|V2" means bfloat16, which Megatron-Core stored in this way, and
// not raw bytes. kDataLoss: invalid JSON, or shape and chunks that do not match or overflow.
// kUnsupported: another format version, a compressor, filters, more than kMaxRank axes, or an
// element type other than "bfloat16" that DTypeFromNpyDescr does not support. The sizes in bytes of
// the shape and of a chunk fit 64 bits, so products of extents need no checks.
Result<ZarrArray> ParseZarray(std::string_view json, bool raw_is_bf16 = false);

// The index of the chunk with a name like "1.0.2" (no signs, no leading zeros). nullopt if the name
// is not that of a chunk with `rank` axes. The chunk of an array without axes has the name "0" and
// an empty index.
std::optional<Dims> ParseChunkName(std::string_view name, int rank, char separator);

// Checks the .zgroup of a group: kUnsupported if its format is not version 2, kDataLoss if it is
// invalid.
Status ParseZgroup(std::string_view text);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_ZARR_ARRAY_H_
