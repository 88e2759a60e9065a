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

// Which files the tensors are stored in (docs/format.md, "Data files"): kAuto decides by size and
// by the lengths of the shards' runs.
enum class PlacementRule { kAuto, kTensorFile, kRankShard, kSafetensors };

// How replicas are compared. kRotating: each rank that holds a region hashes its own share of the
// region and that of one other rank, in turn, so that everything is compared after as many saves as
// ranks hold it. kFull: everything is compared. A difference is kDataLoss, except with kWarn, which
// compares like kRotating, stores the main replica or the lowest rank's (SaveStrategy::kMain), and
// adds the difference to the report's warnings; likewise for objects that differ between ranks.
enum class ReplicaCheck { kRotating, kFull, kOff, kWarn };

// Which ranks write cells that several ranks hold. kParallel: these ranks share the cells, so that
// all ranks write about the same number of bytes. kMain: the main replica if replicas are labelled,
// otherwise the lowest rank.
enum class SaveStrategy { kParallel, kMain };

// Handling of common values that differ between ranks. With kOff and kWarn the lowest rank's value
// is stored.
enum class CommonCheck { kOff, kWarn, kError };

// Whether a save links data files of an earlier checkpoint of its store instead of writing equal
// data again. kAuto: data that are equal byte for byte, proved by hashes of 64 KiB or by
// comparison.
enum class Reuse { kAuto, kOff };

// Whether a save counts the values of every tensor (zeros, NaNs, infinities, largest magnitude)
// while it hashes them (docs/numbers.md). kBasic takes a few percent of the CPU time of the hashes.
enum class Statistics { kOff, kBasic };

// What a save does about NaNs and infinities, which it finds by Statistics::kBasic. kWarn: a
// warning in the report of all ranks. kRefuse: the save fails on all ranks before anything is
// published, with the cause "values that are not finite" (ErrorFields::cause).
enum class Nonfinite { kAllow, kWarn, kRefuse };

struct SaveReport;

// Options above "Of this rank alone" must be equal on all ranks: a difference is kInvalidArgument
// on every rank, before anything is written (a difference of `timeouts` is not detected).
struct SaveOptions {
  PlacementRule placement = PlacementRule::kAuto;
  ReplicaCheck replicas = ReplicaCheck::kRotating;
  IfExists if_exists = IfExists::kFail;
  SaveStrategy strategy = SaveStrategy::kParallel;
  // Whether the ranks check, before anything is written, that they cover every tensor exactly.
  // Without this check publishing still refuses an incomplete checkpoint, but with a less specific
  // error.
  bool validate = true;
  CommonCheck common = CommonCheck::kError;
  // Globs of paths of common values that may differ: "args.rank", "rng*".
  std::vector<std::string> common_exempt = {};
  // Reuse plans of earlier saves over the same communicator if no rank's layout changed (costs one
  // exchange of 64 bytes per rank).
  bool reuse_plan = true;
  // Also store hashes of 4 KiB, for chunks over 64 KiB of tensors with two axes or more
  // (docs/format.md, "Page hashes"): reads of a few rows or columns then read and verify 4 KiB
  // pages instead of whole leaves of 64 KiB. Page hashes add 0.42 % of the data size to the
  // manifests. Adopted checkpoints, and those made through a mount, have no page hashes.
  bool page_hashes = false;
  Statistics statistics = Statistics::kBasic;
  // Anything but kAllow needs `statistics`. Data of a base whose values were not counted are then
  // written again instead of linked; inherited data without counts are not checked.
  Nonfinite nonfinite = Nonfinite::kAllow;
  // Globs of keys of tensors that may hold NaNs and infinities: "*.mask".
  std::vector<std::string> nonfinite_exempt = {};
  // ---- Steps over time (docs/steps.md, "Reuse") ----
  // Hard-link data files of the base whose contents this save needs; only changed data are written.
  // Saves without `validate` reuse nothing, because nobody has proved that they are complete.
  Reuse reuse = Reuse::kAuto;
  // Name of the base, a checkpoint of the same store; empty: the latest.
  std::string reuse_from = {};
  // Every n-th save in a row writes everything that the ranks have, so that a bad disk sector
  // affects at most n steps. 0: never.
  std::uint32_t full_every = 50;
  // Name of a checkpoint of the same store: tensors, objects and common values that no rank has are
  // taken from it by hard links, so that the new checkpoint is complete. That checkpoint is also
  // the base of `reuse`. If it is adopted, the new checkpoint depends on the same foreign files.
  // Empty: none.
  std::string inherit = {};

  // After the commit rank 0 removes checkpoints that these rules do not keep
  // (tensormount/retention.h); RetentionRules::OfStore(): the rules stored in the store; nullopt:
  // none. Rank 0's report lists removals and failures; a failure does not fail the save.
  std::optional<RetentionRules> retention = std::nullopt;
  // Temporary: once a later checkpoint is committed, the save or import that commits it, or the
  // next prune, removes this one, unless it is pinned, a running save takes data from it, or
  // RetentionRules::match excludes its name. Rules do not count it.
  bool ephemeral = false;
  // For a save to a bucket ("s3://BUCKET/STORE/NAME"): a directory that all ranks see, for this
  // purpose alone. The save is made in this store, and rank 0 copies it into the bucket
  // (docs/remote.md, "Saves"). Empty: the environment variable TENSORMOUNT_STAGING. Other saves
  // ignore it. `retention` is then that of the bucket; `if_exists` kReplace, `ephemeral` and
  // RetentionRules::OfStore() are kUnsupported.
  std::string staging = {};
  std::string producer = {};  // Shown in checkpoint.json; empty: "tensormount <version>".
  Timeouts timeouts = {};

