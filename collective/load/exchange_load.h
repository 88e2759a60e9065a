// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/file_system.h"
#include "collective/comm/collective.h"
#include "collective/load/load_plan.h"
#include "index/checkpoint.h"

namespace tensormount {

// One region that this rank asked for and where its bytes go.
struct LoadTarget {
  const PlannedTensor* tensor = nullptr;
  std::uint32_t want = 0;         // Position in tensor->wants.
  std::vector<PlacedBox> placed;  // Of bytes, relative to `base`.
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  ReadVerify verify = ReadVerify::kOff;
  ReadStats stats;
};

// Loads the tensors marked `exchange`: each rank reads long runs of the data files (row blocks of
// chunks), cuts them up and passes the pieces on. What is short on disk is then never read alone,
// and what several ranks want is read once. In rounds of bounded memory. `targets` are this rank's,
// those of exchanged tensors in the order of the plan. Adds to stats of the targets (bytes_wanted,
// bytes_by_leaf), and to `read` and `received` what this rank read and received. `progress`, where
// not null, counts what is read at once.
// Collective; the verdict is the same everywhere.
Status LoadByExchange(FileSystem& fs, const OpenedCheckpoint& checkpoint, Collective& collective,
                      std::span<const PlannedTensor> tensors, std::span<LoadTarget> targets,
                      LoadVerify verify, std::uint64_t* read, std::uint64_t* received,
                      std::atomic<std::uint64_t>* progress = nullptr);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_EXCHANGE_LOAD_H_
