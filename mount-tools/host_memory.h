// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_
#define TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"

namespace tensormount::tools {

// Page-aligned memory for the slices of one rank, freed together.
//
// One for each rank of `import` and `load`, and not shared between threads. Large buffers are
// mapped with their pages there at once (MAP_POPULATE), small ones come from malloc: a mapping each
// would cost a page and a system call for every bias of a model.
class HostMemory {
 public:
  // Neither copied nor moved: buffers point into it.
  HostMemory() = default;
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // The size follows from type and region; strides are never needed here.
  // A packed buffer for a region: its extents, or one axis for a flat range. kResourceExhausted.
  // The view is valid as long as this lives. Its bytes are not set.
  Result<BufferView> BufferFor(const TensorMeta& meta, const Region& region);
  // Of all buffers so far.
  std::uint64_t bytes() const { return bytes_; }

 private:
  // How a block is freed follows from its size, as it was allocated.
  std::vector<std::span<std::byte>> blocks_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_
