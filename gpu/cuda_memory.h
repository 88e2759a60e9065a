// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_MEMORY_H_
#define TENSORMOUNT_GPU_CUDA_MEMORY_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tensormount/status.h"

#include "base/hash.h"
#include "gpu/cuda_api.h"
#include "gpu/cuda_context.h"

// Memory that CudaDevice and its queues work with, all of it bounded.

namespace tensormount::gpu {

// Pages of the host that a device copies from and to by itself. They are the process's own pages,
// registered with the driver: they stay where they are whatever becomes of the context.
// Thread-safe.
class PinnedMemory {
 public:
  PinnedMemory(std::shared_ptr<CudaContext> context, int numa_node)
      : context_(std::move(context)), numa_node_(numa_node) {}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  // kResourceExhausted where the system gives or pins no more.
  Result<std::byte*> Allocate(std::size_t bytes);
  void Free(std::byte* data);

 private:
  void Release(std::byte* data, std::size_t bytes);
  const std::shared_ptr<CudaContext> context_;
  const int numa_node_;
  std::mutex mutex_;
  std::map<std::byte*, std::size_t> all_;
};

// Memory of the device through which strided bytes go, and into which kernels write hashes. A few
// for all queues of a device, which take turns in the device's time: nobody waits on the host.
class ScratchPool {
 public:
  static constexpr std::size_t kCount = 2;
  // Where the device has not so much, halves of it are tried, so many times.
  static constexpr int kHalvings = 4;
  static constexpr std::size_t kResults = std::size_t{64} << 10;  // Words of 16 bytes.

  // `bytes` of data each.
  ScratchPool(std::shared_ptr<CudaContext> context, std::size_t bytes)
      : context_(std::move(context)), bytes_(bytes) {}
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

 private:
  struct Slot {
    std::mutex mutex;
    cuda::Address data = 0;
    std::size_t data_bytes = 0;
    cuda::Event last = nullptr;  // Recorded behind the work of whoever had it.
  };

 public:
  // Bytes of data that each has at least. kResourceExhausted where the device has not even the
  // least; otherwise Take always finds one. In a CudaScope.
  Result<std::size_t> Room();

  // One that the caller has alone until it is destroyed: what it submits to `stream` meanwhile
  // comes after what others submitted for it, and before what others will. In a CudaScope.
  class Lease {
   public:
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    cuda::Address data() const { return slot_->data; }
    std::size_t data_bytes() const { return slot_->data_bytes; }
    cuda::Address results() const { return slot_->data + slot_->data_bytes; }

   private:
    friend class ScratchPool;
    Lease(ScratchPool* pool, Slot* slot, cuda::Stream stream, std::unique_lock<std::mutex> lock)
        : pool_(pool), slot_(slot), stream_(stream), lock_(std::move(lock)) {}
    ScratchPool* pool_;
    Slot* slot_;
    cuda::Stream stream_;
    std::unique_lock<std::mutex> lock_;
  };
  // kResourceExhausted where the device has not even the least.
  Result<Lease> Take(cuda::Stream stream);

 private:
  Status Make(Slot& slot);
  const std::shared_ptr<CudaContext> context_;
  const std::size_t bytes_;
  std::atomic<std::size_t> room_ = 0;  // Of the first that was made; no later one has less.
  std::array<Slot, kCount> slots_;
  std::atomic<unsigned> turn_ = 0;
};

// Pinned memory of the host into which results of kernels come before they go to who wants them.
// Made as it is needed, kept, and used again.
class ResultSlabs : public std::enable_shared_from_this<ResultSlabs> {
 public:
  static constexpr std::size_t kSlabBytes = std::size_t{256} << 10;

  explicit ResultSlabs(std::shared_ptr<PinnedMemory> pinned) : pinned_(std::move(pinned)) {}
  ~ResultSlabs();

  // Goes back when nobody has it any more. Not before all that was to be written there has been.
  struct Slab {
    std::byte* data = nullptr;
    std::size_t used = 0;
  };
  Result<std::shared_ptr<Slab>> Take();

 private:
  const std::shared_ptr<PinnedMemory> pinned_;
  std::mutex mutex_;
  std::vector<std::byte*> free_;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_MEMORY_H_
