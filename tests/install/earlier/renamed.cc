// SPDX-License-Identifier: Apache-2.0
// Uses each name that CHANGELOG.md lists as old.
#include <cstdio>
#include <optional>

#include <tensormount/export.h>
#include <tensormount/tensormount.h>

using tensormount::CommonDifference;
using tensormount::CommonValue;
using tensormount::ObjectPlace;

TENSORMOUNT_EXPORT int Visible() { return 0; }

int main() {
  const ObjectPlace place{};
  const std::optional<CommonDifference> difference =
      tensormount::FirstDifference(CommonValue(std::int64_t{1}), CommonValue(std::int64_t{2}));
  if (!difference.has_value()) {
    std::fprintf(stderr, "1 and 2 are equal\n");
    return 1;
  }
  (void)place;
  return Visible();
}
