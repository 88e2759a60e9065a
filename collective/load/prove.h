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

// Verification by digest takes one exchange for all tensors: contributions of 8 bytes, whose
// exclusive or must be the digest, and CRCs of replicas, which must be equal; rank 0 checks them.
// At the end of reading the ranks report which tensors need this verification (Unproved). If a
// check fails, a second exchange follows: the ranks that have a part of that tensor locate the
// damage (FindDamage). CRCs are computed from the destination, in host memory after everything
// else, so that bytes changed by memory, a copy or a kernel are found as well as those of a disk.
// For device data that a rank read for itself without other checks, they were computed when each
// part arrived (LoadTarget::arrived).
//
// Returns one bit for each tensor of the plan: set if this rank has bytes of it that no leaf hash
// verified, or will get bytes by exchange. Empty if no tensor can be verified by digest.
std::string Unproved(const LoadPlan& plan, std::span<const LoadTarget> targets);
// Runs at rank 0: combines the bits of all ranks by or.
Result<std::string> UnprovedByAny(std::span<const std::string> bits);

// Verifies by digest, over the bytes now in the ranks' buffers, every tensor of `unproved`
// (UnprovedByAny). Devices hash their own memory. Collective, with the same verdict on every rank:
// kDataLoss names the tensor and, if the damage is located, the box, and the file if storage is
// damaged. Returns by position in the plan which tensors were verified; empty if none had to be.
// `read` is called with the bytes read from storage to complete a proof.
Result<std::vector<bool>> ProveByDigest(Collective& collective, const OpenedCheckpoint& checkpoint,
                                        const LoadPlan& plan, std::span<const LoadTarget> targets,
                                        const DeviceLimits& devices, const std::string& unproved,
                                        const std::function<void(std::uint64_t)>& read);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_PROVE_H_
