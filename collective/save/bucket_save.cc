// SPDX-License-Identifier: Apache-2.0
// Saves into buckets: what comes before and after an ordinary save to the staging store.
//
// The copy runs on a thread of rank 0. Meanwhile all ranks make one exchange after the other, by
// which they see that rank 0 lives, and rank 0 learns that a rank was cancelled. If the ranks lose
// each other, rank 0 stops the copy, and the others ask the bucket whether it has the checkpoint.
#include "collective/save/bucket_save.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/cancel_scope.h"
#include "base/coding.h"
#include "base/file_system_for.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/thread.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"
#include "collective/save/after_commit.h"
#include "collective/save/save_messages.h"
#include "index/store/copy.h"
#include "index/store/pins.h"

namespace tensormount {
namespace {

constexpr const char* kStagingVariable = "TENSORMOUNT_STAGING";
// Time between two exchanges while rank 0 copies.
constexpr std::chrono::milliseconds kCopyRound{500};

// Failures of a server that a later try may not meet. The save goes on without it at first.
bool MayBeBackLater(const Status& status) {
  return status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded ||
         status.code() == Code::kPermissionDenied;
}

}  // namespace

// A copy to one store in a bucket, which is read at the first one only. For one save at a time.
struct BucketSave::KeptCopy {
  KeptCopy(FileSystem& to, const std::string& store)
      : options{.cancel = &cancel}, job(to, store, options) {}
  std::atomic<bool> cancel{false};
  const CopyOptions options;
  CopyJob job;
};

struct BucketSave::KeptCopies {
  std::mutex mutex;
  std::map<std::string, std::vector<std::unique_ptr<KeptCopy>>> idle;  // By store in a bucket.
  // Stores in buckets, each with the uuid of a staging store that has claimed their generations.
  std::set<std::pair<std::string, std::string>> claimed;
};

std::unique_ptr<BucketSave::KeptCopy> BucketSave::TakeCopy(FileSystem& to,
                                                           const std::string& store) {
  KeptCopies& kept = PerProcess<KeptCopies>();
  const std::lock_guard lock(kept.mutex);
  auto& idle = kept.idle[store];
  if (idle.empty()) return std::make_unique<KeptCopy>(to, store);
  std::unique_ptr<KeptCopy> copy = std::move(idle.back());
  idle.pop_back();
  copy->cancel = false;
  return copy;
}

void BucketSave::GiveBack(const std::string& store, std::unique_ptr<KeptCopy> copy) {
  KeptCopies& kept = PerProcess<KeptCopies>();
  const std::lock_guard lock(kept.mutex);
  kept.idle[store].push_back(std::move(copy));
}

// What rank 0 tells the others in each exchange.
struct BucketSave::Outcome {
  bool over = false;
  Status status;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_copied_in_bucket = 0;

  std::string Encode() const {
    ByteWriter out;
    out.U8(over ? 1 : 0);
    WriteStatus(out, status);
    out.U64(bytes_sent);
    out.U64(bytes_copied_in_bucket);
    return std::move(out.bytes());
  }
  static Result<Outcome> Decode(std::string_view bytes) {
    ByteReader in(bytes, "save: what rank 0 said of the copy");
    Outcome outcome;
    outcome.over = in.U8() != 0;
    outcome.status = ReadStatus(in);
    outcome.bytes_sent = in.U64();
    outcome.bytes_copied_in_bucket = in.U64();
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    return outcome;
  }
};

// What rank 0 does for one checkpoint, on a thread: `work`, whose waits for the server end once
// `cancel` is set.
class BucketSave::Copying {
 public:
  Copying(std::atomic<bool>& cancel, std::function<void(Outcome&)> work)
      : cancel_(cancel), thread_([this, run = std::move(work)] {
          Outcome outcome;
          const Status ran = Guarded([&] {
            const CancelScope scope(&cancel_);
            run(outcome);
            return Status();
          });
          if (!ran.ok()) outcome.status = ran;
          outcome.over = true;
          const std::lock_guard lock(mutex_);
          outcome_ = std::move(outcome);
          changed_.notify_all();
        }) {}
  ~Copying() {
    Cancel();
    thread_.join();
  }
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;

  void Cancel() { cancel_ = true; }
  // Ends the copy.
  Outcome End() {
    Cancel();
    std::unique_lock lock(mutex_);
    while (!outcome_.over) changed_.wait_for(lock, kCopyRound);
    return outcome_;
  }
  // After `most` at the latest.
  Outcome Await(std::chrono::milliseconds most) {
    std::unique_lock lock(mutex_);
    (void)changed_.wait_for(lock, most, [&] { return outcome_.over; });
    return outcome_;
  }

