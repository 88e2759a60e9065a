// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_SAVE_PLAN_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_SAVE_PLAN_TESTING_H_

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "collective/layout/layout.h"
#include "tests/support/status_matchers.h"

namespace tensormount {

// Ranks with tensors and no memory: planning never looks at data.
class Ranks {
 public:
  explicit Ranks(int n) : dicts_(static_cast<std::size_t>(n)) {}

  Ranks& Tensor(int rank, const std::string& key, DType dtype, const Dims& shape,
                const Region& region, Replica replica = Replica::kUnlabelled) {
    EXPECT_OK(at(rank).AddTensor(key, MetadataOnly(dtype, shape, region, replica)));
    return *this;
  }
  Ranks& Object(int rank, const std::string& key, const std::string& bytes,
                const GridPosition& place = {}) {
    EXPECT_OK(at(rank).AddObject(key, bytes, place));
    return *this;
  }
  StateDict& at(int rank) { return dicts_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(dicts_.size()); }

  // Of the keys of one owner; of all, where there is one.
  Result<GlobalLayout> Layout(std::uint32_t owner = 0, std::uint32_t owners = 1) {
    LayoutTable table;
    for (int r = 0; r < size(); ++r) {
      TENSORMOUNT_RETURN_IF_ERROR(
          table.Add(EncodeLayout(at(r), owner, owners), std::vector<int>{r}));
    }
    return MakeLayout(table, size());
  }

 private:
  std::vector<StateDict> dicts_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_SAVE_PLAN_TESTING_H_
