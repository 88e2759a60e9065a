// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_STRIDED_DIGEST_H_
#define TENSORMOUNT_SHARD_STRIDED_DIGEST_H_

#include <cstddef>

#include "tensormount/box.h"

#include "base/hash.h"
#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// The contribution of a box to the digest of its tensor (base/hash.h, Crc64Shift): the CRC of each
// of its runs in the tensor's row-major byte string, shifted by the number of bytes after it. The
// contributions of a partition XOR to the CRC-64 of the whole.
//
// Example: in a tensor of bytes [2, 4] with the byte string "abcdefgh", the box of columns 0 and 1
// is the runs 0:2 and 4:6. It contributes CRC("ab") shifted by 6 bytes XOR CRC("ef") shifted by 2.
// Columns 2 and 3 contribute CRC("cd") shifted by 4 XOR CRC("gh"); together they give
// CRC("abcdefgh").

// `placed`: the positions of the box's bytes relative to `base` (any strides); `byte_shape`: the
// tensor's ByteShape, in which the box must lie. An empty box contributes 0. Needs at most 256 KiB
// of memory, and only if runs of the tensor are not contiguous in memory.
Crc64 DigestOfPlaced(const PlacedBox& placed, const std::byte* base, const Dims& byte_shape);

// Does ExecuteCopy(plan, src, dst), where `plan` is PlanCopy(part, ..., ...), and XORs the
// contribution of `part` to *contribution. Runs over 512 bytes are copied and hashed in one pass
// over memory; for shorter runs blocks that are still cached are read a second time.
void ExecuteCopyWithDigest(const StridedCopy& plan, const Box& part, const std::byte* src,
                           std::byte* dst, const Dims& byte_shape, Crc64* contribution);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_STRIDED_DIGEST_H_
