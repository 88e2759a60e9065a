// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_STATE_COPY_H_
#define TENSORMOUNT_STATE_STATE_COPY_H_

#include <cstddef>
#include <functional>

#include "tensormount/shard.h"
#include "tensormount/state_dict.h"

namespace tensormount {

// A copy of the state with other memory: `shard_of(i)` returns the shard of item i, with the tensor
// shape, dtype and region that it has. What AddTensor checks is not checked again. The copy owns no
// memory (StateDict::AllocateData); a failure in `state` is kept.
StateDict WithShards(const StateDict& state, const std::function<Shard(std::size_t)>& shard_of);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_STATE_COPY_H_
