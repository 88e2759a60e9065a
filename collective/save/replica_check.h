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

// Replicas are compared by block hashes, at the rank that checks the key (its owner). Rank and
// owner compute the same blocks from the shard's size, its number of holders and the generation of
// the save. So hashes travel without names, 16 bytes a block, and their number shows whether both
// sides planned the same blocks (CompareReplicas).

namespace tensormount {

// Size of the blocks that are compared and reported.
inline constexpr std::uint64_t kReplicaBlockBytes = 1024 * 1024;

// Bytes of a replicated shard that several of its holders hash. Holders are numbered from 0 among
// those of this shard (RankTask::Replica::replica_index), not by rank.
struct ReplicaBlock {
  std::uint64_t begin = 0;  // Offset in the packed bytes of the shard.
  std::uint64_t bytes = 0;
  bool all = false;         // Whether all holders hash the block.
  std::uint32_t first = 0;  // Unless `all`: the two holders that hash the block, first < second.
  std::uint32_t second = 0;
  bool IsHashedBy(std::uint32_t replica_index) const {
    return all || replica_index == first || replica_index == second;
  }
};

// The blocks of a shard of `bytes` bytes with `holders` holders (at least two). kRotating and kWarn
// cut the shard into `holders` shares; share i is hashed by holder i and one other, which changes
// with `generation`: after holders - 1 consecutive generations every replica was compared whole.
std::vector<ReplicaBlock> PlanReplicaBlocks(std::uint64_t bytes, std::uint32_t holders,
                                            ReplicaCheck check, std::uint64_t generation);

// The hashes of this rank's blocks, by owner of the key, in the owner's order. `hashed` (may be
// null) counts bytes. kCancelled once rules.cancel (may be null) is set.
Result<std::vector<std::vector<Hash128>>> HashReplicas(const RankTask& task, ReplicaCheck check,
                                                       std::uint64_t generation,
                                                       const StateDict& state,
                                                       std::uint64_t* hashed = nullptr,
                                                       const BlockRules& rules = {});

// The ranks, rising, that hold replicas of the keys in `layout`, and so send hashes to the rank
// that checks these keys.
std::vector<int> RanksWithReplicas(const GlobalLayout& layout, int world);

struct ReplicaFindings {
  // Texts of at most kMaxListed differences, such as "tensor w: [0:4, 0:8] differs between the
  // replicas on rank 0 and rank 2".
  std::vector<std::string> listed;
  std::string key;              // Key of the first tensor with a difference.
  std::uint64_t differing = 0;  // Number of differing blocks, listed or not.
  // Bytes of compared blocks, counted for each replica but the first of a block.
  std::uint64_t compared_bytes = 0;

  static constexpr std::size_t kMaxListed = 16;
  void Add(ReplicaFindings&& other);
  // Ok, or kDataLoss with the listed differences and the number of unlisted ones.
  Status ToStatus() const;
};

// Compares the replicas of the keys in `layout`. `hashes[r]`: rank r's hashes for these keys. Fails
// with kInternal if their number is wrong.
Result<ReplicaFindings> CompareReplicas(const GlobalLayout& layout, ReplicaCheck check,
                                        std::uint64_t generation,
                                        std::span<const std::vector<Hash128>> hashes);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_REPLICA_CHECK_H_
