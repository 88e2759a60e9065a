// SPDX-License-Identifier: Apache-2.0
// Finds holes and overlaps of boxes by subdividing space. A part that no box touches is a hole. If
// one box touches a part, the holes are the part without that box. A part that several boxes touch
// is cut in two, at a boundary of a box that crosses few other boxes. Holes that a cut has split
// are joined again on the way out, so that one missing box is reported as one.
#include "shard/coverage_search.h"

#include <algorithm>
#include <unordered_set>

#include "shard/box_access.h"

namespace tensormount {
namespace {

using Id = std::uint32_t;

// Compares position and extent on all axes except `axis`; 0 if boxes can be joined along `axis`.
int CompareAcross(const Box& a, const Box& b, int axis) {
  for (int i = 0; i < a.rank(); ++i) {
    if (i == axis) continue;
    if (a.begin(i) != b.begin(i)) return a.begin(i) < b.begin(i) ? -1 : 1;
    if (a.extent(i) != b.extent(i)) return a.extent(i) < b.extent(i) ? -1 : 1;
  }
  return 0;
}

// Cuts the shape at box boundaries recursively, until at most one box touches a part without
// spanning it. The cut is the median boundary of the axis on which it crosses the fewest boxes, so
// rows and grids split cleanly (O(n log n)).
class Search {
 public:
  Search(const RegionSet& boxes, std::size_t max_pairs, bool only_overlaps)
      : boxes_(boxes), max_pairs_(max_pairs), only_overlaps_(only_overlaps) {}

  void Run(const Box& cell, std::vector<Id> touching) { Visit(cell, std::move(touching), {}); }

  CoverageFindings found;

 private:
  // `touching`: boxes that meet the cell. `covers`: boxes known to span the cell; all pairs among
  // `covers`, and of `covers` with `touching`, are already in found.pairs.
  void Visit(const Box& cell, std::vector<Id> touching, std::vector<Id> covers) {
    if (only_overlaps_ && found.pairs_dropped) return;
    std::vector<Id> spanning;
    std::erase_if(touching, [&](Id i) {
      if (!Spans(i, cell)) return false;
      spanning.push_back(i);
      return true;
    });
    for (std::size_t k = 0; k < spanning.size() && !found.pairs_dropped; ++k) {
      for (std::size_t j = 0; j < k; ++j) NotePair(spanning[j], spanning[k]);
      for (const Id i : touching) NotePair(spanning[k], i);
    }
    covers.insert(covers.end(), spanning.begin(), spanning.end());
    if (!covers.empty() && (touching.size() < 2 || found.pairs_dropped)) return;
    if (only_overlaps_ && touching.size() < 2) return;
    if (touching.empty()) {
      NoteHole(cell);
      return;
    }
    if (touching.size() == 1) {
      std::vector<Box> left = {cell};
      SubtractBox(left, boxes_.At(touching[0]).box());
      for (const Box& hole : left) NoteHole(hole);
      return;
    }
    std::int64_t cut = 0;
    const int axis = ChooseCut(cell, touching, &cut);
    Box half = BoxAccess::WithAxis(cell, axis, cell.begin(axis), cut - cell.begin(axis));
    std::vector<Id> part;
    for (const Id i : touching) {
      if (boxes_.low(i)[axis] < cut) part.push_back(i);
    }
    const std::size_t below = found.holes.size();
    Visit(half, std::move(part), covers);
    half = BoxAccess::WithAxis(cell, axis, cut, cell.end(axis) - cut);
    std::erase_if(touching, [&](Id i) { return boxes_.high(i)[axis] <= cut; });
    const std::size_t above = found.holes.size();
    Visit(half, std::move(touching), std::move(covers));
    JoinAtCut(below, above, axis, cut);
  }

  // Joins found.holes [below, above) with those from `above` on if the cut split one hole. Joining
  // from the innermost cut outwards restores a single missing box for any sequence of cuts; other
  // orders may leave pieces that do not match pairwise.
  void JoinAtCut(std::size_t below, std::size_t above, int axis, std::int64_t cut) {
    if (below == above || above == found.holes.size()) return;
    std::vector<std::size_t> ends;
    for (std::size_t i = below; i < above; ++i) {
      if (found.holes[i].end(axis) == cut) ends.push_back(i);
    }
    if (ends.empty()) return;
    const auto less = [&](std::size_t a, std::size_t b) {
      return CompareAcross(found.holes[a], found.holes[b], axis) < 0;
    };
    std::sort(ends.begin(), ends.end(), less);
    std::size_t kept = above;
    for (std::size_t i = above; i < found.holes.size(); ++i) {
      if (found.holes[i].begin(axis) == cut) {
        const auto at = std::lower_bound(ends.begin(), ends.end(), i, less);
        if (at != ends.end() && !less(i, *at)) {
          Box& box = found.holes[*at];
          box = BoxAccess::WithAxis(box, axis, box.begin(axis),
                                    box.extent(axis) + found.holes[i].extent(axis));
          continue;
        }
      }
      if (kept != i) found.holes[kept] = found.holes[i];
      ++kept;
    }
    found.holes.resize(kept);
  }

