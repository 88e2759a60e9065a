// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_DEVICE_H_
#define TENSORMOUNT_GPU_DEVICE_H_

#include "tensormount/status.h"

namespace tensormount::gpu {

// The only door to a GPU, so that all other folders compile and link without CUDA. `doctor` asks
// it.

// Whether device memory can be staged here. kUnsupported where this build has no CUDA form of
// gpu/, kUnavailable where it has one and there is no device. Thread-safe.
Status DeviceStatus();

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_DEVICE_H_
