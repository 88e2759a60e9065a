// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COMMON_VALUE_H_
#define TENSORMOUNT_COMMON_VALUE_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace tensormount {

// A value of the common state: the same on every rank, stored once, shown in common.json.
// 64-bit integers, NaN and infinities are kept exactly.
struct CommonBytes {
  std::string data;
  friend bool operator==(const CommonBytes&, const CommonBytes&) = default;
};
using CommonValue = std::variant<bool, std::int64_t, double, std::string, CommonBytes>;

}  // namespace tensormount

#endif  // TENSORMOUNT_COMMON_VALUE_H_
