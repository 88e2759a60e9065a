// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_RETENTION_H_
#define TENSORMOUNT_INDEX_STORE_RETENTION_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/retention.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

// Removal of checkpoints by rules (docs/format.md, "Keeping and removing"). Decide is a pure
// function of the candidates; Prune performs the removals.

namespace tensormount::retention {

// A checkpoint's value for one metric.
struct MetricValue {
  std::optional<long double> number;  // Wide enough for every 64-bit integer and every double.
  // Reason for a missing number: "has no eval.loss", "has a value of eval.loss that is NaN".
  std::string problem;
};

// Everything that the rules use about one checkpoint.
struct Candidate {
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  // Not OK: the checkpoint cannot be read. Only its name is then known.
  Status problem;
  bool ephemeral = false;
  // Whether RetentionRules::match excludes the checkpoint, which then stays. Set by Decide.
  bool other_run = false;
  bool derived = false;  // Made by `derive`, so it is not a step of a run.
  // Whether the caller of the prune has just saved this checkpoint. It stays, even if newer ones
  // were published.
  bool saved_now = false;
  std::string pinned;       // Description of the pin; empty: not pinned.
  std::string expired_pin;  // Description of an expired pin; empty: none.
  // The staging of a running save that uses the checkpoint's files; empty: none.
  std::string base_of;
  // Not OK: `created` and `metrics` could not be read.
  Status opened;
  std::int64_t created = 0;          // Seconds since 1970; only for rules with hours.
  std::vector<MetricValue> metrics;  // One for each of rules.keep_best.
};

// Whether Decide needs `created` or `metrics` of the candidates.
bool NeedsOpening(const RetentionRules& rules);

// Makes one decision for each candidate. The decisions are in this order: readable candidates by
// generation, uuid and name, the highest first, derived ones after the others, and those that
// RetentionRules::match excludes after all of these; then unreadable candidates by name. The first
// candidate stays if it is readable. Several names of one checkpoint count as one, except for rules
// by steps. A pure function.
std::vector<PruneReport::Decision> Decide(const RetentionRules& rules,
                                          std::vector<Candidate> candidates);

// Messages about rules by metric that keep all checkpoints, because none has a number as this
// metric.
std::vector<std::string> UnmetRules(const RetentionRules& rules,
                                    const std::vector<Candidate>& candidates);

// The last run of decimal digits in a name, as a number. nullopt: no digits, or more than 64 bits.
std::optional<std::uint64_t> StepOf(std::string_view name);

// kInvalidArgument for rules that Parse refuses, or if the policy of the store is combined with
// other rules.
Status CheckRules(const RetentionRules& rules);

// Arguments of Prune in addition to those of the public PruneCheckpoints (tensormount/retention.h).
struct PruneContext {
  Uuid saved;  // The checkpoint that the caller has just committed; zero: none.
  // Current time in seconds since 1970, which tells whether pins have expired. 0: read the clock.
  std::int64_t now = 0;
  // Limit of the time for what earlier prunes left in .trash (trash::FreeLeftovers).
  std::chrono::seconds free_for = std::chrono::hours(1);
};
Result<PruneReport> Prune(FileSystem& fs, const Store& store, const PruneOptions& options,
                          const PruneContext& context = {});

// Adds to a "disk full" error the number of bytes in .trash that gc may free. Returns other errors
// unchanged.
Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure);

// JSON for the command and the C interface.
nlohmann::ordered_json PruneJson(const PruneReport& report);
nlohmann::ordered_json PinJson(const PinnedCheckpoint& pin);

}  // namespace tensormount::retention

#endif  // TENSORMOUNT_INDEX_STORE_RETENTION_H_
