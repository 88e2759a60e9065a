// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_MILESTONE_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_MILESTONE_H_

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include "tensormount/status.h"

#include "base/deadline.h"

namespace tensormount {

// An event that a background job reaches once, with a value. Threads can wait for it, with or
// without a time limit, and event loops can poll a descriptor. Thread-safe.
template <typename T>
class Milestone {
 public:
  Milestone() = default;
  Milestone(const Milestone&) = delete;
  Milestone& operator=(const Milestone&) = delete;
  ~Milestone() {
    if (fd_ >= 0) close(fd_);
  }

  // Call once. `first` runs before any waiter sees the value, under the lock that WithLock takes.
  template <typename First>
  void Reach(T value, First first) {
    {
      std::lock_guard lock(mutex_);
      first();
      value_.emplace(std::move(value));
      if (fd_ >= 0) Signal();
    }
    changed_.notify_all();
  }
  void Reach(T value) {
    Reach(std::move(value), [] {});
  }

  // Waits for the event. Returns a copy of the value, because other threads may wait, too.
  T Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return value_.has_value(); });
    return *value_;
  }
  // Waits for at most `most`; empty if the event was not reached by then.
  std::optional<T> WaitFor(std::chrono::milliseconds most) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::min(most, kLongestWait), [&] { return value_.has_value(); });
    return value_;
  }
  template <typename Fn>
  void WithLock(Fn fn) {
    std::lock_guard lock(mutex_);
    fn();
  }

  // A descriptor, owned by this object, that becomes readable at the event. Fails if no descriptor
  // can be made.
  Result<int> EventFd() {
    std::lock_guard lock(mutex_);
    if (fd_ < 0) {
      fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      if (fd_ < 0) return Status::FromErrno(errno, "make", "an eventfd");
      if (value_.has_value()) Signal();
    }
    return fd_;
  }

 private:
  // The eventfd's counter was zero and has no other writer, so the write cannot fail.
  void Signal() {
    const std::uint64_t one = 1;
    (void)!write(fd_, &one, sizeof(one));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<T> value_;
  int fd_ = -1;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_MILESTONE_H_
