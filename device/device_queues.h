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

// What one save or load does on devices, whichever they are: a queue to each, behind the fences of
// the call, and what is built on it.

namespace tensormount {

// How a save or load treats devices. What it names must outlive who is told.
struct DeviceRules {
  const DeviceFences* fences = nullptr;
  const std::atomic<bool>* cancel = nullptr;
  // For one block of pinned memory: until one is free, or what goes through it is done.
  std::chrono::milliseconds patience{0};

  // Awaits a mark of `device`, which is named where it fails.
  Status Await(DeviceMark& mark, const OpenedDevice& device) const;
  Result<PinnedRing::Block> TakeBlock(const OpenedDevice& device) const;
};

// How long a device is waited for whose work nobody wants any more: it is on memory of the caller.
inline constexpr std::chrono::milliseconds kDeviceGrace{250};

// What became of work that was given to a queue, in calls of which the last said `submitted`: that,
// or the failure of the mark behind it. `mark` stands for all that the device got, a part of what
// failed included; failed, where none can be had.
struct Submission {
  Status status;
  Result<std::shared_ptr<DeviceMark>> mark;
};
Submission MarkSubmitted(DeviceQueue& queue, const Status& submitted);
// Runs what submits: no exception may come between a submission and its mark, without which the
// memory that it names counts as free.
Status NothingThrown(const std::function<Status()>& work) noexcept;

// Where the next bytes of a block of pinned memory may begin: at a cache line, which vector loads
// and device copies like.
constexpr std::size_t AlignedInBlock(std::size_t used) { return (used + 63) / 64 * 64; }

// A block of pinned memory whose bytes are on their way to or from a device. Goes back to the ring
// once they have come, as far as that is known.
class FlyingBlock {
 public:
  FlyingBlock(PinnedRing::Block block, std::shared_ptr<const OpenedDevice> device)
      : block_(std::move(block)), device_(std::move(device)) {}
  // Waits a little for bytes that nobody wants any more: they are the caller's memory.
  ~FlyingBlock() { Settle(Deadline::After(kDeviceGrace)); }
  FlyingBlock(const FlyingBlock&) = delete;
  FlyingBlock& operator=(const FlyingBlock&) = delete;

  std::byte* data() const { return block_.data(); }
  std::size_t size() const { return block_.size(); }
  bool landed() const { return landed_; }

  // Submits by `work` what moves its bytes; it must have landed before.
  Status Launch(DeviceQueue& queue, const std::function<Status()>& work);
  Status Land(const DeviceRules& rules);
  // The same for bytes that nobody wants any more; after `deadline` the block stays with the
  // device.
  void Settle(const Deadline& deadline);

 private:
  PinnedRing::Block block_;
  std::shared_ptr<const OpenedDevice> device_;
  Result<std::shared_ptr<DeviceMark>> mark_ = std::shared_ptr<DeviceMark>();
  bool landed_ = true;
};

// A queue to a device, behind the fences of the call. Where it is destroyed before its work is
// done, the streams of the fences wait for that (DeviceFences::Hold), and memory that is freed
// later (DeviceRemains).
Result<std::unique_ptr<DeviceQueue>> MakeFencedQueue(const OpenedDevice& device,
                                                     const DeviceRules& rules);

// Queues, one a device, made when they are first asked for. Of one thread at a time.
class DeviceQueues {
 public:
  explicit DeviceQueues(const DeviceRules& rules) : rules_(rules) {}
  Result<DeviceQueue*> Of(const std::shared_ptr<const OpenedDevice>& device);
  DeviceRules& rules() { return rules_; }

 private:
  DeviceRules rules_;
  std::map<std::shared_ptr<const OpenedDevice>, std::unique_ptr<DeviceQueue>> queues_;
};

// Memory of a device: boxes of bytes relative to `base`.
struct DeviceBoxes {
  std::shared_ptr<const OpenedDevice> device;
  std::span<const PlacedBox> placed;
  std::byte* base = nullptr;
};

// Brings bytes into memory of devices, through pinned blocks: while some are on their way the next
// are filled. Small boxes share a block. Thread-safe, and threads that write at the same time fill
// blocks of their own, which go in queues of their own.
// Who waits for a block holds none, and has sent those that nobody was filling; who waits for
// others calls Push before.
class DeviceWriter {
 public:
  explicit DeviceWriter(const DeviceRules& rules) : rules_(rules) {}
  // Waits a little for bytes that nobody wants any more: they go into the caller's memory.
  ~DeviceWriter();

