// SPDX-License-Identifier: Apache-2.0
// Load of tensormount/load.h, one rank's side: runs the steps of docs/architecture.md, "A load,
// step by step", in order. Each step has a file of its own.
#include "tensormount/load.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/cancel_scope.h"
#include "base/coding.h"
#include "base/file_system.h"
#include "base/hash.h"
#include "base/log.h"
#include "collective/comm/collective.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"
#include "collective/layout/layout_exchange.h"
#include "collective/load/direct_read.h"
#include "collective/load/exchange_load.h"
#include "collective/load/meeting.h"
#include "collective/load/prove.h"
#include "collective/load/target.h"
#include "collective/phase_events.h"
#include "collective/save_load.h"
#include "index/foreign/open_source.h"
#include "index/foreign/rule_packs.h"
#include "index/records/name_binding.h"

namespace tensormount {
namespace {

// Hash that identifies the opened checkpoint; it must be equal on all ranks. A checkpoint of the
// same name on another machine, or a foreign checkpoint that was written again, has another hash.
Result<Hash128> Identity(const OpenedCheckpoint& checkpoint) {
  ByteWriter out;
  if (const DecodedCommit* commit = checkpoint.commit()) {
    out.String(commit->record.uuid.ToString());
    out.Hash(commit->record.content_root);
    return Xxh3(out.bytes());
  }
  const CheckpointIndex& index = checkpoint.stored_index();
  out.String(checkpoint.directory());
  out.String(index.info().root);
  for (const FileRecord& file : index.files()) {
    out.String(file.name);
    out.U64(file.length);
    out.I64(file.mtime_seconds);
    out.I64(file.mtime_nanoseconds);
  }
  // Files of equal names and lengths may contain other tensors, for which a plan would be wrong, so
  // the tensors and the places of their chunks are hashed, too.
  Status failure;
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
    out.String(entry.meta.key());
    out.U8(static_cast<std::uint8_t>(entry.meta.dtype()));
    out.U8(static_cast<std::uint8_t>(entry.meta.shape().rank()));
    for (const std::int64_t extent : entry.meta.shape()) out.I64(extent);
    const Result<std::shared_ptr<const ExtentTable>> extents = index.Extents(entry);
    failure = extents.status();
    if (failure.ok()) out.Hash(Xxh3(extents.value()->packed()));
    return failure.ok();
  }));
  TENSORMOUNT_RETURN_IF_ERROR(failure);
  return Xxh3(out.bytes());
}

// Hash of the name map with all its numbers; it must be equal on all ranks, too.
Hash128 NamesIdentity(const OpenedCheckpoint& checkpoint, const NameMap& names) {
  ByteWriter out;
  for (const std::string& text : {names.rules, names.as, names.from}) out.String(text);
  for (const OpenedCheckpoint* at = &checkpoint; at->is_mapped(); at = at->source()) {
    for (const auto& [name, number] : at->binding()->rules().numbers) {
      out.String(name);
      out.I64(number);
    }
  }
  return Xxh3(out.bytes());
}

std::string ListKeys(const std::vector<std::string>& keys) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(keys.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + keys[i];
  }
  if (keys.size() > kShown) text += " and " + std::to_string(keys.size() - kShown) + " more";
  return text;
}

class LoadJob {
 public:
  LoadJob(FileSystem* fs, const StateDict& request, std::string_view path, Communicator& comm,
          const LoadOptions& options, const LoadControl& control)
      : fs_(fs),
        request_(request),
        path_(path),
        options_(options),
        comm_(comm),
        control_(control),
        collective_(comm, options.timeouts, control.cancel),
        events_(options.events, "load", path, comm.rank()) {}

  const std::shared_ptr<const DeviceFences>& fences() const { return fences_; }

