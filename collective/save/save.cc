// SPDX-License-Identifier: Apache-2.0
// Save of tensormount/save.h, one rank's side: the steps of docs/architecture.md, "A save, step by
// step".
#include "tensormount/save.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/file_system_for.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/parallel.h"
#include "base/thread.h"
#include "collective/comm/collective.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"
#include "collective/layout/layout_exchange.h"
#include "collective/phase_events.h"
#include "collective/save/after_commit.h"
#include "collective/save/bucket_save.h"
#include "collective/save/data_writer.h"
#include "collective/save/plan_exchange.h"
#include "collective/save/replica_check.h"
#include "collective/save/reuse.h"
#include "collective/save/save_messages.h"
#include "collective/save/value_guard.h"
#include "collective/save_load.h"
#include "index/records/common_state.h"
#include "index/records/manifest.h"
#include "index/records/store_paths.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "state/common_records.h"

namespace tensormount {
namespace {

// Runs a callback of the caller. An exception is logged only: it must not keep this rank from the
// exchanges that the other ranks wait in.
void LogThrown(const std::string& what, const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& e) {
    Log(LogLevel::kError, what + " threw an exception: " + e.what());
  } catch (...) {
    Log(LogLevel::kError, what + " threw something other than a std::exception");
  }
}

constexpr std::string_view kDefaultProducer = "tensormount 0.1";
// Most writers of a rank if the caller names no number.
constexpr int kMostWritersUnasked = 8;
// Most ranks whose NaNs and infinities are warnings of their own.
constexpr int kMostRanksWarned = 16;

// Errors of rank 0's machine (disk full, permissions, read-only) are reported with its rank; errors
// that every rank would see are not.
Status RankZeroStatus(const Status& status) {
  const bool machine = status.code() == Code::kResourceExhausted ||
                       status.code() == Code::kPermissionDenied || status.code() == Code::kReadOnly;
  return machine ? FromRank(0, status) : status;
}

std::string_view NameOf(PlacementRule rule) {
  switch (rule) {
    case PlacementRule::kAuto:
      return "auto";
    case PlacementRule::kTensorFile:
      return "tensor-file";
    case PlacementRule::kRankShard:
      return "rank-shard";
    case PlacementRule::kSafetensors:
      return "safetensors";
  }
  return "?";
}
std::string_view NameOf(ReplicaCheck check) {
  switch (check) {
    case ReplicaCheck::kRotating:
      return "rotating";
    case ReplicaCheck::kFull:
      return "full";
    case ReplicaCheck::kOff:
      return "off";
    case ReplicaCheck::kWarn:
      return "warn";
  }
  return "?";
}
std::string_view NameOf(Nonfinite nonfinite) {
  switch (nonfinite) {
    case Nonfinite::kAllow:
      return "allow";
    case Nonfinite::kWarn:
      return "warn";
    case Nonfinite::kRefuse:
      return "refuse";
  }
  return "?";
}
CallDescription Describe(const std::string& path, const SaveOptions& o) {
  CallDescription call;
  const auto add = [&](const char* what, std::string_view value) {
    call.options.emplace_back(what, std::string(value));
  };
  add("path", path);
  add("placement", NameOf(o.placement));
  add("replicas", NameOf(o.replicas));
  add("if_exists", o.if_exists == IfExists::kReplace ? "replace" : "fail");
  add("strategy", o.strategy == SaveStrategy::kMain ? "main" : "parallel");
  add("reuse_plan", o.reuse_plan ? "on" : "off");
  add("page_hashes", o.page_hashes ? "on" : "off");
  add("statistics", o.statistics == Statistics::kBasic ? "basic" : "off");
  add("nonfinite", NameOf(o.nonfinite));
  std::string exempt;
  for (const std::string& glob : o.nonfinite_exempt) exempt += (exempt.empty() ? "" : ", ") + glob;
  add("nonfinite_exempt", "[" + exempt + "]");
  add("reuse", o.reuse == Reuse::kAuto ? "auto" : "off");
  add("reuse_from", o.reuse_from);
  add("full_every", std::to_string(o.full_every));
  add("inherit", o.inherit);
  add("producer", o.producer);
  add("retention", o.retention ? o.retention->ToText() : std::string("not set"));
  add("ephemeral", o.ephemeral ? "on" : "off");
  call.common = o.common;
  call.common_exempt = o.common_exempt;
  call.validate = o.validate;
  call.keep_lowest = o.replicas == ReplicaCheck::kWarn;
  return call;
}

// One save on one rank. Every rank makes the collective calls in the same order. From "begin" on,
// except in "reuse", rank 0's decisions travel as data, so a failed call means that ranks could not
// be reached. Once there may be a staging directory, a rank whose call failed asks the store
// (Settle).
//
//   phase     exchanges, in order                             what exists after it
//   validate  those of ExchangeLayouts                        nothing on disk
//   plan      Decide "plan", messages "send the plan";        a RankTask on every rank
//             none if the kept plan fits
//   stage     Decide "begin": votes; rank 0 makes the staging .staging/ entry
//   reuse     with a base: Decide "reuse" and "link"          links in the staging
//             (reuse.h)
//   write     none                                            data and manifests, durable
//   compare   Decide "write": votes; then messages "compare"  shared files sealed
//             with hashes, if there are replicas to compare
//   before    none; the caller's hook, if it set one          nothing more
//   publish   Gather "report", Broadcast "publish"            COMMIT, by rank 0's rename
//   copy      Decide "copy" until rank 0 has copied; only     COMMIT in the bucket
//             for a bucket (bucket_save.h)
//
// When a rank dies:
//   before "begin" is decided: all others fail, and have nothing to undo. A staging that rank 0
//     made before it died stays behind: no other rank knows its name;
//   from then to the publish: the others' call fails, each asks the store (Settle), which
//     aborts the staging, and each removes its own files;
//   after the rename: the save is committed. A rank that missed the verdict finds the commit in the
//     store and returns success;
//   rank 0, anywhere after "begin": as above. The store is the arbiter, not a rank, and gives every
//     rank the same answer; kUnknown remains for a store that cannot be asked.
class SaveSession {
 public:
  SaveSession(FileSystem* fs, const StateDict& state, std::string_view path, Communicator& comm,
              const SaveOptions& options, const SaveControl& control)
      : fs_(fs),
        state_(state),
        path_(WithoutTrailingSlashes(path)),
        options_(options),
        control_(control),
        comm_(comm),
        collective_(comm, options.timeouts, control.cancel),
        rank_(comm.rank()),
        world_(comm.size()),
        phases_(options.events, "save", path_, comm.rank()) {}

