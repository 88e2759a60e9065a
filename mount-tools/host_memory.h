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

// Memory for the shards of one rank of `load`, which the destructor frees. Not thread-safe. Large
// buffers are mappings with all pages present (MAP_POPULATE). Small buffers come from malloc,
// because a mapping would take a page and a system call for every bias of a model.
class HostMemory {
 public:
  // Neither copyable nor movable, because callers hold views of the buffers.
  HostMemory() = default;
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // Allocates a packed buffer with the shape of a region: its extents, or one axis for a flat
  // range. The view is valid as long as this object; the bytes are not initialised.
  // kResourceExhausted: memory does not suffice.
  Result<BufferView> BufferFor(const TensorMeta& meta, const Region& region);
  // Total size of all buffers.
  std::uint64_t bytes() const { return bytes_; }

 private:
  // All buffers. A buffer of at least kMapFrom bytes (host_memory.cc) was mapped, others are from
  // malloc.
  std::vector<std::span<std::byte>> blocks_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_
