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

// Hashes of device memory, computed by the devices while the host does other work: only 16 bytes
// per leaf are transferred. Not thread-safe.
class DeviceHashes {
 public:
  // Hashes are submitted to `queues`, so later submissions there run after them. `queues` must
  // outlive this object.
  explicit DeviceHashes(DeviceQueues& queues) : queues_(queues) {}
  // Waits at most kDeviceGrace for unfinished hashes, and leaks results that a device may still
  // write.
  ~DeviceHashes();
  DeviceHashes(const DeviceHashes&) = delete;
  DeviceHashes& operator=(const DeviceHashes&) = delete;

  // Submits hashes. The copies of `gather` read relative to `base` and write to offsets 0 to
  // `bytes` of a packed buffer; each leaf of `leaf_bytes` of that buffer gets one XXH3-128. Returns
  // the number to pass to Get.
  Result<std::size_t> Add(const std::shared_ptr<const OpenedDevice>& device,
                          std::span<const StridedCopy> gather, const std::byte* base,
                          std::uint64_t bytes, std::uint64_t leaf_bytes);
  // Waits for the hashes of the Add call that returned `number`, and returns one hash for each
  // leaf. The span is valid as long as this object.
  Result<std::span<const Hash128>> Get(std::size_t number);

 private:
  // Hashes submitted to one device in sequence, and the mark after them.
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
  // For each device, the index in batches_ of its batch that has no mark yet.
  std::map<std::shared_ptr<const OpenedDevice>, std::size_t> open_;
  std::vector<Job> jobs_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_HASHES_H_
