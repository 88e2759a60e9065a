// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_CALL_OPTIONS_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_CALL_OPTIONS_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// An option of a collective call that differs between rank 0 and another rank.
struct DifferentOption {
  std::string name;
  std::string on_rank_0;
  std::string on_rank;
};

// The first difference between the options that rank 0 and rank `rank` sent: ByteWriter::String of
// name and value, for each option. nullopt: they have other options. kDataLoss: malformed, or a
// text has more than `most` bytes.
Result<std::optional<DifferentOption>> FindDifferentOption(std::string_view of_rank_0,
                                                           std::string_view of_rank, int rank,
                                                           std::size_t most);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_CALL_OPTIONS_H_
