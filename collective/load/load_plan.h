// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tensormount/load.h"

#include "collective/load/digest_proof.h"
#include "collective/load/resolve.h"
#include "index/read/checkpoint.h"
#include "index/records/checkpoint_index.h"

// What all ranks together read of a checkpoint, and how. Every rank makes the same plan out of
// everybody's requests, so that no plan travels; where no rank needs to know what the others want,
// each makes one of its own request alone.

namespace tensormount {

// One stored tensor that somebody asked for: by whom, whether it is exchanged, and how it is
// proved. `wants` of ranks that are not known are missing (LoadPlanner::Finish, all_known).
struct PlannedTensor {
  std::shared_ptr<const TensorEntry> stored;
  const TensorEntry& entry() const { return *stored; }
  std::vector<LoadWant> wants;                    // Not empty ones; by rank, then item.
  std::pair<std::uint32_t, std::uint64_t> place;  // File and offset of its first chunk.
  bool exchange = false;
  ProofPlan proof;
};

// The same on every rank where all are known; positions in `tensors` mean the same on all then.
struct LoadPlan {
  std::vector<PlannedTensor> tensors;  // In file order.
  std::vector<int> groups;             // By rank: LoadOptions::exchange_group.
};

// Why a rank has to know what the others want. Where no rank has a reason, requests stay where they
// are: a load of whole shards on 4,096 ranks sends no layouts at all.
struct LoadNeeds {
  bool proof = false;       // Bytes that only the digest can prove without reading far more.
  bool short_runs = false;  // Runs that are better read together, if machines differ.
};
Result<LoadNeeds> FindNeeds(const CheckpointIndex& index, const Resolved& mine,
                            const LoadOptions& options);

// Makes a plan of what ranks want, which is told one rank after the other, in the order of the
// ranks: what one asks for need not be kept once it is in the plan.
class LoadPlanner {
 public:
  explicit LoadPlanner(const CheckpointIndex& index) : index_(index) {}
  void Add(int rank, const Resolved& wanted);
  // `all_known`: every rank was added; otherwise nothing is exchanged or proved by digest.
  // `groups` by rank.
  Result<LoadPlan> Finish(int ranks, bool all_known, std::vector<int> groups, bool several_machines,
                          const LoadOptions& options);

 private:
  const CheckpointIndex& index_;
  LoadPlan plan_;
  std::map<std::uint32_t, std::size_t> position_;  // By ordinal.
};

// How to read a region of a tensor so that its bytes end up verified as `verify` says: by whole
// leaves where widening costs little, or where the tensor cannot be proved by digest; into memory
// of a device not at all, where its digest will be taken there.
Result<ReadVerify> ChooseReadVerify(const CheckpointIndex& index, const PlannedTensor& tensor,
                                    const Region& region, LoadVerify verify, bool on_device);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