 private:
  std::atomic<bool>& cancel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Outcome outcome_;
  Thread thread_;  // Declared last: the thread uses all other members.
};

bool BucketSave::IsFor(std::string_view path) {
  const Result<FileSystem*> fs = FileSystemFor(std::string(path));
  return fs.ok() && fs.value()->object_writer() != nullptr;
}

Result<BucketSave> BucketSave::Make(const std::string& path, const SaveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const to, FileSystemFor(path));
  BucketSave save(*to, options);
  save.path_ = WithoutTrailingSlashes(path);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName parts, SplitCheckpointPath(save.path_));
  save.store_ = parts.store;
  save.name_ = parts.name;
  const auto refused = [&](Code code, const std::string& why) {
    return Status(code, "save " + save.path_ + ": " + why);
  };
  if (options.if_exists == IfExists::kReplace) {
    return refused(Code::kUnsupported,
                   "replace: a checkpoint in a bucket is never replaced; remove it first "
                   "(tensormount rm), or choose another name");
  }
  if (options.ephemeral) {
    return refused(Code::kUnsupported, "ephemeral: buckets have no marks of checkpoints");
  }
  if (options.retention && options.retention->of_store) {
    return refused(Code::kUnsupported,
                   "retention by \"policy\": a bucket has no policy; name the rules");
  }
  std::string directory = options.staging;
  const char* const variable = std::getenv(kStagingVariable);
  if (directory.empty() && variable != nullptr) directory = variable;
  if (directory.empty()) {
    return refused(Code::kInvalidArgument,
                   std::string("ranks save into a bucket through a staging directory, which all "
                               "ranks see: set the option `staging`, or ") +
                       kStagingVariable + ". Or save to a file system; `tensormount copy STORE " +
                       save.store_ + " --drain` copies each step as soon as it is published");
  }
  const Result<FileSystem*> local = FileSystemFor(directory);
  if (!local.ok() || !local.value()->Can(Ability::kRenameNoReplace)) {
    return refused(Code::kInvalidArgument,
                   "the staging directory " + directory + " must be on a file system");
  }
  save.staged_ = JoinPath(WithoutTrailingSlashes(directory), save.name_);
  return save;
}

SaveOptions BucketSave::StagingOptions() const {
  SaveOptions options = options_;
  options.retention.reset();
  options.ephemeral = true;
  return options;
}

std::string BucketSave::PinReason() const { return "not yet in " + store_; }

Status BucketSave::Prepare(const Store& staging) const {
  if (staging.FindListing(name_).problem.ok()) {
    return Status(Code::kAlreadyExists,
                  staged_ +
                      ": the staging directory has a checkpoint of this name; `tensormount "
                      "copy " +
                      staged_ + " " + store_ + "` copies it, `tensormount rm --force " + staged_ +
                      "` removes it");
  }
  const Status reached = Guarded([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store bucket, Store::OpenOrCreate(*to_, store_));
    TENSORMOUNT_RETURN_IF_ERROR(bucket.PrepareToWrite());
    const CheckpointListing there = bucket.FindListing(name_);
    if (there.problem.ok()) {
      return Status(Code::kAlreadyExists, path_ + ": a checkpoint of this name exists");
    }
    TENSORMOUNT_RETURN_IF_ERROR(ClaimGenerations(bucket, staging));
    ReleaseArrived(bucket, staging);
    return {};
  });
  if (!MayBeBackLater(reached)) return reached;
  const Result<std::vector<std::string>> names = staging.Names();
  if (!names.ok() || names.value().empty()) {
    // The generation of the checkpoint might be lower than that of an older one in the bucket.
    return reached;
  }
  Log(LogLevel::kWarning, "save " + path_ + ": the bucket cannot be used now, and is tried again " +
                              "when " + staged_ + " is saved: " + reached.message());
  return {};
}

Status BucketSave::ClaimGenerations(const Store& bucket, const Store& staging) const {
  KeptCopies& kept = PerProcess<KeptCopies>();
  const std::pair pair(store_, staging.uuid().ToString());
  {
    const std::lock_guard lock(kept.mutex);
    if (kept.claimed.contains(pair)) return {};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> there, bucket.List());
  std::uint64_t highest = 0;
  for (const CheckpointListing& one : there) {
    if (one.problem.ok()) highest = std::max(highest, one.generation);
    // It may be the latest.
    if (one.state == CheckpointListing::State::kUnread) return one.problem;
  }
  if (highest > 0) {
    TENSORMOUNT_RETURN_IF_ERROR(staging.PrepareToWrite());
    TENSORMOUNT_RETURN_IF_ERROR(staging.ClaimUpTo(highest));
  }
  const std::lock_guard lock(kept.mutex);
  kept.claimed.insert(pair);
  return {};
}

