// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_QUEUE_H_
#define TENSORMOUNT_GPU_CUDA_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "device/device_ops.h"
#include "gpu/cuda_api.h"
#include "gpu/cuda_device.h"
#include "gpu/kernels/jobs.h"

namespace tensormount::gpu {

// A stream of the least priority, and what it was given. As DeviceQueue says: of one thread at a
// time, and nothing here waits for the device, but where host memory is not pinned: the driver then
// returns from a copy when it is over.
class CudaQueue : public DeviceQueue {
 public:
  // Takes the stream.
  CudaQueue(std::shared_ptr<CudaDevice> device, cuda::Stream stream);
  ~CudaQueue() override;
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  Status After(const std::shared_ptr<DeviceMark>& mark) override;
  Status CopyOut(std::span<const DeviceCopy> copies) override;
  Status CopyIn(std::span<const DeviceCopy> copies) override;
  Status CopyWithin(std::span<const DeviceCopy> copies) override;
  Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base, std::uint64_t bytes,
                    std::uint64_t leaf_bytes, Hash128* out) override;
  Status Digest(std::span<const PlacedBox> placed, const std::byte* base, const Dims& byte_shape,
                Crc64* out) override;
  Result<std::shared_ptr<DeviceMark>> Mark() override;

 private:
  class Results;
  // Hashes and digests are computed many at a time: they wait for others, or for what is submitted
  // after them.
  struct WantedHashes {  // Of the bytes [begin, end) that plans put side by side.
    std::vector<StridedCopy> gather;
    const std::byte* base = nullptr;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t leaf_bytes = 0;
    Hash128* out = nullptr;
    // Where they lie side by side on the device, if they do.
    const std::byte* in_place = nullptr;
    std::uint64_t leaves() const { return (end - begin + leaf_bytes - 1) / leaf_bytes; }
  };
  struct WantedDigest {
    std::size_t first = 0;  // Of its regions.
    std::size_t count = 0;
    Crc64* out = nullptr;
  };
  struct Region {
    StridedCopy plan;
    const std::byte* base = nullptr;
    std::uint64_t tensor_bytes = 0;
  };

  // Begins to submit: what waits to be submitted goes before.
  Status Begin();
  Status Launch(cuda::Function function, std::uint64_t threads, void* job, std::string_view name);
  // Copies between host and device through scratch memory.
  enum class Way { kOut, kIn };
  Status Cross(std::span<const DeviceCopy> copies, Way way);
  Status CrossStrided(std::span<const DeviceCopy> copies, Way way);
  Status CrossByRuns(const DeviceCopy& copy, Way way);
  Status CrossBytes(std::byte* to, const std::byte* from, std::uint64_t bytes, Way way);
  Status CopyMembers(kernels::CopyJob& job);
  // Results that kernels put side by side from `from` on, each to whom it is for, once a mark is
  // reached.
  struct Wanted {
    void* out = nullptr;
    std::size_t bytes = 0;
  };
  Status Deliver(cuda::Address from, std::span<const Wanted> results);
  Status Wait(WantedHashes wanted, std::uint64_t room);
  Status FlushHashes();
  // Puts them side by side from `at` on.
  Status Gather(const WantedHashes& wanted, cuda::Address at);
  Status FlushDigests();

  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<CudaContext> context_;
  const cuda::Stream stream_;
  const std::shared_ptr<Results> results_;
  std::vector<WantedHashes> hashes_;
  std::uint64_t hashes_leaves_ = 0;    // Of them.
  std::uint64_t hashes_gathered_ = 0;  // Bytes of them that do not lie side by side.
  std::vector<WantedDigest> digests_;
  std::vector<Region> regions_;  // Of them.
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_QUEUE_H_
