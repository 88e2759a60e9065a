// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_EVEN_SHARES_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_EVEN_SHARES_H_

#include <cstdint>
#include <span>
#include <vector>

namespace tensormount {

// Bytes that any of some ranks may write, in any parts.
struct SharedBytes {
  std::vector<int> ranks;  // Each once.
  std::uint64_t bytes = 0;
};

// For each group how many of its bytes each of its ranks should write, so that the busiest rank
// writes as little as possible; `loads` is what ranks write besides, by rank. All of a group's
// bytes are given out. Groups of which no rank is in another have no shares (an empty list): each
// can be given out by itself. Nearly even: groups are poured over their ranks in turn, until little
// moves or the work, which is bounded for any number of ranks, is done. Pure: integers only, the
// same on every machine.
//
// O(passes * members * log(members)), members being the ranks of all groups that overlap. Integers
// because owners on different machines must come to the same shares.
std::vector<std::vector<std::uint64_t>> EvenShares(std::span<const SharedBytes> groups,
                                                   std::span<const std::uint64_t> loads);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_EVEN_SHARES_H_
