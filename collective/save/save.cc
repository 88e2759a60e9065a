// SPDX-License-Identifier: Apache-2.0
#include "tensormount/save.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/log.h"
#include "collective/comm/collective.h"
#include "collective/guarded.h"
#include "collective/save/data_writer.h"
#include "collective/save/replica_check.h"
#include "collective/save/save_plan.h"
#include "collective/save_load.h"
#include "collective/validate/descriptor.h"
#include "collective/validate/layout_check.h"
#include "index/manifest.h"
#include "index/record_coding.h"
#include "index/store.h"
#include "index/store_layout.h"
#include "state/common_records.h"

namespace tensormount {
namespace {

constexpr std::string_view kDefaultProducer = "tensormount 0.1";
constexpr std::size_t kMaxText = std::size_t{1} << 16;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Status FromRank(int rank, const Status& status) {
  return status.WithContext("rank " + std::to_string(rank));
}

// What befell rank 0's machine is told as its own; what is so on every machine is not.
Status OfRankZero(const Status& status) {
  const bool machine = status.code() == Code::kResourceExhausted ||
                       status.code() == Code::kPermissionDenied || status.code() == Code::kReadOnly;
  return machine ? FromRank(0, status) : status;
}

std::string EncodeStaging(const Status& status, const Staging& staging) {
  ByteWriter out;
  WriteStatus(out, status);
  if (!status.ok()) return std::move(out.bytes());
  out.String(staging.store);
  out.String(staging.directory);
  out.String(staging.name);
  out.U64(staging.uuid.high);
  out.U64(staging.uuid.low);
  out.U64(staging.generation);
  out.U64(staging.parent.high);
  out.U64(staging.parent.low);
  out.String(staging.parent_name);
  return std::move(out.bytes());
}

Result<Staging> DecodeStaging(std::string_view bytes) {
  ByteReader in(bytes, "staging that rank 0 sent");
  TENSORMOUNT_RETURN_IF_ERROR(ReadStatus(in));
  Staging staging;
  staging.store = in.String(kMaxText);
  staging.directory = in.String(kMaxText);
  staging.name = in.String(kMaxText);
  staging.uuid.high = in.U64();
  staging.uuid.low = in.U64();
  staging.generation = in.U64();
  staging.parent.high = in.U64();
  staging.parent.low = in.U64();
  staging.parent_name = in.String(kMaxText);
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return staging;
}

// What a rank tells rank 0 when its data and its manifest are durable.
struct WriterReport {
  Status status;
  std::uint64_t bytes = 0;
  std::uint64_t manifest_bytes = 0;
  std::vector<Hash128> replicas;
  std::vector<std::pair<std::string, std::string>> common;  // That this rank is the first to set.
};

std::string EncodeReport(const WriterReport& report) {
  ByteWriter out;
  WriteStatus(out, report.status);
  if (!report.status.ok()) return std::move(out.bytes());
  out.U64(report.bytes);
  out.U64(report.manifest_bytes);
  out.U64(report.replicas.size());
  for (const Hash128& h : report.replicas) out.Hash(h);
  out.U32(static_cast<std::uint32_t>(report.common.size()));
  for (const auto& [name, value] : report.common) {
    out.String(name);
    out.String(value);
  }
  return std::move(out.bytes());
}

Result<WriterReport> DecodeReport(std::string_view bytes) {
  ByteReader in(bytes, "report");
  WriterReport report;
  report.status = ReadStatus(in);
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (!report.status.ok()) return report;
  report.bytes = in.U64();
  report.manifest_bytes = in.U64();
  const std::uint64_t hashes = in.U64();
  if (hashes > in.left() / sizeof(Hash128)) {
    return Status(Code::kDataLoss, "report: more hashes are announced than there are bytes");
  }
  for (std::uint64_t i = 0; i < hashes; ++i) report.replicas.push_back(in.Hash());
  const std::uint32_t values = in.U32();
  for (std::uint32_t i = 0; i < values && in.status().ok(); ++i) {
    std::string name(in.String(kMaxKeyBytes));
    report.common.emplace_back(std::move(name), in.String(in.left()));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return report;
}

// One save on one rank. Collective calls are made in Run and Commit only, and every rank makes the
// same ones; what rank 0 decides travels as data, so that a failed call always means that ranks
// could not be reached, and then the store is asked (Settle).
class SaveSession {
 public:
  SaveSession(FileSystem& fs, const StateDict& state, std::string_view path, Communicator& comm,
              const SaveOptions& options)
      : fs_(fs),
        state_(state),
        path_(path),
        options_(options),
        collective_(comm, options.timeouts),
        rank_(comm.rank()),
        world_(comm.size()) {
    while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  }

  Result<SaveReport> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(Validate());
    Result<std::string> told = collective_.Broadcast(Begin(), "begin");
    if (!told.ok()) {
      // Only rank 0 may have made a staging by now.
      return begun_ ? Settle(told.status()) : told.status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(staging_, DecodeStaging(told.value()));
    begun_ = true;
    const auto start = std::chrono::steady_clock::now();
    const Status written = Guarded([&] { return Write(); });
    report_.write_seconds = SecondsSince(start);
    return Commit(written);
  }

 private:
  // The same failure on every rank, or nothing; no rank waits for another after the exchange.
  Status Validate() {
    const auto start = std::chrono::steady_clock::now();
    std::string mine;
    const Status described = Guarded([&]() -> Status {
      mine = EncodeDescriptor(state_, path_, options_, rank_, world_);
      return {};
    });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(described, "describe"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                                 collective_.AllGather(mine, "validate"));
    const Status status = Guarded([&]() -> Status {
      std::vector<RankDescriptor> ranks;
      for (int r = 0; r < world_; ++r) {
        TENSORMOUNT_ASSIGN_OR_RETURN(RankDescriptor d,
                                     DecodeDescriptor(all[static_cast<std::size_t>(r)], r, world_));
        ranks.push_back(std::move(d));
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(layout_, CheckLayout(ranks));
      TENSORMOUNT_ASSIGN_OR_RETURN(plan_, PlanSave(layout_, options_.placement));
      const std::size_t slash = path_.rfind('/');
      if (slash == std::string::npos) {
        return Status(Code::kInvalidArgument, "save to " + path_ + ": want STORE/NAME");
      }
      store_path_ = slash == 0 ? "/" : path_.substr(0, slash);
      name_ = path_.substr(slash + 1);
      return CheckCheckpointName(name_);
    });
    report_.validate_seconds = SecondsSince(start);
    report_.path = path_;
    report_.tensors = layout_.tensors.size();
    report_.bytes = layout_.tensor_bytes;
    report_.replica_bytes = layout_.replica_bytes;
    return status;
  }

  // On rank 0: claims the name. What happened, for all ranks.
  Result<std::string> Begin() {
    if (rank_ != 0) return std::string();
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::OpenOrCreate(fs_, store_path_));
      TENSORMOUNT_ASSIGN_OR_RETURN(staging_, store.Begin(name_, options_.if_exists));
      begun_ = true;
      return Status();
    });
    return EncodeStaging(OfRankZero(status), staging_);
  }

