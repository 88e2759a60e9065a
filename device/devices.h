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

// Device memory from Allocate, and pending work of destroyed queues. Memory that such work may
// access is freed only after the work has ended. Nothing waits for the work, because its stream may
// hang: instead, memory whose work has ended is freed whenever a queue is made or destroyed, and
// whenever memory is allocated or freed. Thread-safe.
class PendingDeviceWork {
 public:
  explicit PendingDeviceWork(std::shared_ptr<DeviceOps> ops) : ops_(std::move(ops)) {}

  // The pending work of one destroyed queue. A queue allocates its entry when it is made, because
  // there may be no memory when it is destroyed.
  struct QueueWork {
    std::shared_ptr<DeviceMark> mark;  // Null: the end of the work is unknown.
    std::uint64_t number = 0;          // Counts destroyed queues with pending work, from 1 on.
  };
  using Slot = std::list<QueueWork>;
  // Adds the pending work of a destroyed queue. `work`: the queue's last mark, or an error if it
  // has none.
  void Add(Slot slot, const Result<std::shared_ptr<DeviceMark>>& work) noexcept;
  // Whether all pending work has ended.
  bool IsIdle() noexcept;

  // Allocates device memory. The errors are those of DeviceOps::Allocate.
  Result<std::byte*> Allocate(std::size_t bytes);
  // Frees memory from Allocate once all work has ended that destroyed queues left pending since
  // Allocate or ResetPendingWork. Live queues must not use the memory.
  void Free(std::byte* data) noexcept;
  // Whether all work has ended that destroyed queues left pending since Allocate or
  // ResetPendingWork.
  bool HasNoPendingWork(std::byte* data) noexcept;
  // Declares that no pending work uses this memory.
  void ResetPendingWork(std::byte* data) noexcept;

 private:
  struct Area {
    std::uint64_t since = 0;  // Pending work with a number above `since` may use the memory.
    std::uint64_t until = 0;  // Set by Free: work with a number above `until` cannot use it.
  };
  void Sweep() noexcept;
  bool HasNoPendingWorkLocked(const Area& area) const;

  const std::shared_ptr<DeviceOps> ops_;
  std::mutex mutex_;
  std::uint64_t count_ = 0;
  Slot work_;
  std::map<std::byte*, Area> areas_;
  // Freed memory that pending work may use. Free moves an entry of areas_ here, because it must not
  // allocate.
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
// For tests: replaces the source and forgets opened devices. An empty source restores the CUDA
// module (device/device_module.h).
void SetDeviceSource(DeviceSource source);

// Opens the device of a buffer. kUnsupported if the CUDA module is missing or from another build;
// kUnavailable if the device cannot be opened, or if this process was forked from one that had
// opened a device, because a forked child cannot use devices. Thread-safe.
Result<std::shared_ptr<const OpenedDevice>> OpenDevice(const Device& device);

// This device's end of direct transfers (DeviceOps::OpenLink). Also returns errors of OpenDevice.
// Thread-safe.
Result<std::unique_ptr<DeviceLink>> OpenDeviceLink(const Device& device);

// Checks that saves and loads can use the memory of a view: host memory (CheckHostMemory) or memory
// of a device that OpenDevice opens (DeviceOps::Check). The errors are those of these functions.
Status CheckMemory(const BufferView& view);
inline bool IsDeviceMemory(const BufferView& view) { return view.device.kind != DeviceKind::kHost; }

// Marks, made at the beginning of a save or load, of the streams that order its buffers. A
// background save or load works later in other threads, and must not wait for work that the streams
// get after the call. Once shared between threads, only const functions may be called; Hold and
// NoteLostWork set memory_in_use, which is atomic.
class DeviceFences {
 public:
  // Marks the current work of the buffer's stream, once per stream. Ignores host memory. The errors
  // are those of OpenDevice and MarkStream.
  Status Add(const BufferView& view);
  // Makes later work of `queue`, a queue of `device`, wait for the fences of `device`.
  Status MakeQueueWait(DeviceQueue& queue, const OpenedDevice& device) const;
  // For a call that ends before its device work: makes later work of the streams wait for `work`,
  // so that `work` does not overwrite memory that a stream-ordered allocator has handed out again.
  // A stream is left out while `work` may still wait for the fence of another stream: that stream
  // may hang, or wait for this one. The streams must live until the call has ended. Thread-safe.
  void Hold(const OpenedDevice& device, const Result<std::shared_ptr<DeviceMark>>& work) const;
  // Sets memory_in_use, because pending work has no mark that a stream could wait for.
  void NoteLostWork() const { memory_in_use_ = true; }
  // Whether pending work exists for which some stream does not wait: a buffer has no stream, or
  // another thread's default stream; the work has no mark; the stream refused to wait; or Hold left
  // the stream out.
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
