// SPDX-License-Identifier: Apache-2.0
// Views of a caller's memory (tensormount/buffer.h).
#include "tensormount/buffer.h"

#include "shard/box_access.h"
#include "shard/host_memory.h"

namespace tensormount {

BufferView BufferView::Host(DType dtype, void* data, const Dims& shape) {
  return HostStrided(dtype, data, shape, PackedStrides(shape));
}

BufferView BufferView::Host(DType dtype, const void* data, const Dims& shape) {
  // Loads and saves use the same view type, whose pointer is not const; a save only reads.
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

Result<DeviceStream> DeviceStream::FromDLPack(std::int64_t number) {
  switch (number) {
    case -1:
      return DeviceStream();
    case 1:
      return DeviceStream(StreamKind::kLegacyDefault, nullptr);
    case 2:
      return DeviceStream(StreamKind::kPerThreadDefault, nullptr);
    default:
      break;
  }
  if (number <= 0) {
    return Status(Code::kInvalidArgument,
                  "stream " + std::to_string(number) + ": not a CUDA stream that DLPack defines");
  }
  return DeviceStream(StreamKind::kHandle,
                      reinterpret_cast<void*>(static_cast<std::uintptr_t>(number)));
}

Status CheckDescription(const BufferView& view) {
  const auto cannot_be = [](const char* what) {
    return Status(Code::kInvalidArgument, std::string("the buffer is ") + what);
  };
  const bool on_host = view.device.kind == DeviceKind::kHost;
  if (on_host && view.memory == MemoryKind::kDevice) {
    return cannot_be("described as device memory, but its device is the host");
  }
  if (!on_host && view.memory == MemoryKind::kPinned) {
    return cannot_be("described as pinned host memory, but its device is not the host");
  }
  if ((view.stream.kind == StreamKind::kHandle) != (view.stream.handle != nullptr)) {
    return cannot_be("ordered by a stream whose kind does not match its handle");
  }
  return Status();
}

Status CheckHostMemory(const BufferView& view) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckDescription(view));
  if (view.device.kind != DeviceKind::kHost) {
    return Status(Code::kUnsupported,
                  "the buffer is in device memory, which the host cannot reach");
  }
  if (view.stream.kind != StreamKind::kNone) {
    return Status(Code::kUnsupported,
                  "the buffer is ordered by a device stream, which this build cannot wait for");
  }
  return Status();
}

bool BufferView::IsPacked() const {
  if (shape.rank() != strides.rank()) return false;
  for (const std::int64_t e : shape) {
    if (e == 0) return true;
  }
  // Compares strides with packed ones, from the innermost axis outwards. The shape is not checked
  // yet, hence the overflow test.
  std::int64_t step = 1;
  for (int a = shape.rank() - 1; a >= 0; --a) {
    if (shape[a] == 1) continue;  // The stride of such an axis is not used.
    if (strides[a] != step) return false;
    if (__builtin_mul_overflow(step, shape[a], &step)) return false;
  }
  return true;
}

}  // namespace tensormount
