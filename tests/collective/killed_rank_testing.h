// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_KILLED_RANK_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_KILLED_RANK_TESTING_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <signal.h>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
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

// Until it holds for all ranks, or 30 s are over.
inline void WaitForRanks(int ranks, const std::function<bool(int rank)>& holds) {
  for (int waited = 0; waited < 30'000; waited += 20) {
    bool all = true;
    for (int r = 0; r < ranks; ++r) all = all && holds(r);
    if (all) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// What others wait for is there wholly or not at all.
inline void WriteAtOnce(const std::string& path, std::string_view bytes) {
  WriteWholeFile(path + ".new", bytes);
  EXPECT_EQ(rename((path + ".new").c_str(), path.c_str()), 0);
}

// The end of the calling process, or its sleep, which `path` tells beforehand. On a busy machine
// ranks send reminders, so that the n-th message of one run need not be in the next: then nobody is
// hit.
inline void Hit(const std::string& path, int signal) {
  WriteAtOnce(path, "hit");
  (void)kill(getpid(), signal);  // Cannot fail for ourselves.
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_KILLED_RANK_TESTING_H_
