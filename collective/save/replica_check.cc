// SPDX-License-Identifier: Apache-2.0
#include "collective/save/replica_check.h"

#include <algorithm>
#include <memory>
#include <string>

#include "collective/save/packed_source.h"

namespace tensormount {
namespace {

// Gathered pieces of strided memory.
constexpr std::size_t kScratchBytes = 256 * 1024;

std::string BlockName(const GlobalLayout& layout, const ReplicaBlock& block) {
  const LayoutTensor& tensor = layout.tensors[block.tensor];
  const Region& region = tensor.holdings[block.holding].region;
  const std::uint64_t bits = tensor.meta.bits();
  // Widened to whole elements where a block ends inside one.
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

std::vector<ReplicaBlock> PlanReplicaCheck(const GlobalLayout& layout, ReplicaCheck check,
                                           std::uint64_t generation) {
  std::vector<ReplicaBlock> plan;
  if (check == ReplicaCheck::kOff) return plan;
  for (std::uint32_t t = 0; t < layout.tensors.size(); ++t) {
    for (std::uint32_t h = 0; h < layout.tensors[t].holdings.size(); ++h) {
      const Holding& holding = layout.tensors[t].holdings[h];
      const std::uint64_t n = holding.holders.size();
      if (n < 2) continue;
      const std::uint64_t share = (holding.bytes + n - 1) / n;
      for (std::uint64_t i = 0; i < n; ++i) {
        std::vector<std::uint32_t> who;
        if (check == ReplicaCheck::kFull) {
          for (std::uint64_t k = 0; k < n; ++k) who.push_back(static_cast<std::uint32_t>(k));
        } else {
          const std::uint64_t other = (i + 1 + generation % (n - 1)) % n;
          who = {static_cast<std::uint32_t>(std::min(i, other)),
                 static_cast<std::uint32_t>(std::max(i, other))};
        }
        const std::uint64_t end = std::min(holding.bytes, (i + 1) * share);
        for (std::uint64_t begin = std::min(holding.bytes, i * share); begin < end;) {
          const std::uint64_t bytes = std::min(kReplicaBlockBytes, end - begin);
          plan.push_back({t, h, begin, bytes, who});
          begin += bytes;
        }
      }
    }
  }
  return plan;
}

std::uint64_t ComparedBytes(std::span<const ReplicaBlock> plan) {
  std::uint64_t bytes = 0;
  for (const ReplicaBlock& block : plan) bytes += block.bytes * (block.holders.size() - 1);
  return bytes;
}

Result<std::vector<Hash128>> HashReplicas(const GlobalLayout& layout,
                                          std::span<const ReplicaBlock> plan,
                                          const StateDict& state, int rank) {
  std::vector<Hash128> hashes;
  const auto scratch = std::make_unique<std::byte[]>(kScratchBytes);
  for (const ReplicaBlock& block : plan) {
    const Holding& holding = layout.tensors[block.tensor].holdings[block.holding];
    for (const std::uint32_t k : block.holders) {
      if (holding.holders[k].rank != rank) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const PackedSource source,
          PackedSource::Make(state.tensors()[holding.holders[k].item].shard));
      Xxh3Stream stream;
      for (std::uint64_t done = 0; done < block.bytes;) {
        const auto n =
            static_cast<std::size_t>(std::min<std::uint64_t>(kScratchBytes, block.bytes - done));
        stream.Update(source.Fetch(block.begin + done, n, scratch.get()), n);
        done += n;
      }
      hashes.push_back(stream.Value());
    }
  }
  return hashes;
}

Status CompareReplicas(const GlobalLayout& layout, std::span<const ReplicaBlock> plan,
                       std::span<const std::vector<Hash128>> hashes) {
  std::vector<std::size_t> at(hashes.size(), 0);
  std::string first;
  std::size_t more = 0;
  for (const ReplicaBlock& block : plan) {
    const Holding& holding = layout.tensors[block.tensor].holdings[block.holding];
    Hash128 expected;
    for (std::size_t i = 0; i < block.holders.size(); ++i) {
      const int rank = holding.holders[block.holders[i]].rank;
      const auto r = static_cast<std::size_t>(rank);
      if (r >= hashes.size() || at[r] >= hashes[r].size()) {
        return Status(Code::kInternal, "rank " + std::to_string(rank) +
                                           " sent fewer hashes of replicas than were asked of it");
      }
      const Hash128 hash = hashes[r][at[r]++];
      if (i == 0) expected = hash;
      if (hash == expected) continue;
      if (!first.empty()) {
        ++more;
        continue;
      }
      first = BlockName(layout, block) + " differs between the replicas on rank " +
              std::to_string(holding.holders[block.holders[0]].rank) + " and rank " +
              std::to_string(rank);
    }
  }
  if (first.empty()) return Status();
  if (more > 0) first += " (and " + std::to_string(more) + " more blocks differ)";
  return Status(Code::kDataLoss, first);
}

}  // namespace tensormount
