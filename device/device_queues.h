// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_DEVICE_QUEUES_H_
#define TENSORMOUNT_DEVICE_DEVICE_QUEUES_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "device/devices.h"
#include "shard/tensor_meta.h"

// The device work of one save or load: queues, ordered after the fences of the call, and helpers on
// top.

namespace tensormount {

// Limits for one save or load on devices. `fences` and `cancel`, which may be null, must outlive
// all users of the limits.
struct DeviceLimits {
  const DeviceFences* fences = nullptr;
  const std::atomic<bool>* cancel = nullptr;
  // Limit for each wait: for a free pinned block, for the end of submitted work, or of a queue
  // (QueueLimits).
  std::chrono::milliseconds patience{0};

  // Waits for a mark of `device`; an error names the device.
  Status Await(DeviceMark& mark, const OpenedDevice& device) const;
  Result<PinnedRing::Block> TakeBlock(const OpenedDevice& device) const;
};

// How long destructors wait at most for device work whose result is no longer needed. They wait
// because the work still accesses the caller's memory.
inline constexpr std::chrono::milliseconds kDeviceGrace{250};

// The result of submitting work to a queue. `status` is the error of the submission, or of its
// mark. `mark` stands for all work that the device got, including part of a submission that failed;
// `mark` is an error if no mark can be made.
struct Submission {
  Status status;
  Result<std::shared_ptr<DeviceMark>> mark;
};
Submission MarkSubmitted(DeviceQueue& queue, const Status& submitted);
// Runs `work`, which submits to a queue, and converts exceptions to a status. Otherwise an
// exception between a submission and its mark would make memory look free that the device still
// accesses.
Status CatchExceptions(const std::function<Status()>& work) noexcept;

// Position of the next bytes in a pinned block: cache-line aligned, for vector loads and device
// copies.
constexpr std::size_t AlignedInBlock(std::size_t used) { return (used + 63) / 64 * 64; }

// A block of pinned memory in transit to or from a device. It returns to the ring only once the
// transfer is known to be complete.
class BlockInTransit {
 public:
  BlockInTransit(PinnedRing::Block block, std::shared_ptr<const OpenedDevice> device)
      : block_(std::move(block)), device_(std::move(device)) {}
  // Waits at most kDeviceGrace for a transfer that is no longer needed, because the transfer
  // accesses the caller's memory.
  ~BlockInTransit() { Settle(Deadline::After(kDeviceGrace)); }
  BlockInTransit(const BlockInTransit&) = delete;
  BlockInTransit& operator=(const BlockInTransit&) = delete;

  std::byte* data() const { return block_.data(); }
  std::size_t size() const { return block_.size(); }
  bool transfer_done() const { return transfer_done_; }

  // Submits the transfer by calling `work`; the previous transfer must have completed.
  Status Launch(DeviceQueue& queue, const std::function<Status()>& work);
  Status AwaitTransfer(const DeviceLimits& limits);
  // Waits for a transfer that is no longer needed. If it has not ended by `deadline`, the block
  // stays with the device (PinnedRing::Block::ReturnAfter).
  void Settle(const Deadline& deadline);

 private:
  PinnedRing::Block block_;
  std::shared_ptr<const OpenedDevice> device_;
  Result<std::shared_ptr<DeviceMark>> mark_ = std::shared_ptr<DeviceMark>();
  bool transfer_done_ = true;
};

// Makes a queue to a device, ordered after the fences of the call. If the queue is destroyed with
// pending work, later frees wait for that work (PendingDeviceWork), and so do the streams of the
// fences, with the exceptions of DeviceFences::Hold.
Result<std::unique_ptr<DeviceQueue>> MakeFencedQueue(const OpenedDevice& device,
                                                     const DeviceLimits& limits);

// One queue per device, made on first use. Not thread-safe.
class DeviceQueues {
 public:
  explicit DeviceQueues(const DeviceLimits& limits) : limits_(limits) {}
  Result<DeviceQueue*> Of(const std::shared_ptr<const OpenedDevice>& device);
  DeviceLimits& limits() { return limits_; }

 private:
  DeviceLimits limits_;
  std::map<std::shared_ptr<const OpenedDevice>, std::unique_ptr<DeviceQueue>> queues_;
};

// Boxes of device memory, in bytes relative to `base`.
struct DeviceBoxes {
  std::shared_ptr<const OpenedDevice> device;
  std::span<const PlacedBox> placed;
  std::byte* base = nullptr;
};

// Writes bytes to device memory through pinned blocks: while some blocks are in transit the next
// ones are filled. Small boxes share a block. Thread-safe: concurrent threads fill separate blocks
// and use separate queues. To avoid deadlock, a thread that waits for a block has none itself and
// has sent all blocks that no thread is filling; a caller that waits for other threads calls Push
// first.
class DeviceWriter {
 public:
  explicit DeviceWriter(const DeviceLimits& limits) : limits_(limits) {}
  // Waits at most kDeviceGrace for transfers that are no longer needed, because they access the
  // caller's memory.
  ~DeviceWriter();

