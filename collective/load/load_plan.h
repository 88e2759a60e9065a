// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/load.h"

#include "collective/load/digest_proof.h"
#include "collective/validate/descriptor.h"
#include "index/checkpoint.h"
#include "index/checkpoint_index.h"

// What all ranks together ask of a checkpoint. Every rank makes the same plan out of everybody's
// requests, so that no plan travels.

namespace tensormount {

// A rank's request travels as its descriptor (collective/descriptor.h); path and options of the
// load stand where those of a save would, so that ranks that disagree on them are found; `now` is a
// number for the machine that the rank runs on.
std::string EncodeLoadRequest(const StateDict& request, std::string_view path,
                              const LoadOptions& options, int rank, int world);

struct PlannedTensor {
  TensorEntry entry;
  std::vector<LoadWant> wants;                    // Not empty ones; by rank, then item.
  std::pair<std::uint32_t, std::uint64_t> place;  // File and offset of its first chunk.
  bool exchange = false;
  ProofPlan proof;
};

struct LoadPlan {
  std::vector<PlannedTensor> tensors;      // In file order.
  std::vector<std::string> not_stored;     // Sorted; objects count as keys, "KEY[2]" is a part.
  std::vector<std::string> not_requested;  // Sorted; empty where the options ignore them.
  // Why the requests can never be served; the same on every rank. Then the rest is not filled in.
  Status refusal;
};

// Matches everybody's requests (by rank) with what is stored. Fails only where the index cannot be
// read; what is wrong with a request is in `refusal`.
Result<LoadPlan> MakeLoadPlan(const CheckpointIndex& index,
                              std::span<const RankDescriptor> requests, const LoadOptions& options);

// How to read a region of a tensor so that its bytes end up verified as `verify` says: by whole
// leaves where widening costs little, or where the tensor cannot be proved by digest.
Result<ReadVerify> ChooseReadVerify(const CheckpointIndex& index, const PlannedTensor& tensor,
                                    const Region& region, LoadVerify verify);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_LOAD_PLAN_H_
