// SPDX-License-Identifier: Apache-2.0
// Whether regions cover a shape, in three steps that each cost more than the one before: the proofs
// of partition_proof.h, which answer for every layout in use; a sweep along the row-major order
// where all regions are ranges of it; the search of coverage_search.h, which also finds what is
// wrong. Proof and explanation are separate on purpose: the first must be fast for millions of
// regions, the second only for those that people can read.
#include "shard/coverage.h"

#include <algorithm>

#include "shard/box_access.h"
#include "shard/coverage_search.h"
#include "shard/linear_order.h"
#include "shard/partition_proof.h"

namespace tensormount {
namespace {

Proof Prove(const RegionSet& regions, bool* linear) {
  Proof proof = ProveByOrder(regions, linear);
  if (proof != Proof::kUnknown) return proof;
  if (*linear) return ProveByEnds(regions);
  proof = ProveAsGrid(regions);
  return proof != Proof::kUnknown ? proof : ProveByCorners(regions, nullptr);
}

void AppendRange(const Box& whole, std::int64_t begin, std::int64_t end, std::vector<Box>& out) {
  const Result<Region> range = Region::Flat(whole, begin, end - begin);
  const std::vector<Box> boxes = range.value().Boxes();  // Lies within the tensor.
  out.insert(out.end(), boxes.begin(), boxes.end());
}

// Ranges of the row-major order: a sweep along it. Stops listing overlaps, in order, at `limit`.
void SweepRanges(const RegionSet& regions, std::size_t limit, CoverageReport& report) {
  struct Range {
    LinearRange at;
    std::uint32_t region;
  };
  const Box whole = Box::Whole(regions.shape());
  const LinearOrder order(regions.shape());
  std::vector<Range> ranges(regions.size());
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    std::int64_t volume = 0;
    order.RangeOf(regions, i, &ranges[i].at, &volume);
    ranges[i].region = static_cast<std::uint32_t>(i);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.at.begin != b.at.begin ? a.at.begin < b.at.begin : a.region < b.region;
  });
  std::int64_t covered = 0;
  std::vector<Range> open;  // Those before that reach beyond the beginning of this one.
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
  for (const Range& range : ranges) {
    cover(range.at.begin, range.at.end);
    if (report.overlaps.size() > limit) continue;
    std::erase_if(open, [&](const Range& r) { return r.at.end <= range.at.begin; });
    for (const Range& other : open) {
      const auto [first, second] = std::minmax(range.region, other.region);
      common.clear();
      AppendRange(whole, range.at.begin, std::min(range.at.end, other.at.end), common);
      for (const Box& box : common) {
        report.overlaps.push_back({box, regions.owner(first), regions.owner(second)});
      }
      if (report.overlaps.size() > limit) break;
    }
    open.push_back(range);
  }
  cover(order.elements(), order.elements());
}

// Boxes, and flat ranges as the boxes that they consist of. Owners in the report are positions.
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
  // More pairs than are listed are looked for, so that the listed ones are the first.
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

bool Meet(const RegionSet& regions, std::size_t i, const Box& box) {
  for (int a = 0; a < box.rank(); ++a) {
    if (regions.low(i)[a] >= box.end(a) || regions.high(i)[a] <= box.begin(a)) return false;
  }
  return true;
}

// From the cells that the proof left over; only what meets those with too many regions is searched.
// False, and nothing reported, where the proof was of no use.
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
    // One box around all of them.
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
                                   [&](const Box& box) { return Meet(regions, i, box); });
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
  limit = std::max<std::size_t>(limit, 1);  // A report without findings means complete.
  if (linear) {
    SweepRanges(regions, limit, report);
  } else {
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

CoverageReport CheckCoverage(const Dims& shape, std::span<const OwnedRegion> regions,
                             std::size_t limit) {
  RegionSet set(shape);
  set.Reserve(regions.size());
  for (const OwnedRegion& r : regions) set.Add(r.region, r.owner);
  return CheckCoverage(set, limit);
}

bool IsPartition(const RegionSet& regions) {
  if (Box::Whole(regions.shape()).empty()) return true;
  bool linear = false;
  const Proof proof = Prove(regions, &linear);
  if (proof != Proof::kUnknown) return proof == Proof::kPartition;
  return CheckCoverage(regions, 1).complete();
}

}  // namespace tensormount
