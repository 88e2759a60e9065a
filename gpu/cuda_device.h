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

struct CudaOptions {
  PinnedShape pinned;
  std::size_t scratch_bytes = std::size_t{4} << 20;  // Size of the first buffers of a ScratchPool.
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

// One NVIDIA GPU, or a MIG instance, used through the driver API in its primary context, which
// PyTorch and all users of the CUDA runtime share. Thread-safe.
class CudaDevice : public DeviceOps, public std::enable_shared_from_this<CudaDevice> {
 public:
  // `image`: the compiled kernels (kernels.cu); must live as long as the process. kUnavailable if
  // the device cannot be opened, or the image has no code for it.
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
  // Allows kernels of `peer` to access this device's pool memory, if `peer` can reach it.
  void AllowPeerAccess(const CudaDevice& peer);

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
  Result<std::unique_ptr<DeviceQueue>> MakeQueue(const QueueLimits& limits) override;
  // The link uses NCCL.
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
  int numa_node_ = -1;  // Host NUMA node next to the device; -1: unknown.
  int least_priority_ = 0;
  cuda::Module module_ = nullptr;
  CudaKernels kernels_;
  std::shared_ptr<PinnedMemory> pinned_;
  std::shared_ptr<AreaPool> areas_;
  std::shared_ptr<ScratchPool> scratch_;
  std::shared_ptr<ResultSlabs> results_;
};

// The devices of this process, each opened once, and reopened after a reset. Thread-safe.
class CudaDevices {
 public:
  using Options = CudaOptions;
  // `library`: name of the driver library.
  CudaDevices(std::string library, std::span<const std::byte> image, const Options& options = {})
      : library_(std::move(library)), image_(image), options_(options) {}

  // Opens a device by its UUID if given, otherwise by its ordinal among the devices that
  // CUDA_VISIBLE_DEVICES leaves. kUnavailable if there is no driver or no such device.
  Result<std::shared_ptr<DeviceOps>> Open(const Device& device);
  // Number of devices. kUnavailable as in Open.
  Result<int> Count();

 private:
  Status Begin();  // Opens the driver on first use; requires the lock.
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
