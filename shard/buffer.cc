// SPDX-License-Identifier: Apache-2.0
// Views of a caller's memory (tensormount/buffer.h).
#include "tensormount/buffer.h"

#include "shard/box_access.h"

namespace tensormount {

BufferView BufferView::Host(DType dtype, void* data, const Dims& shape) {
  return HostStrided(dtype, data, shape, PackedStrides(shape));
}

BufferView BufferView::Host(DType dtype, const void* data, const Dims& shape) {
  // A view has one pointer type for loads and saves; a save only reads.
  return Host(dtype, const_cast<void*>(data), shape);
}

BufferView BufferView::HostStrided(DType dtype, void* data, const Dims& shape,
                                   const Dims& strides) {
  BufferView view;
  view.data = data;
  view.dtype = dtype;
  view.shape = shape;
  view.strides = strides;
  return view;
}

bool BufferView::IsPacked() const {
  if (shape.rank() != strides.rank()) return false;
  for (const std::int64_t e : shape) {
    if (e == 0) return true;
  }
  // Strides are compared with what they would be if packed, from the innermost axis outwards. The
  // caller's shape is not checked yet, hence the overflow test.
  std::int64_t step = 1;
  for (int a = shape.rank() - 1; a >= 0; --a) {
    if (shape[a] == 1) continue;  // Its stride is never used.
    if (strides[a] != step) return false;
    if (__builtin_mul_overflow(step, shape[a], &step)) return false;
  }
  return true;
}

}  // namespace tensormount