  // This rank's data and manifest, durable, and the hashes of its replicas.
  Status Write() {
    TENSORMOUNT_ASSIGN_OR_RETURN(WrittenData data, WriteData(fs_, staging_, state_, layout_, plan_,
                                                             rank_, options_.progress));
    mine_.bytes = data.bytes;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest,
                                 EncodeManifest(data.content, data.leaves));
    mine_.manifest_bytes = manifest.size();
    TENSORMOUNT_RETURN_IF_ERROR(
        fs_.WriteFileDurably(JoinPath(staging_.directory, ManifestName(rank_)), manifest));
    const std::vector<ReplicaBlock> blocks =
        PlanReplicaCheck(layout_, options_.replicas, staging_.generation);
    report_.replica_bytes_compared = ComparedBytes(blocks);
    TENSORMOUNT_ASSIGN_OR_RETURN(mine_.replicas, HashReplicas(layout_, blocks, state_, rank_));
    return CollectCommon();
  }

  // The common records that rank 0 gets from this rank.
  Status CollectCommon() {
    const auto send = [&](const std::string& name, const CommonValue& value) {
      ByteWriter encoded;
      EncodeCommon(encoded, value);
      mine_.common.emplace_back(name, std::move(encoded.bytes()));
    };
    const CommonValues shared = SharedCommonRecords(state_);
    for (const LayoutCommon& common : layout_.common) {
      if (common.rank == rank_) send(common.name, shared.at(common.name));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto own, RankCommonRecord(state_, rank_));
    if (own.has_value()) send(own->first, own->second);
    return Status();
  }

