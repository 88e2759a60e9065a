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

#include "base/cancel_scope.h"
#include "base/thread.h"

namespace tensormount {

// Online cores of the machine, at least 1. Cached, because the C++ library opens a file in /sys for
// each call, which is too slow for short loops.
inline unsigned HostCores() {
  static const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  return cores;
}

// Calls fn(i, state) once for every i below `count`, on `threads` threads (0: one per core),
// including the caller's. Each thread creates its own `State`: buffers, an open file. Threads take
// the next i, so that items run in about their order. After the first failure no more items start,
// and that failure is returned when all threads have ended. If threads cannot be created, fewer
// run. Out of memory is kResourceExhausted; another std::exception of fn is kInternal.
//
//   struct Buffer { std::vector<std::byte> bytes; };  // Made once per thread, not once per file.
//   Status s = ForEachParallel<Buffer>(files.size(), 0, [&](std::size_t i, Buffer& buffer) {
//     return Check(files[i], buffer.bytes);
//   });
//
// A CancelScope of the caller holds on all threads.
//
// For steps of a millisecond or more: each call starts its threads, without a pool, because the
// callers (verify, adopt, large reads) are rare. fn runs on several threads, so it must lock shared
// data; writing to element i of a vector of fixed size needs no lock.
template <typename State, typename Fn>
Status ForEachParallel(std::size_t count, int threads, const Fn& fn) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  Status failure;
  const auto fail = [&](Status status) {
    next = count;  // No more items are handed out.
    const std::lock_guard lock(mutex);
    if (failure.ok()) failure = std::move(status);
  };
  // Exceptions must not leave a thread; allocating a State may throw.
  const auto work = [&, cancel = CancelScope::Current()] {
    const CancelScope scope(cancel);
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
  // No more threads than items.
  std::size_t wanted = threads > 0 ? static_cast<std::size_t>(threads) : HostCores();
  wanted = std::clamp<std::size_t>(wanted, 1, std::max<std::size_t>(1, count));
  // References in `work` stay valid: every thread is joined before this returns.
  std::vector<Thread> workers;
  try {
    workers.reserve(wanted);
    for (std::size_t t = 1; t < wanted; ++t) workers.emplace_back(work);
  } catch (const std::exception&) {  // Use the threads that exist.
  }
  work();
  for (Thread& worker : workers) worker.join();
  return failure;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_PARALLEL_H_
