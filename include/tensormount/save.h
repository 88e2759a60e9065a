// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SAVE_H_
#define TENSORMOUNT_SAVE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/event.h"
#include "tensormount/retention.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/store.h"
#include "tensormount/validate.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Where tensors go (docs/format.md, "Data files"): kAuto decides by size and by how long the runs
// of the shards are.
enum class PlacementRule { kAuto, kTensorFile, kRankShard, kSafetensors };

// How contents of replicas are compared. kRotating: each holder hashes its own share of the region
// and a neighbour's, everything over as many saves as there are holders.
enum class ReplicaCheck { kRotating, kFull, kOff };

// Who writes cells that several ranks hold. kParallel: all holders, each its part, so that all
// ranks write about the same number of bytes. kMain: the main replica alone, where replicas are
// labelled; the lowest rank otherwise.
enum class SaveStrategy { kParallel, kMain };

// What a common value that differs between ranks means. With kOff and kWarn the lowest rank's
// value is stored.
enum class CommonCheck { kOff, kWarn, kError };

// Whether a save links what an earlier checkpoint of its store holds already, instead of writing it
// again. kAuto: what is equal byte for byte, proved by hashes of 64 KiB or by comparison.
enum class Reuse { kAuto, kOff };

struct SaveReport;

// Options above "Of this rank alone" must be equal on all ranks: they are compared before anything
// is written, and a difference is kInvalidArgument on every rank.
struct SaveOptions {
  PlacementRule placement = PlacementRule::kAuto;
  ReplicaCheck replicas = ReplicaCheck::kRotating;
  IfExists if_exists = IfExists::kFail;
  SaveStrategy strategy = SaveStrategy::kParallel;
  // Whether the ranks prove, before anything is written, that they cover every tensor exactly. Off
  // saves that time; what is incomplete is then refused at publish, with less to say about who.
  bool validate = true;
  CommonCheck common = CommonCheck::kError;
  // Common values that may differ: globs of their paths, "args.rank", "rng*".
  std::vector<std::string> common_exempt = {};
  // Plans of earlier saves over the same communicator are used again where no rank's layout
  // changed (one exchange of 64 bytes a rank).
  bool reuse_plan = true;
  // Hashes of 4 KiB beside those of 64 KiB, for chunks over 64 KiB of tensors of two axes and more
  // (docs/format.md, "Page hashes"): reads of a few rows or columns are then proved by the pages
  // that they touch, where whole leaves of 64 KiB are read otherwise. They take 0.42 % of the data
  // in the manifests. Checkpoints that are made through a mount or adopted have none.
  bool page_hashes = false;
  // ---- Steps over time (docs/semantics.md, "Steps over time") ----
  // Data files of which the base holds what this save needs become hard links; only what changed is
  // written. Off for saves without `validate`, which nobody has proved to be whole.
  Reuse reuse = Reuse::kAuto;
  // Name of the checkpoint of the same store that is the base; empty: the latest.
  std::string reuse_from = {};
  // Of so many saves in a row one writes everything anew, so that no sector of a disk holds more
  // steps than that. 0: none does.
  std::uint32_t full_every = 50;
  // Name of a checkpoint of the same store: tensors, objects and common values that no rank has are
  // taken from it, by hard links, so that the new one is whole. It is the base of `reuse` too, and
  // may be an adopted one: then the new one needs the same foreign files. Empty: none.
  std::string inherit = {};

  // After the commit rank 0 removes what these rules do not keep (tensormount/retention.h);
  // RetentionRules::OfStore(): the store's own. nullopt: nothing. What was removed, and what could
  // not be, is in rank 0's report, and fails no save.
  std::optional<RetentionRules> retention = std::nullopt;
  // The checkpoint goes once a later one is committed by such a save, an import or a prune,
  // whatever the rules say, unless it is pinned by then. Rules do not count it.
  bool ephemeral = false;
  std::string producer = {};  // Shown in checkpoint.json; empty: "tensormount <version>".
  Timeouts timeouts = {};

