// SPDX-License-Identifier: Apache-2.0
// Names of what a staging and a store consist of, where more than one file of ours has to know
// them.
#include "index/records/store_paths.h"

#include <algorithm>
#include <array>

namespace tensormount::store_paths {
namespace {

// Folders and files of a shared staging besides data/ and manifest/.
constexpr std::array<std::string_view, 8> kLeftovers = {
    "journal", "schema", "done", "common", "report.json", "report.txt", kLockFile, kUuidFile,
};

}  // namespace

bool IsSharedLeftover(std::string_view name) {
  const std::string_view top = name.substr(0, name.find('/'));
  if (top == kSharedFile) return true;
  return std::any_of(kLeftovers.begin(), kLeftovers.end(), [&](std::string_view known) {
    // Also what ReplaceFile makes and exchanges.
    return top == known || (top.starts_with(known) && top.substr(known.size()) == ".new");
  });
}

}  // namespace tensormount::store_paths
