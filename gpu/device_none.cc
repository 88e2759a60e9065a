// SPDX-License-Identifier: Apache-2.0
// device.h in a build without CUDA: kUnsupported, in words.
#include "gpu/device.h"

namespace tensormount::gpu {

Status DeviceStatus() {
  return Status(Code::kUnsupported, "look for a CUDA device: this build has no CUDA support");
}

}  // namespace tensormount::gpu
