// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_
#define TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"

namespace tensormount::tools {

// Page-aligned memory for the slices of one rank, freed together.
class HostMemory {
 public:
  HostMemory() = default;
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // A packed buffer for a region: its extents, or one axis for a flat range. kResourceExhausted.
  Result<BufferView> BufferFor(const TensorMeta& meta, const Region& region);
  std::uint64_t bytes() const { return bytes_; }

 private:
  struct Block {
    void* data;
    std::size_t size;
  };
  std::vector<Block> blocks_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_HOST_MEMORY_H_