  // The fences of the caller's memory; null if `state` is the library's own copy.
  std::shared_ptr<const DeviceFences> fences() const { return control_.copied ? nullptr : fences_; }

  Result<SaveReport> Run() {
    Result<SaveReport> result = Steps();
    if (!result.ok() && rank_ == 0 && fs_ != nullptr) {
      return WithTrashHint(*fs_, store_path_, result.status());
    }
    if (!result.ok()) return result;
    const SaveReport& report = result.value();
    const CallersSignals signals;
    if (options_.on_commit) {
      LogThrown("save " + path_ + ": the on_commit function", [&] { options_.on_commit(report); });
    }
    if (rank_ == 0 && options_.on_commit_once) {
      LogThrown("save " + path_ + ": the on_commit_once function",
                [&] { options_.on_commit_once(report); });
    }
    return result;
  }

 private:
  Result<SaveReport> Steps() {
    // Fences are taken first, because work that the caller submits to its streams later may change
    // the tensors. The other ranks learn of a failure by this rank's vote in "begin".
    fences_ = control_.fences;
    const Status fenced = FencesAtCall(state_, fences_);
    TENSORMOUNT_RETURN_IF_ERROR(
        Phase("validate", &report_.validate_seconds, [&](std::uint64_t*) { return Validate(); }));

    Status local = fenced;  // A failure that only this rank knows.
    if (local.ok() && (options_.writers < 0 || options_.writers > kMostWriters)) {
      local = Status(Code::kInvalidArgument,
                     "save " + path_ + ": writers is " + std::to_string(options_.writers) +
                         ", and must be from 0 to " + std::to_string(kMostWriters));
    }
    Status status;
    (void)Phase("plan", &report_.plan_seconds, [&](std::uint64_t*) {
      status = Plan(&local);
      return status.ok() ? local : status;  // The other ranks learn of `local` in the next phase.
    });
    TENSORMOUNT_RETURN_IF_ERROR(status);

    status = Phase("stage", nullptr, [&](std::uint64_t*) { return Stage(local); });
    if (!status.ok()) return begun_ ? Settle(status) : status;
    if (control_.on_staging_made)
      LogThrown("save " + path_ + ": the function called when the staging directory is made",
                [&] { control_.on_staging_made(*fs_, staging_); });

    if (!staging_.base.IsZero()) {
      status = Phase("reuse", &report_.reuse_seconds, [&](std::uint64_t* bytes) {
        TENSORMOUNT_ASSIGN_OR_RETURN(reused_, TakeFromBase(collective_,
                                                           {*fs_, state_, *plan_.task, staging_,
                                                            options_, Rules(), std::move(base_)},
                                                           job_.common));
        *bytes = reused_.report.bytes;
        CountTaken();
        return Status();
      });
      if (!status.ok()) return Settle(status);
    }

    Status mine = Phase("write", &report_.write_seconds, [&](std::uint64_t* bytes) {
      const Status written = Guarded([&] { return Write(); });
      *bytes = mine_.bytes;
      return written;
    });

    std::optional<Result<SaveReport>> ended;
    (void)Phase("compare", &report_.compare_seconds, [&](std::uint64_t* bytes) {
      ended = Compare(std::move(mine), &status, bytes);
      return status;
    });
    if (ended) return std::move(*ended);

    if (options_.before_publish && mine_.vote.status.ok()) {
      report_.uuid = staging_.uuid.ToString();
      report_.bytes_written_here = mine_.bytes;
      mine_.vote.status = Phase("before_publish", nullptr, [&](std::uint64_t*) {
        const CallersSignals signals;
        return Guarded([&] { return options_.before_publish(report_); });
      });
    }

    double publish_seconds = 0;
    (void)Phase("publish", &publish_seconds, [&](std::uint64_t*) {
      ended = Publish();
      return ended->status();
    });
    if (ended->ok()) ended->value().publish_seconds = publish_seconds;
    if (!ended->ok() || control_.bucket == nullptr) return std::move(*ended);

    SaveReport& saved = ended->value();
    status = Phase("copy", &saved.copy_seconds, [&](std::uint64_t* bytes) {
      const Status copied = control_.bucket->Copy(
          collective_, *fs_, staging_, [this] { return Cancelled(); }, saved);
      if (rank_ == 0) *bytes = saved.bytes_sent;
      return copied;
    });
    if (!status.ok()) return status;
    return std::move(*ended);
  }

