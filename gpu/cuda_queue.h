// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_QUEUE_H_
#define TENSORMOUNT_GPU_CUDA_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "device/device_ops.h"
#include "gpu/cuda_api.h"
#include "gpu/cuda_device.h"
#include "gpu/kernels/jobs.h"

namespace tensormount::gpu {

// DeviceQueue as a CUDA stream of lowest priority. Not thread-safe. It waits, within its limits, at
// some hundreds of pending launches and copies, beyond which the driver would block without a
// deadline, and before copies with pageable host memory, for which the driver blocks. The first
// allocation of scratch memory may also block (AreaPool).
class CudaQueue : public DeviceQueue {
 public:
  // Takes ownership of the stream.
  CudaQueue(std::shared_ptr<CudaDevice> device, cuda::Stream stream, const QueueLimits& limits);
  ~CudaQueue() override;
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  Status WaitFor(const std::shared_ptr<DeviceMark>& mark) override;
  Status CopyOut(std::span<const DeviceCopy> copies) override;
  Status CopyIn(std::span<const DeviceCopy> copies) override;
  Status CopyWithin(std::span<const DeviceCopy> copies) override;
  // kResourceExhausted if the device has no memory for the hashes or digests.
  Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base, std::uint64_t bytes,
                    std::uint64_t leaf_bytes, Hash128* out) override;
  Status Digest(std::span<const PlacedBox> placed, const std::byte* base, const Dims& byte_shape,
                Crc64* out) override;
  Result<std::shared_ptr<DeviceMark>> Mark() override;
  void SetLimits(const QueueLimits& limits) override { limits_ = limits; }

 private:
  class Results;
  // Copies within the device that wait for a launch, grouped by kernel.
  struct Copies {
    kernels::RunJob runs;
    kernels::CopyJob strided;
    kernels::TileJob tiles;
    void Clear() { runs.count = strided.batch.count = tiles.count = 0; }
  };
  // Hashes and digests are batched: they are launched when the batch is full, before hashes with
  // another leaf size, and before the next copy, wait or mark.
  struct PendingHashes {  // Hashes of the packed bytes [begin, end) of `gather`.
    std::vector<StridedCopy> gather;
    const std::byte* base = nullptr;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t leaf_bytes = 0;
    Hash128* out = nullptr;
    // Address of the bytes if they are contiguous on the device.
    const std::byte* in_place = nullptr;
    std::uint64_t leaves() const { return (end - begin + leaf_bytes - 1) / leaf_bytes; }
  };
  struct PendingDigest {
    std::size_t first = 0;  // Index of its first region.
    std::size_t count = 0;
    Crc64* out = nullptr;
  };
  struct Region {
    StridedCopy plan;
    const std::byte* base = nullptr;
    std::uint64_t tensor_bytes = 0;
  };
  // A range of host memory, and its offset `at` in scratch memory.
  struct Span {
    std::byte* host = nullptr;
    std::uint64_t at = 0;
    std::uint64_t bytes = 0;
  };
  // The place and size of a kernel's result, which is copied there once a later mark is reached.
  struct PendingResult {
    void* out = nullptr;
    std::size_t bytes = 0;
  };
  enum class Way { kOut, kIn };

  // Submits batched work.
  Status Flush();
  Status EnsureScratch();
  // Record makes a mark that also delivers results; Await waits for a mark within the limits.
  Result<std::shared_ptr<CudaMark>> Record();
  Status Await(CudaMark& mark) const;
  // Counts a launch or copy, and waits if too many are in progress.
  Status Submitted();
  Status AwaitAll();
  Status Launch(cuda::Function function, std::uint64_t blocks, unsigned threads, void* job,
                std::string_view name);
  // Copies between host and device. Copies that are not contiguous, and short copies of several, go
  // through scratch memory if there is any.
  Status Transfer(std::span<const DeviceCopy> copies, Way way);
  // Like Transfer, for all copies except those that are one run of at least `alone` bytes.
  Status TransferThroughScratch(std::span<const DeviceCopy> copies, std::uint64_t alone, Way way);
  Status TransferSpans(std::vector<Span>& spans, Way way);
  Status TransferByRuns(const DeviceCopy& copy, Way way);
  Status TransferBytes(std::byte* host, const std::byte* device, std::uint64_t bytes, Way way);
  // Adds bytes [first, first + bytes) of a copy within the device, counted along its dense side, to
  // the batch, or only a first part of these bytes; returns the number added. Requires
  // !CopiesAreFull().
  std::uint64_t AddCopy(const StridedCopy& plan, const std::byte* from, std::byte* to,
                        std::uint64_t first, std::uint64_t bytes);
  bool CopiesAreFull() const;
  Status CopyPart(const StridedCopy& plan, const std::byte* from, std::byte* to,
                  std::uint64_t first, std::uint64_t bytes);
  Status LaunchCopies();
  Status Deliver(cuda::Address from, std::span<const PendingResult> wanted);
  Status AddHashes(PendingHashes wanted);
  Status FlushHashes();
  // Packs the bytes of `wanted` into device memory from `at` on.
  Status Gather(const PendingHashes& wanted, cuda::Address at);
  Status FlushDigests();

  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<CudaContext> context_;
  const std::shared_ptr<ScratchPool> pool_;
  const cuda::Stream stream_;
  QueueLimits limits_;
  const std::shared_ptr<Results> results_;
  const std::unique_ptr<Copies> copies_;  // The batch of copies of the current call.
  std::optional<Scratch> scratch_;        // Taken on first use.
  std::vector<PendingHashes> hashes_;
  std::uint64_t hashes_leaves_ = 0;    // Leaves of hashes_.
  std::uint64_t hashes_gathered_ = 0;  // Bytes of hashes_ that are not contiguous.
  std::vector<PendingDigest> digests_;
  std::vector<Region> regions_;  // Regions of digests_.
  int since_mark_ = 0;           // Launches and copies since the last mark.
  std::deque<std::shared_ptr<CudaMark>> under_way_;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_QUEUE_H_
