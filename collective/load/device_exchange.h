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

// A load by exchange whose bytes all end in memory of devices goes between these, not through the
// host:
//
//   storage -> pinned blocks -> units -+-> tensors of this rank
//                                      +-> cut -> BulkTransport -> received -> tensors of another
//
// "units", "cut" and "received" are memory of the device, twice: while one window
// (exchange_windows.h) moves, the next is read.

namespace tensormount {

// The way between the devices of all ranks, and memory for what is on it. Of one thread at a time.
class DeviceWay {
 public:
  // Collective; fails on all ranks alike, where they may go on without (a failure that spends the
  // job fails what follows). `device`: that this rank's targets are on. `patience`: until the ranks
  // are connected.
  static Result<std::unique_ptr<DeviceWay>> Open(Collective& collective, const Device& device,
                                                 std::chrono::milliseconds patience);
  // Leaves its memory to the device where the transport may be at work still.
  ~DeviceWay();
  DeviceWay(const DeviceWay&) = delete;
  DeviceWay& operator=(const DeviceWay&) = delete;

  BulkTransport& transport() { return *transport_; }
  // The transport may be at work still, and nobody will hear of its end.
  void Doubt() { doubtful_ = true; }
  // Queues may be at work still: the memory is freed after that (DeviceRemains).
  void LeaveQueues() { quiet_ = false; }
  const std::shared_ptr<const OpenedDevice>& device() const { return device_; }
  // Of each area; the same on all ranks.
  std::uint64_t area_bytes() const { return area_bytes_; }
  // Where the areas of a half begin, in this order: units, cut, received.
  std::byte* area(std::size_t half, std::size_t number) const {
    return memory_ + (half * 3 + number) * area_bytes_;
  }
  std::uint64_t memory_bytes() const { return 6 * area_bytes_; }

 private:
  DeviceWay() = default;
  std::shared_ptr<const OpenedDevice> device_;
  std::unique_ptr<BulkTransport> transport_;
  std::byte* memory_ = nullptr;
  std::uint64_t area_bytes_ = 0;
  bool doubtful_ = false;
  bool quiet_ = true;
};

// How a batch of units is moved. What it names must outlive the call.
struct DeviceExchangeRules {
  const OpenedCheckpoint* checkpoint = nullptr;
  DeviceRules devices;  // Of waits that keep this rank from answering others.
  // For a window to come, and for devices on the thread that reads.
  std::chrono::milliseconds patience{0};
  int threads = 1;  // That read.
  std::function<void(std::uint64_t bytes)> read;
};

// Moves one batch, none of whose targets needs a proof but a digest of where it ends. Collective;
// the verdict is the same on all ranks. Adds to the report (bytes read and received, messages).
Status ExchangeOnDevices(Collective& collective, const ExchangeUnits& units, DeviceWay& way,
                         const DeviceExchangeRules& rules, LoadReport& report);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_DEVICE_EXCHANGE_H_
