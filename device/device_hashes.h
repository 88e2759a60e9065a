// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_DEVICE_HASHES_H_
#define TENSORMOUNT_DEVICE_DEVICE_HASHES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tensormount/status.h"

#include "base/hash.h"
#include "device/device_queues.h"

namespace tensormount {

// Hashes of memory of devices, which the devices compute while the host does something else:
// nothing of that memory crosses, 16 bytes a leaf come back. Of one thread.
class DeviceHashes {
 public:
  // What is submitted to `queues` later comes after the hashes. They must outlive this.
  explicit DeviceHashes(DeviceQueues& queues) : queues_(queues) {}
  // What a device may still write stays with it.
  ~DeviceHashes();
  DeviceHashes(const DeviceHashes&) = delete;
  DeviceHashes& operator=(const DeviceHashes&) = delete;

  // Submits the XXH3-128 of each `leaf_bytes` of the `bytes` bytes that `gather` puts side by side
  // from 0 on, `base` added where it reads. The number by which Get knows them.
  Result<std::size_t> Add(const std::shared_ptr<const OpenedDevice>& device,
                          std::span<const StridedCopy> gather, const std::byte* base,
                          std::uint64_t bytes, std::uint64_t leaf_bytes);
  // Waits for them. Valid as long as this.
  Result<std::span<const Hash128>> Get(std::size_t number);

 private:
  // Some that were submitted to one device, one after the other, and the mark behind them.
  struct Batch {
    std::shared_ptr<const OpenedDevice> device;
    std::vector<std::unique_ptr<Hash128[]>> leaves;
    std::optional<Result<std::shared_ptr<DeviceMark>>> mark;
    bool done = false;
  };
  struct Job {
    std::size_t batch = 0;
    std::size_t number = 0;
    std::size_t count = 0;
  };
  Status Mark(Batch& batch);

  DeviceQueues& queues_;
  std::vector<Batch> batches_;
  std::map<std::shared_ptr<const OpenedDevice>, std::size_t> open_;  // Those without a mark.
  std::vector<Job> jobs_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_HASHES_H_
