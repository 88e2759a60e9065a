// SPDX-License-Identifier: Apache-2.0
// The history of a store (history.h). A search goes back from the newest step, in batches whose
// indexes are read by several threads. Most questions are about a change in one of the last steps,
// so the first batches are small.
#include "index/store/history.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "base/coding.h"
#include "base/glob.h"
#include "base/parallel.h"
#include "index/records/manifest.h"

namespace tensormount::history {
namespace {

// Numbers of steps that are read at a time: the first batch, and the largest.
constexpr std::size_t kFirstBatch = 4;
constexpr std::size_t kLargestBatch = 128;
// Threads where each read waits for a round trip.
constexpr int kRemoteThreads = 16;
// Up to this many keys are looked up one by one; more are found by a scan of the index.
constexpr std::size_t kFewKeys = 16;

bool IsGlob(std::string_view text) { return text.find_first_of("*?[") != std::string_view::npos; }

KeyState StateOf(const TensorEntry& tensor) {
  KeyState state{.kind = KeyState::Kind::kTensor,
                 .dtype = tensor.meta.dtype(),
                 .shape = tensor.meta.shape(),
                 .bytes = tensor.meta.bytes(),
                 .digest = std::nullopt};
  if (tensor.has_digest) state.digest = tensor.digest;
  return state;
}

// The state of an object with these parts, which are sorted by index.
KeyState StateOf(std::span<const ObjectRecord> parts) {
  KeyState state{
      .kind = KeyState::Kind::kObject, .dtype = {}, .shape = {}, .bytes = 0, .digest = {}};
  ByteWriter hashed;
  bool known = true;
  for (const ObjectRecord& part : parts) {
    state.bytes += part.length;
    known = known && part.has_hash();
    for (const Dims* numbers : {&part.index, &part.grid}) {
      hashed.U32(static_cast<std::uint32_t>(numbers->rank()));
      for (const std::int64_t n : *numbers) hashed.I64(n);
    }
    hashed.U64(part.length);
    hashed.Hash(part.hash);
  }
  if (known) state.digest = Xxh3(hashed.bytes()).low;
  return state;
}

// Calls `fn` for the objects of an index, with all parts of each.
template <typename Fn>
Status ForEachObject(const CheckpointIndex& index, const Fn& fn) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts, index.Objects());
  for (std::size_t i = 0, end = 0; i < parts.size(); i = end) {
    for (end = i + 1; end < parts.size() && parts[end].key == parts[i].key;) ++end;
    fn(parts[i].key, StateOf(std::span(parts).subspan(i, end - i)));
  }
  return Status();
}

Result<KeyState> FindState(const CheckpointIndex& index, const std::string& key) {
  const Result<TensorEntry> tensor = index.Find(key);
  if (tensor.ok()) return StateOf(tensor.value());
  if (tensor.status().code() != Code::kNotFound) return tensor.status();
  const Result<std::vector<ObjectRecord>> parts = index.ObjectParts(key);
  if (parts.ok()) return StateOf(parts.value());
  if (parts.status().code() != Code::kNotFound) return parts.status();
  return KeyState();
}

// The states of `keys`, which are sorted.
Result<std::vector<KeyState>> FindStates(const CheckpointIndex& index,
                                         const std::vector<std::string>& keys) {
  std::vector<KeyState> states(keys.size());
  if (keys.size() <= kFewKeys) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(states[i], FindState(index, keys[i]));
    }
    return states;
  }
  const auto set = [&](const std::string& key, KeyState state) {
    const auto at = std::ranges::lower_bound(keys, key);
    if (at != keys.end() && *at == key) {
      states[static_cast<std::size_t>(at - keys.begin())] = std::move(state);
    }
  };
  TENSORMOUNT_RETURN_IF_ERROR(ForEachObject(index, set));
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
    set(tensor.meta.key(), StateOf(tensor));
    return true;
  }));
  return states;
}

