// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_TEST_DEVICE_H_
#define TENSORMOUNT_TESTS_SUPPORT_TEST_DEVICE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "tensormount/buffer.h"

namespace tensormount {

// What a test does with a device as the program whose device it is: memory, and streams with work
// of its own.
class TestDevice {
 public:
  virtual ~TestDevice() = default;
  // As buffers name it.
  virtual Device device() const = 0;
  virtual std::byte* NewMemory(std::size_t bytes) = 0;
  virtual void FreeMemory(std::byte* there) = 0;
  // Copies that are done when they return.
  virtual void Put(std::byte* there, const void* here, std::size_t bytes) = 0;
  virtual void Get(void* here, const std::byte* there, std::size_t bytes) = 0;
  // A stream of the caller's, and a copy that it makes in its time.
  virtual void* MakeStream() = 0;
  virtual void PutLater(void* stream, std::byte* there,
                        std::shared_ptr<const std::vector<std::byte>> here) = 0;
  // Until a stream has done all that it was given.
  virtual void Synchronize(void* stream) = 0;
};

// The first devices of this machine (the same one twice where there is one), as programs use them
// by the CUDA driver. Ends the process where there is none.
std::vector<std::unique_ptr<TestDevice>> RealCudaDevices();

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_TEST_DEVICE_H_
