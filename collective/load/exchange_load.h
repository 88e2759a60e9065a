// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_

#include <cstdint>
#include <functional>
#include <span>

#include "base/file_system.h"
#include "collective/comm/collective.h"
#include "collective/load/load_plan.h"
#include "collective/load/target.h"
#include "index/read/checkpoint.h"

namespace tensormount {

struct ExchangeStats {
  std::uint64_t read = 0;      // Bytes, from storage.
  std::uint64_t received = 0;  // Bytes, from other ranks.
  std::uint64_t messages = 0;  // Sent.
  std::uint64_t peak = 0;      // Bytes of memory besides the caller's.
};

// Loads the tensors marked `exchange`, in groups of ranks: one of those who want a block of rows of
// a chunk reads it, cuts it up and sends the others their parts. What is short on disk is then
// never read alone, what several ranks want is read once, and what one rank wants is not sent at
// all. Reading goes on in a thread of its own while pieces are on their way; there are no rounds,
// and what is on its way at a time is bounded. Adds to stats of the targets (bytes_wanted,
// bytes_by_leaf). `progress` is called, on the reading thread, with what each block read.
// Collective; the verdict is the same everywhere.
Result<ExchangeStats> LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                                     const LoadPlan& plan, std::span<LoadTarget> targets,
                                     LoadVerify verify,
                                     const std::function<void(std::uint64_t)>& progress);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
