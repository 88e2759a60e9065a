// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_DEVICE_EXCHANGE_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_DEVICE_EXCHANGE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "tensormount/load.h"

#include "collective/comm/bulk_transport.h"
#include "collective/comm/collective.h"
#include "collective/load/exchange_units.h"
#include "collective/load/target.h"
#include "index/read/checkpoint.h"

// A load by exchange between devices, for targets that are all in device memory:
//
//   storage -> pinned blocks -> units -+-> tensors of this rank
//                                      +-> cut -> BulkTransport -> received -> tensors of another
//
// "units", "cut" and "received" are areas of device memory. Each exists twice, so that one window
// (exchange_windows.h) is read while another moves.

namespace tensormount {

// The connection between the devices of all ranks, and the device memory for its data. For one
// thread at a time.
class DeviceExchangePath {
 public:
  // Collective. A failure is the same on all ranks. They may then continue without devices, unless
  // a rank could not be reached. `device` holds this rank's targets. `patience`: the time limit for
  // connecting.
  static Result<std::unique_ptr<DeviceExchangePath>> Open(Collective& collective,
                                                          const Device& device,
                                                          std::chrono::milliseconds patience);
  // Leaks its device memory if the transport may still use it.
  ~DeviceExchangePath();
  DeviceExchangePath(const DeviceExchangePath&) = delete;
  DeviceExchangePath& operator=(const DeviceExchangePath&) = delete;

  BulkTransport& transport() { return *transport_; }
  // Records that the transport may still be at work and that its end will not be seen.
  void MarkStillAccessed() { still_accessed_ = true; }
  // Records that queues may still be at work: the memory is freed after them (PendingDeviceWork).
  void MarkQueuesRunning() { queues_idle_ = false; }
  const std::shared_ptr<const OpenedDevice>& device() const { return device_; }
  // Size of each area; the same on all ranks.
  std::uint64_t area_bytes() const { return area_bytes_; }
  // Address of one area of `half` (0 or 1); `number`: 0 units, 1 cut, 2 received.
  std::byte* area(std::size_t half, std::size_t number) const {
    return memory_ + (half * 3 + number) * area_bytes_;
  }
  std::uint64_t memory_bytes() const { return 6 * area_bytes_; }

 private:
  DeviceExchangePath() = default;
  std::shared_ptr<const OpenedDevice> device_;
  std::unique_ptr<BulkTransport> transport_;
  std::byte* memory_ = nullptr;
  std::uint64_t area_bytes_ = 0;
  bool still_accessed_ = false;
  bool queues_idle_ = true;
};

// How a batch of units is moved. Referenced objects must outlive the call.
struct DeviceExchangeRules {
  const OpenedCheckpoint* checkpoint = nullptr;
  // For waits on the thread that also moves messages: this rank cannot answer others meanwhile, so
  // these waits are short.
  DeviceLimits devices;
  // Time limit for a window to arrive, and for devices on the reading thread.
  std::chrono::milliseconds patience{0};
  int threads = 1;  // Number of reading threads.
  std::function<void(std::uint64_t bytes)> read;
};

// Moves one batch of units between devices. Their bytes are not verified on the way, so they must
// be verified by digest at the destination, or not at all. Collective, with the same verdict on all
// ranks. Adds to the report (bytes read and received, messages).
Status ExchangeOnDevices(Collective& collective, const ExchangeUnits& units,
                         DeviceExchangePath& way, const DeviceExchangeRules& rules,
                         LoadReport& report);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_DEVICE_EXCHANGE_H_
