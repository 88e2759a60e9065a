// SPDX-License-Identifier: Apache-2.0
// A box of a tensor as segments of a file: one run, or a strided box.
#include "fs/views/tensor_box.h"

#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

// Whether the box is one run of row-major bytes: one index on each of the first axes, any range on
// the next axis, and all of the others. [3, 0:4, :] of [8, 16, 64] is one run, [3:5, 0:4, :] is
// two.
bool IsRun(const Box& box, const Dims& shape) {
  int axis = 0;
  while (axis < box.rank() && box.extent(axis) == 1) ++axis;
  for (++axis; axis < box.rank(); ++axis) {
    if (box.extent(axis) != shape[axis]) return false;
  }
  return true;
}

}  // namespace

Status AddTensorBox(FileSegments& segments, const TensorEntry& tensor, const Box& box,
                    const Dims& container) {
  const TensorMeta& meta = tensor.meta;
  const Dims& shape = meta.shape();
  if (box.rank() != shape.rank() || !box.Within(shape) || box.empty() ||
      container != box.extent() || !IsRun(box, shape)) {
    return segments.AddBox(tensor, box, container);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                               RegionBytes(meta.dtype(), shape, Region(box)));
  // Position of the box's first element in row-major order, below the tensor's number of elements.
  std::uint64_t first = 0;
  for (int a = 0; a < box.rank(); ++a) {
    first = first * static_cast<std::uint64_t>(shape[a]) + static_cast<std::uint64_t>(box.begin(a));
  }
  // RegionBytes above has checked that the box begins on a whole byte.
  segments.AddTensor(tensor, first * meta.bits() / 8, bytes);
  return {};
}

}  // namespace tensormount::fs
