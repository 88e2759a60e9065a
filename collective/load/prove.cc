// SPDX-License-Identifier: Apache-2.0
// Chooses the digests to verify, and sums them over all ranks at rank 0.
#include "collective/load/prove.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/coding.h"
#include "collective/guarded.h"
#include "collective/load/digest_proof.h"

namespace tensormount {
namespace {

Status PlanMismatch() {
  return Status(Code::kInternal, "internal error: load: the ranks have different plans");
}

void SetBit(std::string& bits, std::size_t i) {
  bits[i / 8] = static_cast<char>(bits[i / 8] | (1 << (i % 8)));
}

std::string NoBits(const LoadPlan& plan) {
  return std::string((plan.tensors.size() + 7) / 8, '\0');
}

std::size_t PositionIn(const LoadPlan& plan, const LoadTarget& target) {
  return static_cast<std::size_t>(target.tensor - plan.tensors.data());
}

class Prover {
 public:
  Prover(Collective& collective, const OpenedCheckpoint& checkpoint, const LoadPlan& plan,
         std::span<const LoadTarget> targets, const DeviceLimits& devices,
         const std::function<void(std::uint64_t)>& read)
      : collective_(collective),
        checkpoint_(checkpoint),
        plan_(plan),
        targets_(targets),
        devices_(devices),
        read_(read) {}

  Result<std::vector<bool>> Run(const std::string& unproved) {
    TENSORMOUNT_ASSIGN_OR_RETURN(proving_, ReadBits(unproved));
    const Status able = Guarded([&] { return Contribute(); });
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        collective_.Decide(
            able.ok() ? OwnContributions() : std::string(), "load: compare the digests of the data",
            [&](std::vector<std::string>& parts) { return CheckContributions(parts); }, able));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<bool> damaged, ReadBits(told));
    if (std::none_of(damaged.begin(), damaged.end(), [](bool b) { return b; })) return proving_;
    return Diagnose(damaged);
  }

 private:
  std::size_t PositionOf(const LoadTarget& target) const { return PositionIn(plan_, target); }

