// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_EVENT_H_
#define TENSORMOUNT_EVENT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// What happens in a save or load, for loggers and dashboards.
// The texts are valid during the call only; a hook that keeps them copies them.
struct Event {
  enum class Kind : std::uint8_t { kStart, kEnd, kError };
  Kind kind = Kind::kStart;
  std::string_view job;    // "save", "load".
  std::string_view path;   // "STORE/NAME"
  std::string_view phase;  // "validate", "plan", "stage", "write", "compare", "publish", "read",
                           // ... "before_publish" where the save has that hook.
  int rank = 0;
  std::uint64_t bytes = 0;  // Moved by this rank in the phase, with kEnd.
  double seconds = 0;       // That the phase took, with kEnd and kError.
  Status status;            // With kError.
};

// Called on the thread that works, in order, once for the start and once for the end or error of
// each phase of one rank. Must return soon; what it throws is logged and ignored.
using EventHook = std::function<void(const Event&)>;

}  // namespace tensormount

#endif  // TENSORMOUNT_EVENT_H_
