// SPDX-License-Identifier: Apache-2.0
// Save of tensormount/save.h, one rank's side: the steps of docs/architecture.md, "A save, step by
// step".
#include "tensormount/save.h"

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/log.h"
#include "collective/comm/collective.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"
#include "collective/layout/layout_exchange.h"
#include "collective/phase_events.h"
#include "collective/save/after_commit.h"
#include "collective/save/data_writer.h"
#include "collective/save/plan_exchange.h"
#include "collective/save/replica_check.h"
#include "collective/save/reuse.h"
#include "collective/save/save_messages.h"
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

// Runs what the caller gave us. What it throws is logged: it must not keep this rank from the
// others.
void LogThrown(const std::string& what, const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& e) {
    Log(LogLevel::kError, what + " threw: " + e.what());
  } catch (...) {
    Log(LogLevel::kError, what + " threw something that is no std::exception");
  }
}

constexpr std::string_view kDefaultProducer = "tensormount 0.1";

// What befell rank 0's machine is told as its own; what is so on every machine is not.
Status OfRankZero(const Status& status) {
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
  add("reuse", o.reuse == Reuse::kAuto ? "auto" : "off");
  add("reuse_from", o.reuse_from);
  add("full_every", std::to_string(o.full_every));
  add("inherit", o.inherit);
  add("producer", o.producer);
  add("retention", o.retention ? o.retention->ToText() : std::string("none asked for"));
  add("ephemeral", o.ephemeral ? "on" : "off");
  call.common = o.common;
  call.common_exempt = o.common_exempt;
  call.validate = o.validate;
  return call;
}

