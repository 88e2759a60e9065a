// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_HISTORY_H_
#define TENSORMOUNT_INDEX_STORE_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"
#include "shard/tensor_meta.h"

// The history of a store: its steps in order, and the steps at which a key changed. Only commit
// records and indexes are read, no data.

namespace tensormount::history {

// The checkpoints of a store that are steps of its run, in the order of their saves.
struct Steps {
  // By generation, the lowest first. A checkpoint that cannot be read is included, with its
  // problem, if a manifest has its generation. Derived checkpoints are not steps.
  std::vector<CheckpointListing> in_order;
  // Checkpoints that cannot be read and whose generation is unknown, by name.
  std::vector<CheckpointListing> unplaced;
};
// Sorts the checkpoints of a listing. Directories that are not checkpoints are left out, and so are
// derived checkpoints unless `with_derived`.
Steps StepsOf(const Store& store, std::vector<CheckpointListing> listed, bool with_derived = false);

// Calls `fn` with the index of a checkpoint, opened as readers do (a damaged index is bypassed).
// kNotFound: the checkpoint was removed or replaced since it was listed.
Status ReadIndexOf(const Store& store, const CheckpointListing& step,
                   const std::vector<std::string>& roots,
                   const std::function<Status(const OpenedCheckpoint&)>& fn);

// What a checkpoint has under a key.
struct KeyState {
  enum class Kind { kAbsent, kTensor, kObject };
  Kind kind = Kind::kAbsent;
  DType dtype{};  // Of a tensor, like `shape`.
  Dims shape;
  std::uint64_t bytes = 0;
  // The recorded digest of a tensor, or a hash of the recorded hashes of an object's parts.
  // nullopt: none was recorded (adopted with --quick).
  std::optional<std::uint64_t> digest;
};

// How the states of a key in two steps differ.
enum class ChangeKind {
  kNone,
  kAdded,
  kRemoved,
  kKind,  // A tensor became an object, or an object a tensor.
  kDType,
  kShape,
  kDigest,
  kUnknown,  // The same type and shape, and one of the two has no digest.
  kFirst,    // There is no earlier step to compare with.
};
ChangeKind Compare(const KeyState& before, const KeyState& after);
std::string_view ChangeName(ChangeKind kind);  // "added", "digest", ...

// One change of a key.
struct Change {
  std::string key;
  ChangeKind kind = ChangeKind::kNone;  // Never kNone.
  CheckpointListing step;               // The earliest step that is known to have `state`.
  std::int64_t created = 0;
  KeyState state;
  std::string before_step;  // The step that it was compared with; empty with kFirst.
  KeyState before;
  // Steps between the two that could not be read: the change may have happened there.
  std::vector<std::string> unread_before;
  // Steps after `step`, before the next change, that could not be read.
  std::vector<std::string> unread_after;
};

struct Query {
  // A key of a tensor or object, or a glob (GlobMatches) if no checkpoint has this key and it has
  // one of "*?[". A glob stands for the keys of the newest step that can be read.
  std::string key;
  // Largest number of changes of one key, the newest first; 0: all.
  std::size_t limit = 0;
  std::vector<std::string> roots;  // OpenedCheckpoint::Options::roots.
};
struct Report {
  // By key, then the newest first. A key has at least one change.
  std::vector<Change> changes;
  // The steps that could not be read and were needed. They are also named in `changes`, except
  // those without a place in the order.
  std::vector<CheckpointListing> unread;
  std::vector<std::string> unplaced;  // Names of those of unknown generation.
  std::size_t steps = 0;              // Steps that were compared.
};
// The changes of the keys. Goes back from the newest step, and reads no more steps than necessary.
// kNotFound: the store has no step that can be read, or none has the key.
Result<Report> Changes(const Store& store, const Query& query);

}  // namespace tensormount::history

#endif  // TENSORMOUNT_INDEX_STORE_HISTORY_H_
