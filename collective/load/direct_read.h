// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_DIRECT_READ_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_DIRECT_READ_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>

#include "tensormount/load.h"

#include "collective/load/target.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// How a rank reads for itself. What it names must outlive the call.
struct DirectReadRules {
  LoadVerify verify = LoadVerify::kAuto;
  int threads = 1;  // At most, of which the caller's is one.
  const std::atomic<bool>* cancel = nullptr;
  // Told of bytes as they are read, from any of the threads.
  std::function<void(std::uint64_t bytes)> read;
};
struct DirectReadReport {
  std::uint64_t bytes = 0;              // Of the targets, as stored.
  std::uint64_t peak_buffer_bytes = 0;  // Of all threads, besides the targets' memory.
};

// Fills those targets that are not exchanged, in the order in which they stand: that of the files.
// Sets their `verify` and `stats`. What goes to devices is there once their writer has finished.
// Where several threads fail, the failure of one of them; all have ended when this returns.
Result<DirectReadReport> ReadDirectly(const OpenedCheckpoint& checkpoint,
                                      std::span<LoadTarget> targets, const DirectReadRules& rules);

// For ranks of which `ranks_here` share this machine: as many as have a core each, at most 12.
// `asked` where it is not 0.
int ReadThreads(int asked, int ranks_here);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_DIRECT_READ_H_