  Result<SaveReport> Commit(const Status& written) {
    // Shared files are sealed only when nobody writes them any more.
    ByteWriter mine;
    WriteStatus(mine, written);
    const auto start = std::chrono::steady_clock::now();
    Result<std::vector<std::string>> all = collective_.AllGather(mine.bytes(), "write");
    if (!all.ok()) return Settle(all.status());
    if (Status failure = LowestFailure(all.value()); !failure.ok()) {
      if (rank_ == 0) Discard();
      return failure;
    }
    mine_.status = Guarded([&] { return SealShared(fs_, staging_, plan_, rank_); });
    Result<std::vector<std::string>> reports = collective_.Gather(EncodeReport(mine_), "report");
    if (!reports.ok()) return Settle(reports.status());

    Status verdict;
    std::uint64_t bytes_written = 0;
    if (rank_ == 0) {
      verdict = Guarded([&] { return Publish(reports.value(), &bytes_written); });
      if (!verdict.ok() && verdict.code() != Code::kUnknown) verdict = Abort(verdict);
    }
    ByteWriter out;
    WriteStatus(out, verdict);
    out.U64(bytes_written);
    Result<std::string> told = collective_.Broadcast(std::move(out.bytes()), "publish");
    report_.publish_seconds = SecondsSince(start);
    if (!told.ok()) {
      // Rank 0 knows already.
      if (rank_ == 0 && !verdict.ok()) return verdict;
      return Settle(told.status());
    }
    ByteReader in(told.value(), "verdict that rank 0 sent");
    verdict = ReadStatus(in);
    report_.bytes_written = in.U64();
    if (Status status = in.Finish(); verdict.ok() && !status.ok()) return Settle(status);
    if (!verdict.ok()) {
      if (rank_ == 0 && verdict.code() != Code::kUnknown) RemoveAborted();
      return verdict;
    }
    return Committed();
  }

  Status LowestFailure(const std::vector<std::string>& all) const {
    Status first;
    int failed = 0;
    for (std::size_t r = 0; r < all.size(); ++r) {
      ByteReader in(all[r], "outcome of a rank");
      const Status status = ReadStatus(in);
      if (status.ok() && in.status().ok()) continue;
      if (failed++ == 0) {
        first = FromRank(static_cast<int>(r), status.ok() ? in.status() : status);
      }
    }
    if (failed < 2) return first;
    return Status::FromParts(
        first.code(), first.ToErrno(),
        first.message() + " (and " + std::to_string(failed - 1) + " more ranks failed)");
  }

