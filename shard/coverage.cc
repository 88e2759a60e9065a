// SPDX-License-Identifier: Apache-2.0
// Whether regions cover a shape. The proofs of partition_proof.h decide it for almost all layouts
// in use. The errors are found by a sweep along the row-major order if all regions are ranges of
// it, else from the corners (UseDifferences) or by the search of coverage_search.h. The proofs must
// be fast for millions of regions; the search only has to find as many errors as people can read.
#include "shard/coverage.h"

#include <algorithm>

#include "shard/box_access.h"
#include "shard/coverage_search.h"
#include "shard/linear_order.h"
#include "shard/partition_proof.h"

namespace tensormount {
namespace {

// Tries the proofs of partition_proof.h, the cheapest first. Volumes alone refute most wrong
// layouts, and regions in rank order are proved in the same pass (ProveByOrder). Ranges of the
// row-major order need two corners each (ProveByEnds), grids one look-up per axis (ProveAsGrid),
// and other regions 2^axes corners.
Proof Prove(const RegionSet& regions, bool* linear) {
  Proof proof = ProveByOrder(regions, linear);
  if (proof != Proof::kUnknown) return proof;
  if (*linear) return ProveByEnds(regions);
  proof = ProveAsGrid(regions);
  return proof != Proof::kUnknown ? proof : ProveByCorners(regions, nullptr);
}

// Appends elements [begin, end) of the row-major order of the tensor, as boxes.
void AppendRange(const Box& whole, std::int64_t begin, std::int64_t end, std::vector<Box>& out) {
  const Result<Region> range = Region::Flat(whole, begin, end - begin);
  const std::vector<Box> boxes = range.value().Boxes();
  out.insert(out.end(), boxes.begin(), boxes.end());
}

// Finds holes and overlaps by a sweep over ranges along the row-major order. `covered` is the end
// of the gapless part so far, so a hole lies between `covered` and the next begin. O(n log n), plus
// one step for each overlapping pair, of which the first `limit` are listed.
void SweepRanges(const RegionSet& regions, std::size_t limit, CoverageReport& report) {
  const Box whole = Box::Whole(regions.shape());
  const LinearOrder order(regions.shape());
  std::vector<LinearRange> ranges(regions.size());
  std::vector<std::uint32_t> sorted(regions.size());  // Regions sorted by begin.
  for (std::uint32_t i = 0; i < ranges.size(); ++i) {
    std::int64_t volume = 0;
    order.RangeOf(regions, i, &ranges[i], &volume);
    sorted[i] = i;
  }
  std::stable_sort(sorted.begin(), sorted.end(), [&](std::uint32_t a, std::uint32_t b) {
    return ranges[a].begin < ranges[b].begin;
  });
  std::int64_t covered = 0;
  std::vector<std::uint32_t> open;  // Earlier regions that end after the begin of `region`.
  std::vector<Box> common;
  const auto cover = [&](std::int64_t begin, std::int64_t end) {
    if (begin > covered) {
      report.missing_elements += static_cast<std::uint64_t>(begin - covered);
      if (report.missing.size() < kMaxHoles) {
        AppendRange(whole, covered, begin, report.missing);
      } else {
        report.truncated = true;
      }
    }
    covered = std::max(covered, end);
  };
  for (const std::uint32_t region : sorted) {
    const LinearRange& range = ranges[region];
    cover(range.begin, range.end);
    if (report.overlaps.size() > limit) continue;
    std::erase_if(open, [&](std::uint32_t r) { return ranges[r].end <= range.begin; });
    for (const std::uint32_t other : open) {
      const auto [first, second] = std::minmax(region, other);
      common.clear();
      AppendRange(whole, range.begin, std::min(range.end, ranges[other].end), common);
      for (const Box& box : common) {
        report.overlaps.push_back({box, regions.owner(first), regions.owner(second)});
      }
      if (report.overlaps.size() > limit) break;
    }
    open.push_back(region);
  }
  cover(order.elements(), order.elements());
}

// Finds holes and overlaps by SearchCoverage, after splitting flat ranges into boxes. Owners in the
// report are positions in `regions`.
void SearchBoxes(const RegionSet& regions, std::size_t limit, bool only_overlaps,
                 CoverageReport& report) {
  RegionSet pieces(regions.shape());
  const RegionSet* boxes = &regions;
  if (regions.has_flats()) {
    for (std::size_t i = 0; i < regions.size(); ++i) {
      for (const Box& box : regions.At(i).Boxes()) pieces.Add(box, static_cast<std::uint32_t>(i));
    }
    boxes = &pieces;
  }
  // Searches for more pairs than are listed, so that the first `limit` in order can be listed.
  CoverageFindings found = SearchCoverage(*boxes, limit * 4 + 64, only_overlaps);
  std::sort(found.pairs.begin(), found.pairs.end());
  const auto position = [&](std::uint32_t box) {
    return boxes == &regions ? box : pieces.owner(box);
  };
  for (const auto& [a, b] : found.pairs) {
    report.overlaps.push_back(
        {Intersect(boxes->At(a).box(), boxes->At(b).box()), position(a), position(b)});
  }
  report.missing = std::move(found.holes);
  report.missing_elements = found.missing_elements;
  report.truncated = found.holes_dropped || found.pairs_dropped;
}

bool Intersects(const RegionSet& regions, std::size_t i, const Box& box) {
  for (int a = 0; a < box.rank(); ++a) {
    if (regions.low(i)[a] >= box.end(a) || regions.high(i)[a] <= box.begin(a)) return false;
  }
  return true;
}

// Finds the errors without a search of all regions. One pass over the corners (partition_proof.h)
// gives holes and doubly covered cells of any number of regions, if these cells are few. The pass
// does not know the owners, so the regions that meet doubly covered cells are searched separately;
// usually these are two of a million. False, without a report, if the pass gave no cells.
bool UseDifferences(const RegionSet& regions, std::size_t limit, CoverageReport& report) {
  constexpr std::size_t kPlacesApart = 16;
  std::vector<Miscount> differences;
  ProveByCorners(regions, &differences);
  if (differences.empty()) return false;
  std::vector<Box> twice;
  for (const Miscount& d : differences) {
    if (d.surplus > 0) {
      twice.push_back(d.box);
      continue;
    }
    report.missing_elements += static_cast<std::uint64_t>(d.box.volume());
    report.missing.push_back(d.box);
  }
  if (twice.empty()) return true;
  JoinBoxes(regions.rank(), twice);
  if (twice.size() > kPlacesApart) {
    // Each region is compared with every box of `twice`, so many boxes are replaced by one box
    // around all of them. The search below ignores regions in that box that overlap no other
    // region.
    Dims low = twice[0].begin();
    Dims extent;
    for (int a = 0; a < regions.rank(); ++a) {
      std::int64_t high = 0;
      for (const Box& box : twice) {
        low[a] = std::min(low[a], box.begin(a));
        high = std::max(high, box.end(a));
      }
      extent.push_back(high - low[a]);
    }
    twice = {BoxAccess::Make(low, extent)};
  }
  RegionSet near(regions.shape());
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const bool meets = std::any_of(twice.begin(), twice.end(),
                                   [&](const Box& box) { return Intersects(regions, i, box); });
    if (meets) near.AddFrom(regions, i, static_cast<std::uint32_t>(i));
  }
  CoverageReport found;
  SearchBoxes(near, limit, true, found);
  report.overlaps = std::move(found.overlaps);
  report.truncated = found.truncated;
  for (Overlap& o : report.overlaps) {
    o.first = near.owner(o.first);
    o.second = near.owner(o.second);
  }
  return true;
}

}  // namespace

