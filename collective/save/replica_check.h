// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "collective/validate/layout_check.h"

namespace tensormount {

// Blocks of this size are compared, and named where they differ.
inline constexpr std::uint64_t kReplicaBlockBytes = 1024 * 1024;

// A part of a replicated holding of which several ranks hash the same bytes.
struct ReplicaBlock {
  std::uint32_t tensor = 0;
  std::uint32_t holding = 0;
  std::uint64_t begin = 0;  // In the packed bytes of the holding's region.
  std::uint64_t bytes = 0;
  // Positions in the holding's holders, in increasing order: two at least.
  std::vector<std::uint32_t> holders;
};

// Which bytes are compared between whom. Pure, the same on every rank.
// kRotating cuts a holding with R holders into R shares; share i is hashed by holder i and one
// other, who changes with `generation`: after R - 1 saves in a row every replica was compared
// whole.
std::vector<ReplicaBlock> PlanReplicaCheck(const GlobalLayout& layout, ReplicaCheck check,
                                           std::uint64_t generation);

// Bytes of replicas that the plan compares: per extra holder, as in GlobalLayout::replica_bytes.
std::uint64_t ComparedBytes(std::span<const ReplicaBlock> plan);

// The hashes of the blocks that `rank` takes part in, in the plan's order.
Result<std::vector<Hash128>> HashReplicas(const GlobalLayout& layout,
                                          std::span<const ReplicaBlock> plan,
                                          const StateDict& state, int rank);

// `hashes[r]`: what rank r's HashReplicas gave. kDataLoss "tensor w: [0:4, 0:8] differs between the
// replicas on rank 0 and rank 2 (and N more blocks)"; kInternal where counts are wrong.
Status CompareReplicas(const GlobalLayout& layout, std::span<const ReplicaBlock> plan,
                       std::span<const std::vector<Hash128>> hashes);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_
