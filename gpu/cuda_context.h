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

// The context of a device, and marks of its streams.

namespace tensormount::gpu {

// The primary context of a device, which PyTorch and the CUDA runtime also use. If the program
// resets the device, all objects made in the context are destroyed. Thread-safe.
class CudaContext {
 public:
  // Retains the primary context of a device. kUnavailable if the driver does not give one; other
  // errors are those of CudaStatus.
  static Result<std::shared_ptr<CudaContext>> Retain(std::shared_ptr<const cuda::Driver> driver,
                                                     cuda::Device device, std::string name);
  // Does not wait for pending work.
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const cuda::Driver& driver() const { return *driver_; }
  cuda::Device device() const { return device_; }
  const std::string& name() const { return name_; }

  // Whether the context is known to be destroyed; then none of its objects may be used.
  bool gone() const { return gone_.load(std::memory_order_relaxed); }

  // Converts a result like CudaStatus. Also records in gone() that the context was destroyed, and
  // adds to the message of an asynchronous error whether tensormount's work may have caused it.
  Status Check(cuda::Result result, std::string_view doing);

  // Number of our submissions that are not known to be complete.
  std::atomic<std::int64_t> under_way = 0;

 private:
  friend class CudaScope;
  // Whether the retained context was destroyed by a reset.
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

// Makes a device's context current for this thread, and restores the previous context at the end.
// Unless the driver refuses it, calls within the scope do not invalidate graph captures of other
// threads. For use by one thread.
class CudaScope {
 public:
  explicit CudaScope(CudaContext& context);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  // Not ok if the context could not be made current; then no call on the device may be made.
  const Status& status() const { return status_; }

 private:
  CudaContext& context_;
  Status status_;
  bool pushed_ = false;
  bool mode_changed_ = false;
  int capture_mode_ = cuda::kCaptureModeRelaxed;  // The thread's own mode once it is changed.
};

// A DeviceMark implemented as a CUDA event.
class CudaMark : public DeviceMark {
 public:
  // Marks all work submitted to `stream` so far. Requires a CudaScope. `reached` is called once, by
  // the thread that finds the mark reached.
  static Result<std::shared_ptr<CudaMark>> Record(std::shared_ptr<CudaContext> context,
                                                  cuda::Stream stream,
                                                  std::function<void()> reached = {});
  ~CudaMark() override;
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;

  Result<bool> Reached() override;
  // Makes later work of `stream`, a stream of `context`, wait for the mark. Requires a CudaScope.
  // kUnavailable if the mark is of an earlier context of the device, before a reset.
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