// The keys that a query stands for in an index, sorted.
Result<std::vector<std::string>> KeysOf(const CheckpointIndex& index, const std::string& query) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyState exact, FindState(index, query));
  if (exact.kind != KeyState::Kind::kAbsent || !IsGlob(query)) {
    return std::vector<std::string>{query};
  }
  std::vector<std::string> keys;
  const auto add = [&](const std::string& key) {
    if (GlobMatches(query, key)) keys.push_back(key);
  };
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
    add(tensor.meta.key());
    return true;
  }));
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachObject(index, [&](const std::string& key, const KeyState&) { add(key); }));
  std::ranges::sort(keys);
  // The key may be in older steps only, and have a character of globs.
  if (keys.empty()) keys.push_back(query);
  return keys;
}

// What a search found in one step.
struct SeenStep {
  Status status;
  std::int64_t created = 0;
  std::vector<KeyState> states;  // Of the keys that were asked for.
};

// A key during a search. The run is the steps in which the key has its current state.
struct TrackedKey {
  std::string key;
  KeyState state;
  std::size_t first = 0;  // The earliest step of the run so far; position in Steps::in_order.
  std::int64_t created = 0;
  std::vector<std::string> unread_in_run;
  std::vector<Change> changes;
  bool done = false;
};

class Search {
 public:
  Search(const Store& store, const Query& query, Steps steps)
      : store_(store), query_(query), steps_(std::move(steps)), next_(steps_.in_order.size()) {}

