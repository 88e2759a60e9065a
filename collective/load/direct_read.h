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

// How a rank reads data that it does not get by exchange. Referenced objects must outlive the call.
struct DirectReadRules {
  LoadVerify verify = LoadVerify::kAuto;
  int threads = 1;  // Maximum number of threads, including the caller's.
  // The number of this rank among the ranks of this machine, if ranks are numbered machine by
  // machine, how many they are, and whether they are all ranks. Only the speed depends on them.
  int rank_here = 0;
  int ranks_here = 1;
  bool one_machine = true;
  const std::atomic<bool>* cancel = nullptr;
  // Called with the number of bytes read, from any of the threads.
  std::function<void(std::uint64_t bytes)> read;
};
struct DirectReadReport {
  std::uint64_t bytes = 0;              // Stored bytes of the targets.
  std::uint64_t peak_buffer_bytes = 0;  // Buffers of all threads, without target memory.
};

// Fills the targets that are not exchanged, in order (file order), and sets their `verify` and
// `stats`. Bytes for device memory have arrived only after DeviceWriter::Finish. If several threads
// fail, returns the failure of one; all have ended on return.
Result<DirectReadReport> ReadDirectly(const OpenedCheckpoint& checkpoint,
                                      std::span<LoadTarget> targets, const DirectReadRules& rules);

// Number of threads that read on one rank: `asked`, or, if `asked` is 0, the cores of this machine
// divided by `ranks_here` (its number of ranks), but at most 12.
int ReadThreads(int asked, int ranks_here);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_DIRECT_READ_H_
