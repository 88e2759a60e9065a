// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_CODING_H_
#define TENSORMOUNT_SHARD_CODING_H_

#include <string_view>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/coding.h"
#include "shard/tensor_meta.h"

// Binary encoding of shapes, tensors, positions and regions: in manifests and indexes
// (docs/format.md, "Records"), in journals of saves through a mount, and in messages between ranks.
// Encoders append to `out`. Decoders validate, and return kDataLoss "what: why"; if the input is
// too short, they return the reader's error.

namespace tensormount {

// Writes the number of axes as u8, then an i64 per axis.
void EncodeDims(ByteWriter& out, const Dims& dims);
// Reads at most kMaxRank numbers, of any value.
Result<Dims> DecodeDims(ByteReader& in, std::string_view what);

// Writes key, dtype (u8) and shape.
void EncodeMeta(ByteWriter& out, std::string_view key, DType dtype, const Dims& shape);
void EncodeMeta(ByteWriter& out, const TensorMeta& meta);
// Reads key, dtype and shape. kUnsupported for an element type that this version does not know.
Result<TensorMeta> DecodeMeta(ByteReader& in, std::string_view what);

// Reads index and grid of a part of the object `key`. kDataLoss unless both have the same number of
// axes and the index lies on the grid.
Status DecodeGridPosition(ByteReader& in, std::string_view what, std::string_view key, Dims& index,
                          Dims& grid);

// Writes whether it is a flat range (u8), begin and extent of the box (an i64 per axis each), and
// for a flat range its first element and count (i64). The number of axes is not written, because
// the reader knows the tensor's shape.
void EncodeRegion(ByteWriter& out, const Region& region);
// Reads a region, which must lie within `shape`. `key` is the tensor's key, for the error message.
Result<Region> DecodeRegion(ByteReader& in, std::string_view what, std::string_view key,
                            const Dims& shape);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_CODING_H_
