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

// Waits until `mark` is reached, at most until `deadline`; sooner where `cancel`, if not null, is
// set. kDeadlineExceeded, kCancelled, or what the device says. The wait is for the mark alone: the
// device goes on where it is given up.
Status AwaitMark(DeviceMark& mark, const Deadline& deadline,
                 const std::atomic<bool>* cancel = nullptr);

// Leaves memory to a device that may still write there: it is never freed.
void LeaveToDevice(void* memory);

// The pinned memory of one device: a few blocks of one size, between which and the device bytes
// move while the host works on others. Blocks are made when they are first needed and kept, so that
// what saves and loads pin is bounded whatever they move. Where the system pins none (RLIMIT), they
// are ordinary memory: slower, and said once in the log. Thread-safe.
//
// Whoever holds a block and waits for another one must be able to go on without it (TryTake):
// several saves and loads share the ring. Those who wait in Take are served in the order in which
// they came, and before all TryTake.
class PinnedRing : public std::enable_shared_from_this<PinnedRing> {
 public:
  PinnedRing(std::shared_ptr<DeviceOps> ops, const PinnedShape& shape);
  ~PinnedRing();

  // Goes back to the ring when destroyed. Move-only.
  class Block {
   public:
    Block(Block&& other) noexcept;
    Block& operator=(Block&& other) noexcept;
    ~Block();
    std::byte* data() const { return data_; }
    std::size_t size() const;
    // The device may still read or write it: it goes back once `mark` is reached. Where there is
    // none, or it fails, never: nobody knows when the device will be done.
    void GiveUp(const Result<std::shared_ptr<DeviceMark>>& mark);

   private:
    friend class PinnedRing;
    Block(std::shared_ptr<PinnedRing> ring, std::byte* data)
        : ring_(std::move(ring)), data_(data) {}
    void Return();
    std::shared_ptr<PinnedRing> ring_;
    std::byte* data_;
  };

  std::size_t block_bytes() const { return shape_.block_bytes; }

  // kDeadlineExceeded where others have held all blocks until then, kCancelled as AwaitMark,
  // kResourceExhausted where there is no memory for even one; what the device said where all are
  // with work that failed.
  Result<Block> Take(const Deadline& deadline, const std::atomic<bool>* cancel = nullptr);
  // Nothing where none is free now, or somebody waits.
  std::optional<Block> TryTake();

  // Whether somebody waits in Take.
  bool IsWaitedFor() const;

  // Bytes that are pinned, and bytes of blocks in ordinary memory instead.
  std::size_t pinned_bytes() const;
  std::size_t pageable_bytes() const;

 private:
  struct Memory {
    std::byte* data = nullptr;
    bool pinned = false;
  };
  struct Lost {
    std::byte* data = nullptr;
    Result<std::shared_ptr<DeviceMark>> mark;  // Failed: for good.
  };

  // With the lock held. Null where none is free, and no more may be made.
  Result<std::byte*> TakeLocked();
  Status Make();
  Status Name(const Status& failure) const;
  void CollectLost();

  const std::shared_ptr<DeviceOps> ops_;
  const PinnedShape shape_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::deque<const void*> waiting_;  // In Take, the first of them first.
  std::vector<Memory> made_;
  std::vector<std::byte*> free_;
  std::vector<Lost> lost_;  // Given up, with the device.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_PINNED_RING_H_