  Result<Report> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(BeginAtNewest());
    for (std::size_t batch = kFirstBatch; next_ > 0; batch = std::min(batch * 2, kLargestBatch)) {
      std::vector<std::string> keys;
      std::vector<TrackedKey*> open;
      for (TrackedKey& tracked : tracked_) {
        if (tracked.done) continue;
        keys.push_back(tracked.key);
        open.push_back(&tracked);
      }
      if (open.empty()) break;
      GoBack(std::min(batch, next_), keys, open);
    }
    for (TrackedKey& tracked : tracked_) {
      // A key that no step has, before the run, is not a change.
      if (!tracked.done && tracked.state.kind != KeyState::Kind::kAbsent) {
        EndRun(tracked, ChangeKind::kFirst, nullptr, {});
      }
    }
    for (TrackedKey& tracked : tracked_) {
      std::ranges::move(tracked.changes, std::back_inserter(report_.changes));
    }
    if (report_.changes.empty()) return NoSuchKey();
    for (const CheckpointListing& one : steps_.unplaced) {
      report_.unplaced.push_back(one.name);
      report_.unread.push_back(one);
    }
    return std::move(report_);
  }

 private:
  const CheckpointListing& StepAt(std::size_t i) const { return steps_.in_order[i]; }

  // Notes that a step could not be read. A step that was removed meanwhile is ignored.
  void Skip(std::size_t i, const Status& why) {
    if (why.code() == Code::kNotFound) return;
    unread_.push_back(StepAt(i).name);
    CheckpointListing listing = StepAt(i);
    if (listing.problem.ok()) {
      listing.problem = why;
      listing.state = why.code() == Code::kDataLoss ? CheckpointListing::State::kDamaged
                                                    : CheckpointListing::State::kUnread;
    }
    report_.unread.push_back(std::move(listing));
  }

  // Finds the newest step that can be read, and the keys.
  Status BeginAtNewest() {
    while (next_ > 0) {
      const std::size_t i = --next_;
      const Status read =
          StepAt(i).problem.ok()
              ? ReadIndexOf(store_, StepAt(i), query_.roots,
                            [&](const OpenedCheckpoint& opened) -> Status {
                              const CheckpointIndex& index = opened.index();
                              TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> keys,
                                                           KeysOf(index, query_.key));
                              TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<KeyState> states,
                                                           FindStates(index, keys));
                              tracked_.clear();
                              for (std::size_t k = 0; k < keys.size(); ++k) {
                                TrackedKey& tracked = tracked_.emplace_back();
                                tracked.key = keys[k];
                                tracked.state = std::move(states[k]);
                                tracked.first = i;
                                tracked.created = index.info().created;
                              }
                              return Status();
                            })
              : StepAt(i).problem;
      if (!read.ok()) {
        Skip(i, read);
        continue;
      }
      for (TrackedKey& tracked : tracked_) tracked.unread_in_run = unread_;
      unread_.clear();
      ++report_.steps;
      return Status();
    }
    // An unreadable step is not a missing key.
    if (!report_.unread.empty()) return report_.unread.front().problem;
    if (!steps_.unplaced.empty()) return steps_.unplaced.front().problem;
    return Status(Code::kNotFound, store_.path() + ": the store has no checkpoint that is a step");
  }

  // Compares `open` in the `count` steps before next_.
  void GoBack(std::size_t count, const std::vector<std::string>& keys,
              const std::vector<TrackedKey*>& open) {
    const std::size_t begin = next_ - count;
    std::vector<SeenStep> seen(count);
    struct Nothing {};
    const int threads = store_.fs().Can(Ability::kKernelFiles) ? 0 : kRemoteThreads;
    const Status looked = ForEachParallel<Nothing>(count, threads, [&](std::size_t n, Nothing&) {
      // The newest of the batch first.
      const std::size_t at = count - 1 - n;
      const CheckpointListing& step = StepAt(begin + at);
      SeenStep& one = seen[at];
      one.status = step.problem;
      if (!one.status.ok()) return Status();
      one.status =
          ReadIndexOf(store_, step, query_.roots, [&](const OpenedCheckpoint& opened) -> Status {
            one.created = opened.index().info().created;
            TENSORMOUNT_ASSIGN_OR_RETURN(one.states, FindStates(opened.index(), keys));
            return Status();
          });
      return Status();
    });
    while (next_ > begin) {
      SeenStep& one = seen[--next_ - begin];
      // Without memory or threads the steps count as unread.
      if (one.status.ok() && one.states.size() != keys.size()) one.status = looked;
      if (!one.status.ok()) {
        Skip(next_, one.status);
        continue;
      }
      ++report_.steps;
      for (std::size_t k = 0; k < open.size(); ++k) {
        if (!open[k]->done) CompareOlder(*open[k], next_, one.created, std::move(one.states[k]));
      }
      unread_.clear();
    }
  }

  // Compares a key's state in step `i`, the next older one that could be read, with its run.
  void CompareOlder(TrackedKey& tracked, std::size_t i, std::int64_t created, KeyState state) {
    const ChangeKind kind = Compare(state, tracked.state);
    if (kind == ChangeKind::kNone) {
      std::ranges::copy(unread_, std::back_inserter(tracked.unread_in_run));
    } else {
      EndRun(tracked, kind, &StepAt(i).name, state);
      tracked.state = std::move(state);
      tracked.unread_in_run.clear();
    }
    tracked.first = i;
    tracked.created = created;
  }

  void EndRun(TrackedKey& tracked, ChangeKind kind, const std::string* before_step,
              const KeyState& before) {
    tracked.changes.push_back({.key = tracked.key,
                               .kind = kind,
                               .step = StepAt(tracked.first),
                               .created = tracked.created,
                               .state = tracked.state,
                               .before_step = before_step == nullptr ? "" : *before_step,
                               .before = before,
                               .unread_before = unread_,
                               .unread_after = tracked.unread_in_run});
    tracked.done = query_.limit != 0 && tracked.changes.size() >= query_.limit;
  }

  Status NoSuchKey() const {
    std::string why =
        IsGlob(query_.key)
            ? "'" + query_.key + "': no key of the newest step matches it"
            : "no tensor or object " + query_.key + " in any step of " + store_.path();
    if (!report_.unread.empty()) {
      why += "; " + std::to_string(report_.unread.size()) +
             " of the steps cannot be read, such as " + report_.unread.front().name;
    }
    return Status(Code::kNotFound, why).With({.key = query_.key});
  }

  const Store& store_;
  const Query& query_;
  const Steps steps_;
  std::size_t next_;  // Steps from here on were visited.
  // Unreadable steps since the last one that could be read, the newest first.
  std::vector<std::string> unread_;
  std::vector<TrackedKey> tracked_;
  Report report_;
};

}  // namespace

