// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BUFFER_H_
#define TENSORMOUNT_BUFFER_H_

#include <cstdint>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Where memory is.
enum class DeviceKind : std::uint8_t { kHost, kCuda };

// `ordinal` counts devices of a kind as the CUDA runtime does; 0 on the host.
struct Device {
  DeviceKind kind = DeviceKind::kHost;
  int ordinal = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// Memory that the caller owns, described as DLPack describes it: pointer, device, dtype, shape,
// strides, stream. A value; never frees anything. The memory must stay valid until the call that
// it was handed to has returned (for saves: until the handle says so).
//
// Example, the left half of a 4 by 8 matrix of floats in place:
//
//   float matrix[4][8];
//   const auto left = BufferView::HostStrided(DType::kF32, matrix, {4, 4}, {8, 1});
struct TENSORMOUNT_EXPORT BufferView {
  void* data = nullptr;
  Device device;
  DType dtype = DType::kU8;
  Dims shape;    // Extents in elements; rank 0 is one element.
  Dims strides;  // In elements, one per axis, may be negative; of element types under a byte
                 // only the packed row-major form is allowed.
  void* stream = nullptr;  // CUDA stream that orders the buffer's contents; null on the host.

  // Row-major and packed.
  // Strides are left empty then. `data` may be null where the shape has no elements.
  static BufferView Host(DType dtype, void* data, const Dims& shape);
  static BufferView Host(DType dtype, const void* data, const Dims& shape);  // For saving only.
  static BufferView HostStrided(DType dtype, void* data, const Dims& shape, const Dims& strides);

  // Whether the bytes are the row-major order without gaps, as strides say or by having none.
  bool IsPacked() const;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BUFFER_H_
