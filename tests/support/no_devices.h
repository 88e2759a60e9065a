// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_NO_DEVICES_H_
#define TENSORMOUNT_TESTS_SUPPORT_NO_DEVICES_H_

#include "device/devices.h"

namespace tensormount {

// While it lives there are no devices, whatever this machine has: kUnsupported "cannot reach".
class NoDevices {
 public:
  NoDevices() {
    SetDeviceSource([](const Device&) -> Result<std::shared_ptr<DeviceOps>> {
      return Status(Code::kUnsupported, "memory of a device, which tests cannot reach");
    });
  }
  ~NoDevices() { SetDeviceSource({}); }
  NoDevices(const NoDevices&) = delete;
  NoDevices& operator=(const NoDevices&) = delete;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_NO_DEVICES_H_
