// SPDX-License-Identifier: Apache-2.0
#include "gpu/device.h"
#include "tests/support/status_matchers.h"

namespace tensormount::gpu {
namespace {

TEST(DeviceNone, SaysInWordsThatThereIsNoCuda) {
  EXPECT_THAT(DeviceStatus(), HasCode(Code::kUnsupported));
  EXPECT_THAT(DeviceStatus(), HasMessage("no CUDA support"));
}

}  // namespace
}  // namespace tensormount::gpu
