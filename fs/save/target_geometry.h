// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_TARGET_GEOMETRY_H_
#define TENSORMOUNT_FS_SAVE_TARGET_GEOMETRY_H_

#include <cstddef>
#include <cstdint>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {

// Rows 2 to 3 of a 4 x 8 tensor of bytes are one run, bytes 16 to 31 of the tensor, so they can lie
// in the file of the tensor at their final position. Columns 2 to 3 are 4 short runs of it: their
// packed bytes only make sense in a file of their own.
// A box of a tensor as a string of bytes, its packed row-major order. A value; immutable.
class TargetGeometry {
 public:
  // kInvalidArgument as ByteRegion.
  static Result<TargetGeometry> Make(const TensorMeta& meta, const Box& box);

  std::uint64_t bytes() const { return bytes_; }
  // Whether the bytes are one run of the tensor's, and from where on.
  bool is_run() const { return is_run_; }
  std::uint64_t run_begin() const { return run_begin_; }

  // What `size` bytes from `begin` on contribute to the digest of the whole tensor (base/hash.h).
  // To lie within bytes().
  // CRCs are linear: the digest of a tensor is the XOR of what its parts contribute, each shifted
  // by the bytes behind it. So every part is hashed once, by whoever has it in memory, in any
  // order.
  Crc64 Contribution(std::uint64_t begin, const void* data, std::size_t size) const;

 private:
  Box box_;  // Of bytes.
  Dims byte_shape_;
  std::uint64_t bytes_ = 0;
  std::uint64_t tensor_bytes_ = 0;
  bool is_run_ = false;
  std::uint64_t run_begin_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_TARGET_GEOMETRY_H_
