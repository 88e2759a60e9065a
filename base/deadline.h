// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_DEADLINE_H_
#define TENSORMOUNT_BASE_DEADLINE_H_

#include <algorithm>
#include <chrono>

namespace tensormount {

// The longest wait; callers shorten longer ones to it. It is practically endless, and still small
// enough to add to the current time: milliseconds::max() would overflow into the past.
inline constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 365);

// A point of the steady clock at which a wait gives up. A value type; never infinite, because no
// call waits forever. Make one at the start of an operation and pass it down, so that all parts
// share the time. Setting the system time does not affect the steady clock.
//
//   const Deadline deadline = Deadline::After(limit);
//   TENSORMOUNT_RETURN_IF_ERROR(Connect(peer, deadline));   // May take all of the time.
//   return Receive(peer, deadline);                         // Gets the time that is left.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `d` must be at most kLongestWait: the sum is not checked.
  static Deadline After(std::chrono::nanoseconds d) { return Deadline(Clock::now() + d); }
  static Deadline At(Clock::time_point t) { return Deadline(t); }

  Clock::time_point time() const { return at_; }
  bool Passed() const { return Clock::now() >= at_; }
  // The time left; never negative, so that it can be passed to poll(2) and wait_for.
  std::chrono::nanoseconds Left() const {
    return std::max(std::chrono::nanoseconds(0),
                    std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now()));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_DEADLINE_H_
