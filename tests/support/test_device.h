// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_TEST_DEVICE_H_
#define TENSORMOUNT_TESTS_SUPPORT_TEST_DEVICE_H_

#include <cstddef>
#include <functional>

namespace tensormount {

// What a test does with a device as the program whose device it is: memory that can be looked at,
// and streams with work of its own.
class TestDevice {
 public:
  virtual ~TestDevice() = default;
  virtual std::byte* NewMemory(std::size_t bytes) = 0;
  virtual void FreeMemory(std::byte* data) = 0;
  // Memory that can be read: that behind a pointer of the device.
  virtual std::byte* Reveal(const void* data) = 0;
  // A stream of the caller's, and work for it. Null: the legacy default stream.
  virtual void* MakeStream() = 0;
  virtual void Enqueue(void* handle, std::function<void()> kernel) = 0;
  // Until a stream has done all that it was given.
  virtual void Synchronize(void* handle) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_TEST_DEVICE_H_
