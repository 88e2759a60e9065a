// SPDX-License-Identifier: Apache-2.0
// Memory pools of CUDA devices. Pinned memory consists of the process's own registered pages, so
// that a reset of the device does not remove memory that is being read.
#include "gpu/cuda_memory.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "base/deadline.h"
#include "device/pinned_ring.h"

namespace tensormount::gpu {
namespace {

constexpr std::size_t kHostPage = 4096;
constexpr std::size_t kLeastBytes = 1024;  // Scratch memory of this size holds a part of any copy.
constexpr long kPreferred = 1;             // MPOL_PREFERRED, without libnuma's header.

std::size_t WholePages(std::size_t bytes) {
  return (bytes + kHostPage - 1) / kHostPage * kHostPage;
}

}  // namespace

// ---- PinnedMemory ----------------------------------------------------------------------------

PinnedMemory::~PinnedMemory() {
  for (const auto& [data, bytes] : all_) Release(data, bytes);
}

Result<std::byte*> PinnedMemory::Allocate(std::size_t bytes) {
  bytes = WholePages(bytes);
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return Status(Code::kResourceExhausted,
                  Status::FromErrno(errno, "map", "memory to pin").message());
  }
  auto* const data = static_cast<std::byte*>(mapped);
  if (numa_node_ >= 0 && numa_node_ < 64) {
    // A refusal is ignored: memory on another NUMA node is only slower.
    const unsigned long nodes = 1UL << numa_node_;
    (void)syscall(SYS_mbind, mapped, bytes, kPreferred, &nodes, 64UL, 0UL);
  }
  // A forked child cannot use devices, so do not copy the pages to it.
  (void)madvise(mapped, bytes, MADV_DONTFORK);
  Status status;
  {
    const CudaScope scope(*context_);
    status = scope.status();
    if (status.ok()) {
      status = context_->Check(
          context_->driver().cuMemHostRegister(data, bytes, cuda::kRegisterPortable),
          "pin " + std::to_string(bytes) + " bytes");
    }
  }
  if (!status.ok()) {
    (void)munmap(mapped, bytes);
    if (status.code() == Code::kUnavailable) return status;
    // Any other driver error counts as a lack of memory: RLIMIT_MEMLOCK, a sandbox, no memory.
    return Status(Code::kResourceExhausted, status.message());
  }
  std::lock_guard lock(mutex_);
  all_.emplace(data, bytes);
  return data;
}

void PinnedMemory::Free(std::byte* data) {
  std::unique_lock lock(mutex_);
  const auto found = all_.find(data);
  if (found == all_.end()) return;
  const std::size_t bytes = found->second;
  all_.erase(found);
  lock.unlock();
  Release(data, bytes);
}

bool PinnedMemory::Has(const std::byte* data, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): only to look it up.
  const auto above = all_.upper_bound(const_cast<std::byte*>(data));
  if (above == all_.begin()) return false;
  const auto& [begin, size] = *std::prev(above);
  return data + bytes <= begin + size;
}

// Unmaps the pages only if they were unregistered, because a device may still write to registered
// pages.
void PinnedMemory::Release(std::byte* data, std::size_t bytes) {
  const CudaScope scope(*context_);
  if (scope.status().ok() && context_->driver().cuMemHostUnregister(data) == cuda::kSuccess) {
    (void)munmap(data, bytes);
  }
}

// ---- AreaPool --------------------------------------------------------------------------------

Result<std::shared_ptr<AreaPool>> AreaPool::Make(std::shared_ptr<CudaContext> context,
                                                 int ordinal) {
  const cuda::Driver& driver = context->driver();
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): the constructor is private.
  std::shared_ptr<AreaPool> made(new AreaPool(std::move(context)));
  int has_pools = 0;
  (void)driver.cuDeviceGetAttribute(&has_pools, cuda::kAttributeMemoryPools,
                                    made->context_->device());
  if (has_pools == 0) return made;
  cuda::PoolProperties properties;
  properties.type = cuda::kPinnedAllocation;
  properties.location = {cuda::kLocationDevice, ordinal};
  const Status pooled = made->context_->Check(driver.cuMemPoolCreate(&made->pool_, &properties),
                                              "create a memory pool");
  if (!pooled.ok()) {
    made->pool_ = nullptr;
    if (pooled.code() == Code::kUnavailable) return pooled;
    return made;
  }
  TENSORMOUNT_RETURN_IF_ERROR(made->context_->Check(
      driver.cuStreamCreateWithPriority(&made->stream_, cuda::kStreamNonBlocking, 0),
      "create a stream"));
  return made;
}

