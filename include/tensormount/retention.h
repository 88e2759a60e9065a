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

// Retention: which checkpoints of a store are kept (docs/steps.md, "Retention rules"). For programs
// without a shell; the commands `tensormount prune`, `pin` and `unpin` do the same.
//
//   SaveOptions options;
//   options.retention = RetentionRules::Parse("last=3,every=1000,best=eval.loss:min:2").value();
//
// The functions need no ranks and no communicator: one process calls them, and concurrent calls, on
// several hosts too, are safe. Thread-safe. They block on storage.

namespace tensormount {

// A checkpoint is kept if any rule keeps it, or if there are no rules. Always kept: the checkpoint
// of the highest generation (of those whose names match `match`), pinned checkpoints, derived ones
// (tensormount/derive.h), those from which a running save takes data, open ones (their data, until
// they are closed), and those that cannot be read. No rule keeps an ephemeral checkpoint
// (SaveOptions::ephemeral).
struct TENSORMOUNT_EXPORT RetentionRules {
  // Use the rules stored in the store (SetRetentionPolicy). Then no other member may be set.
  bool of_store = false;

  // The run to which the rules apply: a shell pattern for names of checkpoints ("runA-*"). Other
  // checkpoints are kept and not counted. Empty: every name.
  std::string match = {};

  std::uint64_t keep_last = 0;  // Keep the N highest generations; 0: no such rule.

  struct Every {
    enum class Unit {
      kSteps,        // The last decimal number in the name is a multiple of `count`, or missing.
      kGenerations,  // The newest of each `count` generations.
      kHours,        // The newest of each `count` hours.
    };
    std::uint64_t count = 0;  // At least 1.
    Unit unit = Unit::kSteps;
    friend bool operator==(const Every&, const Every&) = default;
  };
  std::vector<Every> keep_every = {};

  // Keep the `count` best by a number of the common state: "eval.loss" is the value of that name,
  // or "loss" in the dict "eval", and so on (CommonValue::At). Checkpoints without such a number
  // (missing, NaN, a string), and those that tie with the last of the best, are kept and reported.
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
  // "policy" (the rules of the store), or rules separated by commas: "last=3", "every=1000"
  // (steps), "every=5-generations", "every=6h", "best=eval.loss:min:2", "match=runA-*". In names of
  // metrics and patterns a backslash escapes the next character. "" is no rule. kInvalidArgument
  // names the invalid rule.
  static Result<RetentionRules> Parse(std::string_view text);
  // Text that Parse converts back to equal rules.
  std::string ToText() const;
};

// ---- Pins ----

struct PinOptions {
  std::string reason = {};   // For people; up to 4,096 bytes.
  std::int64_t expires = 0;  // Seconds since 1970, by the removing host's clock; 0: never.
};
struct PinnedCheckpoint {
  std::string uuid;  // 32 hex digits. The pin protects this uuid under any name.
  std::string name;  // Name of the checkpoint when it was pinned.
  std::string reason;
  std::string by;            // "user 1000 on node7".
  std::int64_t created = 0;  // Seconds since 1970.
  std::int64_t expires = 0;
  bool expired = false;
  // Why the pin cannot be read; empty if it can. An unreadable pin protects the checkpoint forever.
  std::string problem = {};
  bool unread = false;  // `problem` is an error of the disk; the pin's file may be intact.
};
// Pins "STORE/NAME", durably: protects the checkpoint from rules and from removal without force. A
// second call replaces reason and expiry. kNotFound: no such checkpoint. kDataLoss: its uuid cannot
// be read.
TENSORMOUNT_EXPORT Result<PinnedCheckpoint> PinCheckpoint(const std::string& path,
                                                          const PinOptions& options = {});
// Removes the pin of "STORE/NAME". kNotFound: no such checkpoint, or it is not pinned.
TENSORMOUNT_EXPORT Status UnpinCheckpoint(const std::string& path);
// All pins of a store, sorted by uuid. Pins of removed checkpoints are listed until gc deletes
// them.
TENSORMOUNT_EXPORT Result<std::vector<PinnedCheckpoint>> ListPins(const std::string& store);

// ---- Pruning ----

struct PruneOptions {
  RetentionRules rules = RetentionRules::OfStore();
  bool dry_run = false;
  // How long to wait for another process that removes checkpoints of this store or changes its
  // policy; then kBusy.
  double wait_seconds = 10;
  // Directories where data of adopted checkpoints may lie, whoever adopted them.
  std::vector<std::string> roots = {};
};
struct TENSORMOUNT_EXPORT PruneReport {
  // The decision on one checkpoint. `decisions` has the highest generation first; after those to
  // which the rules apply come derived checkpoints, then names that RetentionRules::match excludes,
  // then checkpoints that cannot be read.
  struct Decision {
    std::string checkpoint;
    std::string uuid;  // Zeros if it could not be read.
    std::uint64_t generation = 0;
    bool kept = true;
    std::string reason;    // Why it is kept or removed, as text.
    bool unread = false;   // The checkpoint could not be read, so it is kept.
    bool removed = false;  // Never true in a dry run.
    Status failed;         // Why the removal failed; kUnknown: the checkpoint may reappear.
  };
  std::vector<Decision> decisions;
  std::string rules;  // The rules used, as text; empty: none.
  bool dry_run = false;
  // Rules without effect, because no checkpoint has their metric: "best=loss:min:1: ...".
  std::vector<std::string> notes;
  // Space of removed checkpoints that was freed at once, space that waits in .trash, and why each
  // of those checkpoints waits ("step-1: still read").
  std::uint64_t bytes_freed = 0;
  std::uint64_t bytes_waiting = 0;
  std::vector<std::string> waiting;
  std::uint64_t removed() const;
  // One line per failed removal: "step-7: ...".
  std::vector<std::string> failures() const;
};
// Removes the checkpoints that the rules do not keep, and frees their space. Readers that have a
// removed checkpoint open can read on; the next save or prune with rules, or gc, frees its space
// after they close it. A failed removal is reported, and the next removal is tried (unless the
// newest checkpoint or the policy changed meanwhile). With these errors nothing is removed:
//   kDataLoss, ...     the newest checkpoint (named) does not pass a quick verification, or cannot
//                      be read; or policy.json is damaged
//   kUnsupported       policy.json was written by a newer version
//   kBusy              another process removes checkpoints or changes the policy
//   kNotFound          no store
TENSORMOUNT_EXPORT Result<PruneReport> PruneCheckpoints(const std::string& store,
                                                        const PruneOptions& options = {});

// The rules stored in the store (policy.json); nullopt: none.
TENSORMOUNT_EXPORT Result<std::optional<RetentionRules>> RetentionPolicy(const std::string& store);
// Stores rules durably; nullopt removes them. kInvalidArgument for RetentionRules::OfStore() and
// for empty rules; kUnsupported if the existing policy was written by a newer version.
TENSORMOUNT_EXPORT Status SetRetentionPolicy(const std::string& store,
                                             const std::optional<RetentionRules>& rules);

}  // namespace tensormount

#endif  // TENSORMOUNT_RETENTION_H_
