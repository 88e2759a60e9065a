// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/devices.h"

namespace tensormount {

// Memory of devices for copies of what is being saved, as SnapshotPool has memory of the host: kept
// between saves, since devices are slow to give and take back. Thread-safe.
class DeviceSnapshots : public std::enable_shared_from_this<DeviceSnapshots> {
 public:
  // At most `bound` bytes of each device at a time; 0: none at all.
  explicit DeviceSnapshots(std::uint64_t bound) : bound_(bound) {}
  // Frees what it has, but for memory of saves that failed: their device may be at it still.
  ~DeviceSnapshots();

  // Goes back when destroyed.
  class Memory {
   public:
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::byte* data() const { return data_; }
    // The save that it was for has failed.
    void Doubt() { doubtful_ = true; }

   private:
    friend class DeviceSnapshots;
    Memory(std::shared_ptr<DeviceSnapshots> pool, std::size_t piece, std::byte* data)
        : pool_(std::move(pool)), piece_(piece), data_(data) {}
    const std::shared_ptr<DeviceSnapshots> pool_;
    const std::size_t piece_;
    std::byte* const data_;
    bool doubtful_ = false;
  };

  // `bytes` of memory, contents undefined; null where that would be over the bound, other saves
  // hold what is missing, or the device has no more. Does not wait for other saves.
  std::unique_ptr<Memory> Take(const std::shared_ptr<const OpenedDevice>& device,
                               std::uint64_t bytes);

 private:
  struct Block {
    std::shared_ptr<const OpenedDevice> device;
    std::byte* data = nullptr;  // Null: freed.
    std::uint64_t size = 0;
    bool taken = false;
    bool doubtful = false;
  };
  void Free(Block& block);

  const std::uint64_t bound_;
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_
