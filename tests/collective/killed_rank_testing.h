// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_KILLED_RANK_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_KILLED_RANK_TESTING_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

// What tests share in which ranks are killed or stopped before the n-th of their events.

namespace tensormount {

// `n` of `count` events, spread over all of them and moved by the seed; the last one included.
inline std::vector<int> SampleEvents(Random& random, int count, int n) {
  std::vector<int> points = {count - 1};
  for (int i = 0; i + 1 < n; ++i) {
    const int from = count * i / (n - 1);
    const int to = std::max(from, count * (i + 1) / (n - 1) - 1);
    points.push_back(static_cast<int>(random.Int(from, to)));
  }
  return points;
}

// Until all ranks but one say that they returned, or 30 s are over: a stopped one does not end.
inline void WaitForSurvivors(int ranks, int victim, const std::function<bool(int rank)>& returned) {
  for (int waited = 0; waited < 30'000; waited += 20) {
    bool all = true;
    for (int r = 0; r < ranks; ++r) all = all && (r == victim || returned(r));
    if (all) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// What WaitForSurvivors looks for is there wholly or not at all.
inline void WriteAtOnce(const std::string& path, std::string_view bytes) {
  WriteWholeFile(path + ".new", bytes);
  EXPECT_EQ(rename((path + ".new").c_str(), path.c_str()), 0);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_KILLED_RANK_TESTING_H_