CoverageReport CheckCoverage(const RegionSet& regions, std::size_t limit) {
  CoverageReport report;
  if (Box::Whole(regions.shape()).empty()) return report;
  bool linear = false;
  if (Prove(regions, &linear) == Proof::kPartition) return report;
  limit = std::max<std::size_t>(limit, 1);  // An empty report would mean complete coverage.
  if (linear) {
    SweepRanges(regions, limit, report);
  } else {
    // Both functions set positions in `regions` as owners, which the loop replaces by owners.
    if (!UseDifferences(regions, limit, report)) SearchBoxes(regions, limit, false, report);
    for (Overlap& o : report.overlaps) {
      o.first = regions.owner(o.first);
      o.second = regions.owner(o.second);
    }
  }
  JoinBoxes(regions.rank(), report.missing);
  std::stable_sort(report.overlaps.begin(), report.overlaps.end(),
                   [](const Overlap& a, const Overlap& b) { return RowMajorLess(a.box, b.box); });
  report.truncated |= report.missing.size() > limit || report.overlaps.size() > limit;
  if (report.missing.size() > limit) report.missing.resize(limit);
  if (report.overlaps.size() > limit) report.overlaps.resize(limit);
  return report;
}

bool IsPartition(const RegionSet& regions) {
  if (Box::Whole(regions.shape()).empty()) return true;
  bool linear = false;
  const Proof proof = Prove(regions, &linear);
  if (proof != Proof::kUnknown) return proof == Proof::kPartition;
  return CheckCoverage(regions, 1).complete();
}

}  // namespace tensormount
