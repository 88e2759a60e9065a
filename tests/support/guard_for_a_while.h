// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_GUARD_FOR_A_WHILE_H_
#define TENSORMOUNT_TESTS_SUPPORT_GUARD_FOR_A_WHILE_H_

#include <gtest/gtest.h>

#include "base/mapping.h"

namespace tensormount {

// The mapping guard as long as this lives, so that reads map.
class GuardForAWhile {
 public:
  GuardForAWhile() { EXPECT_TRUE(EnableMappingGuard()); }
  ~GuardForAWhile() { DisableMappingGuard(); }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_GUARD_FOR_A_WHILE_H_
