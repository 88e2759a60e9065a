// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_INDEX_RETAINED_STEPS_H_
#define TENSORMOUNT_TESTS_INDEX_RETAINED_STEPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "index/store/store_moves.h"
#include "tests/index/store_test_support.h"

namespace tensormount {

inline TinySpec RetainedStepSpec(std::uint64_t seed) {
  TinySpec spec;
  spec.writers = 1;
  spec.tensors = {{"w", DType::kF32, {4, 8}, seed, 2, 0, true}};
  spec.common = {{"iteration", static_cast<std::int64_t>(seed)}};
  return spec;
}

// A store of steps, of which some are removed.
class RetainedStepsTest : public StoreTest {
 protected:
  // step-1 to step-n.
  void SaveSteps(int n) {
    for (int i = 1; i <= n; ++i) {
      ASSERT_OK(Save("step-" + std::to_string(i), RetainedStepSpec(static_cast<std::uint64_t>(i))));
    }
  }
  // Names of checkpoints that are there.
  std::vector<std::string> Left() {
    std::vector<std::string> names;
    const auto list = MakeStore().List();
    EXPECT_OK(list);
    for (const CheckpointListing& c : list.value()) names.push_back(c.name);
    return names;
  }
  Uuid UuidOf(const std::string& name) {
    const auto commit = store_moves::ReadCommit(fs(), InStore(name));
    EXPECT_OK(commit);
    return commit.value().record.uuid;
  }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_INDEX_RETAINED_STEPS_H_
