// SPDX-License-Identifier: Apache-2.0
// Pinned memory is the process's own pages, registered: what a program does to a context (resetting
// the device) then takes no memory away that somebody reads.
#include "gpu/cuda_memory.h"

#include <cerrno>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace tensormount::gpu {
namespace {

constexpr std::size_t kHostPage = 4096;
constexpr long kPreferred = 1;  // MPOL_PREFERRED, without libnuma's header.

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

void PinnedMemory::Release(std::byte* data, std::size_t bytes) {
  {
    const CudaScope scope(*context_);
    if (scope.status().ok()) (void)context_->driver().cuMemHostUnregister(data);
  }
  (void)munmap(data, bytes);
}

// ---- ScratchPool -----------------------------------------------------------------------------

ScratchPool::~ScratchPool() {
  const CudaScope scope(*context_);
  if (!scope.status().ok()) return;
  for (const Slot& slot : slots_) {
    if (slot.data == 0) continue;
    (void)context_->driver().cuEventDestroy(slot.last);
    (void)context_->driver().cuMemFree(slot.data);
  }
}

Status ScratchPool::Make(Slot& slot) {
  const cuda::Driver& driver = context_->driver();
  Status status;
  for (int halvings = 0; halvings <= kHalvings; ++halvings) {
    const std::size_t bytes = bytes_ >> halvings;
    if (bytes < room_) break;
    cuda::Address data = 0;
    const cuda::Result result = driver.cuMemAlloc(&data, bytes + kResults * sizeof(Hash128));
    status = context_->Check(result, "allocate a buffer of " + std::to_string(bytes) + " bytes");
    if (result == cuda::kOutOfMemory) continue;
    TENSORMOUNT_RETURN_IF_ERROR(status);
    status = context_->Check(driver.cuEventCreate(&slot.last, cuda::kEventDisableTiming),
                             "make an event");
    if (!status.ok()) {
      (void)driver.cuMemFree(data);
      return status;
    }
    slot.data = data;
    slot.data_bytes = bytes;
    std::size_t none = 0;
    room_.compare_exchange_strong(none, bytes);
    return {};
  }
  return status.ok() ? Status(Code::kResourceExhausted, context_->name() + ": no buffer") : status;
}

Result<std::size_t> ScratchPool::Room() {
  if (room_ == 0) {
    Slot& first = slots_.front();
    std::lock_guard lock(first.mutex);
    if (first.data == 0) TENSORMOUNT_RETURN_IF_ERROR(Make(first));
  }
  return room_.load();
}

Result<ScratchPool::Lease> ScratchPool::Take(cuda::Stream stream) {
  const unsigned turn = turn_++;
  Status why;
  for (unsigned i = 0; i < kCount; ++i) {
    Slot& slot = slots_[(turn + i) % kCount];
    std::unique_lock lock(slot.mutex);
    const bool fresh = slot.data == 0;
    if (fresh) {
      why = Make(slot);
      if (why.code() == Code::kResourceExhausted) continue;  // Another one may be there.
      TENSORMOUNT_RETURN_IF_ERROR(why);
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(context_->Check(
          context_->driver().cuStreamWaitEvent(stream, slot.last, 0), "wait for an event"));
    }
    return Lease(this, &slot, stream, std::move(lock));
  }
  return why;
}

ScratchPool::Lease::~Lease() {
  if (!lock_.owns_lock()) return;
  // Where it fails the context is broken, which the mark of that work will tell.
  (void)pool_->context_->driver().cuEventRecord(slot_->last, stream_);
}

// ---- ResultSlabs -----------------------------------------------------------------------------

ResultSlabs::~ResultSlabs() {
  for (std::byte* const data : free_) pinned_->Free(data);
}

Result<std::shared_ptr<ResultSlabs::Slab>> ResultSlabs::Take() {
  std::byte* data = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      data = free_.back();
      free_.pop_back();
    }
  }
  if (data == nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(data, pinned_->Allocate(kSlabBytes));
  }
  return std::shared_ptr<Slab>(new Slab{data}, [pool = shared_from_this()](Slab* slab) {
    std::lock_guard lock(pool->mutex_);
    pool->free_.push_back(slab->data);
    delete slab;
  });
}

}  // namespace tensormount::gpu
