// SPDX-License-Identifier: Apache-2.0
// Parses sizes that users type.
#include "base/byte_size.h"

#include <string>
#include <utility>

#include "base/checked.h"

namespace tensormount {

Result<std::uint64_t> ParseByteSize(std::string_view what, std::string_view text) {
  static constexpr std::pair<std::string_view, std::uint64_t> kUnits[] = {
      {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30},
      {"KB", 1'000},       {"MB", 1'000'000},   {"GB", 1'000'000'000},
      {"K", 1'000},        {"M", 1'000'000},    {"G", 1'000'000'000},
  };
  const auto bad = [&] {
    return Status(Code::kInvalidArgument,
                  std::string(what) + " \"" + std::string(text) +
                      "\": not a number of bytes, optionally followed by K, M, G, KB, MB, GB "
                      "(powers of 1000) or KiB, MiB, GiB (powers of 1024)");
  };
  std::string_view digits = text;
  std::uint64_t unit = 1;
  for (const auto& [suffix, bytes] : kUnits) {
    if (!text.ends_with(suffix)) continue;
    digits.remove_suffix(suffix.size());
    unit = bytes;
    break;
  }
  if (digits.empty() || digits.size() > 19) return bad();
  std::uint64_t number = 0;  // Cannot overflow: 19 digits fit in 64 bits.
  for (const char c : digits) {
    if (c < '0' || c > '9') return bad();
    number = number * 10 + static_cast<std::uint64_t>(c - '0');
  }
  const auto bytes = CheckedMul(number, unit);
  if (!bytes || *bytes == 0 || *bytes > INT64_MAX) return bad();
  return *bytes;
}

}  // namespace tensormount