  // Whether the box contains the whole cell.
  bool Spans(Id i, const Box& cell) const {
    const std::int64_t* low = boxes_.low(i);
    const std::int64_t* high = boxes_.high(i);
    for (int a = 0; a < boxes_.rank(); ++a) {
      if (low[a] > cell.begin(a) || high[a] < cell.end(a)) return false;
    }
    return true;
  }

  // Notes each pair once, although cuts may separate its common cells. After max_pairs_ pairs only
  // records that there are more.
  void NotePair(Id a, Id b) {
    if (found.pairs_dropped) return;
    const Id first = std::min(a, b);
    const Id second = std::max(a, b);
    if (!seen_.insert((std::uint64_t{first} << 32) | second).second) return;
    if (found.pairs.size() == max_pairs_) {
      found.pairs_dropped = true;
      return;
    }
    found.pairs.emplace_back(first, second);
  }

  void NoteHole(const Box& box) {
    found.missing_elements += static_cast<std::uint64_t>(box.volume());
    if (found.holes.size() < kMaxHoles) {
      found.holes.push_back(box);
    } else {
      found.holes_dropped = true;
    }
  }

  // Some box does not span the cell, so there is a boundary inside. Tries the median boundary on
  // each axis; the best has the fewest boxes on the larger side, then the fewest on both sides,
  // then the outer axis. O(axes * n) without sorting.
  int ChooseCut(const Box& cell, const std::vector<Id>& touching, std::int64_t* cut) {
    int best = -1;
    std::size_t best_side = 0;
    std::size_t best_sum = 0;
    for (int a = 0; a < boxes_.rank(); ++a) {
      bounds_.clear();
      for (const Id i : touching) {
        const std::int64_t low = boxes_.low(i)[a];
        const std::int64_t high = boxes_.high(i)[a];
        if (low > cell.begin(a)) bounds_.push_back(low);
        if (high < cell.end(a)) bounds_.push_back(high);
      }
      if (bounds_.empty()) continue;
      const auto middle = bounds_.begin() + static_cast<std::ptrdiff_t>(bounds_.size() / 2);
      std::nth_element(bounds_.begin(), middle, bounds_.end());
      std::size_t below = 0;
      std::size_t above = 0;
      for (const Id i : touching) {
        if (boxes_.low(i)[a] < *middle) ++below;
        if (boxes_.high(i)[a] > *middle) ++above;
      }
      const std::size_t side = std::max(below, above);
      if (best < 0 || side < best_side || (side == best_side && below + above < best_sum)) {
        best = a;
        best_side = side;
        best_sum = below + above;
        *cut = *middle;
      }
    }
    return best;
  }

  const RegionSet& boxes_;
  const std::size_t max_pairs_;
  const bool only_overlaps_;
  std::unordered_set<std::uint64_t> seen_;
  std::vector<std::int64_t> bounds_;
};

// Joins boxes that touch along `axis` and agree on all other axes; returns whether any were joined.
bool JoinAlong(int axis, std::vector<Box>& boxes) {
  std::sort(boxes.begin(), boxes.end(), [axis](const Box& a, const Box& b) {
    const int order = CompareAcross(a, b, axis);
    return order != 0 ? order < 0 : a.begin(axis) < b.begin(axis);
  });
  const auto joins = [axis](const Box& a, const Box& b) {
    return a.end(axis) == b.begin(axis) && CompareAcross(a, b, axis) == 0;
  };
  std::size_t kept = 0;
  for (std::size_t i = 1; i < boxes.size(); ++i) {
    if (joins(boxes[kept], boxes[i])) {
      boxes[kept] = BoxAccess::WithAxis(boxes[kept], axis, boxes[kept].begin(axis),
                                        boxes[kept].extent(axis) + boxes[i].extent(axis));
    } else {
      boxes[++kept] = boxes[i];
    }
  }
  const bool any = kept + 1 < boxes.size();
  if (!boxes.empty()) boxes.resize(kept + 1);
  return any;
}

}  // namespace

bool RowMajorLess(const Box& a, const Box& b) {
  return std::lexicographical_compare(a.begin().begin(), a.begin().end(), b.begin().begin(),
                                      b.begin().end());
}

void JoinBoxes(int rank, std::vector<Box>& boxes) {
  bool again = boxes.size() > 1;
  while (again) {
    again = false;
    for (int axis = rank - 1; axis >= 0; --axis) again = JoinAlong(axis, boxes) || again;
  }
  std::sort(boxes.begin(), boxes.end(), RowMajorLess);
}

CoverageFindings SearchCoverage(const RegionSet& boxes, std::size_t max_pairs, bool only_overlaps) {
  std::vector<Id> all(boxes.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<Id>(i);
  Search search(boxes, max_pairs, only_overlaps);
  search.Run(Box::Whole(boxes.shape()), std::move(all));
  return std::move(search.found);
}

}  // namespace tensormount
