// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_PHASE_EVENTS_H_
#define TENSORMOUNT_COLLECTIVE_PHASE_EVENTS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tensormount/event.h"
#include "tensormount/status.h"

namespace tensormount {

// Reports the phases of one job on one rank to the caller's event hook, on the calling thread.
class PhaseEvents {
 public:
  PhaseEvents(const EventHook& hook, std::string_view job, std::string_view path, int rank)
      : hook_(hook), job_(job), path_(path), rank_(rank) {}

  // Runs `fn` between the start event of `phase` and its end or error event. `fn` adds the bytes
  // that it moved to *bytes. Adds the duration to *seconds (may be null).
  Status Run(std::string_view phase, double* seconds,
             const std::function<Status(std::uint64_t* bytes)>& fn);

 private:
  void Emit(Event& event) const;

  const EventHook& hook_;
  const std::string job_;
  const std::string path_;
  const int rank_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_PHASE_EVENTS_H_
