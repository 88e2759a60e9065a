// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "device/devices.h"

namespace tensormount {

// A pool of device memory for snapshots, as SnapshotPool is for host memory. Memory is kept between
// saves, because devices allocate and free slowly. Thread-safe.
class DeviceSnapshots : public std::enable_shared_from_this<DeviceSnapshots> {
 public:
  // Uses at most `bound` bytes of each device at a time; 0: no device memory.
  explicit DeviceSnapshots(std::uint64_t bound) : bound_(bound) {}
  // Frees the pool's memory; blocks that a device may still access are freed later
  // (PendingDeviceWork).
  ~DeviceSnapshots();

  // Memory taken from the pool, which goes back when this object is destroyed.
  class Memory {
   public:
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::byte* data() const { return data_; }
    // Records that the device writes to this memory until `mark` is reached; a failed `mark` means
    // that the end of the writes is unknown. This object may be destroyed earlier; the pool reuses
    // the memory only after the writes.
    void SetPendingWrites(Result<std::shared_ptr<DeviceMark>> mark) { writes_ = std::move(mark); }
    void ClearPendingWrites() { writes_.reset(); }
    // Records that the save failed, and that operations left in its queues may still read this
    // memory. The queues must be destroyed before this object.
    void MarkStillAccessed() { still_accessed_ = true; }

   private:
    friend class DeviceSnapshots;
    Memory(std::shared_ptr<DeviceSnapshots> pool, std::size_t piece, std::byte* data)
        : pool_(std::move(pool)), block_index_(piece), data_(data) {}
    const std::shared_ptr<DeviceSnapshots> pool_;
    const std::size_t block_index_;
    std::byte* const data_;
    std::optional<Result<std::shared_ptr<DeviceMark>>> writes_;
    bool still_accessed_ = false;
  };

  // Returns `bytes` of memory with undefined contents; null if this exceeds the bound, other saves
  // use the memory, or the device has no more. Does not wait for other saves.
  std::unique_ptr<Memory> Take(const std::shared_ptr<const OpenedDevice>& device,
                               std::uint64_t bytes);

 private:
  struct Block {
    std::shared_ptr<const OpenedDevice> device;
    std::byte* data = nullptr;  // Null: the block was freed.
    std::uint64_t size = 0;
    bool taken = false;
    bool still_accessed = false;
    // Writes that the last save did not wait for (SetPendingWrites).
    std::optional<Result<std::shared_ptr<DeviceMark>>> writes;
  };
  void Free(Block& block);
  // Whether all writes of earlier saves to the block are known to have ended.
  static bool HaveWritesEnded(Block& block);
  // Whether all writes and reads of earlier saves are known to have ended, so that the block may be
  // freed.
  static bool IsIdle(Block& block);

  const std::uint64_t bound_;
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_
