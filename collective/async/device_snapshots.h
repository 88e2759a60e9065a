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

// Memory of devices for copies of what is being saved, as SnapshotPool has memory of the host: kept
// between saves, since devices are slow to give and take back. Thread-safe.
class DeviceSnapshots : public std::enable_shared_from_this<DeviceSnapshots> {
 public:
  // At most `bound` bytes of each device at a time; 0: none at all.
  explicit DeviceSnapshots(std::uint64_t bound) : bound_(bound) {}
  // Frees what it has; memory that a device may still read or write later (DeviceRemains).
  ~DeviceSnapshots();

  // Goes back when destroyed.
  class Memory {
   public:
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::byte* data() const { return data_; }
    // The device is about to write here, until `mark` is reached; a failed `mark` says that nobody
    // can know when it ends. This may be destroyed before, but the memory is not given out until
    // then.
    void AwaitWrites(Result<std::shared_ptr<DeviceMark>> mark) { writes_ = std::move(mark); }
    // The writes have ended.
    void WritesArrived() { writes_.reset(); }
    // The save that it was for has failed, and what its queues left under way may be reading here
    // still. They are gone before this is.
    void Doubt() { doubtful_ = true; }

   private:
    friend class DeviceSnapshots;
    Memory(std::shared_ptr<DeviceSnapshots> pool, std::size_t piece, std::byte* data)
        : pool_(std::move(pool)), piece_(piece), data_(data) {}
    const std::shared_ptr<DeviceSnapshots> pool_;
    const std::size_t piece_;
    std::byte* const data_;
    std::optional<Result<std::shared_ptr<DeviceMark>>> writes_;
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
    // Writes that the last save did not wait for; AwaitWrites.
    std::optional<Result<std::shared_ptr<DeviceMark>>> writes;
  };
  void Free(Block& block);
  // Whether no write of an earlier save is due any more.
  static bool IsQuiet(Block& block);
  // The same of reads, too: it may be freed.
  static bool IsIdle(Block& block);

  const std::uint64_t bound_;
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_DEVICE_SNAPSHOTS_H_
