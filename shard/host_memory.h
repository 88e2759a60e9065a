// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_HOST_MEMORY_H_
#define TENSORMOUNT_SHARD_HOST_MEMORY_H_

#include "tensormount/buffer.h"
#include "tensormount/status.h"

namespace tensormount {

// kInvalidArgument if a view's description of its memory is contradictory: device memory on the
// host, pinned memory on a device, or a stream kind that does not match the stream handle.
Status CheckDescription(const BufferView& view);

// Checks that the host can access the memory of a view now: pageable, pinned or managed memory
// whose contents are valid. kUnsupported for device memory (device/devices.h handles it), and if a
// device stream orders the contents; also the errors of CheckDescription.
Status CheckHostMemory(const BufferView& view);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_HOST_MEMORY_H_
