// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_cuda_devices.h"

#include <cstring>
#include <dlfcn.h>
#include <span>
#include <utility>

#include "device/devices.h"
#include "gpu/cuda_driver.h"
#include "tests/support/twin_memory.h"

namespace tensormount {
namespace {

constexpr std::byte kImage[] = {std::byte{'f'}, std::byte{'a'}, std::byte{'k'}, std::byte{'e'}};

class FakeCudaDevice : public TestDevice {
 public:
  FakeCudaDevice(gpu::CudaDevices& cuda, int ordinal) : cuda_(cuda), ordinal_(ordinal) {}
  // By cuMemAlloc and cuMemFree, as programs do: the latter waits for what a failure left on it.
  std::byte* NewMemory(std::size_t bytes) override {
    gpu::cuda::Address there = 0;
    // Whole words, of which kernels read all where they want a part.
    In([&] { return Driver().cuMemAlloc(&there, (bytes + 16) / 16 * 16); });
    return reinterpret_cast<std::byte*>(there);
  }
  void FreeMemory(std::byte* data) override {
    In([&] { return Driver().cuMemFree(reinterpret_cast<gpu::cuda::Address>(data)); });
  }
  Device device() const override { return {DeviceKind::kCuda, ordinal_}; }
  void Put(std::byte* there, const void* here, std::size_t bytes) override {
    std::memcpy(TheFakeCuda().reveal(there), here, bytes);
  }
  void Get(void* here, const std::byte* there, std::size_t bytes) override {
    std::memcpy(here, TheFakeCuda().reveal(there), bytes);
  }
  void* MakeStream() override { return TheFakeCuda().make_stream(ordinal_); }
  void PutLater(void* stream, std::byte* there,
                std::shared_ptr<const std::vector<std::byte>> here) override {
    TheFakeCuda().enqueue(ordinal_, stream,
                          [this, there, here] { Put(there, here->data(), here->size()); });
  }
  void Synchronize(void* handle) override { TheFakeCuda().synchronize(ordinal_, handle); }

 private:
  static const gpu::cuda::Driver& Driver() {
    static const auto driver = gpu::OpenDriver(TENSORMOUNT_FAKE_CUDA).value();
    return *driver;
  }
  template <typename Fn>
  void In(Fn fn) {
    (void)cuda_.Open({DeviceKind::kCuda, ordinal_}).value();  // Before the first memory is made.
    gpu::cuda::Device device = 0;
    gpu::cuda::Context context = nullptr;
    if (Driver().cuDeviceGet(&device, ordinal_) != 0 ||
        Driver().cuDevicePrimaryCtxRetain(&context, device) != 0 ||
        Driver().cuCtxPushCurrent(context) != 0 || fn() != 0 ||
        Driver().cuCtxPopCurrent(&context) != 0) {
      AbortDevice("the driver of the tests failed");
    }
  }
  gpu::CudaDevices& cuda_;
  const int ordinal_;
};

}  // namespace

const FakeCuda& TheFakeCuda() {
  static const FakeCuda* const control = [] {
    void* const handle = dlopen(TENSORMOUNT_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) AbortDevice(dlerror());
    const auto entry = reinterpret_cast<const FakeCuda* (*)()>(dlsym(handle, kFakeCudaControl));
    return entry();
  }();
  return *control;
}

gpu::CudaDevices::Options FakeCudaDevices::Small() {
  return {.pinned = {4, std::size_t{256} << 10}, .scratch_bytes = std::size_t{64} << 10};
}

FakeCudaDevices::FakeCudaDevices(const gpu::CudaDevices::Options& options)
    : cuda_(std::make_shared<gpu::CudaDevices>(TENSORMOUNT_FAKE_CUDA, std::span(kImage), options)) {
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    devices_.push_back(std::make_unique<FakeCudaDevice>(*cuda_, ordinal));
  }
  SetDeviceSource([cuda = cuda_](const Device& device) { return cuda->Open(device); });
}

FakeCudaDevices::~FakeCudaDevices() { SetDeviceSource({}); }

}  // namespace tensormount
