// SPDX-License-Identifier: Apache-2.0
// `copy --drain`: looks for new checkpoints once a second, and copies them.
#include "index/store/drain.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/cancel_scope.h"
#include "base/file_system_for.h"
#include "index/store/copy.h"
#include "index/store/retention.h"
#include "index/store/store.h"

namespace tensormount {
namespace {

constexpr std::chrono::milliseconds kLook{1000};
// A source without times of directories is listed as a whole.
constexpr std::chrono::milliseconds kFarLook{10'000};
constexpr std::chrono::milliseconds kNap{200};
constexpr std::chrono::seconds kLongestPause{60};
// Age of a directory's change time from which on another change gets another time.
constexpr std::int64_t kSettled = 2;

// What is in the way of one checkpoint is in the way of all.
bool ConcernsAll(const Status& status) {
  return status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded ||
         status.code() == Code::kResourceExhausted;
}

// Failures of one checkpoint that a later try may not meet.
bool MayPass(const Status& status) {
  switch (status.code()) {
    case Code::kPermissionDenied:
    case Code::kBusy:
    case Code::kUnknown:
    case Code::kStale:     // Somebody else changed the destination.
    case Code::kNotFound:  // Its bucket.
      return true;
    default:
      return ConcernsAll(status);
  }
}

class Drain {
 public:
  Drain(FileSystem& from, Store source, FileSystem& to, const std::string& destination,
        const DrainOptions& options)
      : from_(from),
        source_(std::move(source)),
        to_(to),
        destination_(destination),
        job_(to, destination, options.copy),
        options_(options) {}

  Status Run() {
    std::chrono::seconds wait{0};
    if (options_.retain) Prune(Uuid());  // Frees what an earlier drain had to leave.
    for (;;) {
      const Status round = Round();
      if (round.code() == Code::kCancelled || (!round.ok() && !ConcernsAll(round))) return round;
      if (round.ok()) {
        wait = std::chrono::seconds(0);
        if (later_.empty() && options_.caught_up) options_.caught_up();
        TENSORMOUNT_RETURN_IF_ERROR(Sleep(from_.Can(Ability::kStamps) ? kLook : kFarLook));
        continue;
      }
      wait = Longer(wait);
      stamp_.reset();
      if (options_.waiting) options_.waiting(round, wait);
      TENSORMOUNT_RETURN_IF_ERROR(Sleep(wait));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  // A checkpoint that is tried again.
  struct Later {
    std::chrono::seconds wait{0};
    Clock::time_point when;
  };

  static std::chrono::seconds Longer(std::chrono::seconds wait) {
    return std::clamp(wait * 2, std::chrono::seconds(1), kLongestPause);
  }

  Status Sleep(std::chrono::milliseconds time) {
    const auto end = Clock::now() + time;
    do {
      if (options_.copy.watch) TENSORMOUNT_RETURN_IF_ERROR(options_.copy.watch(0, 0));
      from_.SleepFor(std::min(time, kNap));
    } while (Clock::now() < end);
    return {};
  }

  // Whether the directory of the source may have changed since the last call that returned true.
  Result<bool> MayHaveChanged() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, from_.Stat(source_.path()));
    if (!from_.Can(Ability::kStamps)) return true;
    const std::pair<std::int64_t, std::int64_t> stamp{info.ctime_seconds, info.ctime_nanoseconds};
    if (stamp_ == stamp) return false;
    // A change within the same tick of the clock would keep the time.
    if (from_.NowSeconds() - info.ctime_seconds >= kSettled) {
      stamp_ = stamp;
    } else {
      stamp_.reset();
    }
    return true;
  }

  // Copies what is new, or to be tried again. Fails with what concerns all checkpoints, or ends the
  // drain.
  Status Round() {
    const auto now = Clock::now();
    const bool due = std::any_of(later_.begin(), later_.end(),
                                 [&](const auto& one) { return one.second.when <= now; });
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool changed, MayHaveChanged());
    if (!changed && !due) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<CheckpointListing> all, source_.List());
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return std::tie(a.generation, a.uuid) < std::tie(b.generation, b.uuid);
    });
    std::erase_if(all, [&](const CheckpointListing& one) {
      return one.state == CheckpointListing::State::kNoCheckpoint || seen_.contains(KeyOf(one));
    });
    LeaveOutByRules(all);
    std::map<std::string, Later> before = std::exchange(later_, {});
    for (const CheckpointListing& one : all) {
      const auto again = before.find(KeyOf(one));
      if (again != before.end() && again->second.when > now) {
        later_.insert(*again);
        continue;
      }
      const Status status = CopyOne(one);
      if (status.ok()) continue;
      if (status.code() == Code::kCancelled || ConcernsAll(status) || !MayPass(status)) {
        return status;
      }
      Later& next = later_[KeyOf(one)];
      if (again != before.end()) next.wait = again->second.wait;
      next.wait = Longer(next.wait);
      next.when = Clock::now() + next.wait;
      if (options_.waiting) options_.waiting(status, next.wait);
    }
    return {};
  }

  // Removes from `all` those that the rules would remove at once, so that a drain that begins again
  // does not copy what earlier ones have pruned. Rules by hours and by metrics say that only of
  // what the store has.
  void LeaveOutByRules(std::vector<CheckpointListing>& all) {
    if (!options_.retain || all.empty() || options_.retain->of_store ||
        retention::NeedsOpening(*options_.retain)) {
      return;
    }
    const Result<Store> store = Store::Open(to_, destination_);
    Result<std::vector<CheckpointListing>> there = std::vector<CheckpointListing>();
    if (store.ok()) there = store.value().List();
    if (!there.ok() || (!store.ok() && store.status().code() != Code::kNotFound)) return;
    std::vector<retention::Candidate> candidates;
    std::set<Uuid> known;
    for (const std::vector<CheckpointListing>* list :
         {&std::as_const(there).value(), &std::as_const(all)}) {
      for (const CheckpointListing& one : *list) {
        if (!one.problem.ok() || !known.insert(one.uuid).second) continue;
        retention::Candidate& candidate = candidates.emplace_back();
        candidate.name = one.name;
        candidate.uuid = one.uuid;
        candidate.generation = one.generation;
        candidate.derived = one.derived;
      }
    }
    std::set<std::string> gone;
    for (const auto& decision : retention::Decide(*options_.retain, std::move(candidates))) {
      if (!decision.kept) gone.insert(decision.uuid);
    }
    std::erase_if(all, [&](const CheckpointListing& one) {
      const bool out = one.problem.ok() && gone.contains(one.uuid.ToString());
      if (out) seen_.insert(KeyOf(one));
      return out;
    });
  }

  static std::string KeyOf(const CheckpointListing& one) {
    return one.problem.ok() ? one.uuid.ToString() : one.name + "/";
  }

  Status CopyOne(const CheckpointListing& one) {
    const Result<CopyReport> report = job_.Run({source_.CheckpointPath(one.name)}, {&from_});
    CopiedCheckpoint copied{.name = one.name, .uuid = one.uuid.ToString()};
    if (report.ok() && !report.value().checkpoints.empty()) {
      copied = report.value().checkpoints.front();
    } else {
      copied.status = report.status();
    }
    const Status& status = copied.status;
    if (status.code() == Code::kCancelled) return status;
    // A checkpoint that is not there any more need not be copied.
    if (!status.ok() &&
        from_.LinkStat(source_.CheckpointPath(one.name)).status().code() == Code::kNotFound) {
      return from_.Stat(source_.path()).status();
    }
    if (MayPass(status)) return status;
    // Nothing was copied yet: it may be that nothing can be.
    const bool fatal = status.code() == Code::kUnsupported ||
                       status.code() == Code::kInvalidArgument || status.code() == Code::kReadOnly;
    if (fatal && !any_) return status;
    seen_.insert(KeyOf(one));
    any_ = any_ || status.ok();
    if (options_.copied) options_.copied(job_.store()->path(), copied);
    if (status.ok() && !copied.was_there && options_.retain) Prune(one.uuid);
    return {};
  }

  // `saved`: the checkpoint that was just copied, which stays. A failure does not end the drain.
  void Prune(const Uuid& saved) {
    const Result<Store> store = Store::Open(to_, destination_);
    if (store.status().code() == Code::kNotFound) return;
    PruneOptions options;
    options.rules = *options_.retain;
    const Result<PruneReport> pruned =
        store.ok()
            ? retention::Prune(to_, store.value(), options, retention::PruneContext{.saved = saved})
            : Result<PruneReport>(store.status());
    if (!pruned.ok()) {
      if (options_.not_pruned) options_.not_pruned(pruned.status());
    } else if (options_.pruned) {
      options_.pruned(pruned.value());
    }
  }

  FileSystem& from_;
  const Store source_;
  FileSystem& to_;
  const std::string destination_;
  CopyJob job_;
  const DrainOptions& options_;
  std::optional<std::pair<std::int64_t, std::int64_t>> stamp_;
  std::set<std::string> seen_;  // Copied, or left out for good.
  std::map<std::string, Later> later_;
  bool any_ = false;
};

}  // namespace

Status DrainStore(const std::string& source, const std::string& destination,
                  const DrainOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const from, FileSystemFor(source));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const to, FileSystemFor(destination));
  if (options.retain) TENSORMOUNT_RETURN_IF_ERROR(retention::CheckRules(*options.retain));
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::Open(*from, source));
  const CancelScope scope(options.copy.cancel);
  return Drain(*from, std::move(store), *to, destination, options).Run();
}

}  // namespace tensormount
