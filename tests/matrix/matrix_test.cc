// SPDX-License-Identifier: Apache-2.0
// {1, 2, 3, 4, 8} ranks to {1, 2, 3, 4, 8}, every cut to every cut.
#include <string>

#include <gtest/gtest.h>

#include "tests/matrix/matrix_cases.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 8};

class AcceptanceMatrix : public testing::TestWithParam<Cut> {};

TEST_P(AcceptanceMatrix, LoadsUnderEveryCutOnEveryNumberOfRanks) {
  int turn = 0;
  for (const int savers : kRanks) {
    TempDir dir;
    const std::string path = dir.Join("store/step");
    ASSERT_OK(
        RunOnThreads(savers, [&](Communicator& comm) { return SaveCut(comm, path, GetParam()); }));
    for (const int loaders : kRanks) {
      // Threads of one group make all loads of that many ranks: starting them costs more.
      ASSERT_OK(RunOnThreads(loaders, [&](Communicator& comm) -> Status {
        int mine = turn;
        for (const Cut cut : AllCuts()) {
          LoadOptions options;
          options.path = mine % 3 == 1 ? LoadPath::kExchange : LoadPath::kAuto;
          options.verify = mine % 4 == 3 ? LoadVerify::kLeaves : LoadVerify::kAuto;
          ++mine;
          const Status loaded = LoadCut(comm, path, cut, options);
          if (!loaded.ok()) {
            return loaded.WithContext("saved on " + std::to_string(savers) + " by " +
                                      std::string(CutName(GetParam())) + ", loaded on " +
                                      std::to_string(loaders) + " by " + std::string(CutName(cut)));
          }
        }
        return {};
      }));
      ++turn;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, AcceptanceMatrix,
                         testing::ValuesIn(AllCuts().begin(), AllCuts().end()),
                         [](const testing::TestParamInfo<Cut>& cut) {
                           return std::string(CutName(cut.param));
                         });

}  // namespace
}  // namespace tensormount
