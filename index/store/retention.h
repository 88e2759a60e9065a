// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_RETENTION_H_
#define TENSORMOUNT_INDEX_STORE_RETENTION_H_

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
  // Reason for a missing number: "has no eval.loss", "eval.loss is NaN".
  std::string problem;
};

// Everything that the rules use about one checkpoint.
struct Candidate {
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  // Not OK: the checkpoint cannot be read, so only its name is known.
  Status problem;
  bool ephemeral = false;
  // Whether RetentionRules::match excludes the checkpoint. Set by Decide.
  bool other_run = false;
  bool derived = false;  // Made by `derive`, so it is not a step of a run.
  // The caller of the prune has just saved this checkpoint. It stays, even if newer saves have
  // begun.
  bool saved_now = false;
  std::string pinned;       // Description of the pin; empty: not pinned.
  std::string expired_pin;  // Description of an expired pin; empty: none.
  // The staging of a running save that uses the checkpoint's files; empty: none.
  std::string base_of;
  // Not OK: the members below could not be read.
  Status opened;
  std::int64_t created = 0;          // Seconds since 1970; only for rules with hours.
  std::vector<MetricValue> metrics;  // One for each of rules.keep_best.
};

// Whether Decide needs `created` or `metrics` of the candidates.
bool NeedsOpening(const RetentionRules& rules);

// Makes one decision for each candidate. Order of the decisions: readable candidates by generation,
// uuid and name, the highest first, derived ones after the others; then unreadable candidates by
// name. The first candidate stays if it is readable. Several names of one checkpoint count as one.
// A pure function.
std::vector<PruneReport::Decision> Decide(const RetentionRules& rules,
                                          std::vector<Candidate> candidates);

// Messages about rules that match nothing, because no checkpoint has the data (metric, step
// number).
std::vector<std::string> UnmetRules(const RetentionRules& rules,
                                    const std::vector<Candidate>& candidates);

// The last run of decimal digits in a name, as a number. nullopt: no digits, or more than 64 bits.
std::optional<std::uint64_t> StepOf(std::string_view name);

// kInvalidArgument for rules that Parse refuses, or if the policy of the store is combined with
// other rules.
Status CheckRules(const RetentionRules& rules);

// Circumstances of PruneCheckpoints of tensormount/retention.h.
struct PruneContext {
  Uuid saved;  // Checkpoint that the caller just committed; zero: none.
  // Current time in seconds since 1970, for the expiry of pins. 0: read the clock.
  std::int64_t now = 0;
};
Result<PruneReport> Prune(FileSystem& fs, const Store& store, const PruneOptions& options,
                          const PruneContext& context = {});

// Adds to a "disk full" failure how much of .trash gc may free. Returns other failures unchanged.
Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure);

// JSON for the command and the C interface.
nlohmann::ordered_json PruneJson(const PruneReport& report);
nlohmann::ordered_json PinJson(const PinnedCheckpoint& pin);

}  // namespace tensormount::retention

#endif  // TENSORMOUNT_INDEX_STORE_RETENTION_H_
