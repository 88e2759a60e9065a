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

// The stream of a device that NCCL works on, in the primary context, which is also that of the
// CUDA runtime by which NCCL finds its device. Errors are those of CudaContext::Check.
class CudaNcclStream final : public NcclStream {
 public:
  // `priority`: as the driver has it. `device`: what NcclStream::device says.
  static Result<std::shared_ptr<CudaNcclStream>> Make(std::shared_ptr<CudaContext> context,
                                                      int priority, std::string device);
  // What it was given goes on.
  ~CudaNcclStream() override;
  CudaNcclStream(const CudaNcclStream&) = delete;
  CudaNcclStream& operator=(const CudaNcclStream&) = delete;

  void* handle() const override { return stream_; }
  std::string device() const override { return device_; }
  // In a CudaScope: nothing is left behind in the thread, and no graph of another one is spoilt.
  Status Within(const std::function<Status()>& calls) override;
  Status Mark() override;
  // True before the first Mark.
  Result<bool> Done() override;

 private:
  CudaNcclStream(std::shared_ptr<CudaContext> context, cuda::Stream stream, std::string device)
      : context_(std::move(context)), stream_(stream), device_(std::move(device)) {}
  // Notes in CudaContext::under_way whether work of ours is.
  void SetUnderWay(bool is);

  const std::shared_ptr<CudaContext> context_;
  const cuda::Stream stream_;
  const std::string device_;
  std::shared_ptr<CudaMark> mark_;
  bool under_way_ = false;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_NCCL_STREAM_H_