Steps StepsOf(const Store& store, std::vector<CheckpointListing> listed, bool with_derived) {
  Steps steps;
  for (CheckpointListing& one : listed) {
    if (one.state == CheckpointListing::State::kNoCheckpoint) continue;
    if (one.derived && !with_derived) continue;
    if (!one.problem.ok()) {
      const Result<CheckpointInfo> info =
          ReadManifestInfo(store.fs(), store.CheckpointPath(one.name));
      if (!info.ok()) {
        steps.unplaced.push_back(std::move(one));
        continue;
      }
      one.uuid = info.value().uuid;
      one.generation = info.value().generation;
    }
    steps.in_order.push_back(std::move(one));
  }
  std::ranges::sort(steps.in_order, {}, [](const CheckpointListing& one) {
    return std::tie(one.generation, one.uuid, one.name);
  });
  return steps;
}

Status ReadIndexOf(const Store& store, const CheckpointListing& step,
                   const std::vector<std::string>& roots,
                   const std::function<Status(const OpenedCheckpoint&)>& fn) {
  const std::string directory = store.CheckpointPath(step.name);
  OpenedCheckpoint::Options how;
  how.roots = roots;
  // The index is not compared with its hash at open. Only a few records are read, and each read
  // checks its records.
  how.check_index_bytes = 0;
  const auto opened = OpenedCheckpoint::Open(store.fs(), directory, how);
  if (!opened.ok()) {
    // A checkpoint that is being deleted is as good as removed.
    const bool gone = opened.status().code() == Code::kStale;
    return gone ? Status(Code::kNotFound, opened.status().message()) : opened.status();
  }
  if (opened.value()->index().info().uuid != step.uuid) {
    return Status(Code::kNotFound, directory + ": the checkpoint was replaced by another one");
  }
  return fn(*opened.value());
}

ChangeKind Compare(const KeyState& before, const KeyState& after) {
  using Kind = KeyState::Kind;
  if (before.kind != after.kind) {
    return before.kind == Kind::kAbsent  ? ChangeKind::kAdded
           : after.kind == Kind::kAbsent ? ChangeKind::kRemoved
                                         : ChangeKind::kKind;
  }
  if (after.kind == Kind::kAbsent) return ChangeKind::kNone;
  if (before.dtype != after.dtype) return ChangeKind::kDType;
  if (before.shape != after.shape) return ChangeKind::kShape;
  if (before.bytes != after.bytes) return ChangeKind::kDigest;
  if (!before.digest || !after.digest) return ChangeKind::kUnknown;
  return *before.digest == *after.digest ? ChangeKind::kNone : ChangeKind::kDigest;
}

std::string_view ChangeName(ChangeKind kind) {
  switch (kind) {
    case ChangeKind::kNone:
      return "none";
    case ChangeKind::kAdded:
      return "added";
    case ChangeKind::kRemoved:
      return "removed";
    case ChangeKind::kKind:
      return "kind";
    case ChangeKind::kDType:
      return "dtype";
    case ChangeKind::kShape:
      return "shape";
    case ChangeKind::kDigest:
      return "digest";
    case ChangeKind::kUnknown:
      return "unknown";
    case ChangeKind::kFirst:
      return "first";
  }
  return "unknown";
}

Result<Report> Changes(const Store& store, const Query& query) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<CheckpointListing> listed, store.List());
  return Search(store, query, StepsOf(store, std::move(listed))).Run();
}

}  // namespace tensormount::history
