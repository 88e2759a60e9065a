// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_DRIVER_H_
#define TENSORMOUNT_GPU_CUDA_DRIVER_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "gpu/cuda_api.h"

// The driver as it is found on this machine, and what it says in words.

namespace tensormount::gpu {

// Opens a driver and initialises it; it stays open for as long as the process lives. Thread-safe.
// kUnavailable where there is none, it is older than CUDA 12, or it does not begin: no device, or a
// process that was forked from one that had begun.
Result<std::shared_ptr<const cuda::Driver>> OpenDriver(const char* library = cuda::kLibrary);

// What failed, in the driver's words: "copy 4096 bytes: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal
// memory access was encountered)". kOk for kSuccess; kResourceExhausted without memory;
// kUnavailable where the device or its context is gone; kInternal for what only a bug of ours
// gives.
Status CudaStatus(const cuda::Driver& driver, cuda::Result result, std::string_view doing);

// Whether an error says that the context will never work again.
bool IsSticky(cuda::Result result);

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_CUDA_DRIVER_H_
