// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_CONTEXT_H_
#define TENSORMOUNT_GPU_CUDA_CONTEXT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "device/device_ops.h"
#include "gpu/cuda_api.h"

// One device's context, and the moments of its streams.

namespace tensormount::gpu {

// The primary context of a device, which the program shares: frameworks work in it, too. Somebody
// may reset the device, and all that was made in it is gone then. Thread-safe.
class CudaContext {
 public:
  // kUnavailable where the driver gives none; the errors of CudaStatus.
  static Result<std::shared_ptr<CudaContext>> Retain(std::shared_ptr<const cuda::Driver> driver,
                                                     cuda::Device device, std::string name);
  // Its work is left to itself.
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const cuda::Driver& driver() const { return *driver_; }
  cuda::Device device() const { return device_; }
  const std::string& name() const { return name_; }

  // Whether it was destroyed, as far as is known: nothing that was made in it may be named any
  // more.
  bool gone() const { return gone_.load(std::memory_order_relaxed); }

  // CudaStatus, which notes what is gone, and says of an error that came with somebody's work
  // whether it can be ours.
  Status Check(cuda::Result result, std::string_view doing);

  // Pieces of our work that were submitted and are not known to be over.
  std::atomic<std::int64_t> under_way = 0;

 private:
  friend class CudaScope;
  // Whether the context that was retained is no more.
  bool WasReset() const;
  CudaContext(std::shared_ptr<const cuda::Driver> driver, cuda::Device device, std::string name)
      : driver_(std::move(driver)), device_(device), name_(std::move(name)) {}

  const std::shared_ptr<const cuda::Driver> driver_;
  const cuda::Device device_;
  const std::string name_;
  cuda::Context context_ = nullptr;
  std::uint64_t id_ = 0;
  std::atomic<bool> gone_ = false;
};

// Within it the thread's context is that of a device, and what the thread asks spoils no graph that
// another one records. What was current before is so again afterwards. Of one thread.
class CudaScope {
 public:
  explicit CudaScope(CudaContext& context);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  // Why there is no context, if so: nothing may be asked of the device then.
  const Status& status() const { return status_; }

 private:
  CudaContext& context_;
  Status status_;
  bool pushed_ = false;
  int capture_mode_ = cuda::kCaptureModeRelaxed;
};

// A moment of a stream, by an event.
class CudaMark : public DeviceMark {
 public:
  // Of what `stream` was given until now. In a CudaScope. `reached` is called once, when it is
  // found to be reached, by the thread that finds it.
  static Result<std::shared_ptr<CudaMark>> Record(std::shared_ptr<CudaContext> context,
                                                  cuda::Stream stream,
                                                  std::function<void()> reached = {});
  ~CudaMark() override;
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;

  Result<bool> Reached() override;
  // What is submitted to `stream` of `context` from now on comes after it. In a CudaScope.
  // kUnavailable where that is another context: the device was reset since.
  Status Precede(CudaContext& context, cuda::Stream stream);

 private:
  CudaMark(std::shared_ptr<CudaContext> context, cuda::Event event, std::function<void()> reached)
      : context_(std::move(context)), event_(event), reached_call_(std::move(reached)) {}

  const std::shared_ptr<CudaContext> context_;
  const cuda::Event event_;
  std::mutex mutex_;
  std::function<void()> reached_call_;
  bool reached_ = false;
  Status failure_;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_CONTEXT_H_
