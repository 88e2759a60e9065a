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

// A box of a tensor as a byte string in packed row-major order. A value; immutable.
// Rows 2 to 3 of a 4 x 8 tensor of bytes are one run, bytes 16 to 31 of the tensor, and can lie at
// their position in the tensor's file. Columns 2 to 3 are 4 short runs, so their packed bytes are
// stored elsewhere.
class TargetGeometry {
 public:
  // kInvalidArgument: the box is outside of the tensor, or does not begin and end on whole bytes.
  static Result<TargetGeometry> Make(const TensorMeta& meta, const Box& box);

  std::uint64_t bytes() const { return bytes_; }
  // Whether the box is one run of the tensor's bytes, and where that run begins.
  bool is_run() const { return is_run_; }
  std::uint64_t run_begin() const { return run_begin_; }

  // The contribution of `size` bytes from `begin` on (within bytes()) to the digest of the whole
  // tensor (base/hash.h).
  // CRCs are linear: the digest of a tensor is the XOR of the contributions of its parts, each
  // shifted by the bytes after it. So each part is hashed once, in any order.
  Crc64 Contribution(std::uint64_t begin, const void* data, std::size_t size) const;

 private:
  Box box_;  // The box in bytes of the tensor.
  Dims byte_shape_;
  std::uint64_t bytes_ = 0;
  std::uint64_t tensor_bytes_ = 0;
  bool is_run_ = false;
  std::uint64_t run_begin_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_TARGET_GEOMETRY_H_
