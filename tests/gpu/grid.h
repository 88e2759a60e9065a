// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_GPU_GRID_H_
#define TENSORMOUNT_TESTS_GPU_GRID_H_

#include <cstdint>
#include <vector>

#include "tests/support/random.h"

namespace tensormount {

// A grid of a device on the host: calls fn(number) for each of `threads`, in blocks whose order is
// drawn, as nobody knows it on a device.
template <typename Fn>
void RunGrid(Random& random, std::uint64_t threads, Fn fn) {
  constexpr std::uint64_t kBlock = 64;
  std::vector<std::uint64_t> blocks;
  for (std::uint64_t b = 0; b * kBlock < threads; ++b) blocks.push_back(b);
  random.Shuffle(blocks);
  for (const std::uint64_t b : blocks) {
    for (std::uint64_t t = b * kBlock; t < threads && t < (b + 1) * kBlock; ++t) fn(t);
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_GPU_GRID_H_