  Result<std::vector<bool>> ReadBits(const std::string& bits) const {
    std::vector<bool> out(plan_.tensors.size(), false);
    if (bits.size() != NoBits(plan_).size()) return PlanMismatch();
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = ((static_cast<unsigned char>(bits[i / 8]) >> (i % 8)) & 1) != 0;
    }
    return out;
  }

  Status DigestTargets() {
    digests_.assign(targets_.size(), 0);
    std::vector<DigestRequest> on_devices;
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      const LoadTarget& target = targets_[i];
      if (!proving_[PositionOf(target)]) continue;
      const TensorMeta& meta = target.tensor->entry().meta;
      if (target.digested && !target.arrived.unknown) {
        digests_[i] = target.arrived.digest;
      } else if (target.device == nullptr) {
        digests_[i] = DigestOfBuffer(meta, target.placed, target.base);
      } else {
        on_devices.push_back({target.boxes(), ByteShape(meta.dtype(), meta.shape()), &digests_[i]});
      }
    }
    return DigestsOnDevices(on_devices, devices_);
  }

  Status Contribute() {
    contribution_.assign(plan_.tensors.size(), 0);
    TENSORMOUNT_RETURN_IF_ERROR(DigestTargets());
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      const LoadTarget& target = targets_[i];
      const std::size_t t = PositionOf(target);
      if (!proving_[t]) continue;
      const ProofPlan& proof = target.tensor->proof;
      if (std::binary_search(proof.contributors.begin(), proof.contributors.end(), target.want)) {
        contribution_[t] ^= digests_[i];
      }
    }
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      const PlannedTensor& tensor = plan_.tensors[t];
      if (!proving_[t] || tensor.proof.completed.empty()) continue;
      if (tensor.proof.completer != collective_.rank()) continue;
      ReadStats stats;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const Crc64 digest,
          DigestFromStorage(checkpoint_, tensor.entry(), tensor.proof.completed, &stats));
      contribution_[t] ^= digest;
      read_(stats.bytes_read);
    }
    return {};
  }

  // Calls fn once for each request whose region several requests share, in the same order on every
  // rank.
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

  // The digest of this rank's buffer for request `want` of tensor `t`. Targets are in the order of
  // the plan and of its wants.
  Crc64 DigestOf(std::size_t t, std::uint32_t want) const {
    const auto at = std::ranges::lower_bound(
        targets_, std::pair(t, want), {},
        [&](const LoadTarget& target) { return std::pair(PositionOf(target), target.want); });
    return digests_[static_cast<std::size_t>(at - targets_.begin())];
  }

  // Encodes this rank's contributions, by tensor, and the digests of its regions that other ranks
  // have, too.
  std::string OwnContributions() const {
    ByteWriter mine;
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      if (proving_[t]) mine.U64(contribution_[t]);
    }
    ForEachReplicaHolder([&](std::size_t t, std::uint32_t want) {
      if (plan_.tensors[t].wants[want].rank == collective_.rank()) {
        mine.U64(DigestOf(t, want));
      }
    });
    return std::move(mine.bytes());
  }

  // Runs at rank 0. Returns one bit for each tensor, set if the loaded bytes differ from the stored
  // ones. Contributions must add up to the stored digest, and all ranks that loaded one region must
  // have equal digests.
  Result<std::string> CheckContributions(const std::vector<std::string>& parts) const {
    std::vector<ByteReader> in;
    for (const std::string& part : parts) in.emplace_back(part, "load: digests of a rank");
    std::string damaged = NoBits(plan_);
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      if (!proving_[t]) continue;
      Crc64 found = 0;
      for (ByteReader& of_rank : in) found ^= of_rank.U64();
      if (found != plan_.tensors[t].entry().digest) SetBit(damaged, t);
    }
    std::map<std::pair<std::size_t, std::uint32_t>, Crc64> digests;
    ForEachReplicaHolder([&](std::size_t t, std::uint32_t want) {
      const auto rank = static_cast<std::size_t>(plan_.tensors[t].wants[want].rank);
      digests[{t, want}] = in[rank].U64();
    });
    for (ByteReader& of_rank : in) {
      if (!of_rank.Finish().ok()) return PlanMismatch();
    }
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t) {
      if (!proving_[t]) continue;
      for (const ProofPlan::Replica& replica : plan_.tensors[t].proof.replicas) {
        if (digests[{t, replica.want}] != digests[{t, replica.contributor}]) SetBit(damaged, t);
      }
    }
    return damaged;
  }

  // The same check as FindDamage, for device memory, one block at a time.
  Status FindDamageOnDevice(const LoadTarget& target) const {
    const TensorEntry& entry = target.tensor->entry();
    Status found;
    std::vector<std::byte> stored;
    std::vector<std::byte> there;
    for (const PlacedBox& placed : target.placed) {
      SplitBox(placed.box, 1, target.device->ring->block_bytes(), [&](const Box& box) {
        if (!found.ok()) return;
        stored.resize(static_cast<std::size_t>(box.volume()));
        const PlacedBox packed = PlacePacked(tensormount::Region(box), 0).front();
        ReadStats stats;
        found = checkpoint_.ReadPlaced(entry, {&packed, 1}, stored.data(),
                                       ReadVerify::kExtendLeaves, stats, nullptr);
        if (!found.ok()) return;
        const PlacedBox part = PartOfPlaced(placed, box);
        found = ReadBack({target.device, {&part, 1}, target.base}, devices_, there).status();
        if (!found.ok() || stored == there) return;
        found = Status(Code::kDataLoss,
                       "tensor " + entry.meta.key() + " " + target.wanted().region.ToString() +
                           ": bytes changed between storage and " + target.device->ops->name());
      });
    }
    return found;
  }

  // Reads damaged tensors again by whole leaves, to name the damaged parts.
  Status Diagnose(const std::vector<bool>& damaged) {
    std::string first;
    for (std::size_t t = 0; t < damaged.size(); ++t) {
      if (damaged[t] && first.empty()) first = plan_.tensors[t].entry().meta.key();
    }
    const Status found = Guarded([&]() -> Status {
      for (const LoadTarget& target : targets_) {
        if (!damaged[PositionOf(target)]) continue;
        TENSORMOUNT_RETURN_IF_ERROR(target.device != nullptr
                                        ? FindDamageOnDevice(target)
                                        : FindDamage(checkpoint_, target.tensor->entry(),
                                                     target.wanted().region, target.placed,
                                                     target.base));
      }
      for (std::size_t t = 0; t < damaged.size(); ++t) {
        const PlannedTensor& tensor = plan_.tensors[t];
        if (!damaged[t] || tensor.proof.completer != collective_.rank()) continue;
        for (const Box& box : tensor.proof.completed) {
          TENSORMOUNT_RETURN_IF_ERROR(FindDamage(checkpoint_, tensor.entry(), box, {}, nullptr));
        }
      }
      return {};
    });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(found, "load: find the damaged data"));
    return Status(
        Code::kDataLoss,
        "tensor " + first +
            ": the digest of the loaded data differs from the stored one, although the stored "
            "data, read again, is intact");
  }

  Collective& collective_;
  const OpenedCheckpoint& checkpoint_;
  const LoadPlan& plan_;
  std::span<const LoadTarget> targets_;
  const DeviceLimits& devices_;
  const std::function<void(std::uint64_t)>& read_;
  std::vector<bool> proving_;  // By position in the plan: whether the tensor is verified.
  // This rank's contributions, by position of the tensor in the plan.
  std::vector<Crc64> contribution_;
  std::vector<Crc64> digests_;  // By target: the digest of its buffer.
};

}  // namespace

std::string Unproved(const LoadPlan& plan, std::span<const LoadTarget> targets) {
  const bool any = std::any_of(plan.tensors.begin(), plan.tensors.end(),
                               [](const PlannedTensor& t) { return t.proof.possible; });
  if (!any) return {};
  std::string bits = NoBits(plan);
  for (const LoadTarget& target : targets) {
    if (target.tensor->proof.possible && target.stats.bytes_by_leaf < target.bytes) {
      SetBit(bits, PositionIn(plan, target));
    }
  }
  return bits;
}

Result<std::string> UnprovedByAny(std::span<const std::string> bits) {
  std::string any = bits.front();
  for (const std::string& of_rank : bits) {
    if (of_rank.size() != any.size()) return PlanMismatch();
    for (std::size_t i = 0; i < any.size(); ++i) any[i] = static_cast<char>(any[i] | of_rank[i]);
  }
  return any;
}

Result<std::vector<bool>> ProveByDigest(Collective& collective, const OpenedCheckpoint& checkpoint,
                                        const LoadPlan& plan, std::span<const LoadTarget> targets,
                                        const DeviceLimits& devices, const std::string& unproved,
                                        const std::function<void(std::uint64_t)>& read) {
  const bool any = std::any_of(unproved.begin(), unproved.end(), [](char c) { return c != 0; });
  if (!any) return std::vector<bool>();
  return Prover(collective, checkpoint, plan, targets, devices, read).Run(unproved);
}

}  // namespace tensormount