  // On rank 0.
  Status Publish(const std::vector<std::string>& reports, std::uint64_t* bytes_written) {
    Content coordinator;
    coordinator.info.producer =
        options_.producer.empty() ? std::string(kDefaultProducer) : options_.producer;
    coordinator.info.world_size = static_cast<std::uint32_t>(world_);
    std::vector<std::vector<Hash128>> replicas;
    for (int r = 0; r < world_; ++r) {
      Result<WriterReport> decoded = DecodeReport(reports[static_cast<std::size_t>(r)]);
      if (!decoded.ok()) return FromRank(r, decoded.status());
      WriterReport& report = decoded.value();
      if (!report.status.ok()) return FromRank(r, report.status);
      *bytes_written += report.bytes;
      replicas.push_back(std::move(report.replicas));
      for (const auto& [name, encoded] : report.common) {
        ByteReader in(encoded, "common value");
        TENSORMOUNT_ASSIGN_OR_RETURN(coordinator.common[name], DecodeCommon(in, "common value"));
        TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
      }
      // A manifest that this machine does not see (yet) would be a checkpoint without its objects.
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info,
                                   fs_.Stat(JoinPath(staging_.directory, ManifestName(r))));
      if (info.size != report.manifest_bytes) {
        return Status(Code::kDataLoss, ManifestName(r) + ": " + std::to_string(info.size) +
                                           " bytes are seen of the " +
                                           std::to_string(report.manifest_bytes) + " that rank " +
                                           std::to_string(r) + " wrote");
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(CompareReplicas(
        layout_, PlanReplicaCheck(layout_, options_.replicas, staging_.generation), replicas));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs_, staging_.store));
    Store::PublishOptions publish;
    publish.if_exists = options_.if_exists;
    publish.now = options_.now;
    return OfRankZero(store.Publish(staging_, coordinator, publish).status());
  }

  // ---- How it ends ----

  SaveReport Committed() {
    report_.uuid = staging_.uuid.ToString();
    report_.generation = staging_.generation;
    report_.bytes_written_here = mine_.bytes;
    if (report_.bytes_written == 0) report_.bytes_written = mine_.bytes;
    return std::move(report_);
  }

  // On rank 0 after `failure`: sees to it that the staging is never published. The verdict for all.
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
    // Others may still have to ask where that uuid is, so its entry stays for gc.
    EmptyAborted();
    return failure;
  }

  Result<Verdict> AskStore() {
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

  // All ranks know that it failed: nothing is left behind.
  void Discard() {
    if (Result<Verdict> verdict = AskStore(); !verdict.ok()) {
      Log(LogLevel::kWarning, "save " + path_ + ": " + staging_.directory +
                                  " could not be aborted: " + verdict.status().message());
      return;
    }
    RemoveAborted();
  }

  std::string TrashEntry() const {
    return JoinPath(JoinPath(staging_.store, layout::kTrashFolder),
                    staging_.uuid.ToString() + std::string(layout::kAbortedSuffix));
  }
  // Best effort; gc removes what this could not.
  void RemoveAborted() {
    const std::string entry = TrashEntry();
    (void)fs_.RemoveTree(entry);  // Best effort.
    (void)fs_.RemoveFile(entry + std::string(layout::kSinceSuffix));
  }
  void EmptyAborted() {
    const std::string entry = TrashEntry();
    for (const char* folder : {"data", "manifest", "index"}) {
      (void)fs_.RemoveTree(JoinPath(entry, folder));  // Best effort.
    }
  }

  FileSystem& fs_;
  const StateDict& state_;
  std::string path_;
  const SaveOptions& options_;
  Collective collective_;
  const int rank_;
  const int world_;
  std::string store_path_;
  std::string name_;
  GlobalLayout layout_;
  SavePlan plan_;
  Staging staging_;
  bool begun_ = false;  // staging_ is set.
  WriterReport mine_;
  SaveReport report_;
};

}  // namespace

Result<SaveReport> SaveOn(FileSystem& fs, const StateDict& state, std::string_view path,
                          Communicator& comm, const SaveOptions& options,
                          const SaveControl& control) {
  (void)control;
  return SaveSession(fs, state, path, comm, options).Run();
}

Result<SaveReport> Save(const StateDict& state, std::string_view path, Communicator& comm,
                        const SaveOptions& options) {
  return SaveOn(HostFileSystem(), state, path, comm, options);
}

}  // namespace tensormount
