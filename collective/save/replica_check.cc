// SPDX-License-Identifier: Apache-2.0
// Chooses the blocks of a replicated region that each holder hashes, and compares the hashes at the
// rank that checks the key (its owner).
#include "collective/save/replica_check.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "device/device_hashes.h"

namespace tensormount {
namespace {

std::string BlockName(const LayoutTensor& tensor, const Holding& holding,
                      const ReplicaBlock& block) {
  const Region& region = holding.region;
  const std::uint64_t bits = tensor.meta.bits();
  // Widened to whole elements if a block ends inside one.
  const std::uint64_t first = block.begin * 8 / bits;
  const std::uint64_t end =
      std::min<std::uint64_t>(((block.begin + block.bytes) * 8 + bits - 1) / bits,
                              static_cast<std::uint64_t>(region.volume()));
  Result<Region> part =
      Region::Flat(region.box(), region.flat_first() + static_cast<std::int64_t>(first),
                   static_cast<std::int64_t>(end - first));
  return "tensor " + tensor.meta.key() + ": " +
         (part.ok() ? part.value().ToString() : region.ToString());
}

}  // namespace

std::vector<ReplicaBlock> PlanReplicaBlocks(std::uint64_t bytes, std::uint32_t holders,
                                            ReplicaCheck check, std::uint64_t generation) {
  std::vector<ReplicaBlock> blocks;
  if (check == ReplicaCheck::kOff || holders < 2) return blocks;
  const std::uint64_t n = holders;
  const std::uint64_t share = bytes / n + (bytes % n != 0 ? 1 : 0);
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t other = (i + 1 + generation % (n - 1)) % n;
    ReplicaBlock block;
    block.all = check == ReplicaCheck::kFull;
    block.first = static_cast<std::uint32_t>(std::min(i, other));
    block.second = static_cast<std::uint32_t>(std::max(i, other));
    const std::uint64_t end = std::min(bytes, (i + 1) * share);
    for (block.begin = std::min(bytes, i * share); block.begin < end; block.begin += block.bytes) {
      block.bytes = std::min(kReplicaBlockBytes, end - block.begin);
      blocks.push_back(block);
    }
  }
  return blocks;
}

Result<std::vector<std::vector<Hash128>>> HashReplicas(const RankTask& task, ReplicaCheck check,
                                                       std::uint64_t generation,
                                                       const StateDict& state,
                                                       std::uint64_t* hashed,
                                                       const BlockRules& rules) {
  std::vector<std::vector<Hash128>> hashes(task.replicas.size());
  if (check == ReplicaCheck::kOff) return hashes;
  // Devices hash their own memory, while the host hashes the rest.
  struct OwnerRequest {
    std::size_t owner = 0;
    std::uint64_t bytes = 0;
    std::optional<std::size_t> job = {};  // Hash job on a device, with one leaf for each block.
    OwnerRequest(std::size_t of, std::uint64_t size) : owner(of), bytes(size) {}
  };
  struct Span {  // A range of consecutive blocks.
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<OwnerRequest> asked;
  std::vector<BlockReader::PlannedRange> here;
  BlockReader blocks(state, rules);
  DeviceHashes there(blocks.queues());
  for (std::size_t owner = 0; owner < hashes.size(); ++owner) {
    for (const RankTask::Replica& replica : task.replicas[owner]) {
      const StateDict::TensorItem& item = state.tensors()[replica.item];
      std::optional<PackedSource> on_device;
      if (IsDeviceMemory(item.shard.data) && !item.shard.metadata_only) {
        Result<PackedSource> source = PackedSource::Make(item.shard);
        if (!source.ok()) return source.status().WithContext("tensor " + item.key);
        on_device = std::move(source).value();
      }
      Span span;
      const auto hash_here = [&](std::uint64_t begin, std::uint64_t bytes) {
        here.push_back({replica.item, begin, bytes});
        asked.emplace_back(owner, bytes);
      };
      const auto hash_there = [&]() -> Status {
        if (span.bytes == 0) return {};
        const Result<std::size_t> job =
            there.Add(on_device->device(), on_device->Gather(span.begin, span.bytes),
                      on_device->base(), span.bytes, kReplicaBlockBytes);
        if (job.ok()) {
          asked.emplace_back(owner, span.bytes).job = job.value();
        } else if (job.status().code() == Code::kResourceExhausted) {
          // The device is full: the host hashes its bytes.
          for (std::uint64_t done = 0; done < span.bytes; done += kReplicaBlockBytes) {
            hash_here(span.begin + done, std::min(kReplicaBlockBytes, span.bytes - done));
          }
        } else {
          return job.status();
        }
        return {};
      };
      for (const ReplicaBlock& block :
           PlanReplicaBlocks(replica.bytes, replica.holders, check, generation)) {
        if (!block.IsHashedBy(replica.replica_index)) continue;
        if (!on_device) {
          hash_here(block.begin, block.bytes);
        } else if (block.begin == span.begin + span.bytes && span.bytes % kReplicaBlockBytes == 0) {
          span.bytes += block.bytes;
        } else {
          TENSORMOUNT_RETURN_IF_ERROR(hash_there().WithContext("tensor " + item.key));
          span = {block.begin, block.bytes};
        }
      }
      TENSORMOUNT_RETURN_IF_ERROR(hash_there().WithContext("tensor " + item.key));
    }
  }
  blocks.Plan(std::move(here));
  for (const OwnerRequest& a : asked) {
    if (rules.cancel != nullptr && rules.cancel->load(std::memory_order_relaxed)) {
      return Status(Code::kCancelled, "the save is being cancelled");
    }
    if (hashed != nullptr) *hashed += a.bytes;
    if (a.job) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> of_blocks, there.Get(*a.job));
      hashes[a.owner].insert(hashes[a.owner].end(), of_blocks.begin(), of_blocks.end());
      continue;
    }
    TENSORMOUNT_RETURN_IF_ERROR(blocks.Next().status());
    Xxh3Stream stream;
    for (std::uint64_t done = 0; done < a.bytes;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const std::byte> block,
                                   blocks.Take(BlockReader::kBlockBytes));
      stream.Update(block.data(), block.size());
      done += block.size();
    }
    hashes[a.owner].push_back(stream.Value());
  }
  return hashes;
}