  // ---- Of this rank alone ----
  // Called on the thread that saves, at the start and end of every phase (event.h).
  EventHook events = {};
  // Once what this rank wrote is durable, replicas are compared and nothing is published yet, with
  // the report so far. What is not ok, or thrown, fails the save on all ranks. May take its time:
  // heartbeats go on. Must not use the communicator.
  std::function<Status(const SaveReport&)> before_publish = {};
  // After the commit, before Save returns. `on_commit` on every rank, `on_commit_once` on rank 0.
  // What they throw is logged: the checkpoint exists.
  std::function<void(const SaveReport&)> on_commit = {};
  std::function<void(const SaveReport&)> on_commit_once = {};
  // Where not null: why a layout was refused, in full, and otherwise what was found sound.
  LayoutReport* layout = nullptr;
  // Where not null, counts bytes as this rank has written them, or found them in the base: for
  // progress displays.
  std::atomic<std::uint64_t>* progress = nullptr;
};

// What a save did not write, because an earlier checkpoint holds it. Of all ranks.
struct ReuseReport {
  std::string base;  // Name of that checkpoint; empty: nothing was looked for.
  std::string note;  // Why nothing was taken, or links were refused; empty: nothing to say.
  std::uint64_t tensors = 0;  // Taken as they are; inherited ones too.
  std::uint64_t objects = 0;  // Parts of objects, likewise.
  std::uint64_t bytes = 0;    // Of them, as they are stored.
  // Of these bytes, how they were proved to be the same: by hashes of leaves, by comparison with
  // what is stored. The rest was inherited.
  std::uint64_t bytes_by_leaf = 0;
  std::uint64_t bytes_by_comparison = 0;
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_linked = 0;  // Lengths of these files.
  // Where links were refused; and, in bytes alone, out of files of which less than half is live.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_copied = 0;
};

// The same on every rank, but for what says that it is of this one.
struct SaveReport {
  std::string path;  // STORE/NAME
  std::string uuid;
  std::uint64_t generation = 0;
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;          // Of all tensors.
  std::uint64_t bytes_written = 0;  // By all ranks, headers included.
  std::uint64_t bytes_written_here = 0;
  std::uint64_t replica_bytes = 0;           // Cells held more than once, counted per extra holder.
  std::uint64_t replica_bytes_compared = 0;  // Of these, in this save.
  bool plan_reused = false;
  ReuseReport reused;
  struct File {
    std::string name;         // "data/...", below the checkpoint.
    std::uint64_t bytes = 0;  // Written by this rank.
  };
  std::vector<File> files;            // That this rank wrote, or parts of.
  std::vector<std::string> warnings;  // Common values that differ (CommonCheck::kWarn).
  // Of rank 0 alone, once it is committed: names of checkpoints that were removed by rule, and what
  // could not be, with the reason ("step-7: PERMISSION_DENIED: ..."); also those that cannot be
  // read.
  std::vector<std::string> pruned;
  std::vector<std::string> not_pruned;
  // Seconds of this rank.
  double validate_seconds = 0;
  double plan_seconds = 0;
  double reuse_seconds = 0;    // Comparing with the base, linking.
  double write_seconds = 0;    // Writing, hashing, syncing.
  double compare_seconds = 0;  // Replicas.
  double publish_seconds = 0;  // Waiting for the verdict included.
};

// Collective: every rank of `comm` calls it with its part and the same path "STORE/NAME" and
// options, and every rank returns the same verdict. The store is made on first write.
//
//   ok                 committed and durable
//   kInvalidArgument   the shards do not cover a tensor exactly (names tensor, ranks and the exact
//                      missing or doubled box), dtype or shape differ between ranks, or options do
//   kAlreadyExists     that name is taken
//   kDataLoss          replicas differ (names key, ranks, box)
//   kResourceExhausted disk full, on some rank; nothing is left behind
//   kDeadlineExceeded, kUnavailable   a rank died or did not come, and is named; not committed
//   kUnknown           committed or not could not be found out
// A rank that cannot reach the others any more asks the store: "committed" where the rename had
// happened (then ok), otherwise it sees to it that the save can never be published.
// Until the rename that publishes it, nothing of the checkpoint is visible under its name, and a
// failure leaves what is published as it was. Once it returns ok, a power cut cannot undo it.
TENSORMOUNT_EXPORT Result<SaveReport> Save(const StateDict& state, std::string_view path,
                                           Communicator& comm, const SaveOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_SAVE_H_
