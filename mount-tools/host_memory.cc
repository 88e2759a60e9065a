// SPDX-License-Identifier: Apache-2.0
// Memory for `load` (host_memory.h). Large buffers are mapped together with their pages
// (MAP_POPULATE), so that the measured time of a load does not include their page faults.
#include "mount-tools/host_memory.h"

#include <cerrno>
#include <cstdlib>
#include <sys/mman.h>

namespace tensormount::tools {
namespace {

// Buffers of at least this size are mappings.
constexpr std::size_t kMapFrom = std::size_t{1} << 20;

}  // namespace

HostMemory::~HostMemory() {
  for (const std::span<std::byte> block : blocks_) {
    if (block.size() >= kMapFrom) {
      munmap(block.data(), block.size());
    } else {
      std::free(block.data());
    }
  }
}

Result<BufferView> HostMemory::BufferFor(const TensorMeta& meta, const Region& region) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t size,
                               RegionBytes(meta.dtype(), meta.shape(), region));
  void* data = nullptr;
  if (size >= kMapFrom) {
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                -1, 0);
    if (data == MAP_FAILED) {  // NOLINT
      return Status::FromErrno(errno, "allocate", std::to_string(size) + " bytes");
    }
  } else {
    data = std::malloc(size == 0 ? 1 : size);
    if (data == nullptr)
      return Status::FromErrno(ENOMEM, "allocate", std::to_string(size) + " bytes");
  }
  blocks_.emplace_back(static_cast<std::byte*>(data), size);
  bytes_ += size;
  const Dims shape = region.is_flat() ? Dims{region.volume()} : region.box().extent();
  return BufferView::Host(meta.dtype(), data, shape);
}

}  // namespace tensormount::tools
