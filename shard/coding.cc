// SPDX-License-Identifier: Apache-2.0
// The encoding of dims, tensor metadata, grid positions and regions. Decoded regions get their
// canonical form, so that equal regions compare equal.
#include "shard/coding.h"

#include <cstdint>
#include <string>
#include <utility>

#include "base/errors.h"

namespace tensormount {

void EncodeDims(ByteWriter& out, const Dims& dims) {
  out.U8(static_cast<std::uint8_t>(dims.rank()));
  for (const std::int64_t d : dims) out.I64(d);
}

Result<Dims> DecodeDims(ByteReader& in, std::string_view what) {
  // Checked before the values are read, because Dims hold at most kMaxAxes. If this read fails, the
  // number is 0, and in.status() below has the error.
  const std::uint8_t rank = in.U8();
  if (rank > kMaxRank)
    return DataLoss(what, "has " + std::to_string(rank) + " axes, at most " +
                              std::to_string(kMaxRank) + " are allowed");
  Dims dims;
  for (int a = 0; a < rank; ++a) dims.push_back(in.I64());
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return dims;
}

void EncodeMeta(ByteWriter& out, std::string_view key, DType dtype, const Dims& shape) {
  out.String(key);
  out.U8(static_cast<std::uint8_t>(dtype));
  EncodeDims(out, shape);
}

void EncodeMeta(ByteWriter& out, const TensorMeta& meta) {
  EncodeMeta(out, meta.key(), meta.dtype(), meta.shape());
}

Result<TensorMeta> DecodeMeta(ByteReader& in, std::string_view what) {
  std::string key(in.String(kMaxKeyBytes));
  const std::uint8_t number = in.U8();
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims shape, DecodeDims(in, what));
  // An unknown number is a type of a newer version, and therefore kUnsupported and not kDataLoss.
  Result<DType> dtype = DTypeFromNumber(number);
  if (!dtype.ok()) return dtype.status().WithContext(std::string(what) + ": tensor " + key);
  Result<TensorMeta> meta = TensorMeta::Make(std::move(key), dtype.value(), shape);
  if (!meta.ok()) return DataLoss(what, meta.status().message());
  return meta;
}

Status DecodeGridPosition(ByteReader& in, std::string_view what, std::string_view key, Dims& index,
                          Dims& grid) {
  TENSORMOUNT_ASSIGN_OR_RETURN(index, DecodeDims(in, what));
  TENSORMOUNT_ASSIGN_OR_RETURN(grid, DecodeDims(in, what));
  if (index.rank() != grid.rank()) {
    return DataLoss(
        what, "object " + std::string(key) + ": index and grid have different numbers of axes");
  }
  for (int a = 0; a < grid.rank(); ++a) {
    if (index[a] < 0 || index[a] >= grid[a]) {
      return DataLoss(what, "object " + std::string(key) + ": part " + index.ToString() +
                                " is not on its grid " + grid.ToString());
    }
  }
  return Status();
}

void EncodeRegion(ByteWriter& out, const Region& region) {
  out.U8(region.is_flat() ? 1 : 0);
  for (const std::int64_t v : region.box().begin()) out.I64(v);
  for (const std::int64_t v : region.box().extent()) out.I64(v);
  if (!region.is_flat()) return;
  out.I64(region.flat_first());
  out.I64(region.volume());
}

Result<Region> DecodeRegion(ByteReader& in, std::string_view what, std::string_view key,
                            const Dims& shape) {
  const bool flat = in.U8() != 0;
  Dims begin;
  Dims extent;
  for (int a = 0; a < shape.rank(); ++a) begin.push_back(in.I64());
  for (int a = 0; a < shape.rank(); ++a) extent.push_back(in.I64());
  const std::int64_t first = flat ? in.I64() : 0;
  const std::int64_t count = flat ? in.I64() : 0;
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  // Box::Make and Region::Flat check untrusted numbers and make the canonical form, so that equal
  // regions compare equal whoever wrote them.
  const Result<Box> box = Box::Make(begin, extent);
  Result<Region> region = !box.ok() ? Result<Region>(box.status())
                          : flat    ? Region::Flat(box.value(), first, count)
                                    : Result<Region>(box.value());
  if (!region.ok()) {
    return DataLoss(what, "tensor " + std::string(key) + ": " + region.status().message());
  }
  if (!region.value().Within(shape)) {
    return DataLoss(what, "tensor " + std::string(key) + ": a region lies outside of its shape");
  }
  return region;
}

}  // namespace tensormount
