// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BUFFER_H_
#define TENSORMOUNT_BUFFER_H_

#include <array>
#include <cstdint>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

enum class DeviceKind : std::uint8_t { kHost, kCuda };

// The host, or one device. `ordinal` numbers the devices of a kind as the CUDA runtime does; 0 on
// the host.
struct Device {
  DeviceKind kind = DeviceKind::kHost;
  int ordinal = 0;
  // Identifies the device whatever CUDA_VISIBLE_DEVICES does to ordinals; zeros: not specified.
  std::array<std::uint8_t, 16> uuid = {};
  friend bool operator==(const Device&, const Device&) = default;
};

// The kind of memory in which a buffer lies.
enum class MemoryKind : std::uint8_t {
  kPageable,  // Ordinary host memory. On a device: not specified, counts as kDevice.
  kPinned,    // Page-locked host memory, which a device accesses directly.
  kManaged,   // Unified memory: one address, and pages migrate between host and device.
  kDevice,    // Memory of the device only.
};

// The stream whose work, as submitted so far, must finish before a buffer's contents are valid.
enum class StreamKind : std::uint8_t {
  kNone,              // No stream: the contents are valid.
  kLegacyDefault,     // The default stream, which waits for all others.
  kPerThreadDefault,  // The default stream of the calling thread.
  kHandle,            // The stream in `handle`.
};
struct TENSORMOUNT_EXPORT DeviceStream {
  DeviceStream() = default;
  DeviceStream(StreamKind stream_kind, void* stream_handle)
      : kind(stream_kind), handle(stream_handle) {}
  // For older code, in which BufferView::stream was a pointer. Null: no stream.
  [[deprecated("say what kind of stream it is")]] DeviceStream(void* stream_handle)
      : kind(stream_handle == nullptr ? StreamKind::kNone : StreamKind::kHandle),
        handle(stream_handle) {}
  // Converts DLPack's number of a CUDA stream: -1 is no stream, 1 the legacy default, 2 the
  // thread's default, every larger number a handle. kInvalidArgument for 0, which DLPack excludes
  // as ambiguous, and for other negative numbers. Source: the Python specification of DLPack,
  // `__dlpack__`.
  static Result<DeviceStream> FromDLPack(std::int64_t number);

  StreamKind kind = StreamKind::kNone;
  void* handle = nullptr;  // A cudaStream_t; used only with kHandle.
  friend bool operator==(const DeviceStream&, const DeviceStream&) = default;
};

// Memory that the caller owns, described as DLPack describes it: pointer, device, dtype, shape,
// strides, stream. A value type; never frees anything. The memory must stay valid until the save or
// load that uses it has ended (background saves: until SaveHandle::WaitStaged has returned).
//
// Example, the left half of a 4 by 8 matrix of floats in place:
//
//   float matrix[4][8];
//   const auto left = BufferView::HostStrided(DType::kF32, matrix, {4, 4}, {8, 1});
struct TENSORMOUNT_EXPORT BufferView {
  void* data = nullptr;
  Device device;
  DType dtype = DType::kU8;
  Dims shape;  // Extents in elements; no axes: one element.
  // Distance between neighbours on each axis, in elements; may be negative. Element types below one
  // byte must be packed and row-major.
  Dims strides;
  MemoryKind memory = MemoryKind::kPageable;
  DeviceStream stream;  // The stream whose work makes the contents valid.

  // Views of host memory. Host describes row-major elements without gaps, and fills in their
  // strides. `data` may be null if the shape has no elements.
  static BufferView Host(DType dtype, void* data, const Dims& shape);
  static BufferView Host(DType dtype, const void* data, const Dims& shape);  // For saving only.
  static BufferView HostStrided(DType dtype, void* data, const Dims& shape, const Dims& strides);

  // Whether the elements are row-major without gaps. False if there is not one stride per axis.
  bool IsPacked() const;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BUFFER_H_
