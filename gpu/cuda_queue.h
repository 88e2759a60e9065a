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

// A stream of the least priority, and what it was given. As DeviceQueue says: of one thread at a
// time, and nothing here waits for the device but where its rules let it: at some hundreds of
// launches and copies that are under way, beyond which the driver would wait without a deadline,
// and before copies from or to memory that is not pinned, which it ends before it returns.
class CudaQueue : public DeviceQueue {
 public:
  // Takes the stream.
  CudaQueue(std::shared_ptr<CudaDevice> device, cuda::Stream stream, const QueueRules& rules);
  ~CudaQueue() override;
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  Status After(const std::shared_ptr<DeviceMark>& mark) override;
  Status CopyOut(std::span<const DeviceCopy> copies) override;
  Status CopyIn(std::span<const DeviceCopy> copies) override;
  Status CopyWithin(std::span<const DeviceCopy> copies) override;
  // kResourceExhausted where the device has no memory for it.
  Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base, std::uint64_t bytes,
                    std::uint64_t leaf_bytes, Hash128* out) override;
  Status Digest(std::span<const PlacedBox> placed, const std::byte* base, const Dims& byte_shape,
                Crc64* out) override;
  Result<std::shared_ptr<DeviceMark>> Mark() override;
  void SetRules(const QueueRules& rules) override { rules_ = rules; }

 private:
  class Results;
  // Copies within the device that wait for a launch, by the kernel that does them.
  struct Copies {
    kernels::RunJob runs;
    kernels::CopyJob strided;
    kernels::TileJob tiles;
    void Clear() { runs.count = strided.batch.count = tiles.count = 0; }
  };
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
  // Bytes of the host, and where they stand in scratch memory.
  struct Span {
    std::byte* host = nullptr;
    std::uint64_t at = 0;
    std::uint64_t bytes = 0;
  };
  // Results that kernels put side by side, each to whom it is for, once a mark is reached.
  struct Wanted {
    void* out = nullptr;
    std::size_t bytes = 0;
  };
  enum class Way { kOut, kIn };

  // Hands over what waits to be submitted.
  Status Flush();
  Status NeedScratch();
  // The moment of what was submitted, with which its results go to who wants them; and a wait for
  // one, as the rules let it.
  Result<std::shared_ptr<CudaMark>> Record();
  Status Await(CudaMark& mark) const;
  // One launch or copy more is under way.
  Status Submitted();
  Status AwaitAll();
  Status Launch(cuda::Function function, std::uint64_t blocks, unsigned threads, void* job,
                std::string_view name);
  // Copies between host and device, through scratch memory where bytes do not lie side by side.
  Status Cross(std::span<const DeviceCopy> copies, Way way);
  // But those that are one run of `alone` bytes or more.
  Status CrossThroughScratch(std::span<const DeviceCopy> copies, std::uint64_t alone, Way way);
  Status CrossSpans(std::vector<Span>& spans, Way way);
  Status CrossByRuns(const DeviceCopy& copy, Way way);
  Status CrossBytes(std::byte* host, const std::byte* there, std::uint64_t bytes, Way way);
  // Adds bytes [first, first + bytes) of a copy within the device, counted along its dense side, or
  // as many of them as go together, and says how many. There must be room: CopiesAreFull.
  std::uint64_t AddCopy(const StridedCopy& plan, const std::byte* from, std::byte* to,
                        std::uint64_t first, std::uint64_t bytes);
  bool CopiesAreFull() const;
  Status CopyPart(const StridedCopy& plan, const std::byte* from, std::byte* to,
                  std::uint64_t first, std::uint64_t bytes);
  Status LaunchCopies();
  Status Deliver(cuda::Address from, std::span<const Wanted> wanted);
  Status AddHashes(WantedHashes wanted);
  Status FlushHashes();
  // Puts them side by side from `at` on.
  Status Gather(const WantedHashes& wanted, cuda::Address at);
  Status FlushDigests();

  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<CudaContext> context_;
  const std::shared_ptr<ScratchPool> pool_;
  const cuda::Stream stream_;
  QueueRules rules_;
  const std::shared_ptr<Results> results_;
  const std::unique_ptr<Copies> copies_;  // Of one call.
  std::optional<Scratch> scratch_;        // Once it was needed.
  std::vector<WantedHashes> hashes_;
  std::uint64_t hashes_leaves_ = 0;    // Of them.
  std::uint64_t hashes_gathered_ = 0;  // Bytes of them that do not lie side by side.
  std::vector<WantedDigest> digests_;
  std::vector<Region> regions_;  // Of them.
  int since_mark_ = 0;           // Launches and copies.
  std::deque<std::shared_ptr<CudaMark>> under_way_;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_QUEUE_H_
