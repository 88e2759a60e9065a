// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "base/file_system.h"
#include "collective/comm/collective.h"
#include "collective/load/load_plan.h"
#include "collective/load/target.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// Threads of one rank during LoadByExchange:
//
//   its own thread   reads units (exchange_reader.h) in file order, while units that are read and
//                    not sent stay below 4 MiB and 16 units
//   the caller's     posts sends of the units that are read and receives of announced blocks,
//                    places the blocks that arrived, and takes part in the collective call that
//                    ends when all ranks are done
//
// A header with the number of blocks and one checksum over all of them precedes each unit's blocks;
// every rank computes the same order of units. Memory: 8 MiB and one unit, however large the
// checkpoint is.
//
// If all ranks want their parts in device memory and the devices can be connected, tensors that
// need no check on the way go between devices instead (device_exchange.h).

// How a load exchanges. Referenced objects must outlive the call.
struct ExchangeRules {
  LoadVerify verify = LoadVerify::kAuto;
  ExchangeVia via = ExchangeVia::kAuto;
  // This rank's device. Set if on every rank all tensors are on one device; if not set, the
  // exchange goes through the host, or fails with ExchangeVia::kDevices.
  std::optional<Device> device;
  // With kAuto: smaller exchanges go through the host.
  std::uint64_t min_device_exchange_bytes = 0;
  int threads = 1;  // Number of threads that read for an exchange between devices.
  // For waits on the thread that also moves messages: this rank cannot answer others meanwhile, so
  // these waits are short.
  DeviceLimits devices;
  std::chrono::milliseconds patience{0};  // Time limit for all other waits for devices.
};

// Loads the tensors marked `exchange`, in groups of ranks: one of the ranks that want a block of
// rows of a chunk reads it, cuts it up and sends the other ranks their parts. So short runs on disk
// are never read alone, data that several ranks of a group want are usually read once, and data
// that only the reader wants are not sent. A thread reads while blocks are in flight; there are no
// rounds within a batch, and the bytes in flight are bounded. Adds to the stats of the targets
// (bytes_wanted, bytes_by_leaf) and to the report (bytes read and received, messages, peak memory).
// The reading threads call `progress` with the bytes read for each unit. Collective, with the same
// verdict on every rank.
Status LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                      const LoadPlan& plan, std::span<LoadTarget> targets, DeviceWriter& writer,
                      const ExchangeRules& rules, LoadReport& report,
                      const std::function<void(std::uint64_t)>& progress);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
