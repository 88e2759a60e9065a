// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_TENSOR_META_H_
#define TENSORMOUNT_SHARD_TENSOR_META_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

namespace tensormount {

inline constexpr std::size_t kMaxKeyBytes = 2048;

// UTF-8, 1 to kMaxKeyBytes bytes, no NUL.
Status CheckKey(std::string_view key);

// Whether a tensor may have this shape: rank <= 16, elements and bits fit 63 bits, total bits are a
// multiple of 8. kInvalidArgument: "shape [3] of f4 does not fill whole bytes".
Status CheckShape(DType dtype, const Dims& shape);

// Name, element type and global shape of a tensor. Checked once when made, immutable after:
// rank <= 16, elements and bits fit 63 bits, total bits are a multiple of 8. (Extents of zero count
// as one for the size check, so that no stride can overflow.)
class TensorMeta {
 public:
  static Result<TensorMeta> Make(std::string key, DType dtype, const Dims& shape);

  const std::string& key() const { return key_; }
  DType dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  std::uint32_t bits() const { return InfoOf(dtype_).bits; }
  std::uint64_t elements() const { return elements_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::string key_;
  DType dtype_ = DType::kU8;
  Dims shape_;
  std::uint64_t elements_ = 0;
  std::uint64_t bytes_ = 0;
};

// ---- Bytes as cells ------------------------------------------------------------------------
// Everything that moves data works on a tensor of *bytes*, so that one code serves every element
// size: the element shape with one more axis for the bytes of an element. Types under a byte have
// an axis of whole bytes where rows are whole bytes, and otherwise trailing axes are merged until
// they are ([2, 3] of fp4 is 3 bytes).

// The shape in bytes that goes with (dtype, shape). Rank at most kMaxAxes.
Dims ByteShape(DType dtype, const Dims& shape);
// `region` of elements as a region of bytes of ByteShape(dtype, shape).
// kInvalidArgument "does not begin and end on a byte" for sub-byte types cut inside a byte;
// kInvalidArgument where the region does not lie within `shape`.
Result<Region> ByteRegion(DType dtype, const Dims& shape, const Region& region);
// The smallest box of elements around a box of bytes: names bytes in messages.
Box ElementBox(DType dtype, const Dims& shape, const Box& byte_box);
// Bytes that the region takes when packed.
Result<std::uint64_t> RegionBytes(DType dtype, const Dims& shape, const Region& region);

// A box of bytes at its place in a byte string (a file, a buffer): byte (begin) of the box stands
// at `offset`, one step along axis a moves by strides[a] bytes (negative allowed for memory).
struct PlacedBox {
  Box box;
  std::int64_t offset = 0;
  Dims strides;
};
// That part of it, which lies within its box.
PlacedBox PartOfPlaced(const PlacedBox& placed, const Box& part);
// Row-major packed pieces of a byte region from `offset` on: what a chunk looks like in its file.
std::vector<PlacedBox> PlacePacked(const Region& byte_region, std::uint64_t offset);
// A buffer that holds `region` of a (dtype, shape) tensor. Its shape must be the region's extents,
// of which leading ones that are 1 may be left out (layers stacked under one key), or one axis of
// volume() elements in the region's row-major order (always so for flat ranges; also for boxes,
// because a flat range of whole rows becomes one). Offsets are relative to buffer.data.
// kInvalidArgument where dtype or shape do not agree, or strides reach past 2^62 bytes.
Result<std::vector<PlacedBox>> PlaceBuffer(const BufferView& buffer, DType dtype, const Dims& shape,
                                           const Region& region);
// Foreign chunk with element strides in bytes per element axis (transposed or padded storage).
// kInvalidArgument where the box is not in `shape` or a byte would stand before 0 or past 2^62;
// kUnsupported for types under a byte that are not packed.
Result<std::vector<PlacedBox>> PlaceStrided(DType dtype, const Dims& shape, const Box& box,
                                            std::uint64_t offset, const Dims& byte_strides);

// Bytes from the first to the end of the last element of such a chunk; 0 for an empty one.
// kInvalidArgument: another rank, negative strides, or past 2^62 bytes; kUnsupported as above.
Result<std::uint64_t> StridedSpan(DType dtype, const Dims& extents, const Dims& byte_strides);
// Whether these are the strides of packed rows (which records then leave out); of axes of one
// element they do not matter.
bool ArePackedStrides(DType dtype, const Dims& extents, const Dims& byte_strides);
// Bytes that a chunk takes in its file: StridedSpan where it has strides, else RegionBytes. Same
// errors, and kInvalidArgument for strides of a flat range.
Result<std::uint64_t> ChunkBytes(DType dtype, const Dims& shape, const Region& region,
                                 const Dims& byte_strides);
// Where the bytes of a chunk stand in its file: PlaceStrided where it has strides, else
// PlacePacked.
Result<std::vector<PlacedBox>> PlaceChunk(DType dtype, const Dims& shape, const Region& region,
                                          std::uint64_t offset, const Dims& byte_strides);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_TENSOR_META_H_
