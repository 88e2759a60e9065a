// SPDX-License-Identifier: Apache-2.0
#include "tensormount/load.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "base/coding.h"
#include "base/file_system.h"
#include "base/log.h"
#include "collective/comm/collective.h"
#include "collective/guarded.h"
#include "collective/load/digest_proof.h"
#include "collective/load/exchange_load.h"
#include "collective/load/load_plan.h"
#include "collective/save_load.h"
#include "index/store.h"

namespace tensormount {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenResolved(FileSystem& fs, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  if (info.kind == FileKind::kFile) return OpenedCheckpoint::OpenSafetensors(fs, path);
  return OpenedCheckpoint::Open(fs, path, {});
}

// What must be the same on all ranks: not some other checkpoint of this name on another node.
std::string Identity(const OpenedCheckpoint& checkpoint) {
  ByteWriter out;
  if (const DecodedCommit* commit = checkpoint.commit()) {
    out.String(commit->record.uuid.ToString());
    out.Hash(commit->record.content_root);
    return std::move(out.bytes());
  }
  const CheckpointIndex& index = checkpoint.index();
  for (const FileRecord& file : index.files()) out.U64(file.length);
  out.U64(index.tensor_count());
  out.U64(index.tensor_bytes());
  return std::move(out.bytes());
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
  LoadJob(FileSystem& fs, const StateDict& request, Communicator& comm, const LoadOptions& options)
      : fs_(fs), request_(request), options_(options), collective_(comm, options.timeouts) {}

  Result<LoadReport> Run(std::string_view path) {
    TENSORMOUNT_RETURN_IF_ERROR(Open(path));
    TENSORMOUNT_RETURN_IF_ERROR(Plan(path));
    TENSORMOUNT_RETURN_IF_ERROR(ActOn(options_.not_stored, plan_.not_stored, Code::kNotFound,
                                      "asked for, but not stored: ", report_.not_stored));
    TENSORMOUNT_RETURN_IF_ERROR(ActOn(options_.not_requested, plan_.not_requested,
                                      Code::kInvalidArgument,
                                      "stored, but asked for by no rank: ", report_.not_requested));
    const auto read_start = std::chrono::steady_clock::now();
    TENSORMOUNT_RETURN_IF_ERROR(
        collective_.Agree(Guarded([&] { return ReadAll(); }), "load: read"));
    TENSORMOUNT_RETURN_IF_ERROR(LoadByExchange(fs_, *checkpoint_, collective_, plan_.tensors,
                                               targets_, options_.verify, &report_.bytes_read,
                                               &report_.bytes_received, options_.progress));
    report_.read_seconds = SecondsSince(read_start);
    if (options_.before_proof != nullptr) options_.before_proof(collective_.rank());
    const auto proof_start = std::chrono::steady_clock::now();
    TENSORMOUNT_RETURN_IF_ERROR(Prove());
    report_.proof_seconds = SecondsSince(proof_start);
    for (const LoadTarget& target : targets_) {
      report_.bytes_wanted += target.bytes;
      report_.bytes_by_leaf += target.stats.bytes_by_leaf;
      const std::uint64_t rest = target.bytes - target.stats.bytes_by_leaf;
      (IsProved(target) ? report_.bytes_by_digest : report_.bytes_unverified) += rest;
      report_.bytes_read += target.stats.bytes_read;
    }
    return std::move(report_);
  }

 private:
  Status Open(std::string_view path) {
    Result<std::string> where = std::string();
    if (collective_.rank() == 0) {
      const Status opened = Guarded([&] {
        where = OpenFirst(path);
        return where.status();
      });
      if (!opened.ok()) where = opened;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string told,
                                 collective_.Broadcast(where, "load: open"));
    return collective_.Agree(Guarded([&] { return OpenAsTold(told); }), "load: open");
  }

  // Rank 0: opens and says what was opened.
  Result<std::string> OpenFirst(std::string_view path) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string resolved, ResolveSourcePath(fs_, path));
    TENSORMOUNT_ASSIGN_OR_RETURN(checkpoint_, OpenResolved(fs_, resolved));
    for (const std::string& warning : checkpoint_->warnings()) {
      Log(LogLevel::kWarning, resolved + ": " + warning);
    }
    ByteWriter out;
    out.String(resolved);
    out.String(checkpoint_->index().info().uuid.ToString());
    out.String(Identity(*checkpoint_));
    return std::move(out.bytes());
  }

  Status OpenAsTold(std::string_view told) {
    TENSORMOUNT_RETURN_IF_ERROR(request_.status());
    ByteReader in(told, "load: what rank 0 opened");
    const std::string path(in.String(64 * 1024));
    report_.uuid = in.String(64);
    const std::string identity(in.String(1u << 20));
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    if (checkpoint_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(checkpoint_, OpenResolved(fs_, path));
    }
    if (Identity(*checkpoint_) != identity) {
      return Status(Code::kStale, path + " is another checkpoint here than on rank 0");
    }
    return {};
  }

  Status Plan(std::string_view path) {
    std::string mine;
    const Status described = Guarded([&]() -> Status {
      mine = EncodeLoadRequest(request_, path, options_, collective_.rank(), collective_.size());
      return {};
    });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(described, "load: requests"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> gathered,
                                 collective_.AllGather(mine, "load: requests"));
    TENSORMOUNT_RETURN_IF_ERROR(
        collective_.Agree(Guarded([&] { return MakePlan(gathered); }), "load: plan"));
    return plan_.refusal;
  }

  Status MakePlan(const std::vector<std::string>& gathered) {
    std::vector<RankDescriptor> requests;
    for (std::size_t rank = 0; rank < gathered.size(); ++rank) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          RankDescriptor request,
          DecodeDescriptor(gathered[rank], static_cast<int>(rank), collective_.size()));
      TENSORMOUNT_RETURN_IF_ERROR(request.status);
      requests.push_back(std::move(request));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(plan_, MakeLoadPlan(checkpoint_->index(), requests, options_));
    if (!plan_.refusal.ok()) return {};
    for (const PlannedTensor& tensor : plan_.tensors) {
      for (std::uint32_t w = 0; w < tensor.wants.size(); ++w) {
        const LoadWant& want = tensor.wants[w];
        if (want.rank != collective_.rank()) continue;
        const TensorMeta& meta = tensor.entry.meta;
        const Shard& shard = request_.tensors()[want.item].shard;
        LoadTarget target;
        target.tensor = &tensor;
        target.want = w;
        target.base = static_cast<std::byte*>(shard.data.data);
        TENSORMOUNT_ASSIGN_OR_RETURN(
            target.placed, PlaceBuffer(shard.data, meta.dtype(), meta.shape(), shard.region));
        TENSORMOUNT_ASSIGN_OR_RETURN(target.bytes,
                                     RegionBytes(meta.dtype(), meta.shape(), shard.region));
        targets_.push_back(std::move(target));
      }
    }
    return {};
  }

  // What the options say about keys on one side only. The lists are the same on every rank, and so
  // is the verdict.
  Status ActOn(Strict action, std::vector<std::string>& keys, Code code, const char* what,
               std::vector<std::string>& reported) {
    if (keys.empty()) return {};
    switch (action) {
      case Strict::kRaise:
        return Status(code, what + ListKeys(keys));
      case Strict::kLog:
        if (collective_.rank() == 0) {
          Log(LogLevel::kWarning, checkpoint_->directory() + ": " + what + ListKeys(keys));
        }
        return {};
      case Strict::kReturn:
        reported = std::move(keys);
        return {};
      case Strict::kIgnore:
        return {};
    }
    return {};
  }

  void CountRead(std::uint64_t bytes) {
    if (options_.progress == nullptr) return;
    options_.progress->fetch_add(bytes, std::memory_order_relaxed);
  }

  // Everything that this rank reads for itself alone.
  Status ReadAll() {
    const CheckpointIndex& index = checkpoint_->index();
    for (LoadTarget& target : targets_) {
      if (target.tensor->exchange) continue;
      const LoadWant& want = target.tensor->wants[target.want];
      TENSORMOUNT_ASSIGN_OR_RETURN(
          target.verify, ChooseReadVerify(index, *target.tensor, want.region, options_.verify));
      const BufferView& view = request_.tensors()[want.item].shard.data;
      TENSORMOUNT_RETURN_IF_ERROR(checkpoint_->Read(target.tensor->entry, want.region, view,
                                                    target.verify, &target.stats, nullptr));
      CountRead(target.stats.bytes_read);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonState common, index.Common());
    report_.common_values = std::move(common.values);
    report_.rank_common_values = std::move(common.ranks);
    report_.content_metadata = std::move(common.content);
    report_.locals = request_.locals();
    return ReadObjects();
  }

  Status ReadObjects() {
    for (const StateDict::ObjectItem& want : request_.objects()) {
      Result<std::vector<ObjectContent>> parts = checkpoint_->index().ObjectParts(want.key);
      if (!parts.ok() && parts.status().code() == Code::kNotFound) continue;
      if (!parts.ok()) return parts.status();
      for (const ObjectContent& part : parts.value()) {
        if (!(part.index == want.place.index)) continue;
        std::string bytes;
        // Lengths were checked against the file when the checkpoint was published, but the index
        // may have been rebuilt since.
        if (part.file >= checkpoint_->index().files().size() ||
            part.length > checkpoint_->index().files()[part.file].length) {
          return Status(Code::kDataLoss, "object " + want.key + ": longer than its file");
        }
        bytes.resize(static_cast<std::size_t>(part.length));
        TENSORMOUNT_RETURN_IF_ERROR(checkpoint_->ReadObject(part, 0, bytes.data(), bytes.size()));
        report_.objects[{want.key, part.index.ToString()}] = std::move(bytes);
      }
    }
    return {};
  }

  std::size_t PositionOf(const LoadTarget& target) const {
    return static_cast<std::size_t>(target.tensor - plan_.tensors.data());
  }
  bool IsProved(const LoadTarget& target) const {
    return !proving_.empty() && proving_[PositionOf(target)];
  }

  // Proves by digest, over what stands in the buffers now, every tensor of which some rank has
  // bytes that no leaf proved.
  Status Prove() {
    if (options_.verify != LoadVerify::kAuto) return {};
    TENSORMOUNT_RETURN_IF_ERROR(FindUnproved());
    if (std::none_of(proving_.begin(), proving_.end(), [](bool b) { return b; })) return {};

    const Status failure = Guarded([&] { return Contribute(); });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(failure, "load: prove"));
    std::vector<std::uint64_t> expected;
    std::vector<std::uint64_t> mine;
    std::vector<std::size_t> tensors;
    bool any_replicas = false;
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      if (!proving_[t]) continue;
      tensors.push_back(t);
      expected.push_back(plan_.tensors[t].entry.digest);
      mine.push_back(contribution_[t]);
      any_replicas = any_replicas || !plan_.tensors[t].proof.replicas.empty();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> found,
                                 collective_.AllReduceXor(mine, "load: prove"));
    std::vector<bool> damaged(plan_.tensors.size(), false);
    bool any_damage = false;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (found[i] == expected[i]) continue;
      damaged[tensors[i]] = any_damage = true;
    }
    if (any_replicas) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool differ, CompareReplicas(damaged));
      any_damage = any_damage || differ;
    }
    if (!any_damage) return {};
    return Diagnose(damaged);
  }

  // Sets proving_: the same on every rank.
  Status FindUnproved() {
    std::string bits((plan_.tensors.size() + 7) / 8, '\0');
    for (const LoadTarget& target : targets_) {
      const std::size_t t = PositionOf(target);
      if (target.tensor->proof.possible && target.stats.bytes_by_leaf < target.bytes) {
        bits[t / 8] = static_cast<char>(bits[t / 8] | (1 << (t % 8)));
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                                 collective_.AllGather(bits, "load: prove"));
    proving_.assign(plan_.tensors.size(), false);
    for (const std::string& of_rank : all) {
      if (of_rank.size() != bits.size()) {
        return Status(Code::kInternal, "ranks do not agree on the plan of a load");
      }
      for (std::size_t t = 0; t < proving_.size(); ++t) {
        if (((static_cast<unsigned char>(of_rank[t / 8]) >> (t % 8)) & 1) != 0) proving_[t] = true;
      }
    }
    return {};
  }

  Status Contribute() {
    contribution_.assign(plan_.tensors.size(), 0);
    for (LoadTarget& target : targets_) {
      const std::size_t t = PositionOf(target);
      if (!proving_[t]) continue;
      const Crc64 digest = DigestOfBuffer(target.tensor->entry.meta, target.placed, target.base);
      target_digest_[{t, target.want}] = digest;
      const ProofPlan& proof = target.tensor->proof;
      if (std::binary_search(proof.contributors.begin(), proof.contributors.end(), target.want)) {
        contribution_[t] ^= digest;
      }
    }
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      const PlannedTensor& tensor = plan_.tensors[t];
      if (!proving_[t] || tensor.proof.completed.empty()) continue;
      if (tensor.proof.completer != collective_.rank()) continue;
      ReadStats stats;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const Crc64 digest,
          DigestFromStorage(*checkpoint_, tensor.entry, tensor.proof.completed, &stats));
      contribution_[t] ^= digest;
      report_.bytes_read += stats.bytes_read;
      CountRead(stats.bytes_read);
    }
    return {};
  }

  // Holders of the same region must hold the same bytes: only one of them was counted above.
  Result<bool> CompareReplicas(std::vector<bool>& damaged) {
    ByteWriter mine;
    ForEachReplicaHolder([&](std::size_t t, std::uint32_t want) {
      if (plan_.tensors[t].wants[want].rank == collective_.rank()) {
        mine.U64(target_digest_.at({t, want}));
      }
    });
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                                 collective_.AllGather(mine.bytes(), "load: compare replicas"));
    std::vector<std::size_t> next(all.size(), 0);
    std::map<std::pair<std::size_t, std::uint32_t>, Crc64> digests;
    bool complete = true;
    ForEachReplicaHolder([&](std::size_t t, std::uint32_t want) {
      const auto rank = static_cast<std::size_t>(plan_.tensors[t].wants[want].rank);
      if (all[rank].size() < (next[rank] + 1) * 8) {
        complete = false;
        return;
      }
      digests[{t, want}] = LoadLittle<std::uint64_t>(all[rank].data() + 8 * next[rank]++);
    });
    if (!complete) return Status(Code::kInternal, "ranks do not agree on the plan of a load");
    bool differ = false;
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      if (!proving_[t]) continue;
      for (const ProofPlan::Replica& replica : plan_.tensors[t].proof.replicas) {
        if (digests[{t, replica.want}] == digests[{t, replica.contributor}]) continue;
        damaged[t] = differ = true;
      }
    }
    return differ;
  }

  // Every want that has replicas, or is one, once, in an order that all ranks know.
  template <typename Fn>
  void ForEachReplicaHolder(Fn fn) const {
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      if (!proving_[t]) continue;
      std::vector<std::uint32_t> holders;
      for (const ProofPlan::Replica& replica : plan_.tensors[t].proof.replicas) {
        holders.push_back(replica.want);
        holders.push_back(replica.contributor);
      }
      std::sort(holders.begin(), holders.end());
      holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
      for (const std::uint32_t want : holders) fn(t, want);
    }
  }

  // Reads damaged tensors again by whole leaves, so that what is wrong has a name.
  Status Diagnose(const std::vector<bool>& damaged) {
    Status mine;
    std::string first;
    for (std::size_t t = 0; t < damaged.size(); ++t) {
      if (damaged[t] && first.empty()) first = plan_.tensors[t].entry.meta.key();
    }
    for (const LoadTarget& target : targets_) {
      if (!damaged[PositionOf(target)] || !mine.ok()) continue;
      mine = FindDamage(*checkpoint_, target.tensor->entry,
                        target.tensor->wants[target.want].region, target.placed, target.base);
    }
    for (std::size_t t = 0; t < damaged.size() && mine.ok(); ++t) {
      const PlannedTensor& tensor = plan_.tensors[t];
      if (!damaged[t] || tensor.proof.completer != collective_.rank()) continue;
      for (const Box& box : tensor.proof.completed) {
        if (mine.ok()) mine = FindDamage(*checkpoint_, tensor.entry, box, {}, nullptr);
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "load: find the damage"));
    return Status(Code::kDataLoss,
                  "tensor " + first +
                      ": the digest of what was loaded differs from the stored one, though every "
                      "leaf that was read again is as it was written");
  }

  FileSystem& fs_;
  const StateDict& request_;
  const LoadOptions& options_;
  Collective collective_;
  std::shared_ptr<OpenedCheckpoint> checkpoint_;
  LoadPlan plan_;
  std::vector<LoadTarget> targets_;  // In file order; not the empty ones.
  std::vector<bool> proving_;        // By position in the plan: proved by digest.
  std::vector<Crc64> contribution_;  // Of this rank, likewise.
  std::map<std::pair<std::size_t, std::uint32_t>, Crc64> target_digest_;  // (position, want).
  LoadReport report_;
};

}  // namespace

