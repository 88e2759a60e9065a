// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device_mode.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "device/devices.h"
#include "state/state_copy.h"
#include "tests/support/fake_cuda_devices.h"
#include "tests/support/host_device.h"

namespace tensormount {
namespace {

// Bytes from the first to the last that a buffer reaches, and where its first element is in them.
struct Span {
  std::int64_t low = 0;
  std::int64_t high = 0;
};
Span SpanOf(const BufferView& view) {
  const std::int64_t bits = InfoOf(view.dtype).bits;
  std::int64_t elements = 1;
  for (const std::int64_t extent : view.shape) elements *= extent;
  if (elements == 0) return {};
  if (view.IsPacked()) return {0, (elements * bits + 7) / 8};
  Span span{0, bits / 8};
  for (int a = 0; a < view.shape.rank(); ++a) {
    const std::int64_t reach = (view.shape[a] - 1) * view.strides[a] * bits / 8;
    (reach < 0 ? span.low : span.high) += reach;
  }
  return span;
}

// Some streams of a device, which many states share.
void* StreamFor(std::size_t device, std::size_t item) {
  static const auto* const streams = [] {
    auto* made = new std::array<std::array<void*, 4>, 2>;
    for (std::size_t d = 0; d < made->size(); ++d) {
      for (void*& stream : (*made)[d]) stream = ModeDevice(d).MakeStream();
    }
    return made;
  }();
  return (*streams)[device][item % 4];
}

}  // namespace

bool DeviceMode() {
  static const bool on = std::getenv("TENSORMOUNT_TEST_DEVICE") != nullptr;
  return on;
}

TestDevice& ModeDevice(std::size_t number) {
  static const std::string_view mode = std::getenv("TENSORMOUNT_TEST_DEVICE");
  if (mode == "cuda") {
    static auto* const devices = new FakeCudaDevices;
    return (*devices)[number];
  }
  if (mode == "real") {
    static const auto* const devices = new auto(RealCudaDevices());
    return *(*devices)[number];
  }
  const HostDevice::Options options{.pinned = {4, 256 * 1024}, .delay_us = 20};
  static auto* const devices = new HostDevices({options, options});
  return (*devices)[number];
}

OnDevices::OnDevices(const StateDict& state) : state_(state) {
  if (!DeviceMode()) return;
  moved_ = WithShards(state, [&](std::size_t i) { return Move(i, state.tensors()[i].shard); });
}

Shard OnDevices::Move(std::size_t item, const Shard& shard) {
  if (shard.metadata_only || IsDeviceMemory(shard.data) || item % 5 == 4) return shard;
  const std::size_t number = item % 2;
  TestDevice& device = ModeDevice(number);
  Shard moved = shard;
  moved.data.device = device.device();
  moved.data.memory = MemoryKind::kDevice;
  const Span span = SpanOf(shard.data);
  if (shard.data.data == nullptr || span.high == span.low) return moved;
  Moved m;
  m.device = &device;
  m.bytes = static_cast<std::size_t>(span.high - span.low);
  m.here = static_cast<std::byte*>(shard.data.data) + span.low;
  m.there = device.NewMemory(m.bytes);
  moved.data.data = m.there - span.low;
  if (item % 3 == 0) {
    // What the tensor holds comes later: who does not wait for the stream gets this.
    const std::vector<std::byte> early(m.bytes, std::byte{0x5A});
    device.Put(m.there, early.data(), m.bytes);
    m.stream = StreamFor(number, item / 3);
    device.PutLater(m.stream, m.there,
                    std::make_shared<const std::vector<std::byte>>(m.here, m.here + m.bytes));
    moved.data.stream = DeviceStream(StreamKind::kHandle, m.stream);
  } else {
    device.Put(m.there, m.here, m.bytes);
  }
  memory_.push_back(m);
  return moved;
}

OnDevices::~OnDevices() {
  for (const Moved& m : memory_) {
    if (m.stream != nullptr) m.device->Synchronize(m.stream);
    m.device->FreeMemory(m.there);
  }
}

void OnDevices::BringBack() {
  for (const Moved& m : memory_) {
    if (m.stream != nullptr) m.device->Synchronize(m.stream);
    m.device->Get(m.here, m.there, m.bytes);
  }
}

}  // namespace tensormount
