// SPDX-License-Identifier: Apache-2.0
// Devices of CUDA as a program has them (test_device.h), beside what tensormount does there.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "gpu/cuda_driver.h"
#include "tests/support/test_device.h"
#include "tests/support/twin_memory.h"

namespace tensormount {
namespace {

namespace cuda = gpu::cuda;

// What a stream is busy with before a copy, so that who does not wait for it is too early: about
// half a millisecond.
constexpr std::size_t kBusyBytes = std::size_t{64} << 20;
constexpr int kBusyTimes = 20;

class RealCudaDevice : public TestDevice {
 public:
  RealCudaDevice(std::shared_ptr<const cuda::Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {
    cuda::Device device = 0;
    Must(driver_->cuDeviceGet(&device, ordinal), "cuDeviceGet");
    Must(driver_->cuDevicePrimaryCtxRetain(&context_, device), "cuDevicePrimaryCtxRetain");
    In([&] { Must(driver_->cuMemAlloc(&busy_, kBusyBytes), "cuMemAlloc"); });
    own_ = MakeStream();
  }
  Device device() const override { return {DeviceKind::kCuda, ordinal_}; }
  std::byte* NewMemory(std::size_t bytes) override {
    cuda::Address there = 0;
    In([&] { Must(driver_->cuMemAlloc(&there, std::max<std::size_t>(bytes, 1)), "cuMemAlloc"); });
    return reinterpret_cast<std::byte*>(there);
  }
  void FreeMemory(std::byte* there) override {
    In([&] { Must(driver_->cuMemFree(reinterpret_cast<cuda::Address>(there)), "cuMemFree"); });
  }
  void Put(std::byte* there, const void* here, std::size_t bytes) override {
    In([&] {
      Must(driver_->cuMemcpyHtoDAsync(reinterpret_cast<cuda::Address>(there), here, bytes,
                                      static_cast<cuda::Stream>(own_)),
           "cuMemcpyHtoDAsync");
    });
    Synchronize(own_);
  }
  void Get(void* here, const std::byte* there, std::size_t bytes) override {
    In([&] {
      Must(driver_->cuMemcpyDtoHAsync(here, reinterpret_cast<cuda::Address>(there), bytes,
                                      static_cast<cuda::Stream>(own_)),
           "cuMemcpyDtoHAsync");
    });
    Synchronize(own_);
  }
  void* MakeStream() override {
    cuda::Stream stream = nullptr;
    In([&] {
      Must(driver_->cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0),
           "cuStreamCreateWithPriority");
    });
    return stream;
  }
  void PutLater(void* stream, std::byte* there,
                std::shared_ptr<const std::vector<std::byte>> here) override {
    In([&] {
      for (int i = 0; i < kBusyTimes; ++i) {
        Must(driver_->cuMemsetD8Async(busy_, 1, kBusyBytes, static_cast<cuda::Stream>(stream)),
             "cuMemsetD8Async");
      }
      // Memory that is not pinned has been read when it returns.
      Must(driver_->cuMemcpyHtoDAsync(reinterpret_cast<cuda::Address>(there), here->data(),
                                      here->size(), static_cast<cuda::Stream>(stream)),
           "cuMemcpyHtoDAsync");
    });
  }
  void Synchronize(void* stream) override {
    In([&] {
      cuda::Event event = nullptr;
      Must(driver_->cuEventCreate(&event, cuda::kEventDisableTiming), "cuEventCreate");
      Must(driver_->cuEventRecord(event, static_cast<cuda::Stream>(stream)), "cuEventRecord");
      cuda::Result reached = cuda::kNotReady;
      while (reached == cuda::kNotReady) reached = driver_->cuEventQuery(event);
      Must(reached, "cuEventQuery");
      Must(driver_->cuEventDestroy(event), "cuEventDestroy");
    });
  }

 private:
  void Must(cuda::Result result, const char* what) const {
    if (result != 0) AbortDevice(gpu::CudaStatus(*driver_, result, what).message());
  }
  template <typename Fn>
  void In(Fn fn) {
    Must(driver_->cuCtxPushCurrent(context_), "cuCtxPushCurrent");
    fn();
    cuda::Context popped = nullptr;
    Must(driver_->cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
  }

  const std::shared_ptr<const cuda::Driver> driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  cuda::Address busy_ = 0;
  void* own_ = nullptr;
};

}  // namespace

std::vector<std::unique_ptr<TestDevice>> RealCudaDevices() {
  const auto driver = gpu::OpenDriver();
  if (!driver.ok()) AbortDevice(driver.status().message());
  int count = 0;
  (void)driver.value()->cuDeviceGetCount(&count);
  if (count == 0) AbortDevice("there is none");
  std::vector<std::unique_ptr<TestDevice>> devices;
  for (int i = 0; i < 2; ++i) {
    devices.push_back(std::make_unique<RealCudaDevice>(driver.value(), std::min(i, count - 1)));
  }
  return devices;
}

}  // namespace tensormount
