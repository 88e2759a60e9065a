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

// Verifies a load by digest: the bytes in the ranks' buffers after the load, put together, must
// have the CRC that was stored (docs/format.md, "Hashes"). This covers the whole way from storage
// into the buffers and needs no whole leaf to have been read.
//
// CRCs of disjoint parts, each moved to its place in the whole, add up by exclusive or. So every
// rank computes the contribution of its cells, 8 bytes travel, and the sum is compared with the
// stored digest. Example: rows [0:2] on rank 0 and [2:4] on rank 1 of a stored [4, 8]: both are
// contributors, and d0 ^ d1 must be the digest. If rank 2 asked for [0:2] as well, it is a replica
// of rank 0: its CRC must be d0, and is not added.

namespace tensormount {

// A region that a rank asked for; `item` is its position in the request.
struct RequestedRegion {
  int rank = 0;
  std::uint32_t item = 0;
  Region region;         // Region of the stored tensor.
  bool convert = false;  // Whether the load converts elements.
};

// Which ranks contribute which cells to the proof of one tensor. Every cell must be counted once: a
// cell counted twice cancels.
struct ProofPlan {
  bool possible = false;
  std::vector<std::uint32_t> contributors;  // Positions in `wants`; their regions are disjoint.
  // A request for the same region as a contributor's: both CRCs must be equal.
  struct Replica {
    std::uint32_t want = 0;
    std::uint32_t contributor = 0;
  };
  std::vector<Replica> replicas;
  // Cells that no rank asked for, if they are few: read from storage by rank `completer`.
  std::vector<Box> completed;
  int completer = 0;
};

// Plans the proof of one tensor, with the same result on every rank. The proof is not possible if
// the tensor has no digest, requests overlap in part, a request converts elements, or the cells
// that no rank requests are more than a quarter of the tensor, in too many boxes, or not whole
// bytes.
ProofPlan PlanProof(const TensorEntry& entry, std::span<const RequestedRegion> wants, int ranks);

// The contribution of a buffer's bytes to the tensor's digest. `placed`: the disjoint boxes of
// bytes that a region consists of, relative to `base`.
Crc64 DigestOfBuffer(const TensorMeta& meta, std::span<const PlacedBox> placed,
                     const std::byte* base);

// The contribution of boxes that no rank has, read from storage in blocks of bounded size (whole
// boxes if elements are smaller than a byte).
Result<Crc64> DigestFromStorage(const OpenedCheckpoint& checkpoint, const TensorEntry& entry,
                                std::span<const Box> boxes, ReadStats* stats);

// Called after a proof failed: reads `region` again by whole leaves and compares it with the
// buffer.
//   kDataLoss  of storage, naming chunk, box and file; or "changed between storage and the buffer",
//              naming the box of all differing elements in the first block that has some
//   ok         storage is as it was written and the buffer is equal to it
Status FindDamage(const OpenedCheckpoint& checkpoint, const TensorEntry& entry,
                  const Region& region, std::span<const PlacedBox> placed, const std::byte* base);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_DIGEST_PROOF_H_