Result<std::string> LoadReport::object(std::string_view key, const Dims& index) const {
  const auto found = objects.find({std::string(key), index.ToString()});
  if (found == objects.end()) {
    return Status(Code::kNotFound,
                  "object " + std::string(key) +
                      (index.rank() == 0 ? std::string() : " " + index.ToString()) +
                      " was not asked for or is not stored");
  }
  return found->second;
}

Result<CommonValue> LoadReport::common(std::string_view name) const {
  const auto found = common_values.find(std::string(name));
  if (found == common_values.end()) {
    return Status(Code::kNotFound, "no common value " + std::string(name));
  }
  return found->second;
}

Result<CommonValue> LoadReport::rank_common(int rank, std::string_view name) const {
  if (const auto of_rank = rank_common_values.find(rank); of_rank != rank_common_values.end()) {
    const auto found = of_rank->second.find(std::string(name));
    if (found != of_rank->second.end()) return found->second;
  }
  return Status(Code::kNotFound,
                "no common value " + std::string(name) + " of rank " + std::to_string(rank));
}

Result<CommonValue> LoadReport::local(std::string_view name) const {
  const auto found = locals.find(std::string(name));
  if (found == locals.end()) {
    return Status(Code::kNotFound, "the request had no local value " + std::string(name));
  }
  return found->second;
}

Result<LoadReport> LoadOn(FileSystem& fs, const StateDict& request, std::string_view path,
                          Communicator& comm, const LoadOptions& options) {
  return LoadJob(fs, request, comm, options).Run(path);
}

Result<LoadReport> Load(const StateDict& request, std::string_view path, Communicator& comm,
                        const LoadOptions& options) {
  return LoadOn(HostFileSystem(), request, path, comm, options);
}

}  // namespace tensormount
