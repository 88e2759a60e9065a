// SPDX-License-Identifier: Apache-2.0
// Computes how much of each replicated region each holder writes, so that all ranks write nearly
// the same: each group's bytes go to its least loaded holders, in a few passes.
#include "collective/save/even_shares.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tensormount {
namespace {

// Limit of (rank, group) pairs over all passes: some seconds at most.
constexpr std::size_t kMostVisits = std::size_t{1} << 24;
constexpr std::size_t kMostPasses = 64;
// A pass that moves less than 1/kLittle of all bytes is the last.
constexpr std::uint64_t kLittle = 2000;

std::size_t At(int rank) { return static_cast<std::size_t>(rank); }

// Splits `bytes` over ranks with these `loads` so that loads even out: the lowest loads get most.
void FillLowest(std::uint64_t bytes, const std::vector<std::uint64_t>& loads,
                std::vector<std::size_t>& order, std::vector<std::uint64_t>& shares) {
  order.resize(loads.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return loads[a] < loads[b]; });
  std::fill(shares.begin(), shares.end(), 0);
  // Takes ranks in rising order of load while the next one is below the mean of the bytes and the
  // loads taken. Example: loads 0, 4, 20 and 10 bytes. The first two come to (10 + 4) / 2 = 7 each
  // and get 7 and 3; the third, already over 7, gets nothing.
  std::uint64_t sum = bytes;
  std::size_t n = 0;
  while (n < order.size() && (n == 0 || loads[order[n]] < sum / n)) sum += loads[order[n++]];
  const std::uint64_t level = sum / n;
  std::uint64_t left = sum % n;
  for (std::size_t i = 0; i < n; ++i) {
    shares[order[i]] = level - loads[order[i]];
    if (left > 0) {
      ++shares[order[i]];
      --left;
    }
  }
}

}  // namespace

std::vector<std::vector<std::uint64_t>> EvenShares(std::span<const SharedBytes> groups,
                                                   std::span<const std::uint64_t> loads) {
  std::vector<std::vector<std::uint64_t>> shares(groups.size());
  std::vector<std::uint32_t> in(loads.size(), 0);  // By rank: number of its groups.
  for (const SharedBytes& group : groups) {
    for (const int r : group.ranks) ++in[At(r)];
  }
  // Groups that share a rank with others, the largest first. Passes are only for these groups; the
  // caller splits all other groups (even_shares.h).
  std::vector<std::size_t> meeting;
  std::size_t visits = 0;
  std::uint64_t bytes = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const SharedBytes& group = groups[g];
    const bool meets =
        std::any_of(group.ranks.begin(), group.ranks.end(), [&](int r) { return in[At(r)] > 1; });
    if (!meets || group.bytes == 0) continue;
    meeting.push_back(g);
    visits += group.ranks.size();
    bytes += group.bytes;
  }
  if (meeting.empty() || visits > kMostVisits) return shares;
  std::stable_sort(meeting.begin(), meeting.end(),
                   [&](std::size_t a, std::size_t b) { return groups[a].bytes > groups[b].bytes; });
  for (const std::size_t g : meeting) shares[g].assign(groups[g].ranks.size(), 0);
  std::vector<std::uint64_t> all(loads.begin(), loads.end());
  std::vector<std::uint64_t> others;
  std::vector<std::uint64_t> before;
  std::vector<std::size_t> order;
  const std::size_t passes = std::min(kMostPasses, kMostVisits / visits);
  for (std::size_t pass = 0; pass < passes; ++pass) {
    // Each group in turn takes its bytes back and splits them again over the loads that the other
    // groups leave. The first pass moves all bytes, so only later passes can show that little
    // changes.
    std::uint64_t moved = 0;
    for (const std::size_t g : meeting) {
      const SharedBytes& group = groups[g];
      std::vector<std::uint64_t>& mine = shares[g];
      before = mine;
      others.resize(mine.size());
      for (std::size_t i = 0; i < mine.size(); ++i) others[i] = all[At(group.ranks[i])] - mine[i];
      FillLowest(group.bytes, others, order, mine);
      for (std::size_t i = 0; i < mine.size(); ++i) {
        all[At(group.ranks[i])] = others[i] + mine[i];
        if (mine[i] > before[i]) moved += mine[i] - before[i];
      }
    }
    if (pass > 0 && moved <= bytes / kLittle) break;
  }
  return shares;
}

}  // namespace tensormount
