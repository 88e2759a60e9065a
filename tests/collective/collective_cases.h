// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_COLLECTIVE_CASES_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_COLLECTIVE_CASES_H_

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "collective/comm/collective.h"

namespace tensormount {

// For tests in which nobody fails: nothing that a loaded machine does may reach these.
inline constexpr Timeouts kPatient{std::chrono::seconds(60), std::chrono::seconds(120)};
// For tests in which a rank dies or stops.
inline constexpr Timeouts kWatchful{std::chrono::milliseconds(1000), std::chrono::seconds(60)};
// Nobody is let wait longer than its deadline and this.
inline constexpr std::chrono::seconds kMargin{10};

// Every operation with payloads of many sizes, run by all ranks. Returns what was wrong.
Status ExerciseCollective(Communicator& comm);
// Jobs that fail with messages under way, or because a rank comes late; after each, so many good
// ones. Returns what was wrong.
Status ExerciseFailures(Communicator& comm, int jobs = 200);
// A message from every rank to every rank, by rank: the densest of NeighborAllToAll.
Result<std::vector<std::string>> AllToAll(Collective& c, const std::vector<std::string>& to_each,
                                          std::string_view phase);
// One rank's payload is large.
Status ExerciseLargePayload(Communicator& comm, std::size_t bytes);

enum class Operation {
  kAllGather,
  kGather,
  kBroadcast,
  kAgree,
  kExchange,
  kDecide,
  kAllToAll,
};
inline constexpr int kOperations = 7;
// One call, in the same form for all.
Status CallOperation(Collective& collective, Operation operation, const std::string& phase);

// What a rank saw of a group in which `victim` gets `signal` before an operation: a number to
// exit with. kSawFailure + code where the failure named the victim within the deadline and was
// given again at once by the next call, and the next job failed at once too; something below 40
// where not (printed).
inline constexpr int kSawFailure = 40;
int WatchVictim(Communicator& comm, Operation operation, int victim, int signal);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_COLLECTIVE_CASES_H_
