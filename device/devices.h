// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_DEVICES_H_
#define TENSORMOUNT_DEVICE_DEVICES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "device/device_ops.h"
#include "device/pinned_ring.h"

// Devices of this process, and what must be known of memory before it is touched.

namespace tensormount {

// Memory of the device that is ours, and work that queues which are gone have left under way on it.
// Memory that such work may reach is freed after it: a stream that the work is behind may hang, and
// nobody waits for that. What has become free is looked for whenever a queue is made or goes, and
// when memory is taken or given back. Thread-safe.
class DeviceRemains {
 public:
  explicit DeviceRemains(std::shared_ptr<DeviceOps> ops) : ops_(std::move(ops)) {}

  // One entry, which a queue makes before it needs it: when it goes there may be no memory for it.
  struct Left {
    std::shared_ptr<DeviceMark> mark;  // Null: nobody can know when the work ends.
    std::uint64_t number = 0;          // In the order in which queues went, from 1 on.
  };
  using Slot = std::list<Left>;
  // `work`: the last mark of a queue; failed where none can be had.
  void Add(Slot slot, const Result<std::shared_ptr<DeviceMark>>& work) noexcept;
  // Whether none of it is under way any more.
  bool Over() noexcept;

  // Errors of DeviceOps::Allocate.
  Result<std::byte*> Allocate(std::size_t bytes);
  // Gives back memory of Allocate that no queue works on: it is freed once the work is over that
  // was left since Allocate or Renew.
  void Free(std::byte* data) noexcept;
  // Whether none of the work that was left since then is under way.
  bool IsOver(std::byte* data) noexcept;
  // The caller knows that none of it works on this memory.
  void Renew(std::byte* data) noexcept;

 private:
  struct Area {
    std::uint64_t since = 0;  // Work of later numbers may be on it,
    std::uint64_t until = 0;  // and, once it was given back, up to this one.
  };
  void Sweep() noexcept;
  bool IsOverLocked(const Area& area) const;

  const std::shared_ptr<DeviceOps> ops_;
  std::mutex mutex_;
  std::uint64_t count_ = 0;
  Slot work_;
  std::map<std::byte*, Area> areas_;
  std::map<std::byte*, Area> waiting_;  // Given back; Free moves an entry and needs no memory.
};

// A device that was asked for once, with what all its saves and loads share: pinned memory, and
// what was left under way.
struct OpenedDevice {
  explicit OpenedDevice(std::shared_ptr<DeviceOps> device)
      : ops(std::move(device)),
        ring(std::make_shared<PinnedRing>(ops, ops->pinned())),
        remains(std::make_shared<DeviceRemains>(ops)) {}
  // A failure of this device, named in words and as a field.
  Status Name(const Status& failure) const {
    return failure.ok() ? failure : failure.WithContext(ops->name()).With({.device = ops->name()});
  }
  std::shared_ptr<DeviceOps> ops;
  std::shared_ptr<PinnedRing> ring;
  std::shared_ptr<DeviceRemains> remains;
};

// Finds a device. Thread-safe.
using DeviceSource = std::function<Result<std::shared_ptr<DeviceOps>>(const Device&)>;
// For tests: replaces who finds devices, and forgets those that were opened. Empty: the module for
// CUDA again (device/device_module.h).
void SetDeviceSource(DeviceSource source);

// The device that a buffer's memory is on. kUnsupported where the module for it is not installed,
// kUnavailable where there is no such device, or where this process was forked from one that had
// opened it: no work of a device can be done in such a child. Thread-safe.
Result<std::shared_ptr<const OpenedDevice>> OpenDevice(const Device& device);

// Its end of a way to devices of other ranks (DeviceOps::OpenLink). Errors of OpenDevice and of
// that. Thread-safe.
Result<std::unique_ptr<DeviceLink>> OpenDeviceLink(const Device& device);

// Whether saves and loads can work with what a view describes: memory of the host (CheckHostMemory)
// or of a device that OpenDevice gives. Errors of both.
Status CheckMemory(const BufferView& view);
inline bool OnDevice(const BufferView& view) { return view.device.kind != DeviceKind::kHost; }

// What the streams that order some buffers had been given when a call began. A save or load that
// goes on in the background works in other threads later; what the streams are given after the call
// is not its business. Immutable once it is shared, but for what Hold says.
class DeviceFences {
 public:
  // Errors of OpenDevice and MarkStream.
  Status Add(const BufferView& view);
  // Work that is submitted to `queue`, of that device, from now on comes after all of them.
  Status Before(DeviceQueue& queue, const OpenedDevice& device) const;
  // The other way around, for a call that ends before its work on the device does: what the streams
  // are given from now on comes after `work`. Then memory that an allocator gives out in the order
  // of a stream is not written to by what was before. A stream is not made to wait where the work
  // waits for another one of them, which may hang, or wait for something that the program does on
  // this one. The streams must live until the call has ended. Thread-safe.
  void Hold(const OpenedDevice& device, const Result<std::shared_ptr<DeviceMark>>& work) const;
  // Work was left of which nothing is known.
  void Lose() const { memory_in_use_ = true; }
  // Whether work was left that no stream waits for: there is no stream, it is another thread's, the
  // work has no mark, or would make one stream wait for another.
  bool memory_in_use() const { return memory_in_use_; }

 private:
  struct Fence {
    std::shared_ptr<const OpenedDevice> device;
    DeviceStream stream;
    std::shared_ptr<DeviceMark> mark;
    std::thread::id thread;
  };
  std::vector<Fence> fences_;
  std::vector<std::shared_ptr<const OpenedDevice>> unordered_;  // With memory of no stream.
  mutable std::atomic<bool> memory_in_use_ = false;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICES_H_