AreaPool::~AreaPool() {
  const CudaScope scope(*context_);
  if (!scope.status().ok()) return;
  const cuda::Driver& driver = context_->driver();
  for (const auto& [bytes, data] : kept_) (void)driver.cuMemFree(data);
  kept_.clear();
  if (stream_ != nullptr) (void)driver.cuStreamDestroy(stream_);
  // Blocks that are still allocated stay valid when their pool is destroyed.
  if (pool_ != nullptr) (void)driver.cuMemPoolDestroy(pool_);
}

Result<cuda::Address> AreaPool::Allocate(std::size_t bytes) {
  // The stream has only allocations and frees of unused memory, so waiting for it is short.
  constexpr std::chrono::seconds kPatience{30};
  const cuda::Driver& driver = context_->driver();
  const auto check = [&](cuda::Result result) {
    return result == cuda::kSuccess
               ? Status()
               : context_->Check(result, "allocate " + std::to_string(bytes) + " bytes");
  };
  cuda::Address data = 0;
  if (pool_ != nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(
        check(driver.cuMemAllocFromPoolAsync(&data, bytes, pool_, stream_)));
    const auto mark = CudaMark::Record(context_, stream_);
    Status there = mark.status();
    if (there.ok()) there = AwaitMark(*mark.value(), Deadline::After(kPatience));
    if (there.ok()) return data;
    (void)driver.cuMemFreeAsync(data, stream_);
    return there;
  }
  {
    std::lock_guard lock(mutex_);
    const auto fits = kept_.lower_bound(bytes);
    if (fits != kept_.end() && fits->first / 2 <= bytes) {
      data = fits->second;
      in_use_[data] = kept_.extract(fits);
      return data;
    }
  }
  Kept entry{{bytes, 0}};  // Made first: device memory would be lost if this threw later.
  std::map<cuda::Address, Kept::node_type> in_use;
  in_use[0] = entry.extract(entry.begin());
  Status allocated = check(driver.cuMemAlloc(&data, bytes));
  if (allocated.code() == Code::kResourceExhausted && FreeKept()) {
    allocated = check(driver.cuMemAlloc(&data, bytes));
  }
  TENSORMOUNT_RETURN_IF_ERROR(allocated);
  auto node = in_use.extract(in_use.begin());
  node.key() = data;
  node.mapped().mapped() = data;
  std::lock_guard lock(mutex_);
  in_use_.insert(std::move(node));
  return data;
}

// Does not hold the lock during cuMemFree, which waits for all streams of the context.
bool AreaPool::FreeKept() {
  Kept kept;
  {
    std::lock_guard lock(mutex_);
    kept.swap(kept_);
  }
  for (const auto& [bytes, data] : kept) (void)context_->driver().cuMemFree(data);
  return !kept.empty();
}

void AreaPool::Free(cuda::Address data) {
  if (pool_ != nullptr) {
    (void)context_->driver().cuMemFreeAsync(data, stream_);
    return;
  }
  std::lock_guard lock(mutex_);
  auto node = in_use_.extract(data);
  if (!node.empty()) kept_.insert(std::move(node.mapped()));
}

void AreaPool::AllowPeerAccess(cuda::Device peer, int ordinal) {
  int can = 0;
  const cuda::Driver& driver = context_->driver();
  if (pool_ == nullptr ||
      driver.cuDeviceCanAccessPeer(&can, peer, context_->device()) != cuda::kSuccess || can == 0) {
    return;
  }
  const cuda::PoolAccess access{{cuda::kLocationDevice, ordinal}, cuda::kAccessReadWrite};
  // A failure is ignored, because only NCCL needs the access.
  (void)driver.cuMemPoolSetAccess(pool_, &access, 1);
}

