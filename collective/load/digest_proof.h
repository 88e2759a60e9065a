// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_DIGEST_PROOF_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_DIGEST_PROOF_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensormount/box.h"

#include "base/hash.h"
#include "index/read/checkpoint.h"
#include "shard/tensor_meta.h"

// The proof of a load by digest: what stands in the ranks' buffers after the load, put together,
// must have the CRC that was stored (docs/format.md, "Hashes"). It covers the whole way from the
// disk into the buffer, and needs no whole leaf to have been read.

//
// CRCs of disjoint parts add up by exclusive or, each moved to its place in the whole: so every
// rank computes the contribution of what it holds, 8 bytes travel, and their sum is compared with
// the stored digest. Example: rows [0:2] on rank 0 and [2:4] on rank 1 of a stored [4, 8]: both are
// contributors, and d0 ^ d1 must be the digest. Where rank 2 asked for [0:2] as well, it is a
// replica of rank 0: its CRC must be d0, and is not added.

namespace tensormount {

// A region that a rank asked for: number `item` of its request.
struct LoadWant {
  int rank = 0;
  std::uint32_t item = 0;
  Region region;         // Of the stored tensor.
  bool convert = false;  // Into elements of another type.
};

// Who contributes which cells to the proof of one tensor. Every cell must be counted once: one
// cell counted twice cancels.
struct ProofPlan {
  bool possible = false;
  std::vector<std::uint32_t> contributors;  // Positions in the wants; disjoint regions.
  // Same region as that of a contributor: the CRCs of both must be equal.
  struct Replica {
    std::uint32_t want = 0;
    std::uint32_t contributor = 0;
  };
  std::vector<Replica> replicas;
  // What nobody asked for, as far as it is little: read from storage by `completer`.
  std::vector<Box> completed;
  int completer = 0;
};

// Not possible where the tensor has no digest, where requests overlap in part, where one of them
// converts elements, or where more than a quarter of the tensor was asked for by nobody. The same
// on every rank.
ProofPlan PlanProof(const TensorEntry& entry, std::span<const LoadWant> wants, int ranks);

// What stands in a buffer, as a contribution to the tensor's digest. `placed`: the disjoint boxes
// of bytes that a region consists of, relative to `base`.
Crc64 DigestOfBuffer(const TensorMeta& meta, std::span<const PlacedBox> placed,
                     const std::byte* base);

// Contribution of boxes that are read from storage for the proof alone, in blocks of bounded size.
// For the cells that no rank has: without them the sum would prove nothing.
Result<Crc64> DigestFromStorage(const OpenedCheckpoint& checkpoint, const TensorEntry& entry,
                                std::span<const Box> boxes, ReadStats* stats);

// After a proof failed: reads `region` again by whole leaves and compares it with the buffer.
//   kDataLoss  of storage, naming chunk, box and file; or "changed between storage and the buffer",
//              naming the box that holds all differing elements of the first block that has some
//   ok         storage is as it was written and the buffer is equal to it
Status FindDamage(const OpenedCheckpoint& checkpoint, const TensorEntry& entry,
                  const Region& region, std::span<const PlacedBox> placed, const std::byte* base);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_DIGEST_PROOF_H_
