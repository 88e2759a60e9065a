// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_EVEN_SHARES_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_EVEN_SHARES_H_

#include <cstdint>
#include <span>
#include <vector>

namespace tensormount {

// Bytes that may be split in any way among some ranks.
struct SharedBytes {
  std::vector<int> ranks;  // Distinct ranks.
  std::uint64_t bytes = 0;
};

// For each group, how many of its bytes each of its ranks should write, so that the busiest rank
// writes as little as possible. `loads`: by rank, bytes that the rank writes besides. All bytes of
// a group with shares are assigned. A group that shares no rank with another gets an empty list,
// and so do all groups if together they are too large: the caller can split them one by one. The
// result is nearly even: groups are split in turn, until little changes or the bounded work is
// done. Pure, and with integers only, because ranks on different machines must compute the same
// shares.
//
// O(passes * members * log(members)), where members counts the ranks of all overlapping groups.
std::vector<std::vector<std::uint64_t>> EvenShares(std::span<const SharedBytes> groups,
                                                   std::span<const std::uint64_t> loads);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_EVEN_SHARES_H_
