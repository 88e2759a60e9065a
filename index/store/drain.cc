// SPDX-License-Identifier: Apache-2.0
// `copy --drain`: waits for commits of a store, and copies them.
#include "index/store/drain.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/cancel_scope.h"
#include "base/file_system_for.h"
#include "index/store/commit_watch.h"
#include "index/store/copy.h"
#include "index/store/retention.h"
#include "index/store/store.h"

namespace tensormount {
namespace {

constexpr std::chrono::milliseconds kNap{200};
constexpr std::chrono::seconds kLongestPause{60};

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
  Drain(FileSystem& from, const std::string& source, FileSystem& to, const std::string& destination,
        const DrainOptions& options)
      : from_(from),
        source_(source),
        to_(to),
        destination_(destination),
        job_(to, destination, options.copy),
        options_(options) {}

  Status Run() {
    if (options_.retain) Prune(Uuid());  // Frees what an earlier drain had to leave.
    std::chrono::seconds wait{0};
    for (;;) {
      Status round = LookForNew();
      if (round.ok()) round = CopyDue();
      if (round.ok()) {
        wait = std::chrono::seconds(0);
        if (pending_.empty() && options_.caught_up) options_.caught_up();
        continue;
      }
      if (!ConcernsAll(round)) return round;
      wait = Longer(wait);
      if (options_.waiting) options_.waiting(round, wait);
      TENSORMOUNT_RETURN_IF_ERROR(Sleep(wait));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  // A checkpoint that has to be copied, and when it is tried again.
  struct Pending {
    Commit commit;
    std::chrono::seconds wait{0};
    Clock::time_point when = Clock::time_point::min();
  };

  static std::chrono::seconds Longer(std::chrono::seconds wait) {
    return std::clamp(wait * 2, std::chrono::seconds(1), kLongestPause);
  }

  Status CheckWatch() const { return options_.copy.watch ? options_.copy.watch(0, 0) : Status(); }

  Status Sleep(std::chrono::milliseconds time) {
    const auto end = Clock::now() + time;
    do {
      TENSORMOUNT_RETURN_IF_ERROR(CheckWatch());
      from_.SleepFor(std::min(time, kNap));
    } while (Clock::now() < end);
    return {};
  }

  // Waits a moment for commits, and adds them to pending_.
  Status LookForNew() {
    TENSORMOUNT_RETURN_IF_ERROR(CheckWatch());
    if (watch_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(watch_, CommitWatch::Start(from_, source_, {.existing = true}));
    }
    bool any = false;
    for (;;) {
      Result<std::optional<Commit>> next = watch_->Next(any ? std::chrono::milliseconds(0) : kNap);
      if (!next.ok()) watch_.reset();
      TENSORMOUNT_RETURN_IF_ERROR(next.status());
      if (!next.value()) break;
      any = true;
      Commit& commit = *next.value();
      if (seen_.contains(commit.uuid)) continue;
      if (commit.removed) {
        Warn((commit.name.empty() ? commit.uuid.ToString() : commit.name) +
             " was removed before it was copied");
        continue;
      }
      pending_.push_back({.commit = std::move(commit)});
    }
    for (const std::string& warning : watch_->TakeWarnings()) Warn(warning);
    if (any) LeaveOutByRules();
    return {};
  }

  void Warn(const std::string& text) const {
    if (options_.warned) options_.warned(text);
  }

  // Copies what is new, or to be tried again now. Fails with what concerns all checkpoints, or ends
  // the drain.
  Status CopyDue() {
    for (auto at = pending_.begin(); at != pending_.end();) {
      if (at->when > Clock::now()) {
        ++at;
        continue;
      }
      const Status status = CopyOne(at->commit);
      if (status.ok()) {
        seen_.insert(at->commit.uuid);
        at = pending_.erase(at);
        continue;
      }
      if (ConcernsAll(status) || !MayPass(status)) return status;
      at->wait = Longer(at->wait);
      at->when = Clock::now() + at->wait;
      if (options_.waiting) options_.waiting(status, at->wait);
      ++at;
    }
    return {};
  }

  // Removes from pending_ those that the rules would remove at once, so that a drain that begins
  // again does not copy what earlier ones have pruned. Rules by hours and by metrics say that only
  // of what the store has.
  void LeaveOutByRules() {
    if (!options_.retain || options_.retain->of_store || pending_.empty() ||
        retention::NeedsOpening(*options_.retain)) {
      return;
    }
    const Result<Store> store = Store::Open(to_, destination_);
    Result<std::vector<CheckpointListing>> there = std::vector<CheckpointListing>();
    if (store.ok()) there = store.value().List();
    if (!there.ok() || (!store.ok() && store.status().code() != Code::kNotFound)) return;
    std::vector<retention::Candidate> candidates;
    std::set<Uuid> known;
    const auto add = [&](const auto& one) {
      if (!known.insert(one.uuid).second) return;
      retention::Candidate& candidate = candidates.emplace_back();
      candidate.name = one.name;
      candidate.uuid = one.uuid;
      candidate.generation = one.generation;
      candidate.derived = one.derived;
    };
    for (const CheckpointListing& one : there.value()) {
      if (one.problem.ok()) add(one);
    }
    for (const Pending& one : pending_) add(one.commit);
    std::set<std::string> gone;
    for (const auto& decision : retention::Decide(*options_.retain, std::move(candidates))) {
      if (!decision.kept) gone.insert(decision.uuid);
    }
    std::erase_if(pending_, [&](const Pending& one) {
      const bool out = gone.contains(one.commit.uuid.ToString());
      if (out) seen_.insert(one.commit.uuid);
      return out;
    });
  }

  // OK: it was copied, or is left out for good.
  Status CopyOne(const Commit& commit) {
    const std::string path = commit.path();
    const Result<CopyReport> report = job_.Run({path}, {&from_});
    CopiedCheckpoint copied{.name = commit.name, .uuid = commit.uuid.ToString()};
    if (report.ok() && !report.value().checkpoints.empty()) {
      copied = report.value().checkpoints.front();
    } else {
      copied.status = report.status();
    }
    const Status& status = copied.status;
    if (status.code() == Code::kCancelled) return status;
    // A checkpoint that is not there any more need not be copied.
    if (!status.ok() && from_.LinkStat(path).status().code() == Code::kNotFound) {
      Warn(commit.name + " was removed before it was copied");
      return {};
    }
    if (MayPass(status)) return status;
    // Nothing was copied yet: it may be that nothing can be.
    const bool fatal = status.code() == Code::kUnsupported ||
                       status.code() == Code::kInvalidArgument || status.code() == Code::kReadOnly;
    if (fatal && !any_) return status;
    any_ = any_ || status.ok();
    if (options_.copied) options_.copied(job_.store()->path(), copied);
    if (status.ok() && !copied.was_there && options_.retain) Prune(commit.uuid);
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
      Warn(destination_ + " was not pruned: " + pruned.status().message());
    } else if (options_.pruned) {
      options_.pruned(pruned.value());
    }
  }

  FileSystem& from_;
  const std::string source_;
  FileSystem& to_;
  const std::string destination_;
  CopyJob job_;
  const DrainOptions& options_;
  std::unique_ptr<CommitWatch> watch_;
  std::vector<Pending> pending_;
  std::set<Uuid> seen_;  // Copied, or left out for good.
  bool any_ = false;
};

}  // namespace

Status DrainStore(const std::string& source, const std::string& destination,
                  const DrainOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const from, FileSystemFor(source));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const to, FileSystemFor(destination));
  if (options.retain) TENSORMOUNT_RETURN_IF_ERROR(retention::CheckRules(*options.retain));
  // A store that is not there yet would be waited for; here a mistyped path is more likely.
  TENSORMOUNT_RETURN_IF_ERROR(Store::Open(*from, source).status());
  const CancelScope scope(options.copy.cancel);
  return Drain(*from, source, *to, destination, options).Run();
}

}  // namespace tensormount
