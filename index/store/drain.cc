// SPDX-License-Identifier: Apache-2.0
// `copy --drain`: looks for new checkpoints once a second, and copies them.
#include "index/store/drain.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
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

bool MayPass(const Status& status) {
  switch (status.code()) {
    case Code::kUnavailable:
    case Code::kDeadlineExceeded:
    case Code::kResourceExhausted:
    case Code::kPermissionDenied:
    case Code::kBusy:
    case Code::kUnknown:
      return true;
    default:
      return false;
  }
}

bool WasRemoved(const Status& status) {
  return status.code() == Code::kNotFound || status.code() == Code::kStale;
}

class Drain {
 public:
  Drain(FileSystem& from, Store source, FileSystem& to, const std::string& destination,
        const DrainOptions& options)
      : from_(from),
        source_(std::move(source)),
        job_(to, destination, options.copy),
        options_(options) {}

  Status Run() {
    std::chrono::seconds wait{0};
    for (;;) {
      const Status round = Round();
      if (round.code() == Code::kCancelled || (!round.ok() && !MayPass(round))) return round;
      if (round.ok()) {
        wait = std::chrono::seconds(0);
        TENSORMOUNT_RETURN_IF_ERROR(Sleep(from_.Can(Ability::kStamps) ? kLook : kFarLook));
        continue;
      }
      wait = std::clamp(wait * 2, std::chrono::seconds(1), kLongestPause);
      stamp_.reset();
      if (options_.waiting) options_.waiting(round, wait);
      TENSORMOUNT_RETURN_IF_ERROR(Sleep(wait));
    }
  }

 private:
  Status Sleep(std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    do {
      if (options_.copy.watch) TENSORMOUNT_RETURN_IF_ERROR(options_.copy.watch(0, 0));
      from_.SleepFor(std::min(time, kNap));
    } while (std::chrono::steady_clock::now() < end);
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

  // Copies what is new.
  Status Round() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool look, MayHaveChanged());
    if (!look) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<CheckpointListing> all, source_.List());
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return std::tie(a.generation, a.uuid) < std::tie(b.generation, b.uuid);
    });
    Status first;
    for (const CheckpointListing& one : all) {
      if (one.state == CheckpointListing::State::kNoCheckpoint || seen_.contains(KeyOf(one))) {
        continue;
      }
      const Status status = CopyOne(one);
      if (status.code() == Code::kCancelled) return status;
      if (!status.ok() && first.ok()) first = status;
      if (!status.ok() && !MayPass(status)) return status;
      // What is in the way of one may be in the way of all.
      if (!status.ok() && status.code() != Code::kBusy) break;
    }
    return first;
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
    if (status.code() == Code::kCancelled || MayPass(status)) return status;
    // Nothing was copied yet: it may be that nothing can be.
    const bool fatal = status.code() == Code::kUnsupported ||
                       status.code() == Code::kInvalidArgument || status.code() == Code::kReadOnly;
    if (fatal && !any_) return status;
    seen_.insert(KeyOf(one));
    if (WasRemoved(status)) return {};
    any_ = any_ || status.ok();
    if (options_.copied) options_.copied(job_.store()->path(), copied);
    return status.ok() && !copied.was_there ? Prune() : Status();
  }

  Status Prune() {
    if (!options_.retain) return {};
    PruneOptions options;
    options.rules = *options_.retain;
    const Result<PruneReport> pruned = retention::Prune(job_.store()->fs(), *job_.store(), options);
    TENSORMOUNT_RETURN_IF_ERROR(pruned.status());
    if (options_.pruned) options_.pruned(pruned.value());
    return {};
  }

  FileSystem& from_;
  const Store source_;
  CopyJob job_;
  const DrainOptions& options_;
  std::optional<std::pair<std::int64_t, std::int64_t>> stamp_;
  std::set<std::string> seen_;  // Copied, or left out for good.
  bool any_ = false;
};

}  // namespace

Status DrainStore(const std::string& source, const std::string& destination,
                  const DrainOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const from, FileSystemFor(source));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const to, FileSystemFor(destination));
  if (options.retain) TENSORMOUNT_RETURN_IF_ERROR(retention::CheckRules(*options.retain));
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::Open(*from, source));
  return Drain(*from, std::move(store), *to, destination, options).Run();
}

}  // namespace tensormount
