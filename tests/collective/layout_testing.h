// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_LAYOUT_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_LAYOUT_TESTING_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/validate.h"

#include "collective/layout/layout.h"
#include "tests/support/require.h"
#include "tests/support/status_matchers.h"

namespace tensormount {

// Ranks with tensors and no memory: who judges and plans never looks at data.
class LayoutRanks {
 public:
  explicit LayoutRanks(int ranks) : dicts_(static_cast<std::size_t>(ranks)) {}

  LayoutRanks& Tensor(int rank, const std::string& key, DType dtype, const Dims& shape,
                      const Region& region, Replica replica = Replica::kUnlabelled) {
    EXPECT_OK(at(rank).AddTensor(key, MetadataOnly(dtype, shape, region, replica)));
    return *this;
  }
  LayoutRanks& Object(int rank, const std::string& key, const std::string& bytes,
                      const GridPosition& place = {}) {
    EXPECT_OK(at(rank).AddObject(key, bytes, place));
    return *this;
  }
  StateDict& at(int rank) { return dicts_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(dicts_.size()); }

  // What one of `owners` is told; ranks with equal layouts are put in once.
  Result<LayoutTable> Table(std::uint32_t owner = 0, std::uint32_t owners = 1) const {
    std::map<std::string, std::vector<int>> same;
    for (int r = 0; r < size(); ++r) {
      same[EncodeLayout(dicts_[static_cast<std::size_t>(r)], owner, owners)].push_back(r);
    }
    std::map<int, const std::string*> by_rank;
    for (const auto& [encoded, ranks] : same) by_rank[ranks[0]] = &encoded;
    LayoutTable table;
    for (const auto& [rank, encoded] : by_rank) {
      TENSORMOUNT_RETURN_IF_ERROR(table.Add(*encoded, same.at(*encoded)));
    }
    return table;
  }
  LayoutReport Check(std::size_t limit = 100,
                     const std::map<std::string, std::string>* layers = nullptr) const {
    const Result<LayoutTable> table = Table();
    EXPECT_OK(table);
    return CheckLayout(table.value(), {size(), limit, layers});
  }
  GlobalLayout Layout() const {
    EXPECT_TRUE(Check().ok()) << Check().ToText();
    Result<GlobalLayout> layout = MakeLayout(Table().value(), size());
    EXPECT_OK(layout);
    return std::move(layout).value();
  }
  // The messages of all findings.
  std::vector<std::string> Messages() const {
    std::vector<std::string> messages;
    for (const Finding& finding : Check().findings) messages.push_back(finding.message);
    return messages;
  }
  // Of the first finding.
  std::string Cause() const {
    const LayoutReport report = Check();
    return report.findings.empty() ? "(none)" : report.findings[0].cause;
  }

 private:
  std::vector<StateDict> dicts_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_LAYOUT_TESTING_H_
