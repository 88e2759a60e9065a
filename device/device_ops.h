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

// What saves and loads ask of a device whose memory the host cannot read: copy, hash, wait. The one
// seam between them and CUDA; gpu/ implements it, and so does a device of the tests, which is host
// memory behind queues of its own (tests/support/host_device.h). docs/devices.md has the picture.
//
// All of it is *submit and complete*: a queue takes work at once and does it later, in order; a
// mark stands for what was submitted before it. Nothing here waits but AwaitMark, with a deadline,
// and a queue where QueueRules says so.

namespace tensormount {

// The moment at which a queue, or a stream of the caller, has done what it was given before.
// Thread-safe.
class DeviceMark {
 public:
  virtual ~DeviceMark() = default;
  // Whether it is reached. An error is what the device says of the work before it, and stays.
  virtual Result<bool> Reached() = 0;
};

// Bytes that a device moves: runs of a plan (shard/copy_plan.h) from one memory to another, which
// do not overlap.
struct DeviceCopy {
  StridedCopy plan;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

// How long a queue may wait where it must: where so much is under way that the device takes no
// more, and where host memory is not pinned. `cancel`, if not null, must outlive it.
struct QueueRules {
  std::chrono::milliseconds patience{60'000};
  const std::atomic<bool>* cancel = nullptr;
};

// Work of one device in the order in which it was submitted. What is between two submissions is in
// that order; the copies of one submission may be done in any. Of one thread at a time.
// An error of a call may leave a part of it submitted: memory that it names is free again once a
// later mark is reached. An error of the work itself comes with the next mark that is asked.
class DeviceQueue {
 public:
  // What was submitted goes on: whoever must not outlive it awaits a mark.
  virtual ~DeviceQueue() = default;

  // What is submitted from now on begins after `mark`, of this device, is reached.
  virtual Status After(const std::shared_ptr<DeviceMark>& mark) = 0;

  // From memory of this device to the host's, the other way, and within the device. On the host the
  // bytes of each copy lie side by side, in the order of its runs. Where the next copy of a
  // submission begins with the cache line (64 bytes) behind that in which one ends, CopyOut may
  // write what is between them.
  virtual Status CopyOut(std::span<const DeviceCopy> copies) = 0;
  virtual Status CopyIn(std::span<const DeviceCopy> copies) = 0;
  virtual Status CopyWithin(std::span<const DeviceCopy> copies) = 0;

  // XXH3-128 of each `leaf_bytes` (shard/leaf_hash.h) of the `bytes` bytes that `gather` puts
  // side by side from 0 on, each of it in the order of its runs: where it reads, `base` is added.
  // Into `out`, one a leaf, memory of the host that must live until a later mark is found reached.
  virtual Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base,
                            std::uint64_t bytes, std::uint64_t leaf_bytes, Hash128* out) = 0;
  // The contribution of placed boxes to the digest of their tensor (shard/strided_digest.h), into
  // *out, memory of the host as above.
  virtual Status Digest(std::span<const PlacedBox> placed, const std::byte* base,
                        const Dims& byte_shape, Crc64* out) = 0;

  // Stands for all that was submitted so far. An error may be that of work that was submitted
  // before and only now handed to the device: it is told once, and the next mark stands for what
  // the device got.
  virtual Result<std::shared_ptr<DeviceMark>> Mark() = 0;
  // Where no mark is to be had now: stands for what was submitted so far from the next one on that
  // is, and fails with the queue where there is none. Null: the queue has no such marks.
  virtual std::shared_ptr<DeviceMark> MarkLater() { return nullptr; }

  // How long it may wait from now on. A queue that never waits ignores this.
  virtual void SetRules(const QueueRules& /*rules*/) {}
};

// Pinned memory that a device is given: blocks of one size. As many as there are threads that fill
// some while others are on their way; a copy of one takes the bus for long enough to begin the
// next.
struct PinnedShape {
  std::size_t blocks = 32;
  std::size_t block_bytes = std::size_t{4} << 20;
};

// One device. Thread-safe.
class DeviceOps {
 public:
  virtual ~DeviceOps() = default;

  // "cuda:0 (NVIDIA H100 80GB HBM3)": for messages.
  virtual std::string name() const = 0;
  // Whether it must be opened anew, because somebody has reset it.
  virtual bool gone() const { return false; }
  virtual PinnedShape pinned() const { return {}; }

  // Whether a buffer that says so is memory of this device, and the stream that orders it can be
  // waited for: kInvalidArgument, or what befell the device.
  virtual Status Check(const BufferView& view) = 0;

  // Page-locked memory of the host, page-aligned. kResourceExhausted where there is none.
  virtual Result<std::byte*> AllocatePinned(std::size_t bytes) = 0;
  virtual void FreePinned(std::byte* data) = 0;
  // The device's own. Neither waits for streams of the program. No work on what is freed may be
  // under way (DeviceRemains, where a queue that is gone may have left some).
  virtual Result<std::byte*> Allocate(std::size_t bytes) = 0;
  virtual void Free(std::byte* data) = 0;

  // What the caller's stream was given up to now. On the thread whose stream it is, where that is
  // the thread's default one. kInvalidArgument for a stream that records a graph.
  virtual Result<std::shared_ptr<DeviceMark>> MarkStream(const DeviceStream& stream) = 0;

  // Makes the caller's stream wait: work that it is given from now on begins after `mark`, of this
  // device, is reached. Called on the thread whose stream it is, as above. Errors of MarkStream.
  virtual Status HoldStream(const DeviceStream& stream,
                            const std::shared_ptr<DeviceMark>& mark) = 0;

  virtual Result<std::unique_ptr<DeviceQueue>> MakeQueue(const QueueRules& rules) = 0;

  // Its end of a way to the devices of other ranks; no two transports share one. kUnsupported: this
  // kind has none, or one that is too old. kUnavailable: what it needs is not on this machine.
  virtual Result<std::unique_ptr<DeviceLink>> OpenLink() {
    return Status(Code::kUnsupported, name() + ": it has no way to other devices");
  }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_OPS_H_
