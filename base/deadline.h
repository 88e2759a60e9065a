// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_DEADLINE_H_
#define TENSORMOUNT_BASE_DEADLINE_H_

#include <algorithm>
#include <chrono>

namespace tensormount {

// What a caller asks to wait longer than this is cut to it: as good as endless, and clocks can
// still add it to now, where milliseconds::max() would wrap into the past and end the wait at once.
inline constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 365);

// A point of the steady clock after which a wait gives up. A value; there is no infinite one,
// because no call of ours waits for ever. Made once at the begin of an operation and handed down,
// so that the parts of it share one time instead of each beginning its own. The steady clock, so
// that setting the time of day neither ends waits nor prolongs them.
//
//   const Deadline deadline = Deadline::After(limit);
//   TENSORMOUNT_RETURN_IF_ERROR(Connect(peer, deadline));   // May take all of it,
//   return Receive(peer, deadline);                         // then this gets what is left:
//   nothing.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `d` at most kLongestWait: the sum is not checked.
  static Deadline After(std::chrono::nanoseconds d) { return Deadline(Clock::now() + d); }
  static Deadline At(Clock::time_point t) { return Deadline(t); }

  Clock::time_point time() const { return at_; }
  bool Passed() const { return Clock::now() >= at_; }
  // Never negative, so that it can be handed to poll(2) and wait_for as it is.
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
