// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_CODING_H_
#define TENSORMOUNT_SHARD_CODING_H_

#include <string_view>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/coding.h"
#include "shard/tensor_meta.h"

// Shapes, tensors, positions and regions as bytes: in manifests and indexes (docs/format.md,
// "Records"), in journals of saves through a mount, and in messages of ranks. Encoders append.
// Decoders check what they take and give kDataLoss "what: why" for all else; what ends too soon is
// the reader's own error.

namespace tensormount {

void EncodeDims(ByteWriter& out, const Dims& dims);  // u8 rank, i64 each.
// At most kMaxRank numbers, which may be any.
Result<Dims> DecodeDims(ByteReader& in, std::string_view what);

// Key, u8 dtype and shape.
void EncodeMeta(ByteWriter& out, std::string_view key, DType dtype, const Dims& shape);
void EncodeMeta(ByteWriter& out, const TensorMeta& meta);
// kUnsupported for an element type that this version does not know.
Result<TensorMeta> DecodeMeta(ByteReader& in, std::string_view what);

// Index and grid of a part of the object `key`: of one rank, the index on the grid.
Status DecodeGridPosition(ByteReader& in, std::string_view what, std::string_view key, Dims& index,
                          Dims& grid);

// u8 whether it is a flat range, begin and extent of the box as i64 each, and of a flat range its
// first element and their number. Of a tensor whose shape the reader knows: there is no rank.
void EncodeRegion(ByteWriter& out, const Region& region);
// Within `shape`; `key` is its tensor's, for the error.
Result<Region> DecodeRegion(ByteReader& in, std::string_view what, std::string_view key,
                            const Dims& shape);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_CODING_H_
