// SPDX-License-Identifier: Apache-2.0
// Finds libcuda at run time. Nothing links to it, so programs start and work without a driver.
#include "gpu/cuda_driver.h"

#include <cstring>
#include <dlfcn.h>

namespace tensormount::gpu {
namespace {

Status NoDriver(std::string why) { return {Code::kUnavailable, "no CUDA driver: " + why}; }

}  // namespace

Result<std::shared_ptr<const cuda::Driver>> OpenDriver(const char* library) {
  // The library is never closed, because it has its own threads.
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    return NoDriver(why == nullptr ? library : why);
  }
  const auto find = reinterpret_cast<cuda::GetProcAddress>(dlsym(handle, cuda::kGetProcAddress));
  if (find == nullptr) return NoDriver(std::string(library) + " is older than CUDA 12");
  auto driver = std::make_shared<cuda::Driver>();
  const auto resolve = [&](const char* name, auto& function, int version = cuda::kVersion) {
    void* found = nullptr;
    int how = 0;
    const cuda::Result result = find(name, &found, version, 0, &how);
    if (result != cuda::kSuccess || found == nullptr) {
      return NoDriver(std::string(library) + " has no " + name);
    }
    std::memcpy(&function, &found, sizeof(found));
    return Status();
  };
#define TENSORMOUNT_CUDA_RESOLVE(name, parameters) \
  TENSORMOUNT_RETURN_IF_ERROR(resolve(#name, driver->name));
  TENSORMOUNT_CUDA_FUNCTIONS(TENSORMOUNT_CUDA_RESOLVE)
#undef TENSORMOUNT_CUDA_RESOLVE
  TENSORMOUNT_RETURN_IF_ERROR(
      resolve("cuDeviceGetUuid", driver->physical_uuid, cuda::kPhysicalUuidVersion));
  (void)resolve(cuda::kFuncLoad, driver->cuFuncLoad, cuda::kFuncLoadVersion);
  const cuda::Result begun = driver->cuInit(0);
  if (begun == cuda::kNotInitialized) {
    return Status(Code::kUnavailable,
                  "CUDA cannot be used in a process that was forked after CUDA was initialized: "
                  "start the process with spawn instead");
  }
  if (begun != cuda::kSuccess) {
    return Status(Code::kUnavailable, CudaStatus(*driver, begun, "initialize CUDA").message());
  }
  return std::shared_ptr<const cuda::Driver>(std::move(driver));
}

bool IsSticky(cuda::Result result) {
  switch (result) {
    case cuda::kDeinitialized:
    case cuda::kInvalidContext:
    case cuda::kDeviceUnavailable:
    case cuda::kEccUncorrectable:
    case cuda::kNvlinkUncorrectable:
    case cuda::kContained:
    case cuda::kTensorMemoryLeak:
    case cuda::kMpsRpcFailure:
    case cuda::kMpsClientTerminated:
    case cuda::kExternalDevice:
    case cuda::kUnknown:  // Also the result for a device that fell off the bus.
    case cuda::kIllegalAddress:
    case cuda::kLaunchTimeout:
    case cuda::kContextIsDestroyed:
    case cuda::kAssert:
    case cuda::kHardwareStackError:
    case cuda::kIllegalInstruction:
    case cuda::kMisalignedAddress:
    case cuda::kInvalidAddressSpace:
    case cuda::kInvalidPc:
    case cuda::kLaunchFailed:
      return true;
    default:
      return false;
  }
}

Status CudaStatus(const cuda::Driver& driver, cuda::Result result, std::string_view doing) {
  if (result == cuda::kSuccess) return {};
  const char* name = nullptr;
  const char* words = nullptr;
  std::string said = "CUDA error " + std::to_string(result);
  if (driver.cuGetErrorName(result, &name) == cuda::kSuccess && name != nullptr) said = name;
  if (driver.cuGetErrorString(result, &words) == cuda::kSuccess && words != nullptr) {
    said += " (" + std::string(words) + ")";
  }
  Code code = Code::kInternal;
  if (result == cuda::kOutOfMemory) {
    code = Code::kResourceExhausted;
  } else if (IsSticky(result) || result == cuda::kNoDevice || result == cuda::kNotInitialized ||
             result == cuda::kNoBinaryForGpu) {
    code = Code::kUnavailable;
  }
  return {code, std::string(doing) + ": " + said};
}

}  // namespace tensormount::gpu
