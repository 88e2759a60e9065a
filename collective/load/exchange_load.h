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

// On one rank, while the call lasts:
//
//   its own thread   reads units (exchange_reader.h) in file order, while what is read and not yet
//                    sent stays below 4 MiB and 16 units
//   the caller's     posts sends of what is read, receives of what others announced, places what
//                    came, and takes part in the round that ends when all are done
//
// Each unit's pieces follow a letter with their number and one checksum over all of them: what
// arrives is what was read, and in the order in which every rank worked out the units. Memory: 8
// MiB and one unit, however large the checkpoint is.
//
// Where all ranks want their parts in memory of devices, and there is a way between these, bytes go
// by that instead (device_exchange.h).

// How a load exchanges. What it names must outlive the call.
struct ExchangeRules {
  LoadVerify verify = LoadVerify::kAuto;
  ExchangeVia via = ExchangeVia::kAuto;
  // That all tensors of this rank are on, where that is so on every rank: there or nowhere.
  std::optional<Device> device;
  std::uint64_t worth_a_way = 0;          // So many bytes are, with kAuto.
  int threads = 1;                        // That read what goes between devices.
  DeviceRules devices;                    // Of waits that keep this rank from answering others.
  std::chrono::milliseconds patience{0};  // Of all others for devices.
};

// Loads the tensors marked `exchange`, in groups of ranks: one of those who want a block of rows of
// a chunk reads it, cuts it up and sends the others their parts. What is short on disk is then
// never read alone, what several ranks want is read once, and what one rank wants is not sent at
// all. Reading goes on in a thread of its own while pieces are on their way; there are no rounds,
// and what is on its way at a time is bounded. Adds to stats of the targets (bytes_wanted,
// bytes_by_leaf) and to the report (bytes read and received, messages, peak of memory). `progress`
// is called, on the threads that read, with what each block read. Collective; the verdict is the
// same everywhere.
Status LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                      const LoadPlan& plan, std::span<LoadTarget> targets, DeviceWriter& writer,
                      const ExchangeRules& rules, LoadReport& report,
                      const std::function<void(std::uint64_t)>& progress);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
