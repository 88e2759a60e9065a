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

// The reads of all ranks of a load, and how they are made. Every rank makes the same plan from the
// requests of all ranks, so no plan travels. If no rank needs the requests of other ranks, each
// rank makes a plan of its own request alone.

namespace tensormount {

// One stored tensor that some rank requested: the wants, whether it is exchanged, and how it is
// verified. `wants` lacks ranks whose requests are not known (LoadPlanner::Finish, all_known).
struct PlannedTensor {
  std::shared_ptr<const TensorEntry> stored;
  const TensorEntry& entry() const { return *stored; }
  std::vector<RequestedRegion> wants;             // Regions that are not empty; by rank, then item.
  std::pair<std::uint32_t, std::uint64_t> place;  // File and offset of its first chunk.
  bool exchange = false;
  ProofPlan proof;
};

// If all requests are known, the plan and the positions in `tensors` are the same on every rank.
struct LoadPlan {
  std::vector<PlannedTensor> tensors;  // In file order.
  std::vector<int> groups;             // By rank: its LoadOptions::exchange_group.
};

// The reasons for a rank to need the requests of the others. If no rank has such a reason, and the
// caller does not require an exchange, no requests are sent, as in a load of whole shards on 4,096
// ranks.
struct LoadNeeds {
  bool proof = false;  // Some bytes can be verified cheaply only by digest.
  // Some wanted runs in files are so short that ranks on several machines should exchange them.
  bool short_runs = false;
  // The source is behind a server, and other ranks of this machine may want the same requests as
  // this one: whole tensors, or runs whose gaps are read, too.
  bool shared_requests = false;
};
// `far`: the source is behind a server.
Result<LoadNeeds> FindNeeds(const CheckpointIndex& index, const ResolvedRequest& mine, bool far,
                            const LoadOptions& options);

// Between which machines a load with LoadPath::kAuto exchanges.
enum class ExchangeScope {
  kNone,
  // All ranks, tensors of which they want short runs.
  kJob,
  // The ranks of each machine, tensors of which a server would be asked for the same bytes by
  // several of them. Each machine is a group.
  kMachine,
};

// Makes a plan from the wants of the ranks, which are added in the order of ranks; a request may be
// freed after Add.
class LoadPlanner {
 public:
  explicit LoadPlanner(const CheckpointIndex& index) : index_(index) {}
  void Add(int rank, const ResolvedRequest& wanted);
  // `all_known`: whether every rank was added; if not, nothing is exchanged or verified by digest.
  // `groups`: the exchange group of each rank.
  Result<LoadPlan> Finish(int ranks, bool all_known, std::vector<int> groups, ExchangeScope scope,
                          const LoadOptions& options);

 private:
  const CheckpointIndex& index_;
  LoadPlan plan_;
  // Position in plan_.tensors, by ordinal of the stored tensor.
  std::map<std::uint32_t, std::size_t> position_;
};

// Whether a load verifies by digests where they are cheaper than leaves.
inline bool MayProveByDigest(LoadVerify verify) {
  return verify == LoadVerify::kAuto || verify == LoadVerify::kEnd;
}

// Chooses how to read a region of a tensor so that its bytes end up verified as `verify` requires.
// Whole leaves are read and checked if this adds little or the tensor cannot be verified by digest.
// Bytes for device memory are read without checks if their digest is taken on the device.
Result<ReadVerify> ChooseReadVerify(const CheckpointIndex& index, const PlannedTensor& tensor,
                                    const Region& region, LoadVerify verify, bool on_device);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
