// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_NCCL_STREAM_H_
#define TENSORMOUNT_GPU_CUDA_NCCL_STREAM_H_

#include <functional>
#include <memory>
#include <string>

#include "tensormount/status.h"

#include "gpu/cuda_api.h"
#include "gpu/cuda_context.h"
#include "gpu/nccl_link.h"

namespace tensormount::gpu {

// The CUDA stream for NCCL, in the primary context, which the CUDA runtime and so NCCL use. Errors
// are those of CudaContext::Check.
class CudaNcclStream final : public NcclStream {
 public:
  // Makes the stream. `priority`: as for cuStreamCreateWithPriority. `device`: the UUID of the GPU,
  // which device() returns.
  static Result<std::shared_ptr<CudaNcclStream>> Make(std::shared_ptr<CudaContext> context,
                                                      int priority, std::string device);
  // Does not wait for pending work.
  ~CudaNcclStream() override;
  CudaNcclStream(const CudaNcclStream&) = delete;
  CudaNcclStream& operator=(const CudaNcclStream&) = delete;

  void* handle() const override { return stream_; }
  std::string device() const override { return device_; }
  // Runs `calls` in a CudaScope: restores the thread's state, and does not invalidate graph
  // captures.
  Status RunOnDevice(const std::function<Status()>& calls) override;
  Status Mark() override;
  // Whether the work before the last Mark is complete; true before the first Mark.
  Result<bool> Done() override;

 private:
  CudaNcclStream(std::shared_ptr<CudaContext> context, cuda::Stream stream, std::string device)
      : context_(std::move(context)), stream_(stream), device_(std::move(device)) {}
  // Records in CudaContext::under_way whether our work is pending.
  void SetUnderWay(bool is);

  const std::shared_ptr<CudaContext> context_;
  const cuda::Stream stream_;
  const std::string device_;
  std::shared_ptr<CudaMark> mark_;
  bool under_way_ = false;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_NCCL_STREAM_H_
