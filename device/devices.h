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

// The devices of this process, and checks of memory before it is used.

namespace tensormount {

// Device memory that tensormount allocated, and pending work of destroyed queues. Memory that such
// work may access is freed only after the work, without waiting for it, because its stream may
// hang. Whenever a queue is made or destroyed, and when memory is allocated or freed, memory whose
// work has ended is freed. Thread-safe.
class PendingDeviceWork {
 public:
  explicit PendingDeviceWork(std::shared_ptr<DeviceOps> ops) : ops_(std::move(ops)) {}

  // An entry that a queue allocates in advance, because there may be no memory when it is
  // destroyed.
  struct QueueWork {
    std::shared_ptr<DeviceMark> mark;  // Null: the end of the work is unknown.
    std::uint64_t number = 0;          // Order of destruction, from 1 on.
  };
  using Slot = std::list<QueueWork>;
  // Adds the pending work of a destroyed queue. `work`: the queue's last mark, or an error if it
  // has none.
  void Add(Slot slot, const Result<std::shared_ptr<DeviceMark>>& work) noexcept;
  // Whether all pending work has ended.
  bool IsIdle() noexcept;

  // Allocates device memory. The errors are those of DeviceOps::Allocate.
  Result<std::byte*> Allocate(std::size_t bytes);
  // Frees memory of Allocate that no live queue uses, after the work that was left pending since
  // Allocate or ResetPendingWork has ended.
  void Free(std::byte* data) noexcept;
  // Whether all work that was left pending since Allocate or ResetPendingWork has ended.
  bool HasNoPendingWork(std::byte* data) noexcept;
  // Declares that no pending work uses this memory.
  void ResetPendingWork(std::byte* data) noexcept;

 private:
  struct Area {
    std::uint64_t since = 0;  // Pending work with numbers above this one may use it.
    std::uint64_t until = 0;  // Set by Free: work with numbers above this one cannot.
  };
  void Sweep() noexcept;
  bool HasNoPendingWorkLocked(const Area& area) const;

  const std::shared_ptr<DeviceOps> ops_;
  std::mutex mutex_;
  std::uint64_t count_ = 0;
  Slot work_;
  std::map<std::byte*, Area> areas_;
  // Freed memory that pending work may use; Free moves an entry, so it does not allocate.
  std::map<std::byte*, Area> waiting_;
};

// An open device with the state that its saves and loads share: pinned memory, and pending work.
struct OpenedDevice {
  explicit OpenedDevice(std::shared_ptr<DeviceOps> device)
      : ops(std::move(device)),
        ring(std::make_shared<PinnedRing>(ops, ops->pinned())),
        pending_work(std::make_shared<PendingDeviceWork>(ops)) {}
  // Adds the name of the device to the message and the fields of a failure.
  Status Name(const Status& failure) const {
    return failure.ok() ? failure : failure.WithContext(ops->name()).With({.device = ops->name()});
  }
  std::shared_ptr<DeviceOps> ops;
  std::shared_ptr<PinnedRing> ring;
  std::shared_ptr<PendingDeviceWork> pending_work;
};

// Finds a device. Thread-safe.
using DeviceSource = std::function<Result<std::shared_ptr<DeviceOps>>(const Device&)>;
// For tests: replaces the source and forgets opened devices. Empty: the CUDA module again
// (device/device_module.h).
void SetDeviceSource(DeviceSource source);

// Opens the device of a buffer. kUnsupported if its module is not installed; kUnavailable if there
// is no such device, or if this process was forked from one that had opened it, because a forked
// child cannot use devices. Thread-safe.
Result<std::shared_ptr<const OpenedDevice>> OpenDevice(const Device& device);

// This device's end of direct transfers (DeviceOps::OpenLink). Also returns errors of OpenDevice.
// Thread-safe.
Result<std::unique_ptr<DeviceLink>> OpenDeviceLink(const Device& device);

// Checks that saves and loads can use the memory of a view: host memory (CheckHostMemory) or memory
// of a device that OpenDevice opens. The errors are those of both functions.
Status CheckMemory(const BufferView& view);
inline bool IsDeviceMemory(const BufferView& view) { return view.device.kind != DeviceKind::kHost; }

// The state, at the begin of a call, of the streams that order its buffers. A background save or
// load works later in other threads, and must not wait for work that the streams get after the
// call. Immutable once shared, except as noted for Hold.
class DeviceFences {
 public:
  // Marks the current work of the buffer's stream. The errors are those of OpenDevice and
  // MarkStream.
  Status Add(const BufferView& view);
  // Makes later work of `queue`, a queue of `device`, wait for all fences.
  Status MakeQueueWait(DeviceQueue& queue, const OpenedDevice& device) const;
  // For a call that ends before its device work: makes later work of the streams wait for `work`,
  // so that `work` does not overwrite memory that a stream-ordered allocator has reused. A stream
  // does not wait if `work` waits for another of the streams, because that wait may hang, or depend
  // on this stream. The streams must live until the call has ended. Thread-safe.
  void Hold(const OpenedDevice& device, const Result<std::shared_ptr<DeviceMark>>& work) const;
  // Records pending work without a mark.
  void NoteLostWork() const { memory_in_use_ = true; }
  // Whether there is pending work that no stream waits for: the buffer has no stream, or another
  // thread's; the work has no mark; or one stream would have to wait for another.
  bool memory_in_use() const { return memory_in_use_; }

 private:
  struct Fence {
    std::shared_ptr<const OpenedDevice> device;
    DeviceStream stream;
    std::shared_ptr<DeviceMark> mark;
    std::thread::id thread;
  };
  std::vector<Fence> fences_;
  // Devices of buffers without a stream.
  std::vector<std::shared_ptr<const OpenedDevice>> unordered_;
  mutable std::atomic<bool> memory_in_use_ = false;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICES_H_