std::vector<int> RanksWithReplicas(const GlobalLayout& layout, int world) {
  std::vector<char> has(static_cast<std::size_t>(world));
  for (const LayoutTensor& tensor : layout.tensors) {
    for (const Holding& holding : tensor.holdings) {
      if (holding.holders.size() < 2) continue;
      for (const Holder& holder : holding.holders)
        has.at(static_cast<std::size_t>(holder.rank)) = 1;
    }
  }
  std::vector<int> ranks;
  for (int r = 0; r < world; ++r) {
    if (has[static_cast<std::size_t>(r)] != 0) ranks.push_back(r);
  }
  return ranks;
}

void ReplicaFindings::Add(ReplicaFindings&& other) {
  if (key.empty()) key = std::move(other.key);
  for (std::string& line : other.listed) {
    if (listed.size() < kMaxListed) listed.push_back(std::move(line));
  }
  differing += other.differing;
  compared_bytes += other.compared_bytes;
}

Status ReplicaFindings::ToStatus() const {
  if (differing == 0) return Status();
  std::string text;
  for (const std::string& line : listed) text += (text.empty() ? "" : "; ") + line;
  if (differing > listed.size()) {
    text += " (and " + std::to_string(differing - listed.size()) + " more blocks differ)";
  }
  return Status(Code::kDataLoss, std::move(text)).With({.key = key});
}

Result<ReplicaFindings> CompareReplicas(const GlobalLayout& layout, ReplicaCheck check,
                                        std::uint64_t generation,
                                        std::span<const std::vector<Hash128>> hashes) {
  ReplicaFindings findings;
  std::vector<std::size_t> at(hashes.size(), 0);
  for (const LayoutTensor& tensor : layout.tensors) {
    for (const Holding& holding : tensor.holdings) {
      const std::vector<Holder>& holders = holding.holders;
      if (holders.size() < 2) continue;
      for (const ReplicaBlock& block : PlanReplicaBlocks(
               holding.bytes, static_cast<std::uint32_t>(holders.size()), check, generation)) {
        const Hash128* expected = nullptr;
        int expected_rank = 0;
        for (std::uint32_t k = 0; k < holders.size(); ++k) {
          if (!block.IsHashedBy(k)) continue;
          const int rank = holders[k].rank;
          const auto r = static_cast<std::size_t>(rank);
          if (r >= hashes.size() || at[r] >= hashes[r].size()) {
            return Status(Code::kInternal, "rank " + std::to_string(rank) +
                                               " sent fewer hashes of replicas than requested");
          }
          const Hash128& hash = hashes[r][at[r]++];
          if (expected == nullptr) {
            expected = &hash;
            expected_rank = rank;
            continue;
          }
          findings.compared_bytes += block.bytes;
          if (hash == *expected) continue;
          ++findings.differing;
          if (findings.listed.size() >= ReplicaFindings::kMaxListed) continue;
          if (findings.key.empty()) findings.key = tensor.meta.key();
          findings.listed.push_back(
              BlockName(tensor, holding, block) + " differs between the replicas on rank " +
              std::to_string(expected_rank) + " and rank " + std::to_string(rank));
        }
      }
    }
  }
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    if (at[r] != hashes[r].size()) {
      return Status(Code::kInternal,
                    "rank " + std::to_string(r) + " sent more hashes of replicas than requested");
    }
  }
  return findings;
}

}  // namespace tensormount
