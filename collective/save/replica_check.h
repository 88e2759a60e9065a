// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "collective/layout/layout.h"
#include "collective/save/block_reader.h"
#include "collective/save/rank_task.h"

// Replicas are compared by the hashes of blocks, at the owner of the key. Which blocks, and between
// whom, follows from what a rank and the owner both know of a replicated shard: its size, how many
// hold it, and the generation of the save.
// So hashes travel without any names, 16 bytes a block, and their number alone shows whether both
// sides planned the same blocks (CompareReplicas).

namespace tensormount {

// Blocks of this size are compared, and named where they differ.
inline constexpr std::uint64_t kReplicaBlockBytes = 1024 * 1024;

// Bytes of a replicated shard that several of its holders hash.
// Holders are numbered from 0 among those of this shard (RankTask::Replica::position), not by rank.
struct ReplicaBlock {
  std::uint64_t begin = 0;  // In the packed bytes.
  std::uint64_t bytes = 0;
  bool all = false;         // All holders; otherwise
  std::uint32_t first = 0;  // these two, first < second.
  std::uint32_t second = 0;
  bool Has(std::uint32_t position) const { return all || position == first || position == second; }
};

// The blocks of a shard of `bytes` bytes that `holders` (two at least) have. kRotating cuts it into
// as many shares; share i is hashed by holder i and one other, who changes with `generation`: after
// holders - 1 saves in a row every replica was compared whole.
std::vector<ReplicaBlock> PlanReplicaBlocks(std::uint64_t bytes, std::uint32_t holders,
                                            ReplicaCheck check, std::uint64_t generation);

// A rank's part: the hashes of its blocks, by owner of the key, in the owner's order. `hashed`,
// where not null, counts bytes. kCancelled once rules.cancel, where not null, is set.
Result<std::vector<std::vector<Hash128>>> HashReplicas(const RankTask& task, ReplicaCheck check,
                                                       std::uint64_t generation,
                                                       const StateDict& state,
                                                       std::uint64_t* hashed = nullptr,
                                                       const BlockRules& rules = {});

// Which of `world` ranks hold replicas of an owner's keys, rising: those from which it gets hashes.
std::vector<int> RanksWithReplicas(const GlobalLayout& layout, int world);

// What an owner finds.
struct ReplicaFindings {
  // At most kMaxListed: "tensor w: [0:4, 0:8] differs between the replicas on rank 0 and rank 2".
  std::vector<std::string> listed;
  std::string key;                   // Of the tensor that is listed first.
  std::uint64_t differing = 0;       // In all.
  std::uint64_t compared_bytes = 0;  // Per extra holder, as in GlobalLayout::replica_bytes.

  static constexpr std::size_t kMaxListed = 16;
  void Add(ReplicaFindings&& other);
  // Ok, or kDataLoss with what is listed and how many more there are.
  Status ToStatus() const;
};

// `hashes[r]`: what rank r hashed of this owner's keys. kInternal where their number is wrong.
Result<ReplicaFindings> CompareReplicas(const GlobalLayout& layout, ReplicaCheck check,
                                        std::uint64_t generation,
                                        std::span<const std::vector<Hash128>> hashes);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_
