// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_RANDOM_H_
#define TENSORMOUNT_TESTS_SUPPORT_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tensormount {

// The seed of this run: TENSORMOUNT_TEST_SEED, else a fixed one. main() prints it where it was set,
// and after every failure.
std::uint64_t TestSeed();

// `cases` times TENSORMOUNT_TEST_SCALE (default 1; fractions are fine), at least 1: how many random
// cases to try.
int TestScale(int cases);

// A small generator (splitmix64) whose sequence is the same on every machine. Thread-compatible.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next();

  // Uniform enough for tests, both ends included. Needs low <= high.
  std::int64_t Int(std::int64_t low, std::int64_t high) {
    const std::uint64_t span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
    const std::uint64_t draw = span + 1 == 0 ? Next() : Next() % (span + 1);
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + draw);
  }

  // True once in `n` times.
  bool OneIn(int n) { return Int(1, n) == 1; }

  std::string Bytes(std::size_t count) {
    std::string bytes(count, '\0');
    Fill(bytes.data(), count);
    return bytes;
  }

  void Fill(void* data, std::size_t count);

  template <typename T>
  void Shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<std::size_t>(Next() % i)]);
    }
  }

  template <typename T>
  const T& Pick(const std::vector<T>& items) {
    return items[static_cast<std::size_t>(Next() % items.size())];
  }

 private:
  std::uint64_t state_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_RANDOM_H_
