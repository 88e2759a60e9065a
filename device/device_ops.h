// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_DEVICE_OPS_H_
#define TENSORMOUNT_DEVICE_DEVICE_OPS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "device/bulk_mover.h"
#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

// The interface to a device whose memory the host cannot access: copy, hash, wait. gpu/ implements
// it for CUDA, and tests with host memory behind queues (tests/support/host_device.h).
// docs/devices.md describes the design.
//
// Work is submitted and completes later: a queue accepts work at once and executes it in order, and
// a mark stands for all work submitted before it. AwaitMark (device/pinned_ring.h) blocks, with a
// deadline; calls of a queue may block within its QueueLimits, and calls that allocate memory.

namespace tensormount {

// A point in a queue, or in a stream of the caller: reached when all earlier work is done.
// Thread-safe.
class DeviceMark {
 public:
  virtual ~DeviceMark() = default;
  // Whether the mark is reached. If earlier work of the device failed, this and all later calls
  // return its error.
  virtual Result<bool> Reached() = 0;
};

// A copy by a device: the runs of a plan (shard/copy_plan.h), from one memory to another. Source
// and destination must not overlap.
struct DeviceCopy {
  StridedCopy plan;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

// Limits for each wait of a queue. A queue waits while the device accepts no more work, and before
// copies from or to host memory that is not pinned. `cancel`, if not null, must outlive the queue.
struct QueueLimits {
  std::chrono::milliseconds patience{60'000};
  const std::atomic<bool>* cancel = nullptr;
};

// A queue of work for one device. Submissions are ordered; the copies of one submission may run in
// any order. Not thread-safe. If a call fails, part of it may have been submitted: its memory may
// be reused only once a later mark is reached. An error of the work itself is returned by the next
// mark that is queried.
class DeviceQueue {
 public:
  // Submitted work continues: callers that need its end await a mark first.
  virtual ~DeviceQueue() = default;

  // Makes later work wait until `mark`, of this device, is reached.
  virtual Status WaitFor(const std::shared_ptr<DeviceMark>& mark) = 0;

  // Copies from device to host, from host to device, and within the device. On the host the bytes
  // of each copy are contiguous, in the order of its runs. If two consecutive copies of a
  // submission are separated on the host only by the rest of a cache line (64 bytes), CopyOut may
  // overwrite the bytes between them.
  virtual Status CopyOut(std::span<const DeviceCopy> copies) = 0;
  virtual Status CopyIn(std::span<const DeviceCopy> copies) = 0;
  virtual Status CopyWithin(std::span<const DeviceCopy> copies) = 0;

  // Computes leaf hashes (XXH3-128, shard/leaf_hash.h). The copies of `gather` read relative to
  // `base` and write to offsets 0 to `bytes` of a packed buffer, each contiguously in the order of
  // its runs. `out` gets one hash for each `leaf_bytes` of that buffer; it is host memory that must
  // live until a later mark is found reached.
  virtual Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base,
                            std::uint64_t bytes, std::uint64_t leaf_bytes, Hash128* out) = 0;
  // Computes the contribution of placed boxes to the digest of their tensor
  // (shard/strided_digest.h) into *out, host memory that must live as long as in HashLeaves.
  virtual Status Digest(std::span<const PlacedBox> placed, const std::byte* base,
                        const Dims& byte_shape, Crc64* out) = 0;

  // Returns a mark for all work submitted so far. Mark may first hand over work to the device that
  // earlier calls only accepted. If that fails, Mark returns the error once, and the next Mark
  // stands for the work that the device did get.
  virtual Result<std::shared_ptr<DeviceMark>> Mark() = 0;
  // For use when Mark fails: a mark for the work submitted so far. It is reached when the queue's
  // next successful Mark is reached. If no Mark succeeds until the queue is destroyed, it returns
  // an error. Null: not supported.
  virtual std::shared_ptr<DeviceMark> MarkLater() { return nullptr; }

  // Changes the wait limits. A queue that never blocks ignores this.
  virtual void SetLimits(const QueueLimits& /*limits*/) {}
};

// Layout of pinned memory: blocks of one size. There are enough blocks for threads to fill some
// while others are in transit. A block is large enough that the next copy is submitted while the
// copy of this block is running.
struct PinnedShape {
  std::size_t blocks = 32;
  std::size_t block_bytes = std::size_t{4} << 20;
};

// One device. Thread-safe.
class DeviceOps {
 public:
  virtual ~DeviceOps() = default;

  // Name of the device for messages: "cuda:0 (NVIDIA H100 80GB HBM3)".
  virtual std::string name() const = 0;
  // Whether the device must be reopened, because it was reset.
  virtual bool gone() const { return false; }
  virtual PinnedShape pinned() const { return {}; }

  // Checks that a buffer is memory of this device. kInvalidArgument if it is not; or the error of
  // the device.
  virtual Status Check(const BufferView& view) = 0;

  // Page-locked, page-aligned host memory. kResourceExhausted if there is none.
  virtual Result<std::byte*> AllocatePinned(std::size_t bytes) = 0;
  virtual void FreePinned(std::byte* data) = 0;
  // Device memory. Neither call waits for streams of the program, except Allocate on a full device
  // without memory pools. Freed memory must not be in use by pending work (PendingDeviceWork tracks
  // work of destroyed queues).
  virtual Result<std::byte*> Allocate(std::size_t bytes) = 0;
  virtual void Free(std::byte* data) = 0;

  // A mark for all work submitted to the caller's stream so far. For a per-thread default stream
  // call it on that thread. kInvalidArgument for a stream that records a graph, or is of another
  // device.
  virtual Result<std::shared_ptr<DeviceMark>> MarkStream(const DeviceStream& stream) = 0;

  // Makes later work of the caller's stream wait for `mark`, of this device. The calling thread and
  // the errors are as for MarkStream.
  virtual Status HoldStream(const DeviceStream& stream,
                            const std::shared_ptr<DeviceMark>& mark) = 0;

  virtual Result<std::unique_ptr<DeviceQueue>> MakeQueue(const QueueLimits& limits) = 0;

  // This device's end of direct transfers to devices of other ranks; each transport needs its own.
  // kUnsupported if this kind of device has no such transfers, or the library for them (NCCL) is
  // too old; kUnavailable if that library is not on this machine.
  virtual Result<std::unique_ptr<DeviceLink>> OpenLink() {
    return Status(Code::kUnsupported,
                  name() + ": direct transfers to other devices are not supported");
  }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_OPS_H_