// ---- ScratchPool -----------------------------------------------------------------------------

ScratchPool::~ScratchPool() {
  const CudaScope scope(*context_);
  if (!scope.status().ok()) return;
  for (const Returned& returned : returned_) {
    // A buffer with pending work is leaked.
    const bool over = context_->driver().cuEventQuery(returned.free) == cuda::kSuccess;
    (void)context_->driver().cuEventDestroy(returned.free);
    if (over) areas_->Free(returned.scratch.data);
  }
}

Result<Scratch> ScratchPool::Make() {
  constexpr std::chrono::seconds kAskAgain{1};
  if (!why_refused_.ok() && std::chrono::steady_clock::now() < refused_ + kAskAgain) {
    return why_refused_;
  }
  Status status;
  for (int halvings = 0; halvings <= kHalvings; ++halvings) {
    const std::size_t bytes =
        std::max((made_ < kLarge ? bytes_ : bytes_ / 16) >> halvings, kLeastBytes);
    const Result<cuda::Address> data = areas_->Allocate(bytes + kResultBytes);
    if (data.ok()) return Scratch{data.value(), bytes, true};
    status = data.status();
    if (status.code() != Code::kResourceExhausted) break;
  }
  if (status.code() == Code::kResourceExhausted) {
    refused_ = std::chrono::steady_clock::now();
    why_refused_ = status;
  }
  return status;
}

Result<Scratch> ScratchPool::Take() {
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < returned_.size(); ++i) {
    const Returned found = returned_[i];
    const cuda::Result over = context_->driver().cuEventQuery(found.free);
    if (over == cuda::kNotReady) continue;
    TENSORMOUNT_RETURN_IF_ERROR(context_->Check(over, "query an event"));
    returned_.erase(returned_.begin() + static_cast<std::ptrdiff_t>(i));
    (void)context_->driver().cuEventDestroy(found.free);
    return found.scratch;
  }
  if (made_ == kMost) {
    return Status(Code::kResourceExhausted, context_->name() + ": all " + std::to_string(kMost) +
                                                " buffers are in use by other saves and loads");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Scratch scratch, Make());
  ++made_;
  return scratch;
}

void ScratchPool::Give(const Scratch& scratch, cuda::Stream stream) {
  const cuda::Driver& driver = context_->driver();
  std::lock_guard lock(mutex_);
  Returned returned{scratch};
  // Without an event the buffer is leaked, because nobody knows when its work ends.
  if (driver.cuEventCreate(&returned.free, cuda::kEventDisableTiming) != cuda::kSuccess) return;
  if (driver.cuEventRecord(returned.free, stream) != cuda::kSuccess) {
    (void)driver.cuEventDestroy(returned.free);
    return;
  }
  returned_.push_back(returned);
}

// ---- ResultSlabs -----------------------------------------------------------------------------

ResultSlabs::~ResultSlabs() {
  for (const Memory& memory : free_) {
    if (memory.pinned) {
      pinned_->Free(memory.data);
    } else {
      std::free(memory.data);  // NOLINT(cppcoreguidelines-no-malloc)
    }
  }
}

Result<std::shared_ptr<ResultSlabs::Slab>> ResultSlabs::Take() {
  Memory memory;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      memory = free_.back();
      free_.pop_back();
    }
  }
  if (memory.data == nullptr) {
    const Result<std::byte*> pinned = pinned_->Allocate(kSlabBytes);
    if (pinned.ok()) {
      memory = {pinned.value(), true};
    } else if (pinned.status().code() != Code::kResourceExhausted) {
      return pinned.status();
    } else {
      void* data = nullptr;
      if (posix_memalign(&data, kHostPage, kSlabBytes) != 0) return pinned.status();
      memory.data = static_cast<std::byte*>(data);
    }
  }
  return std::shared_ptr<Slab>(new Slab{memory.data, memory.pinned},
                               [pool = shared_from_this()](Slab* slab) {
                                 std::lock_guard lock(pool->mutex_);
                                 pool->free_.push_back({slab->data, slab->pinned});
                                 delete slab;
                               });
}

}  // namespace tensormount::gpu
