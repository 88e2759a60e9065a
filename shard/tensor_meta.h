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

// Checks a key: UTF-8, 1 to kMaxKeyBytes bytes, no NUL.
Status CheckKey(std::string_view key);

// Whether a tensor may have this shape: at most 16 axes, elements and bits fit 63 bits, total bits
// are a multiple of 8. kInvalidArgument: "shape [3] of f4 does not fill whole bytes".
Status CheckShape(DType dtype, const Dims& shape);

// Name, element type and global shape of a tensor. Checked once when made (CheckKey, CheckShape),
// immutable after. (Extents of zero count as one for the size check, so that no stride can
// overflow.)
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
// Code that moves data works on a tensor of *bytes*, so that it serves every element size: the
// element shape with one more axis for the bytes of an element. For types below one byte the last
// axis has the bytes of a row if rows are whole bytes; if not, trailing axes are merged until they
// are whole bytes ([2, 3] of fp4 is 3 bytes).

// The shape in bytes of a tensor of this dtype and shape, with at most kMaxAxes axes.
Dims ByteShape(DType dtype, const Dims& shape);
// Converts `region` of elements to a region of bytes of ByteShape(dtype, shape). kInvalidArgument
// "does not begin and end on a byte" if it cuts a byte, or if it is outside `shape`.
Result<Region> ByteRegion(DType dtype, const Dims& shape, const Region& region);
// The smallest box of elements around a box of bytes, for messages.
Box ElementBox(DType dtype, const Dims& shape, const Box& byte_box);
// Packed size of the region in bytes. The errors are those of ByteRegion.
Result<std::uint64_t> RegionBytes(DType dtype, const Dims& shape, const Region& region);

// A box of bytes with its position in a byte string (a file, a buffer): its first byte is at
// `offset`, and one step along axis a adds strides[a] bytes (may be negative in memory).
struct PlacedBox {
  Box box;
  std::int64_t offset = 0;
  Dims strides;
};
// The part `part` of a placed box, which must contain it.
PlacedBox PartOfPlaced(const PlacedBox& placed, const Box& part);
// The packed row-major layout of a byte region from `offset` on, as a chunk has in its file.
std::vector<PlacedBox> PlacePacked(const Region& byte_region, std::uint64_t offset);
// The packed row-major layout of a whole tensor of bytes.
PlacedBox PlaceWhole(const Dims& byte_shape);
// Places a buffer that holds `region` of a tensor of this dtype and shape. The buffer's shape must
// be the region's extents, of which leading ones that are 1 may be left out (layers stacked under
// one key), or one axis of volume() elements in the region's row-major order (always so for flat
// ranges; also for boxes, because a flat range of whole rows becomes a box). Offsets are relative
// to buffer.data. kInvalidArgument if dtype or shape do not match, strides reach past 2^62 bytes,
// or a type below one byte is not packed; also the errors of ByteRegion.
Result<std::vector<PlacedBox>> PlaceBuffer(const BufferView& buffer, DType dtype, const Dims& shape,
                                           const Region& region);
// Places a foreign chunk with strides in bytes per element axis (transposed or padded storage).
// kInvalidArgument if the box is not in `shape` or a byte would be before 0 or past 2^62;
// kUnsupported for unpacked types below one byte.
Result<std::vector<PlacedBox>> PlaceStrided(DType dtype, const Dims& shape, const Box& box,
                                            std::uint64_t offset, const Dims& byte_strides);

// Bytes from the first to the end of the last element of a chunk with strides; 0 if it is empty.
// kInvalidArgument: another number of axes, negative strides, or past 2^62 bytes; kUnsupported for
// types below one byte.
Result<std::uint64_t> StridedSpan(DType dtype, const Dims& extents, const Dims& byte_strides);
// Whether the strides are those of a packed chunk, which records leave out; strides of axes of
// extent one do not matter.
bool ArePackedStrides(DType dtype, const Dims& extents, const Dims& byte_strides);
// Size of a chunk in its file: StridedSpan if it has strides, else RegionBytes. The errors are
// those of these functions, and kInvalidArgument for strides of a flat range.
Result<std::uint64_t> ChunkBytes(DType dtype, const Dims& shape, const Region& region,
                                 const Dims& byte_strides);
// Positions of a chunk's bytes in its file: PlaceStrided if it has strides, else PlacePacked.
Result<std::vector<PlacedBox>> PlaceChunk(DType dtype, const Dims& shape, const Region& region,
                                          std::uint64_t offset, const Dims& byte_strides);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_TENSOR_META_H_
