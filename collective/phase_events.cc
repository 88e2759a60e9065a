// SPDX-License-Identifier: Apache-2.0
// Reports names, times and bytes of a job's phases to the caller's event hook. An exception of the
// hook is logged and ignored.
#include "collective/phase_events.h"

#include <exception>

#include "base/log.h"
#include "base/thread.h"

namespace tensormount {

void PhaseEvents::Emit(Event& event) const {
  if (!hook_) return;
  event.job = job_;
  event.path = path_;
  event.rank = rank_;
  const CallersSignals signals;
  try {
    hook_(event);
  } catch (const std::exception& e) {
    Log(LogLevel::kWarning,
        job_ + " " + path_ + ": the callback for events threw an exception: " + e.what());
  } catch (...) {
    Log(LogLevel::kWarning, job_ + " " + path_ + ": the callback for events threw an exception");
  }
}

Status PhaseEvents::Run(std::string_view phase, double* seconds,
                        const std::function<Status(std::uint64_t* bytes)>& fn) {
  const auto start = std::chrono::steady_clock::now();
  Event event;
  event.phase = phase;
  Emit(event);
  std::uint64_t bytes = 0;
  const Status status = fn(&bytes);
  event.kind = status.ok() ? Event::Kind::kEnd : Event::Kind::kError;
  event.bytes = bytes;
  event.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  event.status = status;
  if (seconds != nullptr) *seconds += event.seconds;
  Emit(event);
  return status;
}

}  // namespace tensormount
