// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_FAKE_CUDA_DEVICES_H_
#define TENSORMOUNT_TESTS_SUPPORT_FAKE_CUDA_DEVICES_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "gpu/cuda_device.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/support/test_device.h"

namespace tensormount {

// The driver of the tests, opened.
const FakeCuda& TheFakeCuda();

// Devices cuda:0 and cuda:1 of this process by gpu/ over that driver, for as long as it lives; what
// there was before is forgotten.
class FakeCudaDevices {
 public:
  // Small blocks, so that states of a few hundred KiB go around the ring and through scratch
  // memory.
  static gpu::CudaDevices::Options Small();
  explicit FakeCudaDevices(const gpu::CudaDevices::Options& options = Small());
  ~FakeCudaDevices();
  FakeCudaDevices(const FakeCudaDevices&) = delete;
  FakeCudaDevices& operator=(const FakeCudaDevices&) = delete;

  TestDevice& operator[](std::size_t i) { return *devices_[i]; }
  std::size_t size() const { return devices_.size(); }
  gpu::CudaDevices& cuda() { return *cuda_; }

 private:
  std::shared_ptr<gpu::CudaDevices> cuda_;
  std::vector<std::unique_ptr<TestDevice>> devices_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_FAKE_CUDA_DEVICES_H_