  Status Phase(std::string_view name, double* seconds,
               const std::function<Status(std::uint64_t* bytes)>& fn) {
    return phases_.Run(name, seconds, fn);
  }

  // Returns the same verdict on every rank, and no rank waits for another after a failure, so a
  // rank may return at once.
  Status Validate() {
    CallDescription call = Describe(path_, options_);
    if (control_.bucket != nullptr) call.options.emplace_back("bucket", control_.bucket->path());
    if (options_.reuse_plan) {
      // If the look-up of a kept plan fails, the ranks make a new plan.
      const Status looked = Guarded([&]() -> Status {
        kept_plans_ = SavePlansOf(comm_);
        task_ = TaskFingerprint(state_, options_.placement, Strategy());
        kept_plan_ = kept_plans_->Find(
            [&](const KeptPlan& plan) { return plan.Fits(task_, options_.validate); });
        return Status();
      });
      if (!looked.ok()) kept_plans_.reset();
      if (!looked.ok()) kept_plan_.reset();
      if (kept_plan_) call.kept_plan_job = kept_plan_->job;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(job_, ExchangeLayouts(collective_, state_, call));
    // With a kept plan the layout was not checked again, so the report made with the plan is used.
    // Only its warnings are new.
    if (job_.unchanged && kept_plan_ && job_.report.ok()) {
      std::vector<std::string> warnings = std::move(job_.report.warnings);
      job_.report = kept_plan_->report;
      job_.report.warnings = std::move(warnings);
    }
    if (options_.layout != nullptr) *options_.layout = job_.report;
    report_.path = path_;
    report_.tensors = job_.report.tensors;
    report_.bytes = job_.report.bytes;
    report_.replica_bytes = job_.report.replica_bytes;
    report_.warnings = job_.warnings;
    report_.warnings.insert(report_.warnings.end(), job_.report.warnings.begin(),
                            job_.report.warnings.end());
    if (!job_.report.ok()) return job_.report.ToStatus();
    const std::size_t slash = path_.rfind('/');
    if (slash == std::string::npos) {
      return Status(Code::kInvalidArgument, "save " + path_ + ": the path must be STORE/NAME");
    }
    store_path_ = slash == 0 ? "/" : path_.substr(0, slash);
    name_ = path_.substr(slash + 1);
    TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name_));
    for (const std::string& base : {options_.reuse_from, options_.inherit}) {
      if (!base.empty()) TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(base));
    }
    if (options_.nonfinite != Nonfinite::kAllow && options_.statistics == Statistics::kOff) {
      return Status(Code::kInvalidArgument, "save " + path_ + ": nonfinite is " +
                                                std::string(NameOf(options_.nonfinite)) +
                                                ", which needs statistics, but statistics is off");
    }
    if (options_.retention) {
      TENSORMOUNT_RETURN_IF_ERROR(retention::CheckRules(*options_.retention));
    }
    if (!options_.inherit.empty() && !options_.reuse_from.empty() &&
        options_.inherit != options_.reuse_from) {
      return Status(Code::kInvalidArgument,
                    "save " + path_ + ": reuse_from and inherit name different checkpoints, " +
                        options_.reuse_from + " and " + options_.inherit + "; a save has one base");
    }
    // All ranks have the same path by now, so they choose the same file system.
    if (fs_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(fs_, FileSystemFor(store_path_));
    }
    return Status();
  }

  BaseChoice ChooseBase(std::string& base) const {
    base = options_.inherit.empty() ? options_.reuse_from : options_.inherit;
    if (options_.inherit.empty() && (options_.reuse == Reuse::kOff || !options_.validate)) {
      return BaseChoice::kNone;
    }
    return base.empty() ? BaseChoice::kLatest : BaseChoice::kNamed;
  }

  Status Plan(Status* local) {
    if (!control_.read && local->ok()) *local = CheckHasData(state_);
    if (job_.unchanged) {
      if (!kept_plan_ || kept_plan_->job != job_.fingerprint) {
        *local =
            Status(Code::kInternal, "internal error: save: the kept plan belongs to another job");
        return Status();
      }
      plan_ = kept_plan_->plan;
      report_.plan_reused = true;
      return Status();
    }
    // Every rank forgets its plan before the job is planned again, so that no two ranks ever hold
    // plans of one job made at different times.
    if (kept_plans_) {
      kept_plans_->Forget([&](const KeptPlan& plan) { return plan.job == job_.fingerprint; });
    }
    PlanRules rules;
    rules.placement = options_.placement;
    rules.strategy = Strategy();
    rules.owners = job_.owners;
    Status merged;
    auto layout = std::make_shared<const GlobalLayout>(std::move(job_.layout));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        plan_, ExchangePlans(collective_, state_, std::move(layout), rules, &merged));
    if (kept_plans_ && merged.ok()) {
      merged = Guarded([&] {
        kept_plans_->Keep(std::make_shared<const KeptPlan>(
            KeptPlan{job_.fingerprint, task_, options_.validate, job_.report, plan_}));
        return Status();
      });
    }
    if (!merged.ok()) *local = merged;
    return Status();
  }

  Status Stage(const Status& local) {
    Result<std::string> told = collective_.Decide(
        EncodeBegin({local, Cancelled()}, MachineHash()), "begin",
        [&](std::vector<std::string>& votes) -> Result<std::string> {
          const Status status = Guarded([&]() -> Status {
            TENSORMOUNT_RETURN_IF_ERROR(VerdictOfBegin(votes, ranks_here_));
            const auto begin = [&]() -> Status {
              TENSORMOUNT_ASSIGN_OR_RETURN(const Store store,
                                           Store::OpenOrCreate(*fs_, store_path_, name_));
              if (control_.bucket != nullptr) {
                TENSORMOUNT_RETURN_IF_ERROR(control_.bucket->Prepare(store));
              }
              FreeBefore(*fs_, store, options_);
              std::string base;
              const BaseChoice choice = ChooseBase(base);
              TENSORMOUNT_ASSIGN_OR_RETURN(staging_,
                                           store.Begin(name_, options_.if_exists, choice, base));
              begun_ = true;
              TENSORMOUNT_ASSIGN_OR_RETURN(base_, CheckBase(*fs_, options_, staging_));
              return Status();
            };
            return RankZeroStatus(begin());
          });
          return EncodeStaging(status, staging_, ranks_here_);
        });
    // If the call failed, only rank 0 may have made a staging (begun_).
    if (!told.ok()) return told.status();
    TENSORMOUNT_ASSIGN_OR_RETURN(staging_, DecodeStaging(told.value(), ranks_here_));
    begun_ = true;
    return Status();
  }

  BlockRules Rules() const {
    return {{fences_.get(), control_.cancel, DevicePatienceOf(options_.timeouts)}, &control_.read};
  }

  // Counts as progress the bytes that this rank takes from the base instead of writing them.
  void CountTaken() {
    if (options_.progress == nullptr || !reused_.any) return;
    std::uint64_t taken = 0;
    for (const RankTask::Chunk& chunk : plan_.task->chunks) taken += chunk.bytes;
    for (const RankTask::Chunk& chunk : reused_.remaining.chunks) taken -= chunk.bytes;
    options_.progress->fetch_add(taken, std::memory_order_relaxed);
  }

  // The part of this rank's task that is not taken from the base.
  const RankTask& RemainingTask() const { return reused_.any ? reused_.remaining : *plan_.task; }

  // A training step goes on beside a background save, which therefore takes half of the cores.
  int Writers() const {
    // After a failure this thread makes its own stream wait for work that is still under way; other
    // threads cannot (DeviceFences::Hold).
    const bool own_stream = std::ranges::any_of(state_.tensors(), [](const auto& item) {
      return IsDeviceMemory(item.shard.data) &&
             item.shard.data.stream.kind == StreamKind::kPerThreadDefault;
    });
    if (own_stream) return 1;
    if (options_.writers > 0) return options_.writers;
    const int share = static_cast<int>(HostCores()) / std::max(ranks_here_, 1);
    const int cores = std::min(share, AllowedCores());
    return std::clamp(control_.background ? cores / 2 : cores, 1, kMostWritersUnasked);
  }

  // Writes and syncs this rank's data, then its manifest: the manifest names only bytes that are
  // already durable.
  Status Write() {
    TENSORMOUNT_ASSIGN_OR_RETURN(WrittenData data, WriteData({.fs = *fs_,
                                                              .staging = staging_,
                                                              .state = state_,
                                                              .task = RemainingTask(),
                                                              .rank = rank_,
                                                              .page_hashes = options_.page_hashes,
                                                              .count_values = CountsValues(),
                                                              .progress = options_.progress,
                                                              .rules = Rules(),
                                                              .writers = Writers(),
                                                              .asked = options_.writers > 0}));
    mine_.bytes = data.bytes;
    report_.files = std::move(data.files);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest,
                                 EncodeManifest(data.inventory, data.leaves, data.extras));
    mine_.manifest_bytes = manifest.size();
    TENSORMOUNT_RETURN_IF_ERROR(CheckValues(data));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto own, RankCommonRecord(state_, rank_));
    if (own) mine_.rank_common = own->second;
    TENSORMOUNT_RETURN_IF_ERROR(
        fs_->WriteFileDurably(JoinPath(staging_.directory, ManifestName(rank_)), manifest));
    if (!reused_.any) return Status();
    mine_.linked = reused_.linked;
    const LinkedRecords& linked = reused_.records;
    if (linked.empty()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string records,
                                 EncodeManifest(linked.inventory, linked.leaves, linked.extras));
    mine_.linked_manifest_bytes = records.size();
    const auto part = static_cast<std::uint32_t>(rank_);
    return fs_->WriteFileDurably(
        JoinPath(staging_.directory, LinkedManifestName(part, reused_.consecutive_linked)),
        records);
  }

  bool CountsValues() const { return options_.statistics == Statistics::kBasic; }

  // Looks for NaNs and infinities in what this rank wrote and linked.
  Status CheckValues(const WrittenData& data) {
    if (options_.nonfinite == Nonfinite::kAllow) return Status();
    NonfiniteFindings found;
    TENSORMOUNT_RETURN_IF_ERROR(
        found.Add(data.inventory, data.leaves, data.extras, options_.nonfinite_exempt));
    const LinkedRecords& linked = reused_.records;
    TENSORMOUNT_RETURN_IF_ERROR(
        found.Add(linked.inventory, linked.leaves, linked.extras, options_.nonfinite_exempt));
    if (options_.nonfinite == Nonfinite::kRefuse) return found.ToStatus();
    mine_.nonfinite = found.ToText();
    return Status();
  }

  // Hashes replicas, learns whether all ranks have written, seals the files that several ranks
  // wrote, and compares the replicas of the keys that this rank checks. Failures after the ranks'
  // verdict go into this rank's report. Sets `status` to this phase's status. Returns the result of
  // the save if the save ended here.
  std::optional<Result<SaveReport>> Compare(Status written, Status* status,
                                            std::uint64_t* hashed_bytes) {
    std::vector<std::vector<Hash128>> hashes;
    if (written.ok()) {
      written = Guarded([&]() -> Status {
        TENSORMOUNT_ASSIGN_OR_RETURN(
            hashes, HashReplicas(*plan_.task, options_.replicas, staging_.generation, state_,
                                 hashed_bytes, Rules()));
        return Status();
      });
    }
    // Shared files are sealed only when no rank writes to them any more.
    Result<std::string> told =
        collective_.Decide(EncodeVote(VoteOf(std::move(written))), "write",
                           [](std::vector<std::string>& votes) -> Result<std::string> {
                             return EncodeVerdict({VerdictOf(votes)});
                           });
    if (!told.ok()) {
      *status = told.status();
      return Settle(told.status());
    }
    Result<SaveVerdict> verdict = DecodeVerdict(told.value());
    if (!verdict.ok()) {
      *status = verdict.status();
      return Settle(verdict.status());
    }
    if (const Status& failure = verdict.value().status; !failure.ok()) {
      *status = failure;
      if (rank_ == 0) Discard();
      return failure;
    }
    mine_.vote.status = Guarded([&] { return SealShared(*fs_, staging_, RemainingTask()); });
    if (ComparesReplicas()) {
      // A rank sends hashes only to the ranks that check the keys of its replicas (owners), so both
      // sides know all pairs.
      std::vector<Collective::Letter> letters;
      for (std::size_t owner = 0; owner < hashes.size(); ++owner) {
        if (plan_.task->replicas[owner].empty()) continue;
        ByteWriter out;
        for (const Hash128& hash : hashes[owner]) out.Hash(hash);
        letters.push_back({static_cast<int>(owner), std::move(out.bytes())});
      }
      const std::vector<int> from = RanksWithReplicas(*plan_.layout, world_);
      const Result<std::vector<std::string>> told_here =
          collective_.NeighborAllToAll(letters, from, "compare");
      if (!told_here.ok()) {
        *status = told_here.status();
        return Settle(told_here.status());
      }
      const Status compared = Guarded([&] { return CompareOwned(from, told_here.value()); });
      if (mine_.vote.status.ok()) mine_.vote.status = compared;
    }
    *status =
        mine_.vote.status.ok() && !OnlyWarns() ? mine_.replicas.ToStatus() : mine_.vote.status;
    return std::nullopt;
  }

  // Whether replicas that differ are reported in a warning instead of failing the save.
  bool OnlyWarns() const { return options_.replicas == ReplicaCheck::kWarn; }

  // If replicas may differ, the main replica is stored: the choice must not depend on which rank
  // has least to write.
  SaveStrategy Strategy() const { return OnlyWarns() ? SaveStrategy::kMain : options_.strategy; }

  // Must give the same answer on every rank: a rank that skipped the exchange of Compare would be
  // in another phase than the rest.
  bool ComparesReplicas() const {
    return options_.replicas != ReplicaCheck::kOff &&
           (report_.replica_bytes > 0 || !options_.validate);
  }

  // Compares the replicas of the keys that this rank checks. `told[i]`: the hashes from rank
  // from[i].
  Status CompareOwned(std::span<const int> from, std::span<const std::string> told) {
    std::vector<std::vector<Hash128>> hashes(static_cast<std::size_t>(world_));
    for (std::size_t i = 0; i < from.size(); ++i) {
      ByteReader in(told[i], "hashes of replicas that a rank sent");
      std::vector<Hash128>& of_rank = hashes[static_cast<std::size_t>(from[i])];
      of_rank.reserve(told[i].size() / sizeof(Hash128));
      while (in.left() >= sizeof(Hash128)) of_rank.push_back(in.Hash());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(mine_.replicas, CompareReplicas(*plan_.layout, options_.replicas,
                                                                 staging_.generation, hashes));
    return Status();
  }

  Result<SaveReport> Publish() {
    mine_.vote.cancel = Cancelled();
    Result<std::vector<std::string>> reports = collective_.Gather(EncodeReport(mine_), "report");
    if (!reports.ok()) return Settle(reports.status());
    // All ranks have voted. A rank that is cancelled from now on waits for the verdict, and does
    // not delete files that rank 0 publishes.
    collective_.IgnoreCancel();
    SaveVerdict verdict;
    if (rank_ == 0) {
      Status status = Guarded([&] { return Decide(reports.value(), verdict); });
      if (!status.ok() && status.code() != Code::kUnknown) status = Abort(status);
      verdict.status = status;
    }
    Result<std::string> told = collective_.Broadcast(EncodeVerdict(verdict), "publish");
    if (rank_ == 0 && !verdict.status.ok()) {  // Rank 0 knows the verdict even if Broadcast failed.
      if (verdict.status.code() != Code::kUnknown) EmptyAborted();
      return verdict.status;
    }
    if (!told.ok()) return Settle(told.status());
    Result<SaveVerdict> decoded = DecodeVerdict(told.value());
    if (!decoded.ok()) return Settle(decoded.status());
    verdict = decoded.value();
    TENSORMOUNT_RETURN_IF_ERROR(verdict.status);
    report_.bytes_written = verdict.bytes_written;
    report_.replica_bytes_compared = verdict.replica_bytes_compared;
    report_.warnings.insert(report_.warnings.end(), verdict.warnings.begin(),
                            verdict.warnings.end());
    if (rank_ == 0 && (OnlyWarns() || options_.nonfinite == Nonfinite::kWarn)) {
      for (const std::string& warning : report_.warnings) {
        Log(LogLevel::kWarning, "save " + path_ + ": " + warning);
      }
    }
    ReportReuse(verdict.linked);
    return Committed();
  }

  // Runs on rank 0: publishes, unless a report has a failure. On kUnknown (the store could not say
  // whether the checkpoint was published) Publish passes the failure on to all ranks and does not
  // abort.
  Status Decide(const std::vector<std::string>& encoded, SaveVerdict& verdict) {
    Inventory coordinator;
    coordinator.info.producer =
        options_.producer.empty() ? std::string(kDefaultProducer) : options_.producer;
    coordinator.info.world_size = static_cast<std::uint32_t>(world_);
    coordinator.common = std::move(job_.common);
    std::vector<Vote> votes;
    std::vector<SeenManifest> manifests;
    bool of_ranks = false;
    int nonfinite = 0;  // Ranks that saved values that are not finite.
    ReplicaFindings replicas;
    for (int r = 0; r < world_; ++r) {
      Result<WriterReport> decoded = DecodeReport(encoded[static_cast<std::size_t>(r)]);
      if (!decoded.ok()) return FromRank(r, decoded.status());
      WriterReport& report = decoded.value();
      votes.push_back(report.vote);
      manifests.push_back({r, ManifestName(r), report.manifest_bytes});
      if (report.linked_manifest_bytes > 0) {
        manifests.push_back(
            {r, LinkedManifestName(static_cast<std::uint32_t>(r), reused_.consecutive_linked),
             report.linked_manifest_bytes});
      }
      verdict.linked.Add(report.linked);
      verdict.bytes_written += report.bytes;
      replicas.Add(std::move(report.replicas));
      if (report.rank_common) coordinator.common[RankRecordName(r)] = *report.rank_common;
      of_ranks = of_ranks || report.rank_common.has_value();
      if (!report.nonfinite.empty() && nonfinite++ < kMostRanksWarned) {
        verdict.warnings.push_back("rank " + std::to_string(r) + ": " + report.nonfinite);
      }
    }
    if (nonfinite > kMostRanksWarned) {
      verdict.warnings.push_back(std::to_string(nonfinite - kMostRanksWarned) +
                                 " more ranks saved NaNs or infinities");
    }
    Inherit(of_ranks, coordinator);
    verdict.replica_bytes_compared = replicas.compared_bytes;
    TENSORMOUNT_RETURN_IF_ERROR(VerdictOf(votes));
    if (const Status differ = replicas.ToStatus(); !differ.ok()) {
      if (!OnlyWarns()) return differ;
      verdict.warnings.push_back(differ.message() +
                                 "; the main replica is stored, or the lowest "
                                 "rank's if none is labelled");
    }
    return RankZeroStatus(PublishStaging(coordinator, manifests));
  }

  // Adds the base's common values, and its root, to the inventory.
  void Inherit(bool of_ranks, Inventory& coordinator) {
    if (!reused_.any) return;
    for (const auto& [name, value] : reused_.inherited) {
      // The records that ranks set for themselves belong together: all come from this save, or all
      // from the base.
      if (of_ranks && name.starts_with(kRankRecordPrefix)) continue;
      coordinator.common.emplace(name, value);
    }
    coordinator.info.root = reused_.root;
  }

  void ReportReuse(const LinkCounts& linked) {
    ReuseReport& told = report_.reused;
    if (reused_.any) told = reused_.report;
    told.base = staging_.base_name;
    told.note = staging_.base.IsZero() ? staging_.base_note : reused_.report.note;
    if (!linked.refused.empty()) told.note = "hard links were refused: " + linked.refused;
    told.files_linked = linked.files_linked;
    told.bytes_linked = linked.bytes_linked;
    told.files_copied = linked.files_copied;
    told.bytes_copied = linked.bytes_copied;
  }

  struct SeenManifest {
    int rank = 0;
    std::string name;
    std::uint64_t bytes = 0;
  };
  Status PublishStaging(const Inventory& coordinator, const std::vector<SeenManifest>& manifests) {
    for (const SeenManifest& wanted : manifests) {
      // If this machine does not see a manifest (yet), the checkpoint would lack that rank's
      // objects.
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info,
                                   fs_->Stat(JoinPath(staging_.directory, wanted.name)));
      if (info.size != wanted.bytes) {
        return Status(Code::kDataLoss, wanted.name + ": rank 0 sees " + std::to_string(info.size) +
                                           " of the " + std::to_string(wanted.bytes) +
                                           " bytes that rank " + std::to_string(wanted.rank) +
                                           " wrote");
      }
    }
    Ending();
    MarkIfEphemeral(*fs_, staging_, options_, report_);
    if (control_.bucket != nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(control_.bucket->Protect(*fs_, staging_));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(*fs_, staging_.store));
    Store::PublishOptions publish;
    publish.if_exists = options_.if_exists;
    publish.now = control_.now;
    publish.check_layer_names = !options_.inherit.empty();
    TENSORMOUNT_ASSIGN_OR_RETURN(Store::Published published,
                                 store.Publish(staging_, coordinator, publish));
    replaced_ = std::move(published.replaced);
    return {};
  }

  // ---- Cancelling ----

  // Whether this rank was asked to cancel the save. Stays true once it was true.
  bool Cancelled() {
    cancelled_ = cancelled_ || (control_.cancel != nullptr && control_.cancel->load());
    return cancelled_;
  }
  Vote VoteOf(Status status) {
    const bool cancelled = Cancelled();
    // A write that stopped because of the cancellation is not a failure of this rank.
    if (cancelled && status.code() == Code::kCancelled) status = Status();
    return {std::move(status), cancelled};
  }

  // ---- How it ends ----

  SaveReport Committed() {
    report_.uuid = staging_.uuid.ToString();
    report_.generation = staging_.generation;
    report_.bytes_written_here = mine_.bytes;
    if (report_.bytes_written == 0) report_.bytes_written = mine_.bytes;
    if (rank_ == 0) RemoveByRules(*fs_, staging_, options_, replaced_, report_);
    return std::move(report_);
  }

  // Runs on rank 0 after `failure`: makes sure that the staging is never published. Returns the
  // verdict for all ranks, which is ok if the store says that the checkpoint is committed.
  Status Abort(const Status& failure) {
    Result<Verdict> verdict = QueryOutcome();
    if (!verdict.ok()) return UnknownOutcome(failure, verdict.status());
    if (verdict.value() == Verdict::kCommitted) {
      Log(LogLevel::kWarning,
          "save " + path_ + ": committed despite this failure: " + failure.ToString());
      return Status();
    }
    return failure;
  }

  // Called when a collective call failed: the store decides whether the save is committed.
  Result<SaveReport> Settle(const Status& failure) {
    Result<Verdict> verdict = QueryOutcome();
    if (!verdict.ok()) return UnknownOutcome(failure, verdict.status());
    if (verdict.value() == Verdict::kCommitted) return Committed();
    RemoveOwnFiles();
    return failure;
  }

  Result<Verdict> QueryOutcome() {
    Ending();
    Result<Verdict> verdict =
        Status(Code::kUnknown, "internal error: the outcome of the save was not looked up");
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(*fs_, staging_.store));
      verdict = store.AbortOrDecide(staging_);
      return verdict.status();
    });
    if (!status.ok()) return status;
    return verdict;
  }

  Status UnknownOutcome(const Status& failure, const Status& why) const {
    return Status(Code::kUnknown,
                  failure.message() + "; cannot tell whether the checkpoint was published: " +
                      why.message() + "; run `tensormount fsck " + staging_.store + "`");
  }

  // Called on rank 0 when all ranks know that the save failed.
  void Discard() {
    if (Result<Verdict> verdict = QueryOutcome(); !verdict.ok()) {
      Log(LogLevel::kWarning, "save " + path_ + ": " + staging_.directory +
                                  " could not be aborted: " + verdict.status().message());
      return;
    }
    EmptyAborted();
  }

  // Frees the space of the aborted staging, once no rank writes to it. The directory itself stays
  // for gc: a rank that missed the verdict may still look for its uuid there.
  void EmptyAborted() { store_moves::DeleteData(*fs_, AbortedEntry()); }

  // Frees the space of the aborted staging if a rank is not reachable. That rank may hang in a call
  // on its files, and a process that deletes such a file hangs too, so each rank deletes only the
  // files that it alone has written.
  void RemoveOwnFiles() {
    std::vector<std::string> own = FilesWrittenAlone(staging_, RemainingTask(), rank_);
    own.push_back(CopiedPackName(staging_, static_cast<std::uint32_t>(rank_)));
    store_moves::DeleteData(*fs_, AbortedEntry(), own);
  }

  std::string AbortedEntry() const {
    return JoinPath(JoinPath(staging_.store, store_paths::kTrashFolder),
                    staging_.uuid.ToString() + std::string(store_paths::kAbortedSuffix));
  }

  // Acts only on rank 0, and once, before the staging is published or aborted. Both calls can occur
  // in one save, because Abort follows a failed publish.
  void Ending() {
    if (rank_ != 0 || ending_) return;
    ending_ = true;
    if (control_.on_staging_end)
      LogThrown("save " + path_ + ": the function called when the staging directory ends",
                [&] { control_.on_staging_end(staging_); });
  }

  FileSystem* fs_;  // Null if the path decides; then Validate sets it.
  const StateDict& state_;
  const std::string path_;
  const SaveOptions& options_;
  const SaveControl& control_;
  Communicator& comm_;
  Collective collective_;
  int ranks_here_ = 1;  // The most ranks on any one machine.
  const int rank_;
  const int world_;
  PhaseEvents phases_;
  std::string store_path_;
  std::string name_;
  std::shared_ptr<KeptPlans<KeptPlan>> kept_plans_;  // Null: plans are not kept.
  Hash128 task_;                                     // The TaskFingerprint of this rank.
  std::shared_ptr<const KeptPlan> kept_plan_;
  JobLayout job_;
  JobPlan plan_;
  std::shared_ptr<const DeviceFences> fences_;
  Staging staging_;
  std::string replaced_;  // Store::Published::replaced; only on rank 0.
  // The base checkpoint, only on rank 0; the phase "reuse" takes it.
  std::shared_ptr<OpenedCheckpoint> base_;
  ReuseResult reused_;
  bool begun_ = false;  // staging_ is set.
  bool ending_ = false;
  bool cancelled_ = false;
  WriterReport mine_;
  SaveReport report_;
};

}  // namespace

