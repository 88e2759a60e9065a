// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_RETENTION_H_
#define TENSORMOUNT_RETENTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

// Which checkpoints of a store stay (docs/semantics.md, "Steps over time: keeping and removing").
// For trainers that have no shell; `tensormount prune`, `pin` and `unpin` are the same.
//
//   SaveOptions options;
//   options.retention = RetentionRules::Parse("last=3,every=1000,best=eval.loss:min:2").value();
//
// All functions work on the store alone: no ranks, no communicator. One process calls them; several
// at once, on several hosts, do no harm. Thread-safe. They take as long as storage does.

namespace tensormount {

// A checkpoint stays where any rule keeps it. Without rules all stay. Whatever the rules are, these
// stay: the checkpoint of the highest generation, what is pinned, what a save under way shares
// files with, what is open (its bytes, until it is closed), and what cannot be read.
struct TENSORMOUNT_EXPORT RetentionRules {
  // The rules are those of the store (SetRetentionPolicy), and there must be none below.
  bool of_store = false;

  // The run that they are for: names of its checkpoints, as a shell matches them ("runA-*"). All
  // others stay and count for nothing. Empty: every name.
  std::string match = {};

  std::uint64_t keep_last = 0;  // The N highest generations; 0: no such rule.

  struct Every {
    enum class Unit {
      kSteps,        // Whose step, the last decimal number in its name, is a multiple of `count`.
      kGenerations,  // The newest of each `count` generations.
      kHours,        // The newest of each `count` hours.
    };
    std::uint64_t count = 0;  // At least 1.
    Unit unit = Unit::kSteps;
    friend bool operator==(const Every&, const Every&) = default;
  };
  std::vector<Every> keep_every = {};

  // The `count` best by a number of the common state: "eval.loss" is the value of that name, or
  // "loss" in the dict "eval", and so on (CommonValue::At). One that has no such number (none, NaN,
  // a text), and one that is as good as the last of the best, stays and is named.
  struct Best {
    std::string metric;
    bool highest = false;     // False: the lowest are the best.
    std::uint64_t count = 0;  // At least 1.
    friend bool operator==(const Best&, const Best&) = default;
  };
  std::vector<Best> keep_best = {};

  bool empty() const {
    return !of_store && keep_last == 0 && keep_every.empty() && keep_best.empty();
  }
  friend bool operator==(const RetentionRules&, const RetentionRules&) = default;

  static RetentionRules OfStore() {
    RetentionRules rules;
    rules.of_store = true;
    return rules;
  }
  // "policy" (those of the store), or rules with commas between them: "last=3", "every=1000"
  // (steps), "every=5-generations", "every=6h", "best=eval.loss:min:2", "match=runA-*". A backslash
  // takes what follows it for what it is, in names of metrics and patterns. "" is no rule.
  // kInvalidArgument says which rule is none.
  static Result<RetentionRules> Parse(std::string_view text);
  // What Parse makes the same rules of.
  std::string ToText() const;
};

// ---- Pins ----

struct PinOptions {
  std::string reason = {};   // For people; up to 4,096 bytes.
  std::int64_t expires = 0;  // Seconds since 1970, by the clock of whoever prunes; 0: never.
};
struct PinnedCheckpoint {
  std::string uuid;  // 32 hex digits. A pin holds a checkpoint, whatever its name is.
  std::string name;  // That it had when it was pinned.
  std::string reason;
  std::string by;            // "user 1000 on node7".
  std::int64_t created = 0;  // Seconds since 1970.
  std::int64_t expires = 0;
  bool expired = false;
  // Not empty: why the pin cannot be read. It holds all the same, for ever.
  std::string problem = {};
};
// Keeps "STORE/NAME" from rules, and from removal without force, durably. Again: with another
// reason and expiry. kNotFound; kDataLoss where its uuid cannot be read.
TENSORMOUNT_EXPORT Result<PinnedCheckpoint> PinCheckpoint(const std::string& path,
                                                          const PinOptions& options = {});
// kNotFound: no such checkpoint, or it is not pinned.
TENSORMOUNT_EXPORT Status UnpinCheckpoint(const std::string& path);
// By uuid. Pins of checkpoints that are gone are listed until gc takes them away.
TENSORMOUNT_EXPORT Result<std::vector<PinnedCheckpoint>> ListPins(const std::string& store);

// ---- Pruning ----

struct PruneOptions {
  RetentionRules rules = RetentionRules::OfStore();
  bool dry_run = false;
  // Seconds to wait for another one who prunes this store; then kBusy.
  double wait_seconds = 10;
  // Folders where data of adopted checkpoints may lie, whoever adopted them.
  std::vector<std::string> roots = {};
};
struct TENSORMOUNT_EXPORT PruneReport {
  // One a checkpoint, the highest generation first; then those that cannot be read.
  struct Decision {
    std::string checkpoint;
    std::string uuid;  // Zeros where it could not be read.
    std::uint64_t generation = 0;
    bool kept = true;
    std::string reason;    // Why it stays or goes, in words.
    bool unread = false;   // It could not be read: it stays, and may be the newest.
    bool removed = false;  // It is gone; never in a dry run.
    Status failed;         // Why it is still there, or (kUnknown) may come back.
  };
  std::vector<Decision> decisions;
  std::string rules;  // As text, those that were used; empty: none.
  bool dry_run = false;
  // What rules ask for and no checkpoint has: "best=loss:min:1: ...".
  std::vector<std::string> notes;
  // Of what was removed: freed at once, or waiting in .trash, and why each waits ("step-1: still
  // read").
  std::uint64_t bytes_freed = 0;
  std::uint64_t bytes_waiting = 0;
  std::vector<std::string> waiting;
  std::uint64_t removed() const;
  // "step-7: ..." of each removal that failed.
  std::vector<std::string> failures() const;
};
// Removes what the rules do not keep, and frees its space. Readers who have it open read on: its
// space waits for them, and for gc. A removal that fails is in the report, and the next one is
// tried. These remove nothing:
//   kDataLoss, ...     the newest checkpoint does not pass a quick verification, or could not be
//                      looked at, and is named; policy.json is damaged
//   kUnsupported       policy.json is of a newer program
//   kBusy              somebody else prunes
//   kNotFound          no store
TENSORMOUNT_EXPORT Result<PruneReport> PruneCheckpoints(const std::string& store,
                                                        const PruneOptions& options = {});

// The store's own rules, for all who prune it: policy.json. nullopt: it has none.
TENSORMOUNT_EXPORT Result<std::optional<RetentionRules>> RetentionPolicy(const std::string& store);
// Durably; nullopt: none any more. kInvalidArgument for RetentionRules::OfStore(), and for no
// rules; kUnsupported where those that are there are of a newer program.
TENSORMOUNT_EXPORT Status SetRetentionPolicy(const std::string& store,
                                             const std::optional<RetentionRules>& rules);

}  // namespace tensormount

#endif  // TENSORMOUNT_RETENTION_H_
