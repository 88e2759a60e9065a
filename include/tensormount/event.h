// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_EVENT_H_
#define TENSORMOUNT_EVENT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// One step of a save or load, for loggers and dashboards. The strings are valid during the call
// only; a hook that keeps them copies them.
struct Event {
  enum class Kind : std::uint8_t { kStart, kEnd, kError };
  Kind kind = Kind::kStart;
  std::string_view job;    // "save", "load".
  std::string_view path;   // "STORE/NAME"
  std::string_view phase;  // "validate", "plan", "stage", "write", "compare", "publish", "read",
                           // ... "before_publish" if the save has that hook.
  int rank = 0;
  std::uint64_t bytes = 0;  // Bytes that this rank moved in the phase, with kEnd.
  double seconds = 0;       // Duration of the phase, with kEnd and kError.
  Status status;            // The error, with kError.
};

// Called on the working thread, in order: once for the start and once for the end or error of each
// phase of a rank. Must return soon; exceptions are logged and ignored.
using EventHook = std::function<void(const Event&)>;

}  // namespace tensormount

#endif  // TENSORMOUNT_EVENT_H_