// One save on one rank. Collective calls are made by every rank in the same order; what rank 0
// decides travels as data, so that a failed call always means that ranks could not be reached, and
// from the moment at which there may be a staging the store is asked then (Settle).
//
//   phase     exchanges, in order                             what exists after it
//   validate  those of ExchangeLayouts                        nothing on disk
//   plan      Decide "plan", letters "hand out the plan";     a RankTask on every rank
//             none at all where the kept plan fits
//   stage     Decide "begin": votes; rank 0 makes the staging .staging/ entry
//   reuse     where there is a base, Decide "reuse" and       links in the staging
//             "link" (reuse.h)
//   write     none                                            data and manifests, durable
//   compare   Decide "write": votes; then letters "compare"   shared files sealed
//             of hashes, unless nothing is to be compared
//   before    none; the caller's hook, where it gave one       nothing more
//   publish   Gather "report", Broadcast "publish"            COMMIT, by rank 0's rename
//
// When a rank dies:
//   before "begin" is decided: all others fail, and have nothing to undo. A staging that rank 0
//     made before it died stays behind: nobody else knows its name;
//   from there to rank 0's Decide: the others' call fails, each asks the store (Settle), which
//     aborts the staging, and each takes away its own files;
//   after the rename: the save is committed. Whoever missed the verdict finds that in the store and
//     returns success;
//   rank 0, anywhere after "begin": as above. The store is the arbiter, not a rank, and it gives
//     everybody the same answer; kUnknown is left for a store that cannot be asked.
class SaveSession {
 public:
  SaveSession(FileSystem& fs, const StateDict& state, std::string_view path, Communicator& comm,
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

  // Null where the state is a copy of ours.
  std::shared_ptr<const DeviceFences> fences() const { return control_.copied ? nullptr : fences_; }

  Result<SaveReport> Run() {
    Result<SaveReport> result = Steps();
    if (!result.ok() && rank_ == 0) return WithTrashHint(fs_, store_path_, result.status());
    if (!result.ok()) return result;
    const SaveReport& report = result.value();
    if (options_.on_commit) {
      LogThrown("save " + path_ + ": on_commit", [&] { options_.on_commit(report); });
    }
    if (rank_ == 0 && options_.on_commit_once) {
      LogThrown("save " + path_ + ": on_commit_once", [&] { options_.on_commit_once(report); });
    }
    return result;
  }

 private:
  Result<SaveReport> Steps() {
    // At once: what the caller's streams are given later may change the tensors. What fails here is
    // told in the next phase but one.
    fences_ = control_.fences;
    const Status fenced = FencesAtCall(state_, fences_);
    TENSORMOUNT_RETURN_IF_ERROR(
        Phase("validate", &report_.validate_seconds, [&](std::uint64_t*) { return Validate(); }));

    Status local = fenced;  // What only this rank knows.
    Status status;
    (void)Phase("plan", &report_.plan_seconds, [&](std::uint64_t*) {
      status = Plan(&local);
      return status.ok() ? local : status;  // The others learn of `local` in the next phase.
    });
    TENSORMOUNT_RETURN_IF_ERROR(status);

    status = Phase("stage", nullptr, [&](std::uint64_t*) { return Stage(local); });
    if (!status.ok()) return begun_ ? Settle(status) : status;
    if (control_.begun) LogThrown("begun hook", [&] { control_.begun(staging_); });

    if (!staging_.base.IsZero()) {
      status = Phase("reuse", &report_.reuse_seconds, [&](std::uint64_t* bytes) {
        TENSORMOUNT_ASSIGN_OR_RETURN(
            reused_,
            TakeFromBase(collective_, {fs_, state_, *plan_.task, staging_, options_, Rules()},
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
        return Guarded([&] { return options_.before_publish(report_); });
      });
    }

    double publish_seconds = 0;
    (void)Phase("publish", &publish_seconds, [&](std::uint64_t*) {
      ended = Publish();
      return ended->status();
    });
    if (ended->ok()) ended->value().publish_seconds = publish_seconds;
    return std::move(*ended);
  }

  Status Phase(std::string_view name, double* seconds,
               const std::function<Status(std::uint64_t* bytes)>& fn) {
    return phases_.Run(name, seconds, fn);
  }

  // The same failure on every rank, or nothing; no rank waits for another after it.
  // A rank may return at once from it for that reason.
  Status Validate() {
    CallDescription call = Describe(path_, options_);
    if (options_.reuse_plan) {
      // Without it a plan is made, that is all.
      const Status looked = Guarded([&]() -> Status {
        kept_plans_ = SavePlansOf(comm_);
        task_ = TaskFingerprint(state_, options_.placement, options_.strategy);
        at_hand_ = kept_plans_->Find(
            [&](const KeptPlan& plan) { return plan.Fits(task_, options_.validate); });
        return Status();
      });
      if (!looked.ok()) kept_plans_.reset();
      if (!looked.ok()) at_hand_.reset();
      if (at_hand_) call.plan_at_hand = at_hand_->job;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(job_, ExchangeLayouts(collective_, state_, call));
    // What was found out when the plan was made; common values are looked at every time.
    if (job_.unchanged && at_hand_ && job_.report.ok()) job_.report = at_hand_->report;
    if (options_.layout != nullptr) *options_.layout = job_.report;
    report_.path = path_;
    report_.tensors = job_.report.tensors;
    report_.bytes = job_.report.bytes;
    report_.replica_bytes = job_.report.replica_bytes;
    report_.warnings = job_.warnings;
    if (!job_.report.ok()) return job_.report.ToStatus();
    const std::size_t slash = path_.rfind('/');
    if (slash == std::string::npos) {
      return Status(Code::kInvalidArgument, "save to " + path_ + ": want STORE/NAME");
    }
    store_path_ = slash == 0 ? "/" : path_.substr(0, slash);
    name_ = path_.substr(slash + 1);
    TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name_));
    for (const std::string& base : {options_.reuse_from, options_.inherit}) {
      if (!base.empty()) TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(base));
    }
    if (options_.retention) {
      TENSORMOUNT_RETURN_IF_ERROR(retention::CheckRules(*options_.retention));
    }
    if (!options_.inherit.empty() && !options_.reuse_from.empty() &&
        options_.inherit != options_.reuse_from) {
      return Status(Code::kInvalidArgument,
                    "save to " + path_ + ": reuse_from and inherit name two checkpoints, " +
                        options_.reuse_from + " and " + options_.inherit + "; a save has one base");
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
      if (!at_hand_ || at_hand_->job != job_.fingerprint) {
        *local = Status(Code::kInternal, "plan: that of another job is at hand");
        return Status();
      }
      plan_ = at_hand_->plan;
      report_.plan_reused = true;
      return Status();
    }
    // On every rank before the job is planned anew, so that no two ranks ever hold plans of one job
    // that were made at different times.
    if (kept_plans_) {
      kept_plans_->Forget([&](const KeptPlan& plan) { return plan.job == job_.fingerprint; });
    }
    PlanRules rules;
    rules.placement = options_.placement;
    rules.strategy = options_.strategy;
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

  // Rank 0 claims the name, if all ranks are ready.
  Status Stage(const Status& local) {
    Result<std::string> told = collective_.Decide(
        EncodeVote({local, Cancelled()}), "begin",
        [&](std::vector<std::string>& votes) -> Result<std::string> {
          const Status status = Guarded([&]() -> Status {
            TENSORMOUNT_RETURN_IF_ERROR(VerdictOf(votes));
            const auto begin = [&]() -> Status {
              TENSORMOUNT_ASSIGN_OR_RETURN(const Store store,
                                           Store::OpenOrCreate(fs_, store_path_));
              std::string base;
              const BaseChoice choice = ChooseBase(base);
              TENSORMOUNT_ASSIGN_OR_RETURN(staging_,
                                           store.Begin(name_, options_.if_exists, choice, base));
              begun_ = true;
              return CheckBase(fs_, options_, staging_);
            };
            return OfRankZero(begin());
          });
          return EncodeStaging(status, staging_);
        });
    // Only rank 0 may have made a staging where the call failed.
    if (!told.ok()) return told.status();
    TENSORMOUNT_ASSIGN_OR_RETURN(staging_, DecodeStaging(told.value()));
    begun_ = true;
    return Status();
  }

  BlockRules Rules() const {
    return {{fences_.get(), control_.cancel, DevicePatienceOf(options_.timeouts)}, &control_.read};
  }

  // What it found in the base is done, for whoever watches.
  void CountTaken() {
    if (options_.progress == nullptr || !reused_.any) return;
    std::uint64_t taken = 0;
    for (const RankTask::Chunk& chunk : plan_.task->chunks) taken += chunk.bytes;
    for (const RankTask::Chunk& chunk : reused_.left.chunks) taken -= chunk.bytes;
    options_.progress->fetch_add(taken, std::memory_order_relaxed);
  }

  // What this rank writes: all of its task, but for what it found in the base.
  const RankTask& Left() const { return reused_.any ? reused_.left : *plan_.task; }

  // This rank's data and manifests, durable.
  // The manifest is written last: it names only bytes that are already synced.
  Status Write() {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        WrittenData data, WriteData(fs_, staging_, state_, Left(), rank_, options_.page_hashes,
                                    options_.progress, Rules()));
    mine_.bytes = data.bytes;
    report_.files = std::move(data.files);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest,
                                 EncodeManifest(data.inventory, data.leaves, data.paged));
    mine_.manifest_bytes = manifest.size();
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto own, RankCommonRecord(state_, rank_));
    if (own) mine_.rank_common = own->second;
    TENSORMOUNT_RETURN_IF_ERROR(
        fs_.WriteFileDurably(JoinPath(staging_.directory, ManifestName(rank_)), manifest));
    if (!reused_.any) return Status();
    mine_.linked = reused_.linked;
    const LinkedRecords& linked = reused_.records;
    if (linked.empty()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string records,
                                 EncodeManifest(linked.inventory, linked.leaves, linked.paged));
    mine_.linked_manifest_bytes = records.size();
    const auto part = static_cast<std::uint32_t>(rank_);
    return fs_.WriteFileDurably(
        JoinPath(staging_.directory, LinkedManifestName(part, reused_.in_a_row)), records);
  }

  // Hashes replicas, learns whether all ranks have written, seals what they wrote together, and as
  // an owner compares. What fails after the ranks' verdict goes into this rank's report. Returns
  // how the save ended, if it did; `status`: how this went.
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
    // Shared files are sealed only when nobody writes them any more.
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
    mine_.vote.status = Guarded([&] { return SealShared(fs_, staging_, Left()); });
    if (Compares()) {
      // Only between a rank and the owners of what it holds replicas of; both know.
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
    *status = mine_.vote.status.ok() ? mine_.replicas.ToStatus() : mine_.vote.status;
    return std::nullopt;
  }

  // The same on every rank.
  // It must be: it decides whether the exchange of Compare takes place, and one rank that skipped
  // it would be in another phase than the rest.
  bool Compares() const {
    return options_.replicas != ReplicaCheck::kOff &&
           (report_.replica_bytes > 0 || !options_.validate);
  }

  // `told[i]`: what rank from[i] hashed of this owner's keys.
  Status CompareOwned(std::span<const int> from, std::span<const std::string> told) {
    std::vector<std::vector<Hash128>> hashes(static_cast<std::size_t>(world_));
    for (std::size_t i = 0; i < from.size(); ++i) {
      ByteReader in(told[i], "hashes of replicas");
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
    // All were asked: who is cancelled from now on waits for the verdict, and does not take away
    // what rank 0 publishes.
    collective_.IgnoreCancel();
    SaveVerdict verdict;
    if (rank_ == 0) {
      Status status = Guarded([&] { return Decide(reports.value(), verdict); });
      if (!status.ok() && status.code() != Code::kUnknown) status = Abort(status);
      verdict.status = status;
    }
    Result<std::string> told = collective_.Broadcast(EncodeVerdict(verdict), "publish");
    if (rank_ == 0 && !verdict.status.ok()) {  // It knows, whoever can be told.
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
    TellReused(verdict.linked);
    return Committed();
  }

  // On rank 0: publishes, unless the reports say otherwise.
  // kUnknown: whether it was published could not be found out; Publish passes that on to all ranks
  // and does not abort.
  Status Decide(const std::vector<std::string>& encoded, SaveVerdict& verdict) {
    Inventory coordinator;
    coordinator.info.producer =
        options_.producer.empty() ? std::string(kDefaultProducer) : options_.producer;
    coordinator.info.world_size = static_cast<std::uint32_t>(world_);
    coordinator.common = std::move(job_.common);
    std::vector<Vote> votes;
    std::vector<SeenManifest> manifests;
    bool of_ranks = false;
    ReplicaFindings replicas;
    for (int r = 0; r < world_; ++r) {
      Result<WriterReport> decoded = DecodeReport(encoded[static_cast<std::size_t>(r)]);
      if (!decoded.ok()) return FromRank(r, decoded.status());
      WriterReport& report = decoded.value();
      votes.push_back(report.vote);
      manifests.push_back({r, ManifestName(r), report.manifest_bytes});
      if (report.linked_manifest_bytes > 0) {
        manifests.push_back({r, LinkedManifestName(static_cast<std::uint32_t>(r), reused_.in_a_row),
                             report.linked_manifest_bytes});
      }
      verdict.linked.Add(report.linked);
      verdict.bytes_written += report.bytes;
      replicas.Add(std::move(report.replicas));
      if (report.rank_common) coordinator.common[RankRecordName(r)] = *report.rank_common;
      of_ranks = of_ranks || report.rank_common.has_value();
    }
    Inherit(of_ranks, coordinator);
    verdict.replica_bytes_compared = replicas.compared_bytes;
    TENSORMOUNT_RETURN_IF_ERROR(VerdictOf(votes));
    TENSORMOUNT_RETURN_IF_ERROR(replicas.ToStatus());
    return OfRankZero(PublishStaging(coordinator, manifests));
  }

  // What comes from the base beside tensors and objects.
  void Inherit(bool of_ranks, Inventory& coordinator) {
    if (!reused_.any) return;
    for (const auto& [name, value] : reused_.inherited) {
      // What ranks set for themselves belongs together: all of it is of this save, or of the base.
      if (of_ranks && name.starts_with(kRankRecordPrefix)) continue;
      coordinator.common.emplace(name, value);
    }
    coordinator.info.root = reused_.root;
  }

  void TellReused(const LinkCounts& linked) {
    ReuseReport& told = report_.reused;
    if (reused_.any) told = reused_.report;
    told.base = staging_.base_name;
    told.note = staging_.base.IsZero() ? staging_.base_note : reused_.report.note;
    if (!linked.refused.empty()) told.note = "links were refused: " + linked.refused;
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
      // A manifest that this machine does not see (yet) would be a checkpoint without its objects.
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info,
                                   fs_.Stat(JoinPath(staging_.directory, wanted.name)));
      if (info.size != wanted.bytes) {
        return Status(Code::kDataLoss, wanted.name + ": " + std::to_string(info.size) +
                                           " bytes are seen of the " +
                                           std::to_string(wanted.bytes) + " that rank " +
                                           std::to_string(wanted.rank) + " wrote");
      }
    }
    Ending();
    MarkIfEphemeral(fs_, staging_, options_, report_);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs_, staging_.store));
    Store::PublishOptions publish;
    publish.if_exists = options_.if_exists;
    publish.now = control_.now;
    publish.layers_apart = !options_.inherit.empty();
    return store.Publish(staging_, coordinator, publish).status();
  }

  // ---- Cancelling ----

  // Whoever answered yes once does so again: the request stands.
  bool Cancelled() {
    cancelled_ = cancelled_ || (control_.cancel != nullptr && control_.cancel->load());
    return cancelled_;
  }
  Vote VoteOf(Status status) {
    const bool cancelled = Cancelled();
    // That this rank stopped writing because of the request is no failure.
    if (cancelled && status.code() == Code::kCancelled) status = Status();
    return {std::move(status), cancelled};
  }

  // ---- How it ends ----

  SaveReport Committed() {
    report_.uuid = staging_.uuid.ToString();
    report_.generation = staging_.generation;
    report_.bytes_written_here = mine_.bytes;
    if (report_.bytes_written == 0) report_.bytes_written = mine_.bytes;
    if (rank_ == 0) RemoveByRules(fs_, staging_, options_, report_);
    return std::move(report_);
  }

  // On rank 0 after `failure`: sees to it that the staging is never published. The verdict for all.
  // Ok where the store says that it is committed, although publishing reported a failure.
  Status Abort(const Status& failure) {
    Result<Verdict> verdict = AskStore();
    if (!verdict.ok()) return NotKnown(failure, verdict.status());
    if (verdict.value() == Verdict::kCommitted) {
      Log(LogLevel::kWarning, "save " + path_ + ": committed in spite of: " + failure.ToString());
      return Status();
    }
    return failure;
  }

  // Ranks could not be reached: the store is the arbiter.
  Result<SaveReport> Settle(const Status& failure) {
    Result<Verdict> verdict = AskStore();
    if (!verdict.ok()) return NotKnown(failure, verdict.status());
    if (verdict.value() == Verdict::kCommitted) return Committed();
    RemoveOwn();
    return failure;
  }

  Result<Verdict> AskStore() {
    Ending();
    Result<Verdict> verdict = Status(Code::kUnknown, "the store was not asked");
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs_, staging_.store));
      verdict = store.AbortOrDecide(staging_);
      return verdict.status();
    });
    if (!status.ok()) return status;
    return verdict;
  }

  Status NotKnown(const Status& failure, const Status& why) const {
    return Status(Code::kUnknown,
                  failure.message() +
                      "; whether the save was committed could not be found out: " + why.message());
  }

  // All ranks know that it failed.
  void Discard() {
    if (Result<Verdict> verdict = AskStore(); !verdict.ok()) {
      Log(LogLevel::kWarning, "save " + path_ + ": " + staging_.directory +
                                  " could not be aborted: " + verdict.status().message());
      return;
    }
    EmptyAborted();
  }

  // Frees the space, where all ranks have ended their writing. The entry itself stays for gc: a
  // rank that slept through the verdict may still ask where its uuid is.
  void EmptyAborted() { store_moves::DeleteData(fs_, AbortedEntry()); }

  // Likewise, where a rank was not heard of. It may hang in a call on its files, and whoever
  // deletes one waits with it: each rank takes away what it alone has written.
  void RemoveOwn() {
    std::vector<std::string> own = FilesWrittenAlone(staging_, Left(), rank_);
    own.push_back(CopiedPackName(staging_, static_cast<std::uint32_t>(rank_)));
    store_moves::DeleteData(fs_, AbortedEntry(), own);
  }

  std::string AbortedEntry() const {
    return JoinPath(JoinPath(staging_.store, store_paths::kTrashFolder),
                    staging_.uuid.ToString() + std::string(store_paths::kAbortedSuffix));
  }

  // On rank 0, once, before the staging is published or aborted.
  // Both paths may come here in one save: publishing that fails is followed by Abort.
  void Ending() {
    if (rank_ != 0 || ending_) return;
    ending_ = true;
    if (control_.ending) LogThrown("ending hook", [&] { control_.ending(staging_); });
  }

  FileSystem& fs_;
  const StateDict& state_;
  const std::string path_;
  const SaveOptions& options_;
  const SaveControl& control_;
  Communicator& comm_;
  Collective collective_;
  const int rank_;
  const int world_;
  PhaseEvents phases_;
  std::string store_path_;
  std::string name_;
  std::shared_ptr<KeptPlans<KeptPlan>> kept_plans_;  // Null: not to be used.
  Hash128 task_;                                     // TaskFingerprint.
  std::shared_ptr<const KeptPlan> at_hand_;
  JobLayout job_;
  JobPlan plan_;
  std::shared_ptr<const DeviceFences> fences_;
  Staging staging_;
  Reused reused_;
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
    TENSORMOUNT_RETURN_IF_ERROR(fences->Add(item.shard.data).WithContext("tensor " + item.key));
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
  return RunJob<SaveSession>(fs, state, path, comm, options, control);
}

Result<SaveReport> Save(const StateDict& state, std::string_view path, Communicator& comm,
                        const SaveOptions& options) {
  return SaveOn(HostFileSystem(), state, path, comm, options);
}

}  // namespace tensormount
