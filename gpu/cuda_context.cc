// SPDX-License-Identifier: Apache-2.0
// The driver keeps a current context for each thread: calls that use it are made in a CudaScope,
// which makes the device's context current, and restores the caller's context afterwards.
#include "gpu/cuda_context.h"

#include "gpu/cuda_driver.h"

namespace tensormount::gpu {

Result<std::shared_ptr<CudaContext>> CudaContext::Retain(std::shared_ptr<const cuda::Driver> driver,
                                                         cuda::Device device, std::string name) {
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): the constructor is private.
  std::shared_ptr<CudaContext> context(new CudaContext(std::move(driver), device, std::move(name)));
  const cuda::Result retained =
      context->driver().cuDevicePrimaryCtxRetain(&context->context_, device);
  if (retained != cuda::kSuccess) {
    context->context_ = nullptr;
    const Status status =
        CudaStatus(context->driver(), retained, "retain the device's primary context");
    // Any error (exclusive mode of another process, no memory for a context) means that the device
    // is unavailable.
    return Status(Code::kUnavailable, status.message()).WithContext(context->name());
  }
  TENSORMOUNT_RETURN_IF_ERROR(
      CudaStatus(context->driver(), context->driver().cuCtxGetId(context->context_, &context->id_),
                 "get the ID of the device's context")
          .WithContext(context->name()));
  return context;
}

CudaContext::~CudaContext() {
  if (context_ != nullptr && !gone()) (void)driver_->cuDevicePrimaryCtxRelease(device_);
}

Status CudaContext::Check(cuda::Result result, std::string_view doing) {
  if (result == cuda::kSuccess) return {};
  const Status status =
      CudaStatus(*driver_, result, doing).WithContext(name_).With({.device = name_});
  // kInvalidContext alone does not prove a reset: a stream may belong to another context.
  if (result == cuda::kContextIsDestroyed || result == cuda::kDeinitialized ||
      (result == cuda::kInvalidContext && WasReset())) {
    gone_ = true;
    return status.WithMessage(status.message() +
                              ": the device was reset, or its context was destroyed");
  }
  if (!IsSticky(result)) return status;
  return status.WithMessage(
      status.message() +
      (under_way > 0 ? ": work of this program or of tensormount failed on the device"
                     : ": other work of this program failed on the device; tensormount had no work "
                       "under way"));
}

bool CudaContext::WasReset() const {
  std::uint64_t id = 0;
  return driver_->cuCtxGetId(context_, &id) != cuda::kSuccess || id != id_;
}

CudaScope::CudaScope(CudaContext& context) : context_(context) {
  const cuda::Driver& driver = context.driver();
  const auto lost = [&](cuda::Result result) {
    status_ = context.Check(result, "make the device's context current");
  };
  if (context.gone()) {
    lost(cuda::kContextIsDestroyed);
    return;
  }
  // After a reset there may be a new context at the same address.
  const cuda::Result result =
      context.WasReset() ? cuda::kContextIsDestroyed : driver.cuCtxPushCurrent(context.context_);
  if (result != cuda::kSuccess) {
    lost(result);
    return;
  }
  pushed_ = true;
  // In relaxed mode this thread's calls do not invalidate graph captures of other threads. If the
  // mode cannot be changed, the scope works without that protection.
  mode_changed_ = driver.cuThreadExchangeStreamCaptureMode(&capture_mode_) == cuda::kSuccess;
}

CudaScope::~CudaScope() {
  if (!pushed_) return;
  if (mode_changed_) (void)context_.driver().cuThreadExchangeStreamCaptureMode(&capture_mode_);
  cuda::Context popped = nullptr;
  (void)context_.driver().cuCtxPopCurrent(&popped);
}

Result<std::shared_ptr<CudaMark>> CudaMark::Record(std::shared_ptr<CudaContext> context,
                                                   cuda::Stream stream,
                                                   std::function<void()> reached) {
  const cuda::Driver& driver = context->driver();
  cuda::Event event = nullptr;
  TENSORMOUNT_RETURN_IF_ERROR(
      context->Check(driver.cuEventCreate(&event, cuda::kEventDisableTiming), "create an event"));
  const cuda::Result recorded = driver.cuEventRecord(event, stream);
  if (recorded == cuda::kInvalidHandle) {
    (void)driver.cuEventDestroy(event);
    return Status(Code::kInvalidArgument,
                  context->name() + ": the stream does not belong to this device");
  }
  if (recorded != cuda::kSuccess) {
    (void)driver.cuEventDestroy(event);
    return context->Check(recorded, "record an event");
  }
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): the constructor is private.
  return std::shared_ptr<CudaMark>(new CudaMark(std::move(context), event, std::move(reached)));
}

CudaMark::~CudaMark() {
  const CudaScope scope(*context_);
  if (scope.status().ok()) (void)context_->driver().cuEventDestroy(event_);
}

Result<bool> CudaMark::Reached() {
  std::lock_guard lock(mutex_);
  if (reached_) return true;
  TENSORMOUNT_RETURN_IF_ERROR(failure_);
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  const cuda::Result result = context_->driver().cuEventQuery(event_);
  if (result == cuda::kNotReady) return false;
  failure_ = context_->Check(result, "wait for the device's work");
  TENSORMOUNT_RETURN_IF_ERROR(failure_);
  reached_ = true;
  if (reached_call_) reached_call_();
  reached_call_ = {};
  return true;
}

Status CudaMark::Precede(CudaContext& context, cuda::Stream stream) {
  if (&context != context_.get()) {
    return context_->Check(cuda::kContextIsDestroyed, "wait for an event");
  }
  return context_->Check(context_->driver().cuStreamWaitEvent(stream, event_, 0),
                         "wait for an event");
}

}  // namespace tensormount::gpu
