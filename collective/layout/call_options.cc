// SPDX-License-Identifier: Apache-2.0
// Finds the option in which the calls of two ranks differ.
#include "collective/layout/call_options.h"

#include "base/coding.h"

namespace tensormount {

Result<std::optional<DifferentOption>> FindDifferentOption(std::string_view of_rank_0,
                                                           std::string_view of_rank, int rank,
                                                           std::size_t most) {
  ByteReader a(of_rank_0, "the options that rank 0 sent");
  const std::string what = "the options that rank " + std::to_string(rank) + " sent";
  ByteReader b(of_rank, what);
  while (a.left() > 0 && b.left() > 0) {
    const std::string_view name = a.String(most);
    const std::string_view value = a.String(most);
    const std::string_view other_name = b.String(most);
    const std::string_view other_value = b.String(most);
    TENSORMOUNT_RETURN_IF_ERROR(a.status());
    TENSORMOUNT_RETURN_IF_ERROR(b.status());
    if (name != other_name) break;
    if (value == other_value) continue;
    return std::optional(
        DifferentOption{std::string(name), std::string(value), std::string(other_value)});
  }
  return std::optional<DifferentOption>();
}

}  // namespace tensormount
