// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_STRIDED_DIGEST_H_
#define TENSORMOUNT_SHARD_STRIDED_DIGEST_H_

#include <cstddef>

#include "tensormount/box.h"

#include "base/hash.h"
#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// The contribution of a box of a tensor to the tensor's digest (base/hash.h, Crc64Shift):
// the CRC of each of its runs in the tensor's row-major byte string, shifted by the bytes behind
// it. The contributions of a partition XOR to the CRC-64 of the whole.
//
// Example: of a tensor of bytes [2, 4], the box of columns 0 and 1 is the runs 0:2 and 4:6 of its
// byte string "abcdefgh". It contributes CRC("ab") moved up by 6 bytes, XOR CRC("ef") by 2. That of
// columns 2 and 3 is CRC("cd") by 4 XOR CRC("gh"); both together give CRC("abcdefgh").

// `placed`: where the box's bytes are, relative to `base` (any strides); `byte_shape`: the tensor's
// ByteShape, in which the box must lie. An empty box contributes 0. Needs at most 256 KiB of
// memory, and only where runs of the tensor are not runs of memory.
Crc64 DigestOfPlaced(const PlacedBox& placed, const std::byte* base, const Dims& byte_shape);

// ExecuteCopy(plan, src, dst), where `plan` is PlanCopy(part, ..., ...), and the digest of what was
// copied: XORs the contribution of `part` to *contribution. One pass over memory where runs are
// over 512 bytes, otherwise a second one over blocks that are still in cache.
void ExecuteCopyWithDigest(const StridedCopy& plan, const Box& part, const std::byte* src,
                           std::byte* dst, const Dims& byte_shape, Crc64* contribution);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_STRIDED_DIGEST_H_
