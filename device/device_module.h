// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_DEVICE_MODULE_H_
#define TENSORMOUNT_DEVICE_DEVICE_MODULE_H_

#include <memory>
#include <string>

#include "tensormount/buffer.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

#include "device/device_ops.h"

// Loads the CUDA module (gpu/), a separate file that is opened when a device is first needed. The
// rest of tensormount builds, starts and works without it, and without a driver.

namespace tensormount {

// The entry table of the module. C++ types may pass between the module and the library, because
// both must have the same `build`: the same version, shared headers and compiler.
struct DeviceModule {
  const char* build;
  // Opens a device, like DeviceSource (device/devices.h). Thread-safe.
  Result<std::shared_ptr<DeviceOps>> (*open)(const Device& device);
  // Number of devices. kUnavailable with the reason if it is unknown.
  Result<int> (*count)();
};
// Symbol name of the entry point.
inline constexpr char kDeviceModuleEntry[] = "tensormount_device_module";
using DeviceModuleEntry = const DeviceModule* (*)();

// The value that DeviceModule::build must have: the build of the code that calls this function.
std::string DeviceModuleBuild();

// Opens the module, which stays open. Its file is looked for in the directory `tensormount` beside
// this library or program, and in a few places relative to it (../lib/tensormount for a program in
// bin). kUnsupported, with advice, if the module is missing, cannot be loaded, or is from another
// build. Thread-safe.
Result<const DeviceModule*> OpenDeviceModule();

// Number of devices that saves and loads could use. The errors are those of OpenDeviceModule and of
// DeviceModule::count.
Result<int> CountDevices();

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_DEVICE_MODULE_H_
