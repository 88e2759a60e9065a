// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_SHARD_CHECK_H_
#define TENSORMOUNT_STATE_SHARD_CHECK_H_

#include "tensormount/shard.h"
#include "tensormount/status.h"

namespace tensormount {

// The data of a shard that has none: dtype and extents, packed, no memory.
BufferView WithoutMemory(DType dtype, const Region& region);

// Whether a shard is one: its shape is possible, its region lies within it (on whole bytes), and
// its buffer fits the region. Null buffers are for the caller to judge.
Status CheckShard(const Shard& shard);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_SHARD_CHECK_H_
