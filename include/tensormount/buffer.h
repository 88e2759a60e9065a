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

// Where memory is.
enum class DeviceKind : std::uint8_t { kHost, kCuda };

// `ordinal` counts devices of a kind as the CUDA runtime does; 0 on the host.
struct Device {
  DeviceKind kind = DeviceKind::kHost;
  int ordinal = 0;
  // Which one it is, whatever CUDA_VISIBLE_DEVICES makes of ordinals; zeros: not said.
  std::array<std::uint8_t, 16> uuid = {};
  friend bool operator==(const Device&, const Device&) = default;
};

// How memory is reached.
enum class MemoryKind : std::uint8_t {
  kPageable,  // The host's, as malloc gives it. With a device of another kind: not said, kDevice.
  kPinned,    // The host's, page-locked: a device copies from it by itself.
  kManaged,   // Of one address on host and device, between which it moves.
  kDevice,    // The device's alone.
};

// Whether what a buffer holds is there already, or once a stream of its device has come so far.
enum class StreamKind : std::uint8_t {
  kNone,              // It is there.
  kLegacyDefault,     // The default stream, which waits for all others.
  kPerThreadDefault,  // That of the thread that calls.
  kHandle,            // Another one.
};
struct TENSORMOUNT_EXPORT DeviceStream {
  DeviceStream() = default;
  DeviceStream(StreamKind stream_kind, void* stream_handle)
      : kind(stream_kind), handle(stream_handle) {}
  // What BufferView::stream was before: null for none.
  [[deprecated("say what kind of stream it is")]] DeviceStream(void* stream_handle)
      : kind(stream_handle == nullptr ? StreamKind::kNone : StreamKind::kHandle),
        handle(stream_handle) {}
  // As DLPack numbers the streams of CUDA: -1 none, 1 the legacy default, 2 that of the thread,
  // other numbers handles. kInvalidArgument for 0, which DLPack leaves out because it says either
  // default, and for other negative ones. Source: the Python specification of DLPack, `__dlpack__`.
  static Result<DeviceStream> FromDLPack(std::int64_t number);

  StreamKind kind = StreamKind::kNone;
  void* handle = nullptr;  // A cudaStream_t, with kHandle.
  friend bool operator==(const DeviceStream&, const DeviceStream&) = default;
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
  MemoryKind memory = MemoryKind::kPageable;
  DeviceStream stream;  // That orders the buffer's contents.

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
