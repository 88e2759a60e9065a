// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tensormount/load.h"

#include "collective/load/digest_proof.h"
#include "collective/load/resolve.h"
#include "index/checkpoint.h"
#include "index/checkpoint_index.h"

// What all ranks together read of a checkpoint, and how. Every rank makes the same plan out of
// everybody's requests, so that no plan travels; where no rank needs to know what the others want,
// each makes one of its own request alone.

namespace tensormount {

struct PlannedTensor {
  TensorEntry entry;
  std::vector<LoadWant> wants;                    // Not empty ones; by rank, then item.
  std::pair<std::uint32_t, std::uint64_t> place;  // File and offset of its first chunk.
  bool exchange = false;
  ProofPlan proof;
};

struct LoadPlan {
  std::vector<PlannedTensor> tensors;  // In file order.
  std::vector<int> groups;             // By rank: LoadOptions::exchange_group.
};

// Why a rank has to know what the others want.
struct LoadNeeds {
  bool proof = false;       // Bytes that only the digest can prove without reading far more.
  bool short_runs = false;  // Runs that are better read together, if machines differ.
};
Result<LoadNeeds> FindNeeds(const CheckpointIndex& index, const Resolved& mine,
                            const LoadOptions& options);

// `ranks`: what each rank wants, by rank; null where it is not known, and then nothing is exchanged
// or proved by digest. `groups` by rank.
Result<LoadPlan> MakeLoadPlan(const CheckpointIndex& index, std::span<const Resolved* const> ranks,
                              std::vector<int> groups, bool several_machines,
                              const LoadOptions& options);

// How to read a region of a tensor so that its bytes end up verified as `verify` says: by whole
// leaves where widening costs little, or where the tensor cannot be proved by digest.
Result<ReadVerify> ChooseReadVerify(const CheckpointIndex& index, const PlannedTensor& tensor,
                                    const Region& region, LoadVerify verify);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
