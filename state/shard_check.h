// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_SHARD_CHECK_H_
#define TENSORMOUNT_STATE_SHARD_CHECK_H_

#include "tensormount/shard.h"
#include "tensormount/status.h"

namespace tensormount {

// The buffer of a shard without data: dtype, extents and packed strides, with a null pointer.
BufferView WithoutMemory(DType dtype, const Region& region);

// Fails if the shape is invalid, the region lies outside or not on whole bytes, or the buffer does
// not fit the region. A null buffer is not an error here; the caller checks for it.
Status CheckShard(const Shard& shard);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_SHARD_CHECK_H_
