// SPDX-License-Identifier: Apache-2.0
// Human-readable byte counts (counted.h).
#include "base/counted.h"

#include <array>
#include <cstdio>

namespace tensormount {

std::string HumanBytes(std::uint64_t bytes) {
  if (bytes < 1000) return std::to_string(bytes) + " B";
  constexpr std::array kUnits = {"kB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  // 999.95 would be printed as 1000.0, so it already moves to the next unit.
  while (value >= 999.95 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  std::array<char, 32> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.1f %s", value, kUnits[unit]);
  return std::string(text.data(), static_cast<std::size_t>(size));
}

}  // namespace tensormount
