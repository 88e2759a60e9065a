// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_PINNED_RING_H_
#define TENSORMOUNT_DEVICE_PINNED_RING_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tensormount/status.h"

#include "base/deadline.h"
#include "device/device_ops.h"

namespace tensormount {

// Waits until `mark` is reached, until `deadline`, or until `cancel` (if not null) is set. Returns
// kDeadlineExceeded, kCancelled, or the error of the device. If the wait ends early, the device's
// work continues.
Status AwaitMark(DeviceMark& mark, const Deadline& deadline,
                 const std::atomic<bool>* cancel = nullptr);

// Keeps `memory` until the process ends, because a device may still write to it.
void LeakToDevice(void* memory);

// The pinned memory of one device: blocks of one size for transfers that overlap with work of the
// host. At most PinnedShape::blocks blocks are made, when first needed, and kept. If the system
// refuses to pin a block (RLIMIT_MEMLOCK), the block is ordinary memory, which is slower; the first
// one is logged. Thread-safe.
//
// Several saves and loads share the ring. To avoid deadlock, a thread that holds a block gets
// another one only with TryTake, which does not wait. Waiters in Take are served in order; TryTake
// gets no block while a thread waits in Take.
class PinnedRing : public std::enable_shared_from_this<PinnedRing> {
 public:
  PinnedRing(std::shared_ptr<DeviceOps> ops, const PinnedShape& shape);
  ~PinnedRing();

  // A block of the ring. Its destructor returns the memory to the ring. Move-only.
  class Block {
   public:
    Block(Block&& other) noexcept;
    Block& operator=(Block&& other) noexcept;
    ~Block();
    std::byte* data() const { return data_; }
    std::size_t size() const;
    // For a block that the device may still access: the block returns to the ring once `mark` is
    // reached, and never if the mark is an error, because the end of the work is then unknown.
    void ReturnAfter(const Result<std::shared_ptr<DeviceMark>>& mark);

   private:
    friend class PinnedRing;
    Block(std::shared_ptr<PinnedRing> ring, std::byte* data)
        : ring_(std::move(ring)), data_(data) {}
    void Return();
    std::shared_ptr<PinnedRing> ring_;
    std::byte* data_;
  };

  std::size_t block_bytes() const { return shape_.block_bytes; }

  // Takes a block. kDeadlineExceeded if all blocks stayed in use; kCancelled as in AwaitMark;
  // kResourceExhausted if there is no memory for one block; the error of the device if the first
  // block cannot be made, or if failed work keeps all blocks.
  Result<Block> Take(const Deadline& deadline, const std::atomic<bool>* cancel = nullptr);
  // Takes a block without waiting. nullopt if no block is free, or a thread waits in Take.
  std::optional<Block> TryTake();

  // Whether a thread waits in Take.
  bool IsWaitedFor() const;

  // Bytes of pinned blocks, and of blocks in ordinary memory.
  std::size_t pinned_bytes() const;
  std::size_t pageable_bytes() const;

 private:
  struct Memory {
    std::byte* data = nullptr;
    bool pinned = false;
  };
  struct Lost {
    std::byte* data = nullptr;
    Result<std::shared_ptr<DeviceMark>> mark;  // An error: the block never returns.
  };

  // Requires mutex_. Returns null if no block is free and no more can be made.
  Result<std::byte*> TakeLocked();
  Status Make();
  Status Name(const Status& failure) const;
  // Requires mutex_. Frees the oldest block in `lost_` whose mark is reached; false: there is none.
  // A question takes several calls of the driver, so no more are asked than are needed.
  bool CollectOne();

  const std::shared_ptr<DeviceOps> ops_;
  const PinnedShape shape_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::deque<const void*> waiting_;  // Waiters in Take, in order.
  std::vector<Memory> made_;
  std::vector<std::byte*> free_;
  std::vector<Lost> lost_;  // Blocks that the device may still access, the oldest first.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_PINNED_RING_H_
