// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_ZARR_ARRAY_H_
#define TENSORMOUNT_INDEX_FOREIGN_ZARR_ARRAY_H_

#include <optional>
#include <string>
#include <string_view>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

// .zarray: one array of a Zarr hierarchy of version 2 (zarr-specs, "Zarr storage specification
// version 2").

namespace tensormount {

// Chunks are all of the same extents. Those at the end of an axis hang over the shape and are
// stored whole.
struct ZarrArray {
  DType dtype = DType::kU8;
  Dims shape;
  Dims chunks;  // Extents of every chunk, those at the edges too; at least 1.
  bool fortran_order = false;
  char separator = '.';                   // Of numbers in the names of chunks.
  std::optional<std::string> fill_value;  // As JSON; what chunks that are not stored stand for.

  // Chunks along each axis.
  Dims Grid() const;
};

// `raw_is_bf16`: "|V2" is bfloat16, as Megatron-Core stored it; otherwise raw bytes.
// kDataLoss: no such JSON, shapes and chunks that do not go together or overflow; kUnsupported by
// name: another format version, a compressor, filters, element types as DTypeFromNpyDescr says.
// Shape and chunks fit 64 bits in bytes, so products of extents need no further checks.
Result<ZarrArray> ParseZarray(std::string_view json, bool raw_is_bf16 = false);

// "1.0.2" as numbers, written as zarr does (no signs, no leading zeros). nullopt: no name of a
// chunk of that many axes. A chunk of no axes is called "0" and has no numbers.
std::optional<Dims> ParseChunkName(std::string_view name, int rank, char separator);

// The .zgroup of a group: kUnsupported where its format is not version 2, kDataLoss where it is
// none.
Status ParseZgroup(std::string_view text);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_ZARR_ARRAY_H_
