// SPDX-License-Identifier: Apache-2.0
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/support/random.h"

namespace {

// Says after a failure how to get the same random cases again.
class SeedPrinter : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& info) override {
    if (info.result()->Failed()) {
      std::printf("replay with TENSORMOUNT_TEST_SEED=%" PRIu64 "\n", tensormount::TestSeed());
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (std::getenv("TENSORMOUNT_TEST_SEED") != nullptr) {
    std::printf("TENSORMOUNT_TEST_SEED=%" PRIu64 "\n", tensormount::TestSeed());
  }
  // The framework owns its listeners.
  testing::UnitTest::GetInstance()->listeners().Append(new SeedPrinter);
  return RUN_ALL_TESTS();
}