Result<std::shared_ptr<const DeviceFences>> FencesOf(const StateDict& state) {
  auto fences = std::make_shared<DeviceFences>();
  for (const StateDict::TensorItem& item : state.tensors()) {
    if (item.shard.metadata_only) continue;
    if (const Status status = fences->Add(item.shard.data); !status.ok()) {
      return status.WithContext("tensor " + item.key);
    }
  }
  return std::shared_ptr<const DeviceFences>(std::move(fences));
}

Status AfterDevices(const Status& failure, const DeviceFences* fences) {
  if (fences == nullptr || !fences->memory_in_use()) return failure;
  return failure.With({.memory_in_use = true});
}

Status FencesAtCall(const StateDict& state, std::shared_ptr<const DeviceFences>& fences) {
  if (fences != nullptr) return {};
  return Guarded([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(fences, FencesOf(state));
    return {};
  });
}

Status CheckHasData(const StateDict& state) {
  for (const StateDict::TensorItem& item : state.tensors()) {
    if (item.shard.metadata_only && !item.shard.region.empty()) {
      return Status(Code::kInvalidArgument, "tensor " + item.key + ": shard " +
                                                item.shard.region.ToString() + " has no data");
    }
  }
  return Status();
}

Result<SaveReport> SaveOn(FileSystem& fs, const StateDict& state, std::string_view path,
                          Communicator& comm, const SaveOptions& options,
                          const SaveControl& control) {
  return RunJob<SaveSession>(&fs, state, path, comm, options, control);
}

Result<SaveReport> Save(const StateDict& state, std::string_view path, Communicator& comm,
                        const SaveOptions& options, const SaveControl& control) {
  if (!BucketSave::IsFor(path)) {
    return RunJob<SaveSession>(nullptr, state, path, comm, options, control);
  }
  const Result<BucketSave> bucket = BucketSave::Make(std::string(path), options);
  if (!bucket.ok()) {
    // The other ranks must learn of it.
    StateDict failed;
    (void)failed.Fail(bucket.status());
    return RunJob<SaveSession>(nullptr, failed, path, comm, options, control);
  }
  const SaveOptions to_staging = bucket.value().StagingOptions();
  SaveControl with_bucket = control;
  with_bucket.bucket = &bucket.value();
  return RunJob<SaveSession>(nullptr, state, bucket.value().staged(), comm, to_staging,
                             with_bucket);
}

Result<SaveReport> Save(const StateDict& state, std::string_view path, Communicator& comm,
                        const SaveOptions& options) {
  return Save(state, path, comm, options, {});
}

}  // namespace tensormount
