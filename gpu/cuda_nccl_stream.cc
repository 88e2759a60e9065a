// SPDX-License-Identifier: Apache-2.0
// The CUDA stream for NCCL: runs calls in a CudaScope, and marks the stream with an event.
#include "gpu/cuda_nccl_stream.h"

#include <utility>

namespace tensormount::gpu {

Result<std::shared_ptr<CudaNcclStream>> CudaNcclStream::Make(std::shared_ptr<CudaContext> context,
                                                             int priority, std::string device) {
  const CudaScope scope(*context);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  cuda::Stream stream = nullptr;
  TENSORMOUNT_RETURN_IF_ERROR(context->Check(
      context->driver().cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, priority),
      "create a stream"));
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): the constructor is private.
  return std::shared_ptr<CudaNcclStream>(
      new CudaNcclStream(std::move(context), stream, std::move(device)));
}

CudaNcclStream::~CudaNcclStream() {
  SetUnderWay(false);
  const CudaScope scope(*context_);
  if (scope.status().ok()) (void)context_->driver().cuStreamDestroy(stream_);
}

void CudaNcclStream::SetUnderWay(bool is) {
  if (is != under_way_) context_->under_way += is ? 1 : -1;
  under_way_ = is;
}

Status CudaNcclStream::RunOnDevice(const std::function<Status()>& calls) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  return calls();
}

Status CudaNcclStream::Mark() {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  SetUnderWay(true);
  TENSORMOUNT_ASSIGN_OR_RETURN(mark_, CudaMark::Record(context_, stream_));
  return {};
}

Result<bool> CudaNcclStream::Done() {
  if (mark_ == nullptr) return true;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool reached, mark_->Reached());
  if (reached) SetUnderWay(false);
  return reached;
}

}  // namespace tensormount::gpu
