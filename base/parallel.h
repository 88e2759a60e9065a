// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_PARALLEL_H_
#define TENSORMOUNT_BASE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// Cores of the machine that are online, at least 1. Asked of the kernel once: the C++ library opens
// a file of /sys for each answer, which costs more than what is decided by it in short loops.
inline unsigned HostCores() {
  static const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  return cores;
}

// Calls fn(i, state) for every i below `count`, each once, on `threads` threads (0: as many as
// cores), of which the caller's is one. Each thread has a `State` of its own, made on it: buffers,
// the file of the call before. Threads take the next i, so that what is sorted is worked through
// in about that order. After the first failure nothing more is begun, and that failure is returned
// when all threads have ended. Where a thread cannot be had there are fewer. Memory that runs out
// is kResourceExhausted; what else fn throws, kInternal.
//
//   struct Buffer { std::vector<std::byte> bytes; };  // Made once a thread, not once a file.
//   Status s = ForEachParallel<Buffer>(files.size(), 0, [&](std::size_t i, Buffer& buffer) {
//     return Check(files[i], buffer.bytes);
//   });
//
// For work whose steps are milliseconds or more: threads are started for each call, and there is no
// pool, because those who call this (verify, adopt, large reads) do so seldom. fn
// runs on several threads at once, so what it shares it must lock; writing to element i of a vector
// that has its size already needs no lock.
template <typename State, typename Fn>
Status ForEachParallel(std::size_t count, int threads, const Fn& fn) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  Status failure;
  const auto fail = [&](Status status) {
    next = count;  // Whoever asks for an item after this gets none.
    const std::lock_guard lock(mutex);
    if (failure.ok()) failure = std::move(status);
  };
  // Exceptions must not leave a thread, and a state may need much memory.
  const auto work = [&] {
    try {
      State state;
      for (std::size_t i = next++; i < count; i = next++) {
        if (Status status = fn(i, state); !status.ok()) return fail(std::move(status));
      }
    } catch (const std::bad_alloc&) {
      fail(Status(Code::kResourceExhausted, "out of memory"));
    } catch (const std::exception& e) {
      fail(Status(Code::kInternal, e.what()));
    }
  };
  // No more threads than items: of ten files twelve threads would only be started and ended.
  std::size_t wanted = threads > 0 ? static_cast<std::size_t>(threads) : HostCores();
  wanted = std::clamp<std::size_t>(wanted, 1, std::max<std::size_t>(1, count));
  // References in `work` stay good: every thread is joined before this returns.
  std::vector<std::thread> workers;
  try {
    workers.reserve(wanted);
    for (std::size_t t = 1; t < wanted; ++t) workers.emplace_back(work);
  } catch (const std::exception&) {  // No more threads are to be had: as many as there are.
  }
  work();
  for (std::thread& worker : workers) worker.join();
  return failure;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_PARALLEL_H_