  // Writes the packed bytes of a box to the place that `packed` gives, relative to `base`.
  using Fill = std::function<Status(const PlacedBox& packed, std::byte* base)>;
  // The contribution of written bytes to the digest of their tensor. The device computes it after
  // each copy, while later copies are in transit. The object must live until Finish has returned,
  // or the writer is destroyed.
  struct WriteDigest {
    Dims byte_shape;
    Crc64 digest = 0;
    // True if the device had no memory to compute the digest; then `digest` is invalid.
    bool unknown = false;
  };
  // Writes `box`, a part of to.box, to the place that `to` gives in device memory at `base`. Write
  // calls `fill` for the bytes, once for each part of the box that fits into a pinned block. When
  // Finish has returned, the bytes are in device memory, and `arrived`, if not null, has their
  // digest.
  Status Write(const std::shared_ptr<const OpenedDevice>& device, const Box& box,
               const PlacedBox& to, std::byte* base, const Fill& fill,
               WriteDigest* arrived = nullptr);
  // Like Write, with zeros.
  Status WriteZeros(const std::shared_ptr<const OpenedDevice>& device, const Box& box,
                    const PlacedBox& to, std::byte* base);
  // Sends partly filled blocks, except those that another thread is writing. May do nothing if
  // another thread is in a call of this writer, which then may be sending the blocks.
  Status Push();
  // Discards bytes that were not sent.
  void Drop();
  // For use after a cancelled call: later waits, also of existing queues, ignore the cancellation
  // and take up to `patience`. Like Drop and Finish, must not be called while another thread
  // writes.
  void IgnoreCancellation(std::chrono::milliseconds patience);
  // Waits until all bytes are in device memory.
  Status Finish();
  // After a failure, when no thread writes: waits for transfers, at most until `deadline`, and
  // returns whether no transfer is pending any more.
  bool Settle(const Deadline& deadline);

 private:
  struct Line {  // A block and queue for one device; used by one thread at a time.
    std::shared_ptr<const OpenedDevice> device;
    std::unique_ptr<DeviceQueue> queue;
    std::optional<PinnedRing::Block> block;  // The block that is being filled, if any.
    std::size_t used = 0;
    std::vector<DeviceCopy> copies;
    // Destination of a copy whose digest is wanted.
    struct Landing {
      PlacedBox placed;
      std::byte* base = nullptr;
      WriteDigest* arrived = nullptr;
    };
    std::vector<Landing> landings;
    // Digests of sent copies. A deque keeps their addresses valid, to which the device's results
    // are written later.
    struct SubmittedDigest {
      Crc64 digest = 0;
      WriteDigest* arrived = nullptr;
    };
    std::shared_ptr<std::deque<SubmittedDigest>> taken =
        std::make_shared<std::deque<SubmittedDigest>>();
    std::shared_ptr<DeviceMark> last;  // Mark of the last sent block.
    bool lost = false;                 // A block was sent for which no mark could be made.
  };
  Result<std::unique_ptr<Line>> TakeLine(const std::shared_ptr<const OpenedDevice>& device);
  void ReturnLine(std::unique_ptr<Line> line, Status& status);
  Status WriteBy(Line& line, const Box& box, const PlacedBox& to, std::byte* base, const Fill& fill,
                 WriteDigest* arrived);
  Status EnsureRoom(Line& line, std::uint64_t bytes);
  static Status Launch(Line& line);
  static Status TakeDigests(Line& line);
  Status PushLocked();

  std::mutex mutex_;
  DeviceLimits limits_;
  std::vector<std::unique_ptr<Line>> lines_;  // Idle lines.
  std::size_t made_ = 0;                      // Number of lines, busy ones included.
  int waiting_ = 0;                           // Threads that wait for a block.
};

// Computes contributions of device memory to the digests of tensors (shard/strided_digest.h) into
// each `out`. The devices compute them, or the host if a device has no memory to do so.
struct DigestRequest {
  DeviceBoxes boxes;
  Dims byte_shape;
  Crc64* out = nullptr;
};
Status DigestsOnDevices(std::span<const DigestRequest> wanted, const DeviceLimits& limits);

// Reads the boxes of device memory into `out`, packed one after the other. Returns the place of
// each box in `out`.
Result<std::vector<PlacedBox>> ReadBack(const DeviceBoxes& boxes, const DeviceLimits& limits,
                                        std::vector<std::byte>& out);

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_QUEUES_H_
