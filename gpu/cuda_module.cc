// SPDX-License-Identifier: Apache-2.0
// The entry table of libtensormount_cuda.so (device/device_module.h), and the compiled kernels.
#include <span>

#include "device/device_module.h"
#include "gpu/cuda_device.h"

// The image of kernels.cu; the assembler includes the file that nvcc made.
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    ".global tensormount_kernels_begin\n"
    ".hidden tensormount_kernels_begin\n"
    "tensormount_kernels_begin:\n"
    ".incbin \"" TENSORMOUNT_KERNELS_FILE
    "\"\n"
    ".global tensormount_kernels_end\n"
    ".hidden tensormount_kernels_end\n"
    "tensormount_kernels_end:\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" {
extern const std::byte tensormount_kernels_begin[];
extern const std::byte tensormount_kernels_end[];
}

namespace tensormount::gpu {
namespace {

CudaDevices& TheDevices() {
  // Never destroyed, because threads that end at process exit still use the devices.
  static auto* const devices = new CudaDevices(
      cuda::kLibrary, std::span(tensormount_kernels_begin, tensormount_kernels_end));
  return *devices;
}

}  // namespace
}  // namespace tensormount::gpu

extern "C" TENSORMOUNT_EXPORT const tensormount::DeviceModule* tensormount_device_module() {
  static const std::string build = tensormount::DeviceModuleBuild();
  static const tensormount::DeviceModule module = {
      build.c_str(),
      [](const tensormount::Device& device) { return tensormount::gpu::TheDevices().Open(device); },
      [] { return tensormount::gpu::TheDevices().Count(); }};
  return &module;
}
