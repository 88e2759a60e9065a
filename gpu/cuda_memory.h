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

  // kResourceExhausted where the system gives or pins no more; errors of a broken context.
  Result<std::byte*> Allocate(std::size_t bytes);
  void Free(std::byte* data);
  // Whether these bytes are all in such memory.
  bool Has(const std::byte* data, std::size_t bytes);

 private:
  void Release(std::byte* data, std::size_t bytes);
  const std::shared_ptr<CudaContext> context_;
  const int numa_node_;
  std::mutex mutex_;
  std::map<std::byte*, std::size_t> all_;
};

// Memory of the device, from a pool of our own: it is taken and given back without waiting for
// other work of the program, as cuMemFree does, which waits for every stream of the context. Where
// the device has no pools, what is given back is kept and used again, for half as many bytes or
// more, and freed by cuMemFree once the device is full. Thread-safe.
class AreaPool {
 public:
  // In a CudaScope, as all of it.
  static Result<std::shared_ptr<AreaPool>> Make(std::shared_ptr<CudaContext> context, int ordinal);
  ~AreaPool();
  AreaPool(const AreaPool&) = delete;
  AreaPool& operator=(const AreaPool&) = delete;

  // kResourceExhausted where the device has no more.
  Result<cuda::Address> Allocate(std::size_t bytes);
  // No work on it may be under way.
  void Free(cuda::Address data);
  // Kernels of another device may work with it, as NCCL's do where ranks are threads of one
  // process. Memory of a pool needs that to be said, other memory does not.
  void LetReach(cuda::Device peer, int ordinal);

 private:
  explicit AreaPool(std::shared_ptr<CudaContext> context) : context_(std::move(context)) {}
  const std::shared_ptr<CudaContext> context_;
  cuda::Pool pool_ = nullptr;  // Null: there are none.
  cuda::Stream stream_ = nullptr;
  std::mutex mutex_;
  // Without a pool: by size, and what comes back there. Free needs no memory of the host.
  using Kept = std::multimap<std::size_t, cuda::Address>;
  bool FreeKept();  // Whether there was any.
  Kept kept_;
  std::map<cuda::Address, Kept::node_type> in_use_;
};

// Memory of the device through which strided bytes go, and into which kernels write hashes.
struct Scratch {
  cuda::Address data = 0;
  std::size_t data_bytes = 0;
  // Never written so far: what is between bytes that cross may cross with them, and kernels read
  // all of a word of which they want a part.
  bool fresh = true;
  cuda::Address results() const { return data + data_bytes; }
};

// Some of it, for queues, each of which keeps what it took: so what one queue waits for (a stream
// of the program that hangs, say) no other one does. Thread-safe.
class ScratchPool {
 public:
  // So many for as many saves and loads at a time; further ones get a sixteenth of it.
  static constexpr std::size_t kLarge = 8;
  static constexpr std::size_t kMost = 64;
  static constexpr std::size_t kResultBytes = std::size_t{256} << 10;

  // `bytes` of data each. Where the device has not so much, halves of it are tried, so many times.
  static constexpr int kHalvings = 4;
  ScratchPool(std::shared_ptr<CudaContext> context, std::shared_ptr<AreaPool> areas,
              std::size_t bytes)
      : context_(std::move(context)), areas_(std::move(areas)), bytes_(bytes) {}
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  // In a CudaScope. kResourceExhausted where the device has not even the least, or so many queues
  // have what there may be.
  Result<Scratch> Take();
  // Once `stream` has done what it was given so far. In a CudaScope.
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
  // Devices that are full are not asked by each submission.
  std::chrono::steady_clock::time_point refused_{};
  Status why_refused_;
};

// Memory of the host, pinned where it can be, into which results of kernels come before they go to
// who wants them. Made as it is needed, kept, and used again. Thread-safe.
class ResultSlabs : public std::enable_shared_from_this<ResultSlabs> {
 public:
  static constexpr std::size_t kSlabBytes = std::size_t{1} << 20;

  explicit ResultSlabs(std::shared_ptr<PinnedMemory> pinned) : pinned_(std::move(pinned)) {}
  ~ResultSlabs();

  // Goes back when nobody has it any more. Not before all that was to be written there has been.
  struct Slab {
    std::byte* data = nullptr;
    bool pinned = false;
    std::size_t used = 0;
  };
  // kResourceExhausted where the host has no memory.
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