// A step whose copy failed may have been copied by hand, or a process died after a copy.
void BucketSave::ReleaseArrived(const Store& bucket, const Store& staging) const {
  const auto pins = pins::ReadAll(staging.fs(), staging.path(), staging.fs().NowSeconds());
  if (!pins.ok()) return;
  for (const auto& [uuid, pin] : pins.value()) {
    if (pin.reason != PinReason() || !pin.problem.empty()) continue;
    const CheckpointListing here = staging.FindListing(pin.name);
    if (!here.problem.ok() || here.uuid != uuid) continue;
    const CheckpointListing there = bucket.FindListing(pin.name);
    if (!there.problem.ok() || there.uuid != uuid) continue;
    (void)pins::RemovePins(staging.fs(), staging.path(), uuid);
  }
}

Status BucketSave::Protect(FileSystem& fs, const Staging& staging) const {
  return pins::PinBeforePublish(fs, staging.store, staging.uuid, staging.name, PinReason());
}

bool BucketSave::HasArrived(const Uuid& uuid) const {
  bool arrived = false;
  (void)Guarded([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store bucket, Store::Open(*to_, store_));
    const CheckpointListing there = bucket.FindListing(name_);
    arrived = there.problem.ok() && there.uuid == uuid;
    return {};
  });
  return arrived;
}

Status BucketSave::Explained(const Status& failure) const {
  return Status(failure.code(), "save " + path_ + ": " + failure.message() +
                                    "; the checkpoint is complete in the staging directory: "
                                    "`tensormount copy " +
                                    staged_ + " " + store_ + "` copies it into the bucket");
}

Status BucketSave::Copy(Collective& collective, FileSystem& fs, const Staging& staging,
                        const std::function<bool()>& cancelled, SaveReport& report) const {
  Outcome outcome;
  std::unique_ptr<KeptCopy> copy;
  std::optional<Copying> copying;
  if (collective.rank() == 0) {
    const Status begun = Guarded([&] {
      copy = TakeCopy(*to_, store_);
      copying.emplace(copy->cancel,
                      [&](Outcome& out) { RunCopy(*copy, fs, staging, out, report); });
      return Status();
    });
    if (!begun.ok()) outcome = {.over = true, .status = begun};
  }
  do {
    if (copying) outcome = copying->Await(kCopyRound);
    const Result<std::string> told =
        collective.Decide(EncodeVote({Status(), cancelled()}), "copy",
                          [&](std::vector<std::string>& votes) -> Result<std::string> {
                            if (copying && !VerdictOf(votes).ok()) copying->Cancel();
                            return outcome.Encode();
                          });
    if (told.ok()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(outcome, Outcome::Decode(told.value()));
      continue;
    }
    // The ranks have lost each other.
    if (copying) outcome = copying->End();
    const bool arrived = copying ? outcome.status.ok() : HasArrived(staging.uuid);
    outcome.over = true;
    outcome.status = arrived ? Status() : told.status();
    if (!arrived && collective.rank() != 0) {
      outcome.status = Status(Code::kUnknown, told.status().message() +
                                                  "; cannot tell whether the bucket gets the "
                                                  "checkpoint: run `tensormount ls " +
                                                  store_ + "`");
    }
  } while (!outcome.over);
  copying.reset();
  if (copy != nullptr) GiveBack(store_, std::move(copy));
  if (!outcome.status.ok()) return Explained(outcome.status);
  report.path = path_;
  report.staged = staged_;
  report.bytes_sent = outcome.bytes_sent;
  report.bytes_copied_in_bucket = outcome.bytes_copied_in_bucket;
  return {};
}

void BucketSave::RunCopy(KeptCopy& copy, FileSystem& fs, const Staging& staging, Outcome& outcome,
                         SaveReport& report) const {
  // The steps that were removed from the staging directory are of no interest.
  report.pruned.clear();
  const Result<CopyReport> copied = copy.job.Run({JoinPath(staging.store, staging.name)}, {&fs});
  outcome.status = copied.status();
  if (!copied.ok()) return;
  for (const CopiedCheckpoint& one : copied.value().checkpoints) {
    outcome.bytes_sent += one.bytes_copied;
    outcome.bytes_copied_in_bucket += one.bytes_linked;
  }
  if (const auto removed = pins::RemovePins(fs, staging.store, staging.uuid); !removed.ok()) {
    report.not_pruned.push_back(
        staged_ +
        ": is still pinned, and so stays in the staging directory: " + removed.status().message());
  }
  if (!options_.retention) return;
  Staging in_bucket = staging;
  in_bucket.store = store_;
  RemoveByRules(*to_, in_bucket, options_, "", report);
}

}  // namespace tensormount
