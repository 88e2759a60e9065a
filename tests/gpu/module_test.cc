// SPDX-License-Identifier: Apache-2.0
// The module as it is installed: opened at run time, with the kernels that nvcc made, over whatever
// driver the machine has. Its ctest puts that of the tests in the place of libcuda.so.1; by hand,
// without that, it says what this machine has.
#include <string>

#include <gtest/gtest.h>

#include "device/device_module.h"
#include "device/devices.h"
#include "tests/device/device_ops_conformance.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"

namespace tensormount {
namespace {

TEST(DeviceModuleTest, DeviceModuleLoadsAndWorks) {
  ASSERT_OK(OpenDeviceModule());
  const Result<int> count = CountDevices();
  if (!count.ok()) {
    // Without a driver that is what it says, and what memory of a device is answered with.
    EXPECT_THAT(count, HasCode(Code::kUnavailable));
    EXPECT_THAT(OpenDevice({DeviceKind::kCuda, 0}), HasCode(Code::kUnavailable));
    GTEST_SKIP() << count.status().message();
  }
  ASSERT_GT(count.value(), 0);
  ASSERT_OK_AND_ASSIGN(const auto device, OpenDevice({DeviceKind::kCuda, 0}));
  EXPECT_OK(CopiesAreExact(*device->ops, TestSeed(), TestScale(100)));
  EXPECT_OK(TransposesAreExact(*device->ops, TestSeed(), TestScale(40)));
  EXPECT_OK(SmallCopiesAreExact(*device->ops, TestSeed(), TestScale(20)));
  EXPECT_OK(HashesAreThoseOfTheHost(*device->ops, TestSeed(), TestScale(100)));
  EXPECT_OK(LeavesAreThoseOfTheHost(*device->ops, TestSeed(), TestScale(40)));
  EXPECT_OK(OrderIsKept(*device->ops, TestSeed(), TestScale(20)));
  EXPECT_THAT(OpenDevice({DeviceKind::kCuda, count.value()}), HasCode(Code::kUnavailable));
}

}  // namespace
}  // namespace tensormount