  // Writes the packed bytes of a box to where it says, `base` added.
  using Fill = std::function<Status(const PlacedBox& packed, std::byte* base)>;
  // What the bytes that arrived contribute to the digest of their tensor, computed by the device
  // right behind each copy, beside the copies that follow. Must live until Finish has returned, or
  // the writer is gone.
  struct Arrived {
    Dims byte_shape;
    Crc64 digest = 0;
    // The device had no memory for it: `digest` means nothing.
    bool unknown = false;
  };
  // Puts the bytes of `box`, which lies within to.box, where `to` says in memory of a device at
  // `base`. They come from `fill`, which is called here, once for each part that a block takes.
  // They are there once Finish has returned, and then `arrived`, if not null, says what they are.
  Status Write(const std::shared_ptr<const OpenedDevice>& device, const Box& box,
               const PlacedBox& to, std::byte* base, const Fill& fill, Arrived* arrived = nullptr);
  // Zeros instead.
  Status WriteZeros(const std::shared_ptr<const OpenedDevice>& device, const Box& box,
                    const PlacedBox& to, std::byte* base);
  // Sends what waits for more of its block, but for what another thread is writing just now.
  Status Push();
  // Lets go of what was not sent.
  void Drop();
  // From now on waits go on where the call is cancelled, and take `patience`; those of queues that
  // were made before, too. Of no use while another thread writes, as Drop and Finish.
  void WaitOn(std::chrono::milliseconds patience);
  // Until all is there.
  Status Finish();
  // After a failure, when no thread writes: whether nothing of it is under way any more.
  bool Settle(const Deadline& deadline);

 private:
  struct Line {  // To one device. Of one thread at a time.
    std::shared_ptr<const OpenedDevice> device;
    std::unique_ptr<DeviceQueue> queue;
    std::optional<PinnedRing::Block> block;  // That is being filled.
    std::size_t used = 0;
    std::vector<DeviceCopy> copies;
    // Of copies whose digest is wanted: where they go.
    struct Landing {
      PlacedBox placed;
      std::byte* base = nullptr;
      Arrived* arrived = nullptr;
    };
    std::vector<Landing> landings;
    // Of what was sent; addresses stay.
    struct Taken {
      Crc64 digest = 0;
      Arrived* arrived = nullptr;
    };
    std::shared_ptr<std::deque<Taken>> taken = std::make_shared<std::deque<Taken>>();
    std::shared_ptr<DeviceMark> last;  // Of what was sent.
    bool lost = false;                 // Something was sent that no mark stands for.
  };
  Result<std::unique_ptr<Line>> TakeLine(const std::shared_ptr<const OpenedDevice>& device);
  void GiveBack(std::unique_ptr<Line> line, Status& status);
  Status WriteBy(Line& line, const Box& box, const PlacedBox& to, std::byte* base, const Fill& fill,
                 Arrived* arrived);
  Status Room(Line& line, std::uint64_t bytes);
  static Status Launch(Line& line);
  static Status TakeDigests(Line& line);
  Status PushLocked();

  std::mutex mutex_;
  DeviceRules rules_;
  std::vector<std::unique_ptr<Line>> lines_;  // Those that no thread writes by.
  std::size_t made_ = 0;                      // With those that some do.
  int waiting_ = 0;                           // Threads, for a block.
};

// The contributions of memory to the digests of tensors (shard/strided_digest.h), computed by the
// devices; by the host where a device has no memory for it.
struct DigestWanted {
  DeviceBoxes boxes;
  Dims byte_shape;
  Crc64* out = nullptr;
};
Status DigestsOnDevices(std::span<const DigestWanted> wanted, const DeviceRules& rules);

// The bytes of placed boxes of a device, packed one box after the other into `out`, and where they
// stand there.
Result<std::vector<PlacedBox>> ReadBack(const DeviceBoxes& boxes, const DeviceRules& rules,
                                        std::vector<std::byte>& out);

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_QUEUES_H_