  Result<LoadReport> Run() {
    const CancelScope scope(control_.cancel != nullptr ? control_.cancel : CancelScope::Current());
    // Fences are taken first, because work that the caller submits to its streams later may use the
    // tensors. A failure is reported when the ranks meet.
    fences_ = control_.fences;
    fenced_ = FencesAtCall(request_, fences_);
    devices_ = {fences_.get(), control_.cancel, DevicePatienceOf(options_.timeouts)};
    writer_.emplace(devices_);
    double seconds = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        events_.Run("open", &seconds, [&](std::uint64_t*) { return Open(); }));
    TENSORMOUNT_RETURN_IF_ERROR(
        events_.Run("plan", &report_.plan_seconds, [&](std::uint64_t*) { return Plan(); }));
    TENSORMOUNT_RETURN_IF_ERROR(
        events_.Run("read", &report_.read_seconds, [&](std::uint64_t* bytes) {
          const Status status = Read();
          *bytes = direct_bytes_;
          return status;
        }));
    TENSORMOUNT_RETURN_IF_ERROR(Exchange());
    TENSORMOUNT_RETURN_IF_ERROR(events_.Run("prove", &report_.proof_seconds,
                                            [&](std::uint64_t* bytes) { return Prove(bytes); }));
    FillReport();
    return std::move(report_);
  }

 private:
  // Fails with kCancelled if the load was cancelled. The caller passes the failure to the next
  // collective call, by which all ranks learn of it.
  Status CheckCancelled() const {
    if (control_.cancel == nullptr || !control_.cancel->load()) return {};
    return {Code::kCancelled, "the load was cancelled"};
  }

  // ---- Open ----

  Status Open() {
    Result<std::string> where = std::string();
    if (collective_.rank() == 0) {
      const Status opened = Guarded([&] {
        where = OpenFirst();
        return where.status();
      });
      if (!opened.ok()) where = opened;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string told,
                                 collective_.Broadcast(where, "load: open the checkpoint"));
    opened_ =
        Guarded([&] { return OpenAnnounced(told); });  // Plan sends a failure to the other ranks.
    return {};
  }

  Result<FoundSource> Find(const std::string& path) {
    return fs_ != nullptr ? FindSource(*fs_, path, options_.roots)
                          : FindSource(path, options_.roots);
  }

  Status OpenMapped(const FoundSource& found) {
    TENSORMOUNT_ASSIGN_OR_RETURN(checkpoint_, OpenFound(found, options_.roots));
    TENSORMOUNT_ASSIGN_OR_RETURN(checkpoint_, ApplyNames(checkpoint_, options_.names));
    return {};
  }

  // Runs on rank 0: opens the checkpoint and encodes its location for the others.
  Result<std::string> OpenFirst() {
    // A failure of the request itself is reported before any failure of the path.
    TENSORMOUNT_RETURN_IF_ERROR(FromRank(0, request_.status()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, Find(path_));
    TENSORMOUNT_RETURN_IF_ERROR(OpenMapped(found));
    const std::string& resolved = found.path;
    for (const std::string& warning : checkpoint_->warnings()) {
      Log(LogLevel::kWarning, resolved + ": " + warning);
    }
    ByteWriter out;
    out.String(resolved);
    out.String(checkpoint_->index().info().uuid.ToString());
    TENSORMOUNT_ASSIGN_OR_RETURN(identity_, Identity(*checkpoint_));
    out.Hash(identity_);
    out.Hash(NamesIdentity(*checkpoint_, options_.names));
    return std::move(out.bytes());
  }

  Status OpenAnnounced(std::string_view told) {
    TENSORMOUNT_RETURN_IF_ERROR(request_.status());
    ByteReader in(told, "load: the path that rank 0 sent");
    const std::string path(in.String(64 * 1024));
    report_.uuid = in.String(64);
    const Hash128 told_identity = in.Hash();
    const Hash128 told_names = in.Hash();
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    if (checkpoint_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, Find(path));
      TENSORMOUNT_RETURN_IF_ERROR(OpenMapped(found));
      TENSORMOUNT_ASSIGN_OR_RETURN(identity_, Identity(*checkpoint_));
    }
    if (identity_ != told_identity) {
      return Status(Code::kStale, path + ": this rank opened another checkpoint than rank 0");
    }
    if (NamesIdentity(*checkpoint_, options_.names) != told_names) {
      return Status(
          Code::kInvalidArgument,
          path + ": this rank has another name map, or other numbers for it, than rank 0");
    }
    return {};
  }

  // ---- Plan: no tensor memory is written before all ranks have agreed on the plan ----

  Status Plan() {
    Result<MeetingPart> part = MeetingPart();
    const Status prepared = Guarded([&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(opened_);
      TENSORMOUNT_RETURN_IF_ERROR(fenced_);
      TENSORMOUNT_RETURN_IF_ERROR(CheckCancelled());
      part = PrepareMeeting(comm_, checkpoint_->index(), request_, path_, identity_,
                            !checkpoint_->fs().Can(Ability::kKernelFiles), options_);
      TENSORMOUNT_RETURN_IF_ERROR(part.status());
      TENSORMOUNT_RETURN_IF_ERROR(CheckNotLost(part.value().resolved->skipped));
      // A background load exchanges through host memory, unless the caller requires devices. This
      // rank reports that it is not on a device, and then no rank exchanges between devices.
      if (control_.background && options_.exchange_via == ExchangeVia::kAuto) {
        part.value().on_device = false;
      }
      return {};
    });
    if (!prepared.ok()) part = prepared;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        agreed_, Meet(
                     comm_, collective_, opened_.ok() ? &checkpoint_->index() : nullptr,
                     std::move(part), options_, [&] { return Validate(); }, meeting_));
    report_.plan_reused = meeting_.plan_reused;
    TENSORMOUNT_RETURN_IF_ERROR(ApplyStrict(options_.not_stored, agreed_->not_stored,
                                            Code::kNotFound,
                                            "requested, but not stored: ", report_.not_stored));
    return ApplyStrict(options_.not_requested, agreed_->not_requested, Code::kInvalidArgument,
                       "stored, but requested by no rank: ", report_.not_requested);
  }

  // kDataLoss: data of absent requested keys are lost. An option that lets keys be absent does not
  // apply, because the checkpoint has these keys. `absent`: sorted.
  Status CheckNotLost(const std::vector<std::string>& absent) const {
    if (absent.empty()) return {};
    for (const ForeignLoss& loss : checkpoint_->lost()) {
      const std::string* found = nullptr;
      for (const std::vector<std::string>* keys : {&loss.tensors, &loss.objects}) {
        const auto wanted = [&](const std::string& key) {
          return std::ranges::binary_search(absent, key);
        };
        const auto at = std::ranges::find_if(*keys, wanted);
        if (found == nullptr && at != keys->end()) found = &*at;
      }
      // A loss whose keys are unknown may contain any key.
      if (loss.tensors.empty() && loss.objects.empty()) found = &absent.front();
      if (found == nullptr) continue;
      return Status(Code::kDataLoss,
                    checkpoint_->directory() + ": " + loss.ToString() + "; requested: " + *found)
          .With({.key = *found});
    }
    return {};
  }

  // Collective: validates the tensors that all ranks request, like those of a save.
  Status Validate() {
    StateDict tensors;
    const Status copied = Guarded([&]() -> Status {
      for (const StateDict::TensorItem& item : request_.tensors()) {
        TENSORMOUNT_RETURN_IF_ERROR(tensors.AddTensor(item.key, item.shard));
      }
      return {};
    });
    if (!copied.ok()) (void)tensors.Fail(copied);
    TENSORMOUNT_ASSIGN_OR_RETURN(const JobLayout job, ExchangeLayouts(collective_, tensors, {}));
    return job.report.ToStatus();
  }

  // Applies the option for keys that are not stored or not requested. The lists, and so the
  // verdict, are the same on every rank.
  Status ApplyStrict(Strict action, const std::vector<std::string>& keys, Code code,
                     const char* what, std::vector<std::string>& reported) {
    if (keys.empty()) return {};
    switch (action) {
      case Strict::kRaise:
        return Status(code, path_ + ": " + what + ListKeys(keys)).With({.key = keys.front()});
      case Strict::kLog:
        if (collective_.rank() == 0) {
          Log(LogLevel::kWarning, checkpoint_->directory() + ": " + what + ListKeys(keys));
        }
        return {};
      case Strict::kReturn:
        reported = keys;
        return {};
      case Strict::kIgnore:
        return {};
    }
    return {};
  }

  // ---- Read ----

  // Adds to the caller's progress counter. Thread-safe.
  void CountRead(std::uint64_t bytes) {
    if (options_.progress == nullptr) return;
    options_.progress->fetch_add(bytes, std::memory_order_relaxed);
  }

  // Reads this rank's data. Then all ranks learn, in one collective call, whether all reads
  // succeeded and which tensors are still unverified.
  Status Read() {
    const Status able = Guarded([&] { return ReadAll(); });
    // Frees pinned memory before the next collective call, because other jobs may need this memory
    // first.
    if (!able.ok()) writer_->Drop();
    std::string bits;
    if (able.ok() && MayProveByDigest(options_.verify)) {
      bits = Unproved(agreed_->plan, targets_);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        unproved_, collective_.Decide(
                       bits, "load: read the data",
                       [](std::vector<std::string>& parts) { return UnprovedByAny(parts); }, able));
    return {};
  }

  Status ReadAll() {
    const CheckpointIndex& index = checkpoint_->index();
    TENSORMOUNT_ASSIGN_OR_RETURN(targets_, MakeTargets(agreed_->plan, *agreed_->resolved, request_,
                                                       collective_.rank(), *writer_));
    TENSORMOUNT_RETURN_IF_ERROR(ZeroUncovered(*agreed_->resolved, request_, *writer_));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const DirectReadReport read,
        ReadDirectly(*checkpoint_, targets_,
                     {options_.verify, ReadThreads(options_.threads, agreed_->ranks_here),
                      collective_.rank() % agreed_->ranks_here, agreed_->ranks_here,
                      agreed_->ranks_here == collective_.size(), control_.cancel,
                      [this](std::uint64_t bytes) { CountRead(bytes); }}));
    direct_bytes_ = read.bytes;
    report_.peak_buffer_bytes = read.peak_buffer_bytes;
    TENSORMOUNT_RETURN_IF_ERROR(writer_->Finish());
    TENSORMOUNT_RETURN_IF_ERROR(CheckArrived(targets_, false, devices_));
    TENSORMOUNT_RETURN_IF_ERROR(CheckCancelled());
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonState common, index.Common());
    report_.common_values = std::move(common.values);
    report_.rank_common_values = std::move(common.ranks);
    report_.content_metadata = std::move(common.content);
    return ReadObjects();
  }

  Status ReadObjects() {
    const std::vector<FileRecord>& files = checkpoint_->index().files();
    for (const ResolvedObject& object : agreed_->resolved->objects) {
      const ObjectRecord& part = object.part;
      // Lengths were checked against the file when the checkpoint was published, but the index may
      // have been rebuilt since.
      if (part.file >= files.size() || part.length > files[part.file].length) {
        return Status(Code::kDataLoss,
                      "object " + object.key + ": its bytes reach past the end of its data file");
      }
      std::string bytes;
      bytes.resize(static_cast<std::size_t>(part.length));
      TENSORMOUNT_RETURN_IF_ERROR(checkpoint_->ReadObject(part, 0, bytes.data(), bytes.size()));
      report_.objects[{object.key, object.requested_index.ToString()}] = std::move(bytes);
    }
    return {};
  }

  Status Exchange() {
    const LoadPlan& plan = agreed_->plan;
    const bool any = std::any_of(plan.tensors.begin(), plan.tensors.end(),
                                 [](const PlannedTensor& tensor) { return tensor.exchange; });
    if (!any) return {};
    return events_.Run("exchange", &report_.read_seconds, [&](std::uint64_t* bytes) -> Status {
      const std::uint64_t before = report_.bytes_read + report_.bytes_received;
      // A cancelled rank continues to send until all ranks know of the cancellation. Waits for
      // devices are short, because a waiting rank cannot answer the others.
      DeviceLimits waits = devices_;
      waits.cancel = nullptr;
      waits.patience = std::min(devices_.patience, options_.timeouts.liveness);
      const ExchangeRules rules{
          .verify = options_.verify,
          .via = options_.exchange_via,
          .device = meeting_.on_devices ? CommonDevice(request_) : std::nullopt,
          .min_device_exchange_bytes = control_.min_device_exchange_bytes,
          .threads = ReadThreads(options_.threads, agreed_->ranks_here),
          .devices = waits,
          .patience = devices_.patience};
      writer_->IgnoreCancellation(waits.patience);
      const Status status =
          LoadByExchange(*checkpoint_, collective_, plan, targets_, *writer_, rules, report_,
                         [&](std::uint64_t read) { CountRead(read); });
      *bytes = report_.bytes_read + report_.bytes_received - before;
      return status;
    });
  }

  // ---- Prove ----

  Status Prove(std::uint64_t* bytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        proved_, ProveByDigest(collective_, *checkpoint_, agreed_->plan, targets_, devices_,
                               unproved_, [&](std::uint64_t read) {
                                 report_.bytes_read += read;
                                 CountRead(read);
                               }));
    for (const LoadTarget& target : targets_) {
      if (IsProved(target)) *bytes += target.bytes;
    }
    return {};
  }

  bool IsProved(const LoadTarget& target) const {
    return !proved_.empty() &&
           proved_[static_cast<std::size_t>(target.tensor - agreed_->plan.tensors.data())];
  }

  void FillReport() {
    for (const LoadTarget& target : targets_) {
      report_.bytes_wanted += target.bytes;
      report_.bytes_by_leaf += target.stats.bytes_by_leaf;
      const std::uint64_t rest = target.bytes - target.stats.bytes_by_leaf;
      (IsProved(target) ? report_.bytes_by_digest : report_.bytes_unverified) += rest;
      report_.bytes_read += target.stats.bytes_read;
    }
    const ResolvedRequest& resolved = *agreed_->resolved;
    report_.skipped = resolved.skipped;
    for (const ResolvedItem& item : resolved.items) {
      const std::string& key = request_.tensors()[item.item].key;
      for (const Box& box : item.uncovered) report_.uncovered.push_back({key, box, item.zero});
      if (item.convert) report_.converted.push_back(key);
    }
    std::sort(report_.converted.begin(), report_.converted.end());
    report_.converted.erase(std::unique(report_.converted.begin(), report_.converted.end()),
                            report_.converted.end());
    report_.locals = request_.locals();
  }

  FileSystem* const fs_;  // Null: the path decides which file system is used.
  const StateDict& request_;
  const std::string path_;
  const LoadOptions& options_;
  Communicator& comm_;
  const LoadControl control_;
  Collective collective_;
  PhaseEvents events_;
  std::shared_ptr<const OpenedCheckpoint> checkpoint_;
  Status opened_;  // The status of Open on this rank.
  Status fenced_;  // The status of FencesAtCall on this rank.
  std::shared_ptr<const DeviceFences> fences_;
  DeviceLimits devices_;
  std::optional<DeviceWriter> writer_;
  Hash128 identity_;
  std::shared_ptr<const AgreedPlan> agreed_;
  MeetingResult meeting_;
  std::vector<LoadTarget> targets_;  // This rank's targets that are not empty, in file order.
  std::string unproved_;             // The result of UnprovedByAny.
  std::vector<bool> proved_;         // By position of the tensor in the plan.
  std::uint64_t direct_bytes_ = 0;
  LoadReport report_;
};

}  // namespace

Result<LoadReport> LoadOn(FileSystem& fs, const StateDict& request, std::string_view path,
                          Communicator& comm, const LoadOptions& options,
                          const LoadControl& control) {
  return RunJob<LoadJob>(&fs, request, path, comm, options, control);
}

Result<LoadReport> Load(const StateDict& request, std::string_view path, Communicator& comm,
                        const LoadOptions& options, const LoadControl& control) {
  return RunJob<LoadJob>(nullptr, request, path, comm, options, control);
}

Result<LoadReport> Load(const StateDict& request, std::string_view path, Communicator& comm,
                        const LoadOptions& options) {
  return Load(request, path, comm, options, {});
}

}  // namespace tensormount
