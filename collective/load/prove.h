// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_PROVE_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_PROVE_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "collective/comm/collective.h"
#include "collective/load/load_plan.h"
#include "collective/load/target.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// One round for all tensors together, however many there are: contributions of 8 bytes, whose
// exclusive or must be the digest, and CRCs of replicas, which must be equal; rank 0 judges them.
// Which tensors need it the ranks tell each other with the end of their reading (Unproved). Where
// one is wrong, another round: who holds some of that tensor looks for the place (FindDamage).
// CRCs are computed from the destination, of host memory after everything else: bytes that memory,
// a copy or a kernel changed are found as well as those of a disk. Of devices, those that a rank
// read for itself were computed when each part had arrived (LoadTarget::arrived).
//
// A bit for each tensor of the plan of which this rank has bytes that no leaf proved, or will have
// by exchange; empty where no tensor can be proved by digest.
std::string Unproved(const LoadPlan& plan, std::span<const LoadTarget> targets);
// Those of all ranks together, at rank 0.
Result<std::string> UnprovedByAny(std::span<const std::string> bits);

// Proves by digest, over what stands in the ranks' buffers now, every tensor of `unproved`
// (UnprovedByAny). Collective: the same verdict on every rank, kDataLoss naming tensor, box and
// file where something differs. Returns which tensors were proved, by position in the plan; empty
// where none had to be. What is on a device its device hashes. `read` is called with what was read
// from storage to complete a proof.
Result<std::vector<bool>> ProveByDigest(Collective& collective, const OpenedCheckpoint& checkpoint,
                                        const LoadPlan& plan, std::span<const LoadTarget> targets,
                                        const DeviceRules& devices, const std::string& unproved,
                                        const std::function<void(std::uint64_t)>& read);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_PROVE_H_
