// SPDX-License-Identifier: Apache-2.0
// TargetGeometry: positions of a box's bytes in the tensor, and their contribution to its digest.
#include "fs/save/target_geometry.h"

#include "shard/box_access.h"
#include "shard/strided_digest.h"

namespace tensormount::fs {

Result<TargetGeometry> TargetGeometry::Make(const TensorMeta& meta, const Box& box) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region region, ByteRegion(meta.dtype(), meta.shape(), box));
  TargetGeometry made;
  made.byte_shape_ = ByteShape(meta.dtype(), meta.shape());
  made.box_ = region.box();
  made.bytes_ = static_cast<std::uint64_t>(made.box_.volume());
  made.tensor_bytes_ = meta.bytes();
  if (made.bytes_ == 0) return made;
  // A box is a run if its axes are: length one, then any range of one axis, then whole axes.
  const Dims strides = PackedStrides(made.byte_shape_);
  bool began = false;
  made.is_run_ = true;
  for (int a = 0; a < made.box_.rank(); ++a) {
    if (began && made.box_.extent(a) != made.byte_shape_[a]) made.is_run_ = false;
    began = began || made.box_.extent(a) != 1;
    made.run_begin_ += static_cast<std::uint64_t>(made.box_.begin(a) * strides[a]);
  }
  return made;
}

// For a run the shift depends only on the number of tensor bytes after it. In other boxes a range
// of packed bytes is split into boxes.
Crc64 TargetGeometry::Contribution(std::uint64_t begin, const void* data, std::size_t size) const {
  if (size == 0) return 0;
  if (is_run_) {
    return Crc64Shift(tensor_bytes_ - (run_begin_ + begin + size))
        .Apply(Crc64Extend(0, data, size));
  }
  const Result<Region> region =
      Region::Flat(box_, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(size));
  if (!region.ok()) return 0;  // Not within bytes(): a caller's error.
  Crc64 crc = 0;
  for (const PlacedBox& placed : PlacePacked(region.value(), 0)) {
    crc ^= DigestOfPlaced(placed, static_cast<const std::byte*>(data), byte_shape_);
  }
  return crc;
}

}  // namespace tensormount::fs
