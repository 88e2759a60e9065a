// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_DEVICE_MODULE_H_
#define TENSORMOUNT_DEVICE_DEVICE_MODULE_H_

#include <memory>
#include <string>

#include "tensormount/buffer.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

#include "device/device_ops.h"

// The part of tensormount that knows CUDA (gpu/), in a file of its own that is opened when memory
// of a device is first met: so everything else is built, starts and works without it, and without a
// driver.

namespace tensormount {

// What such a file says of itself. Both sides are built from one tree, by one compiler: types of
// C++ may pass, once `build` was found to be equal.
struct DeviceModule {
  const char* build;
  // As DeviceSource (device/devices.h). Thread-safe.
  Result<std::shared_ptr<DeviceOps>> (*open)(const Device& device);
  // How many devices there are. kUnavailable where it cannot be said, with the reason.
  Result<int> (*count)();
};
// By this name it is looked up.
inline constexpr char kDeviceModuleEntry[] = "tensormount_device_module";
using DeviceModuleEntry = const DeviceModule* (*)();

// Of this side.
std::string DeviceModuleBuild();

// Opens the module, which stays open. Looked for in the folder `tensormount` beside the library
// that this is a part of, and of lib beside the folder of a program. kUnsupported, with what to do,
// where it is not there or of another build. Thread-safe.
Result<const DeviceModule*> OpenDeviceModule();

// The devices that saves and loads could use: how many. Errors of OpenDeviceModule and of `count`.
Result<int> CountDevices();

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_MODULE_H_
