// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_MEMORY_H_
#define TENSORMOUNT_GPU_CUDA_MEMORY_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tensormount/status.h"

#include "gpu/cuda_api.h"
#include "gpu/cuda_context.h"

// Memory pools of CudaDevice and its queues.

namespace tensormount::gpu {

// Pinned host memory. The pages are mapped by the process and only registered with the driver, so
// they stay mapped if the context is destroyed. Thread-safe.
class PinnedMemory {
 public:
  PinnedMemory(std::shared_ptr<CudaContext> context, int numa_node)
      : context_(std::move(context)), numa_node_(numa_node) {}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  // Allocates pinned memory. kResourceExhausted if the system has no more memory or refuses to pin
  // it; errors of a broken context.
  Result<std::byte*> Allocate(std::size_t bytes);
  void Free(std::byte* data);
  // Whether the whole range lies in one block that Allocate returned.
  bool Has(const std::byte* data, std::size_t bytes);

 private:
  void Release(std::byte* data, std::size_t bytes);
  const std::shared_ptr<CudaContext> context_;
  const int numa_node_;
  std::mutex mutex_;
  std::map<std::byte*, std::size_t> all_;
};

// Device memory from our own pool, so that allocating and freeing do not wait for other work of the
// program; cuMemFree would wait for every stream of the context. If the device does not support
// pools, freed blocks are kept for requests of at least half their size, and cuMemFree is called
// only when the device is full, and by the destructor. Thread-safe.
class AreaPool {
 public:
  // All functions require a CudaScope of the context on the calling thread.
  static Result<std::shared_ptr<AreaPool>> Make(std::shared_ptr<CudaContext> context, int ordinal);
  ~AreaPool();
  AreaPool(const AreaPool&) = delete;
  AreaPool& operator=(const AreaPool&) = delete;

  // Allocates device memory. kResourceExhausted if the device is full.
  Result<cuda::Address> Allocate(std::size_t bytes);
  // Frees memory that no pending work uses.
  void Free(cuda::Address data);
  // Allows kernels of another device to access the pool, which NCCL needs between threads of one
  // process. Memory from cuMemAlloc would not need this call.
  void AllowPeerAccess(cuda::Device peer, int ordinal);

 private:
  explicit AreaPool(std::shared_ptr<CudaContext> context) : context_(std::move(context)) {}
  const std::shared_ptr<CudaContext> context_;
  cuda::Pool pool_ = nullptr;  // Null: no pool support.
  cuda::Stream stream_ = nullptr;
  std::mutex mutex_;
  // Used if pool_ is null: kept blocks by size, and for each block in use the map node that Free
  // moves to kept_, so that Free does not allocate.
  using Kept = std::multimap<std::size_t, cuda::Address>;
  bool FreeKept();  // Frees all kept blocks; false if there were none.
  Kept kept_;
  std::map<cuda::Address, Kept::node_type> in_use_;
};

// Device memory for packing strided bytes, and for results of hash kernels.
struct Scratch {
  cuda::Address data = 0;
  std::size_t data_bytes = 0;
  // True until a queue has cleared the memory. Every byte must be initialised, because transfers
  // include gaps between copies, and kernels read whole words.
  bool fresh = true;
  cuda::Address results() const { return data + data_bytes; }
};

// Scratch memory for queues. Each queue keeps one buffer for itself until it is destroyed, so that
// a queue that hangs does not block another. Thread-safe.
class ScratchPool {
 public:
  // Number of full-size buffers, for concurrent saves and loads; further ones, up to kMost buffers
  // in all, get a sixteenth of the size.
  static constexpr std::size_t kLarge = 8;
  static constexpr std::size_t kMost = 64;
  static constexpr std::size_t kResultBytes = std::size_t{256} << 10;

  // `bytes`: size of a buffer's data; halved up to kHalvings times if the device has less memory.
  static constexpr int kHalvings = 4;
  ScratchPool(std::shared_ptr<CudaContext> context, std::shared_ptr<AreaPool> areas,
              std::size_t bytes)
      : context_(std::move(context)), areas_(std::move(areas)), bytes_(bytes) {}
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  // Takes a buffer. Requires a CudaScope. kResourceExhausted if the device lacks even the smallest
  // size, or all kMost buffers are in use.
  Result<Scratch> Take();
  // Gives a buffer back; Take hands it out again once the current work of `stream` is done.
  // Requires a CudaScope.
  void Give(const Scratch& scratch, cuda::Stream stream);

 private:
  struct Returned {
    Scratch scratch;
    cuda::Event free = nullptr;
  };
  Result<Scratch> Make();
  const std::shared_ptr<CudaContext> context_;
  const std::shared_ptr<AreaPool> areas_;
  const std::size_t bytes_;
  std::mutex mutex_;
  std::size_t made_ = 0;
  std::vector<Returned> returned_;
  // Time and error of the last refusal, which limit retries on a full device.
  std::chrono::steady_clock::time_point refused_{};
  Status why_refused_;
};

// Host memory, pinned if possible, to which the device copies results of kernels, before the host
// copies them to the caller. Allocated on demand, kept, and reused. Thread-safe.
class ResultSlabs : public std::enable_shared_from_this<ResultSlabs> {
 public:
  static constexpr std::size_t kSlabBytes = std::size_t{1} << 20;

  explicit ResultSlabs(std::shared_ptr<PinnedMemory> pinned) : pinned_(std::move(pinned)) {}
  ~ResultSlabs();

  // A slab goes back to the pool when its last reference is dropped. Keep a reference until the
  // device has finished all writes to the slab.
  struct Slab {
    std::byte* data = nullptr;
    bool pinned = false;
    std::size_t used = 0;
  };
  // Takes a slab. kResourceExhausted if the host has no memory.
  Result<std::shared_ptr<Slab>> Take();

 private:
  struct Memory {
    std::byte* data = nullptr;
    bool pinned = false;
  };
  const std::shared_ptr<PinnedMemory> pinned_;
  std::mutex mutex_;
  std::vector<Memory> free_;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_MEMORY_H_
