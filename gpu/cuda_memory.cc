// SPDX-License-Identifier: Apache-2.0
// Pinned memory is the process's own pages, registered: what a program does to a context (resetting
// the device) then takes no memory away that somebody reads.
#include "gpu/cuda_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace tensormount::gpu {
namespace {

constexpr std::size_t kHostPage = 4096;
constexpr std::size_t kLeastBytes = 1024;  // Less holds no part of a copy.
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
                  Status::FromErrno(errno, "map", "memory to be pinned").message());
  }
  auto* const data = static_cast<std::byte*>(mapped);
  if (numa_node_ >= 0 && numa_node_ < 64) {
    // A wish: where it is refused (another policy of the process) pages lie where they lie.
    const unsigned long nodes = 1UL << numa_node_;
    (void)syscall(SYS_mbind, mapped, bytes, kPreferred, &nodes, 64UL, 0UL);
  }
  // A forked child can do nothing with a device; its parent's pages would only be copied for it.
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
    // Whatever the driver calls it: RLIMIT_MEMLOCK, a sandbox without it, no memory.
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

// Pages that are still registered must stay where they are: a device may write there.
void PinnedMemory::Release(std::byte* data, std::size_t bytes) {
  const CudaScope scope(*context_);
  if (scope.status().ok() && context_->driver().cuMemHostUnregister(data) == cuda::kSuccess) {
    (void)munmap(data, bytes);
  }
}

// ---- ScratchPool -----------------------------------------------------------------------------

ScratchPool::~ScratchPool() {
  const CudaScope scope(*context_);
  if (!scope.status().ok()) return;
  for (const Returned& returned : returned_) {
    (void)context_->driver().cuEventDestroy(returned.free);
    (void)context_->driver().cuMemFree(returned.scratch.data);
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
    cuda::Address data = 0;
    const cuda::Result result = context_->driver().cuMemAlloc(&data, bytes + kResultBytes);
    status = context_->Check(result, "allocate a buffer of " + std::to_string(bytes) + " bytes");
    if (status.ok()) return Scratch{data, bytes, true};
    if (result != cuda::kOutOfMemory) break;
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
    TENSORMOUNT_RETURN_IF_ERROR(context_->Check(over, "ask for a buffer"));
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
  // Without knowing when it is free it is nobody's any more.
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