  // ---- Of this rank alone ----
  // Threads that read, hash and write this rank's data, each into files of its own; at most 16. 0:
  // as many as the machine has cores for each of its ranks, at most 8 and at most as many as this
  // thread may run on, with 16 MiB each or more; a background save takes half of them.
  int writers = 0;
  // Called on the saving thread, at the start and end of every phase (event.h).
  EventHook events = {};
  // Called when this rank's data are durable and replicas are compared, before anything is
  // published, with the report so far. An error or exception fails the save on all ranks. May take
  // long, because heartbeats continue. Must not use the communicator.
  std::function<Status(const SaveReport&)> before_publish = {};
  // Called after the commit, before Save returns: `on_commit` on every rank, `on_commit_once` on
  // rank 0. Exceptions are logged, because the checkpoint exists.
  std::function<void(const SaveReport&)> on_commit = {};
  std::function<void(const SaveReport&)> on_commit_once = {};
  // If not null, receives the full result of the layout check.
  LayoutReport* layout = nullptr;
  // If not null, counts the bytes that this rank has written, or found in the base, for progress
  // displays.
  std::atomic<std::uint64_t>* progress = nullptr;
};

// Data that a save did not write because the base holds them; counts of all ranks.
struct ReuseReport {
  std::string base;           // Name of the base; empty: no reuse was attempted.
  std::string note;           // Why nothing was reused, or links were refused; may be empty.
  std::uint64_t tensors = 0;  // Reused tensors, inherited ones included.
  std::uint64_t objects = 0;  // Reused parts of objects, inherited ones included.
  std::uint64_t bytes = 0;    // Stored size of the reused data.
  // Part of `bytes` proved equal by hashes of leaves, and by comparison with the stored data. The
  // rest was inherited.
  std::uint64_t bytes_by_leaf = 0;
  std::uint64_t bytes_by_comparison = 0;
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_linked = 0;  // Lengths of the linked files.
  // Files copied because a link was refused; bytes_copied also counts live data copied out of files
  // of which less than half is live.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_copied = 0;
};

// Equal on every rank, except the members that are documented as this rank's. A rank that lost
// contact with the others and found the commit in the store has no counts of other ranks.
struct SaveReport {
  std::string path;  // STORE/NAME
  std::string uuid;
  std::uint64_t generation = 0;
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;          // Size of all tensors.
  std::uint64_t bytes_written = 0;  // By all ranks, headers included.
  std::uint64_t bytes_written_here = 0;
  std::uint64_t replica_bytes = 0;           // Bytes that several ranks hold, per extra rank.
  std::uint64_t replica_bytes_compared = 0;  // Part of replica_bytes that this save compared.
  bool plan_reused = false;
  ReuseReport reused;
  struct File {
    std::string name;         // "data/...", below the checkpoint.
    std::uint64_t bytes = 0;  // Written by this rank.
  };
  std::vector<File> files;  // Files that this rank wrote, wholly or in part.
  // Common values that differ (CommonCheck::kWarn); replicas and objects that differ
  // (ReplicaCheck::kWarn); NaNs and infinities (Nonfinite::kWarn).
  std::vector<std::string> warnings;
  // Rank 0 only, after the commit: checkpoints removed by the retention rules or because they are
  // ephemeral; and what failed (a checkpoint not removed, read or freed, a rule without effect),
  // with the reason ("step-7: PERMISSION_DENIED: ...").
  std::vector<std::string> pruned;
  std::vector<std::string> not_pruned;
  // Of a save to a bucket: the path in the staging directory from which it was copied; the bytes
  // that were sent to the server, and those that the server copied from other checkpoints of the
  // bucket. Empty, 0: `path` is no bucket.
  std::string staged;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_copied_in_bucket = 0;
  // Times of this rank, in seconds.
  double validate_seconds = 0;
  double plan_seconds = 0;
  double reuse_seconds = 0;    // Comparing with the base, linking.
  double write_seconds = 0;    // Writing, hashing, syncing.
  double compare_seconds = 0;  // Comparing replicas.
  double publish_seconds = 0;  // Waiting for the verdict included.
  double copy_seconds = 0;     // Of a save to a bucket: the copy into the bucket.
};

// Collective: every rank of `comm` passes its part and the same path "STORE/NAME" and options, and
// every rank returns the same result. The store is created on the first write.
//
//   ok                 committed and durable
//   kInvalidArgument   the shards do not cover a tensor exactly (names tensor, ranks and the exact
//                      missing or doubled box), dtype, shape or options differ between ranks, or a
//                      tensor has NaNs or infinities (Nonfinite::kRefuse; names tensor, rank, box)
//   kAlreadyExists     the name is taken
//   kPermissionDenied  the checkpoint to replace is pinned, or the store cannot be written
//   kNotFound          no checkpoint has the name `reuse_from` or `inherit`
//   kDataLoss          replicas differ (names key, ranks, box)
//   kResourceExhausted disk full, on some rank; the data written so far are deleted
//   kDeadlineExceeded, kUnavailable   a rank died or did not come (named); not committed
//   kUnknown           cannot tell whether the save was committed
// To a bucket, a failure after the commit in the staging directory says where the checkpoint is.
// A rank that loses contact with the others checks the store: if the publishing rename happened, it
// returns ok; otherwise it makes sure that the save can never be published. Before that rename
// nothing of the checkpoint is visible under its name, and a failure leaves the published
// checkpoints unchanged. After ok a power cut cannot undo the save.
TENSORMOUNT_EXPORT Result<SaveReport> Save(const StateDict& state, std::string_view path,
                                           Communicator& comm, const SaveOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_SAVE_H_
