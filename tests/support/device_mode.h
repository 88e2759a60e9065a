// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_DEVICE_MODE_H_
#define TENSORMOUNT_TESTS_SUPPORT_DEVICE_MODE_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "tensormount/state_dict.h"

#include "tests/support/test_device.h"

// The tests of saves and loads once more, with their tensors on devices: with
// TENSORMOUNT_TEST_DEVICE=host what they hand to Save and Load is moved to two host devices first,
// with =cuda to two of gpu/ over the driver of the tests, with =real to the machine's; some of it
// behind streams that write it later, and some stays where it is.

namespace tensormount {

bool DeviceMode();
// Those of the mode, for the whole process: two.
TestDevice& ModeDevice(std::size_t number);

// A state whose tensors are on devices, or in DeviceMode() off the state itself.
class OnDevices {
 public:
  // `state` and its memory must outlive it.
  explicit OnDevices(const StateDict& state);
  ~OnDevices();
  OnDevices(const OnDevices&) = delete;
  OnDevices& operator=(const OnDevices&) = delete;

  const StateDict& dict() const { return moved_ ? *moved_ : state_; }
  // What stands on the devices now, back into the memory of the state.
  void BringBack();

 private:
  struct Moved {
    TestDevice* device = nullptr;
    std::byte* there = nullptr;  // Of `bytes`.
    std::byte* here = nullptr;
    std::size_t bytes = 0;
    void* stream = nullptr;  // Null: none.
  };
  Shard Move(std::size_t item, const Shard& shard);

  const StateDict& state_;
  std::vector<Moved> memory_;
  std::optional<StateDict> moved_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_DEVICE_MODE_H_
