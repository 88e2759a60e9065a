// SPDX-License-Identifier: Apache-2.0
// Parts of tensormount/load.h that no load needs: access to the loaded data besides tensors
// (LoadReport), and StrictFromMegatron.
#include <algorithm>
#include <cctype>
#include <string>

#include "tensormount/load.h"

namespace tensormount {

Result<StrictPolicy> StrictFromMegatron(std::string_view name) {
  struct Row {
    std::string_view name;
    StrictPolicy policy;
  };
  // Megatron's "assume_ok_unexpected" leaves the check for keys that are not stored to the code
  // that reads; here the load does that check and fails.
  static constexpr Row kRows[] = {
      {"assume_ok_unexpected", {Strict::kRaise, Strict::kIgnore}},
      {"log_unexpected", {Strict::kLog, Strict::kIgnore}},
      {"log_all", {Strict::kLog, Strict::kLog}},
      {"raise_unexpected", {Strict::kRaise, Strict::kIgnore}},
      {"raise_all", {Strict::kRaise, Strict::kRaise}},
      {"return_unexpected", {Strict::kReturn, Strict::kIgnore}},
      {"return_all", {Strict::kReturn, Strict::kReturn}},
      {"ignore_all", {Strict::kIgnore, Strict::kIgnore}},
  };
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::string all;
  for (const Row& row : kRows) {
    if (row.name == lower) return row.policy;
    all += (all.empty() ? "" : ", ") + std::string(row.name);
  }
  return Status(Code::kInvalidArgument,
                "unknown strictness " + std::string(name.substr(0, 100)) + "; use one of " + all);
}

Result<std::string> LoadReport::object(std::string_view key, const Dims& index) const {
  const auto found = objects.find({std::string(key), index.ToString()});
  if (found == objects.end()) {
    return Status(Code::kNotFound,
                  "object " + std::string(key) +
                      (index.rank() == 0 ? std::string() : " " + index.ToString()) +
                      " was not asked for or is not stored");
  }
  return found->second;
}

Result<CommonValue> LoadReport::common(std::string_view name) const {
  const auto found = common_values.find(std::string(name));
  if (found == common_values.end()) {
    return Status(Code::kNotFound, "no common value " + std::string(name));
  }
  return found->second;
}

Result<CommonValue> LoadReport::rank_common(int rank, std::string_view name) const {
  if (const auto of_rank = rank_common_values.find(rank); of_rank != rank_common_values.end()) {
    const auto found = of_rank->second.find(std::string(name));
    if (found != of_rank->second.end()) return found->second;
  }
  return Status(Code::kNotFound,
                "no common value " + std::string(name) + " of rank " + std::to_string(rank));
}

Result<CommonValue> LoadReport::local(std::string_view name) const {
  const auto found = locals.find(std::string(name));
  if (found == locals.end()) {
    return Status(Code::kNotFound, "the request had no local value " + std::string(name));
  }
  return found->second;
}

}  // namespace tensormount
