// SPDX-License-Identifier: Apache-2.0
#include "base/crc32.h"

#include <string>

#include <gtest/gtest.h>

namespace tensormount {
namespace {

std::string Noise(std::size_t size) {
  std::string out(size, '\0');
  std::uint32_t state = 12345;
  for (char& c : out) {
    state = state * 1664525 + 1013904223;
    c = static_cast<char>(state >> 24);
  }
  return out;
}

TEST(Crc32Test, MatchesKnownValues) {
  EXPECT_EQ(Crc32Extend(0, "", 0), 0u);
  EXPECT_EQ(Crc32Extend(0, "123456789", 9), 0xCBF43926u);
  const std::string zeros(1000, '\0');
  EXPECT_EQ(Crc32Extend(0, zeros.data(), 32), 0x190A55ADu);
}

TEST(Crc32Test, CombineEqualsTheWhole) {
  const std::string noise = Noise(100'000);
  const std::uint32_t all = Crc32Extend(0, noise.data(), noise.size());
  for (const std::size_t cut : {0u, 1u, 63u, 4096u, 65'537u, 99'999u, 100'000u}) {
    const std::uint32_t a = Crc32Extend(0, noise.data(), cut);
    const std::uint32_t b = Crc32Extend(0, noise.data() + cut, noise.size() - cut);
    EXPECT_EQ(Crc32Combine(a, b, noise.size() - cut), all) << cut;
    EXPECT_EQ(Crc32Extend(a, noise.data() + cut, noise.size() - cut), all) << cut;
  }
  // Over 4 GiB: zeros, by doubling.
  const std::string zeros(1 << 20, '\0');
  std::uint32_t doubled = Crc32Extend(0, zeros.data(), zeros.size());
  for (std::uint64_t n = zeros.size(); n < std::uint64_t{8} << 30; n *= 2) {
    doubled = Crc32Combine(doubled, doubled, n);
  }
  const std::uint32_t mebi = Crc32Extend(0, zeros.data(), zeros.size());
  std::uint32_t added = 0;
  for (int i = 0; i < 8192; ++i) added = Crc32Combine(added, mebi, zeros.size());
  EXPECT_EQ(doubled, added);
}

}  // namespace
}  // namespace tensormount
