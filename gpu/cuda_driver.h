// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_DRIVER_H_
#define TENSORMOUNT_GPU_CUDA_DRIVER_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "gpu/cuda_api.h"

// The CUDA driver of this machine, and its errors.

namespace tensormount::gpu {

// Opens and initialises a driver, which stays open until the process exits. Thread-safe.
// kUnavailable if there is no driver, the driver is older than CUDA 12, or its initialisation
// fails: no device, or a process forked after initialisation.
Result<std::shared_ptr<const cuda::Driver>> OpenDriver(const char* library = cuda::kLibrary);

// Converts a result: "copy 4096 bytes: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was
// encountered)". kOk for kSuccess; kResourceExhausted for lack of memory; kUnavailable if the
// device or its context is lost, there is no device, CUDA is not initialised, or the image of
// kernels has no code for the device; kInternal for all other errors.
Status CudaStatus(const cuda::Driver& driver, cuda::Result result, std::string_view doing);

// Whether an error usually makes the context permanently unusable.
bool IsSticky(cuda::Result result);

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_DRIVER_H_
