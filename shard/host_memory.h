// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_HOST_MEMORY_H_
#define TENSORMOUNT_SHARD_HOST_MEMORY_H_

#include "tensormount/buffer.h"
#include "tensormount/status.h"

namespace tensormount {

// kInvalidArgument where what a view says of its memory cannot be: memory of a device on the host,
// pinned memory on a device, a handle without a stream.
Status CheckDescription(const BufferView& view);

// Whether the host can read and write what a view describes, now: pageable, pinned or managed
// memory whose contents are there. kUnsupported for memory of a device (device/devices.h), and
// where a stream orders the contents, of which nobody says whose it is; errors of CheckDescription.
Status CheckHostMemory(const BufferView& view);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_HOST_MEMORY_H_
