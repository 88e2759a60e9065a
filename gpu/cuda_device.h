// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_DEVICE_H_
#define TENSORMOUNT_GPU_CUDA_DEVICE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "device/device_ops.h"
#include "gpu/cuda_api.h"
#include "gpu/cuda_context.h"
#include "gpu/cuda_memory.h"
#include "gpu/nccl_link.h"

namespace tensormount::gpu {

// What a device is made with.
struct CudaOptions {
  PinnedShape pinned;
  std::size_t scratch_bytes = std::size_t{4} << 20;  // Of a ScratchPool's buffers.
  NcclOptions nccl;
};

// The kernels of an image, loaded for one context.
struct CudaKernels {
  cuda::Function copy = nullptr;
  cuda::Function runs = nullptr;
  cuda::Function tiles = nullptr;
  cuda::Function hash = nullptr;
  cuda::Function crc = nullptr;
};

// One NVIDIA GPU, or a part of one (MIG), by the driver API and its primary context: that in which
// PyTorch and all that uses the CUDA runtime work. Thread-safe.
class CudaDevice : public DeviceOps, public std::enable_shared_from_this<CudaDevice> {
 public:
  // `image`: the compiled kernels (kernels.cu); must live as long as the process.
  // kUnavailable where the device cannot be had, or the image has no code for it.
  static Result<std::shared_ptr<CudaDevice>> Open(std::shared_ptr<const cuda::Driver> driver,
                                                  int ordinal, std::span<const std::byte> image,
                                                  const CudaOptions& options = {});

  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const std::shared_ptr<CudaContext>& context() const { return context_; }
  const CudaKernels& kernels() const { return kernels_; }
  const std::shared_ptr<ScratchPool>& scratch() const { return scratch_; }
  const std::shared_ptr<ResultSlabs>& results() const { return results_; }
  PinnedMemory& pinned_memory() { return *pinned_; }
  // Kernels of `peer` may work with this device's memory, where it can be reached.
  void LetReach(const CudaDevice& peer);

  std::string name() const override { return context_->name(); }
  PinnedShape pinned() const override { return options_.pinned; }
  bool gone() const override { return context_->gone(); }
  Status Check(const BufferView& view) override;
  Result<std::byte*> AllocatePinned(std::size_t bytes) override;
  void FreePinned(std::byte* data) override;
  Result<std::byte*> Allocate(std::size_t bytes) override;
  void Free(std::byte* data) override;
  Result<std::shared_ptr<DeviceMark>> MarkStream(const DeviceStream& stream) override;
  Status HoldStream(const DeviceStream& stream, const std::shared_ptr<DeviceMark>& mark) override;
  Result<std::unique_ptr<DeviceQueue>> MakeQueue(const QueueRules& rules) override;
  // Over NCCL.
  Result<std::unique_ptr<DeviceLink>> OpenLink() override;

 private:
  CudaDevice(std::shared_ptr<CudaContext> context, int ordinal, const CudaOptions& options)
      : context_(std::move(context)), ordinal_(ordinal), options_(options) {}
  Status Load(std::span<const std::byte> image);
  Status FillTables(cuda::Address tables);
  Status CheckAddress(const std::byte* data) const;
  Result<cuda::Stream> StreamOf(const DeviceStream& stream);

  const std::shared_ptr<CudaContext> context_;
  const int ordinal_;
  const CudaOptions options_;
  int numa_node_ = -1;  // Of the host, next to the device; -1: not known.
  int least_priority_ = 0;
  cuda::Module module_ = nullptr;
  CudaKernels kernels_;
  std::shared_ptr<PinnedMemory> pinned_;
  std::shared_ptr<AreaPool> areas_;
  std::shared_ptr<ScratchPool> scratch_;
  std::shared_ptr<ResultSlabs> results_;
};

// The devices of this process, each opened once, and anew where it was reset. Thread-safe.
class CudaDevices {
 public:
  using Options = CudaOptions;
  // `library`: the driver's.
  CudaDevices(std::string library, std::span<const std::byte> image, const Options& options = {})
      : library_(std::move(library)), image_(image), options_(options) {}

  // By its UUID where that is said, otherwise by its ordinal among those that CUDA_VISIBLE_DEVICES
  // leaves. kUnavailable without a driver, or such a device.
  Result<std::shared_ptr<DeviceOps>> Open(const Device& device);
  // How many there are. kUnavailable as Open.
  Result<int> Count();

 private:
  Status Begin();  // With the lock held.
  Result<int> OrdinalOf(const Device& device) const;

  const std::string library_;
  const std::span<const std::byte> image_;
  const Options options_;
  std::mutex mutex_;
  std::shared_ptr<const cuda::Driver> driver_;
  std::map<int, std::shared_ptr<CudaDevice>> opened_;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_DEVICE_H_
