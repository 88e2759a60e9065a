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

// Removing checkpoints by rule (docs/format.md, "Keeping and removing"). What the rules say is a
// pure function of what is known of each checkpoint; what may go wrong while it is done is not.

namespace tensormount::retention {

// What one checkpoint has under the name of a metric.
struct MetricValue {
  std::optional<long double> number;  // Holds every integer of 64 bits and every double.
  std::string problem;  // Where there is none: "has no eval.loss", "eval.loss is NaN".
};

// All that the rules look at.
struct Candidate {
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  Status problem;  // It cannot be read, so nothing but its name is known.
  bool ephemeral = false;
  bool other_run = false;    // RetentionRules::match leaves it out; Decide says so.
  bool derived = false;      // By `derive`, of another one: no step of a run.
  bool saved_now = false;    // By the save that prunes: it stays, whatever was begun after it.
  std::string pinned;        // In words; empty: it is not, or not any more.
  std::string expired_pin;   // In words; empty: it has none.
  std::string base_of;       // The staging of a save that takes files of it; empty: none.
  Status opened;             // Why what follows is not known, where it was asked for.
  std::int64_t created = 0;  // For rules with hours.
  std::vector<MetricValue> metrics;  // One for each of rules.keep_best.
};

// Whether Decide needs Candidate::created or ::metrics.
bool NeedsOpening(const RetentionRules& rules);

// One decision a candidate: those that can be read by generation, uuid and name, the highest first,
// derived ones behind them; then the others by name. The first always stays if it can be read.
// Several names of one checkpoint count once. Pure.
std::vector<PruneReport::Decision> Decide(const RetentionRules& rules,
                                          std::vector<Candidate> candidates);

// Of which rules no checkpoint has what they go by, in words.
std::vector<std::string> Unmet(const RetentionRules& rules,
                               const std::vector<Candidate>& candidates);

// The last run of decimal digits in a name. nullopt: none, or over 64 bits.
std::optional<std::uint64_t> StepOf(std::string_view name);

// kInvalidArgument: rules that Parse would not give, or those of the store beside others.
Status CheckRules(const RetentionRules& rules);

// PruneCheckpoints of retention.h.
struct PruneFor {
  Uuid saved;            // What the caller has just committed; zero: nothing.
  std::int64_t now = 0;  // Seconds since 1970, for the expiry of pins; 0: the clock's.
};
Result<PruneReport> Prune(FileSystem& fs, const Store& store, const PruneOptions& options,
                          const PruneFor& whom = {});

// For people whose disk is full: says beside the failure what of .trash a gc may free. Other
// failures as they are.
Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure);

// As the command and the C interface give it to programs.
nlohmann::ordered_json PruneJson(const PruneReport& report);
nlohmann::ordered_json PinJson(const PinnedCheckpoint& pin);

}  // namespace tensormount::retention

#endif  // TENSORMOUNT_INDEX_STORE_RETENTION_H_
