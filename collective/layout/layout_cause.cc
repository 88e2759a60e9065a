// SPDX-License-Identifier: Apache-2.0
// Finds a likely cause for holes and overlaps: a rank that holds another rank's region, exchanged
// axes, ranks without a shard, a size off by one. Each guess is checked against the layout before
// it is reported; if none fits, a hole has no cause, and that of an overlap names its regions.
#include "collective/layout/layout_cause.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "collective/layout/layout.h"
#include "collective/layout/layout_table.h"

namespace tensormount {
namespace {

std::string CellText(const std::vector<std::int64_t>& cell) {
  std::string text = "(";
  for (std::size_t i = 0; i < cell.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(cell[i]);
  }
  return text + ")";
}

// Subject and verb that agree in number: "rank 3 holds", "ranks 3, 4 hold".
std::string SubjectAndVerb(const std::vector<int>& ranks, std::string_view verb) {
  return RankList(ranks) + " " + std::string(verb) + (ranks.size() == 1 ? "s" : "");
}

}  // namespace

LayoutCauses::LayoutCauses(int world, const RegionSet& regions,
                           const std::vector<std::vector<int>>& holders,
                           const CoverageReport& coverage)
    : world_(world), regions_(regions), holders_(holders), coverage_(coverage) {
  for (const std::vector<int>& some : holders) {
    ranks_.insert(ranks_.end(), some.begin(), some.end());
  }
  std::sort(ranks_.begin(), ranks_.end());
  ranks_.erase(std::unique(ranks_.begin(), ranks_.end()), ranks_.end());
  for (std::size_t i = 0; i < regions_.size() && all_boxes_; ++i) all_boxes_ = !regions_.is_flat(i);
  for (int a = 0; a < regions_.rank(); ++a) {
    std::map<std::int64_t, std::size_t> counts;
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      ++counts[regions_.high(i)[a] - regions_.low(i)[a]];
    }
    std::int64_t usual = 0;
    std::size_t most = 0;
    for (const auto& [extent, count] : counts) {
      if (count >= most) {
        most = count;
        usual = extent;
      }
    }
    usual_.push_back(usual);
  }
  if (ranks_.empty()) return;
  for (std::string (LayoutCauses::*find)() const :
       {&LayoutCauses::FindTransposed, &LayoutCauses::FindSwapped, &LayoutCauses::FindAbsent,
        &LayoutCauses::FindRepeatedOffset, &LayoutCauses::FindAllShort}) {
    general_ = (this->*find)();
    if (!general_.empty()) break;
  }
}

// Looks for a transposed grid: the ranks, in rising order, should hold its cells row by row, but
// some hold cell (j, i) where (i, j) was expected, and no rank holds the expected cells.
std::string LayoutCauses::FindTransposed() const {
  if (!all_boxes_ || coverage_.missing.empty() || !coverage_.overlaps.empty()) return {};
  std::vector<int> axes;
  std::vector<std::int64_t> counts;
  for (int a = 0; a < regions_.rank(); ++a) {
    const std::int64_t extent = usual_[static_cast<std::size_t>(a)];
    if (extent == regions_.shape()[a]) continue;
    if (extent == 0 || regions_.shape()[a] % extent != 0) return {};
    axes.push_back(a);
    counts.push_back(regions_.shape()[a] / extent);
  }
  if (axes.size() != 2) return {};
  const std::int64_t columns = counts[1];
  if (static_cast<std::int64_t>(ranks_.size()) != counts[0] * columns) return {};
  std::set<std::pair<std::int64_t, std::int64_t>> taken;
  std::vector<std::pair<int, std::pair<std::int64_t, std::int64_t>>> who;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    std::int64_t cell[2];
    for (std::size_t n = 0; n < 2; ++n) {
      const auto a = static_cast<std::size_t>(axes[n]);
      if (regions_.high(i)[a] - regions_.low(i)[a] != usual_[a]) return {};
      if (regions_.low(i)[a] % usual_[a] != 0) return {};
      cell[n] = regions_.low(i)[a] / usual_[a];
    }
    taken.insert({cell[0], cell[1]});
    for (const int rank : holders_[i]) who.push_back({rank, {cell[0], cell[1]}});
  }
  std::sort(who.begin(), who.end());
  std::string text;
  for (std::size_t n = 0; n < who.size(); ++n) {
    const auto at = static_cast<std::int64_t>(n);
    const std::pair wanted(at / columns, at % columns);
    const auto& [rank, cell] = who[n];
    if (cell == wanted) continue;
    if (cell != std::pair(wanted.second, wanted.first) || taken.contains(wanted)) return {};
    if (text.empty()) {
      text = "the grid is transposed: " + RankName(rank) + " holds the cell of " +
             CellText({cell.first, cell.second}) + " instead of " +
             CellText({wanted.first, wanted.second});
    }
  }
  return text;
}

// Looks for a box that overlaps other boxes, but would fill a hole if two of its axes were
// exchanged.
std::string LayoutCauses::FindSwapped() const {
  if (!all_boxes_ || coverage_.missing.empty()) return {};
  constexpr std::size_t kTried = 256;
  std::set<std::uint32_t> suspects;
  for (const Overlap& overlap : coverage_.overlaps) {
    if (suspects.size() >= kTried) break;
    suspects.insert(overlap.first);
    suspects.insert(overlap.second);
  }
  std::string text;
  for (const std::uint32_t i : suspects) {
    const Box box = regions_.At(i).box();
    for (int a = 0; a < box.rank(); ++a) {
      for (int b = a + 1; b < box.rank(); ++b) {
        Dims begin = box.begin();
        Dims extent = box.extent();
        std::swap(begin[a], begin[b]);
        std::swap(extent[a], extent[b]);
        const Result<Box> swapped = Box::Make(begin, extent);
        if (!swapped.ok() || swapped.value() == box) continue;
        if (!FillsHole(i, swapped.value())) continue;
        if (!text.empty()) return {};  // Two boxes fit, so the cause is ambiguous.
        text = "the grid is transposed: " + swapped.value().ToString() + " is missing, and " +
               SubjectAndVerb(holders_[i], "hold") + " " + box.ToString();
      }
    }
  }
  return text;
}

// Whether `box` would cover missing cells, and no cells of regions other than number `region`.
bool LayoutCauses::FillsHole(std::size_t region, const Box& box) const {
  const auto meets = [&](const Box& hole) { return !Intersect(hole, box).empty(); };
  if (std::none_of(coverage_.missing.begin(), coverage_.missing.end(), meets)) return false;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    bool apart = i == region;
    for (int a = 0; a < box.rank() && !apart; ++a) {
      apart = regions_.high(i)[a] <= box.begin(a) || regions_.low(i)[a] >= box.end(a);
    }
    if (!apart) return false;
  }
  return true;
}

// Looks for ranks without a shard in a series of ranks with shards at regular distances, if shards
// of these ranks could cover all missing cells.
std::string LayoutCauses::FindAbsent() const {
  if (coverage_.missing.empty() || !coverage_.overlaps.empty()) return {};
  int step = 0;
  for (std::size_t i = 1; i < ranks_.size(); ++i) {
    step = std::gcd(step, ranks_[i] - ranks_[i - 1]);
  }
  step = std::max(step, 1);
  std::vector<int> absent;
  for (std::size_t i = 1; i < ranks_.size(); ++i) {
    for (int r = ranks_[i - 1] + step; r < ranks_[i]; r += step) absent.push_back(r);
    if (absent.size() > ranks_.size()) return {};
  }
  if (absent.empty()) {
    const Box& hole = coverage_.missing[0];
    bool at_front = true;
    for (int a = 0; a < hole.rank(); ++a) at_front &= hole.begin(a) == 0;
    if (at_front && ranks_.front() - step >= 0) {
      absent.push_back(ranks_.front() - step);
    } else if (!at_front && ranks_.back() + step < world_) {
      absent.push_back(ranks_.back() + step);
    }
  }
  if (absent.empty()) return {};
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    largest = std::max(largest, regions_.volume(i));
  }
  if (coverage_.missing_elements / absent.size() > static_cast<std::uint64_t>(largest)) return {};
  // If fewer cells are missing than the smallest shard has, a shard is cut wrongly and no rank is
  // absent.
  std::int64_t smallest = largest;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    smallest = std::min(smallest, regions_.volume(i));
  }
  if (coverage_.missing_elements < static_cast<std::uint64_t>(smallest)) return {};
  return SubjectAndVerb(absent, "hold") + " nothing of this tensor: missing rank or missing state?";
}

// Looks for a repeated offset: counting replicas, the ranks report the right number of cells, but
// some cells too often and others never.
std::string LayoutCauses::FindRepeatedOffset() const {
  if (coverage_.missing.empty() || !coverage_.overlaps.empty()) return {};
  using Wide = unsigned __int128;
  Wide reported = 0;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    reported += static_cast<Wide>(regions_.volume(i)) * holders_[i].size();
  }
  const Wide total = static_cast<Wide>(CheckedProduct(regions_.shape()).value_or(0));
  if (total == 0 || reported < total || reported % total != 0) return {};
  const auto copies = static_cast<std::size_t>(reported / total);
  std::vector<int> first;
  std::vector<int> more;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const std::vector<int>& ranks = holders_[i];
    if (ranks.size() <= copies) continue;
    if (copies > 1) {
      return RankList(ranks) + " report the same box " + regions_.At(i).ToString() +
             ", but other boxes are on " + std::to_string(copies) +
             " ranks each: wrong tensor-parallel rank?";
    }
    first.push_back(ranks[0]);
    more.insert(more.end(), ranks.begin() + 1, ranks.end());
  }
  if (more.empty()) return {};
  std::sort(more.begin(), more.end());
  return SubjectAndVerb(more, "report") + " the box" + (first.size() == 1 ? "" : "es") + " of " +
         RankList(first) + ": wrong tensor-parallel rank?";
}

// Looks for an axis along which every box is followed by a hole of the same thickness.
std::string LayoutCauses::FindAllShort() const {
  if (!all_boxes_ || !coverage_.overlaps.empty() || regions_.size() < 2) return {};
  for (int a = 0; a < regions_.rank(); ++a) {
    const std::int64_t thickness = coverage_.missing.empty() ? 0 : coverage_.missing[0].extent(a);
    std::set<std::size_t> behind;
    bool all = !coverage_.missing.empty() && coverage_.missing.size() == regions_.size();
    for (const Box& hole : coverage_.missing) {
      all = all && hole.extent(a) == thickness;
      for (std::size_t i = 0; i < regions_.size() && all; ++i) {
        if (regions_.high(i)[a] == hole.begin(a) && SameAcross(i, hole, a)) behind.insert(i);
      }
      if (!all) break;
    }
    if (all && behind.size() == regions_.size()) {
      return "every box is " + Units(thickness, a) + " short at its end: off by one?";
    }
  }
  return {};
}

bool LayoutCauses::SameAcross(std::size_t region, const Box& box, int axis) const {
  for (int b = 0; b < regions_.rank(); ++b) {
    if (b != axis &&
        (regions_.low(region)[b] != box.begin(b) || regions_.high(region)[b] != box.end(b))) {
      return false;
    }
  }
  return true;
}

std::int64_t LayoutCauses::Usual(int axis) const { return usual_[static_cast<std::size_t>(axis)]; }

std::string LayoutCauses::Units(std::int64_t count, int axis) const {
  const int rank = regions_.rank();
  const std::string unit = rank == 1          ? "element"
                           : axis == 0        ? "row"
                           : axis == rank - 1 ? "column"
                                              : "index of axis " + std::to_string(axis);
  if (count == 1) return "one " + unit;
  return std::to_string(count) + " " +
         (unit[0] == 'i' ? "indices of axis " + std::to_string(axis) : unit + "s");
}

// Looks for the cause of a hole in the boxes directly before and after the hole.
std::string LayoutCauses::Neighbour(const Box& box) const {
  for (int a = 0; a < box.rank(); ++a) {
    const std::int64_t thickness = box.extent(a);
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      if (regions_.is_flat(i) || !SameAcross(i, box, a)) continue;
      const std::int64_t extent = regions_.high(i)[a] - regions_.low(i)[a];
      const bool behind = regions_.low(i)[a] == box.end(a);
      const bool before = regions_.high(i)[a] == box.begin(a);
      if (!behind && !before) continue;
      if (extent == Usual(a)) {
        // The region has the usual size, and overlaps the next box by the thickness of the hole: it
        // is shifted.
        for (const Overlap& overlap : coverage_.overlaps) {
          if (overlap.first != i && overlap.second != i) continue;
          if (!SameAcross(i, overlap.box, a) || overlap.box.extent(a) != thickness) continue;
          if (behind && overlap.box.end(a) == regions_.high(i)[a]) {
            return "the shard of " + RankList(holders_[i]) + " begins " + Units(thickness, a) +
                   " late";
          }
          if (before && overlap.box.begin(a) == regions_.low(i)[a]) {
            return "the shard of " + RankList(holders_[i]) + " begins " + Units(thickness, a) +
                   " early";
          }
        }
      } else if (extent + thickness == Usual(a)) {
        return "the box of " + RankList(holders_[i]) + " is " + Units(thickness, a) +
               " short at its " + (behind ? "beginning" : "end") +
               (thickness == 1 ? ": off by one?" : "");
      }
    }
  }
  return {};
}

std::string LayoutCauses::CauseOfMissing(const Box& box) const {
  return general_.empty() ? Neighbour(box) : general_;
}

std::string LayoutCauses::CauseOfOverlap(const Box& box,
                                         const std::vector<std::uint32_t>& regions) const {
  if (!general_.empty()) return general_;
  for (const std::uint32_t i : regions) {
    if (regions_.is_flat(i)) continue;
    for (int a = 0; a < box.rank(); ++a) {
      const std::int64_t extent = regions_.high(i)[a] - regions_.low(i)[a];
      const std::int64_t thickness = box.extent(a);
      const bool at_end = box.end(a) == regions_.high(i)[a];
      const bool at_begin = box.begin(a) == regions_.low(i)[a];
      if (!SameAcross(i, box, a) || at_end == at_begin) continue;
      if (extent - thickness == Usual(a)) {
        return "the box of " + RankList(holders_[i]) + " is " + Units(thickness, a) +
               " too long at its " + (at_end ? "end" : "beginning") +
               (thickness == 1 ? ": off by one?" : "");
      }
      if (extent != Usual(a)) continue;
      for (const Box& hole : coverage_.missing) {
        if (hole.extent(a) != thickness || !SameAcross(i, hole, a)) continue;
        if (at_end && hole.end(a) == regions_.low(i)[a]) {
          return "the shard of " + RankList(holders_[i]) + " begins " + Units(thickness, a) +
                 " late";
        }
        if (at_begin && hole.begin(a) == regions_.high(i)[a]) {
          return "the shard of " + RankList(holders_[i]) + " begins " + Units(thickness, a) +
                 " early";
        }
      }
    }
  }
  return DescribeOverlap(regions);
}

std::string LayoutCauses::DescribeOverlap(const std::vector<std::uint32_t>& regions) const {
  constexpr std::size_t kNamed = 4;
  if (regions.size() < 2) return {};
  std::string out;
  bool boxes = true;
  bool within = false;  // One region contains another.
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (i < kNamed) {
      out += (i == 0 ? "" : ", ") + RankList(holders_[regions[i]]) + ": " +
             regions_.At(regions[i]).ToString();
    }
    boxes = boxes && !regions_.is_flat(regions[i]);
  }
  if (regions.size() > kNamed) out += " and " + std::to_string(regions.size() - kNamed) + " more";
  for (std::size_t i = 0; boxes && i < regions.size(); ++i) {
    for (std::size_t k = 0; k < regions.size(); ++k) {
      within = within ||
               (i != k && regions_.At(regions[i]).box().Contains(regions_.At(regions[k]).box()));
    }
  }
  return out + (within ? ": one box contains another: not sharded on some ranks?"
                       : ": cut in different places?");
}

std::string CauseOfShapes(const Dims& a, const Dims& b) {
  if (a.rank() != b.rank()) return {};
  int differ = 0;
  int axis = 0;
  bool reversed = a.rank() > 1;
  for (int i = 0; i < a.rank(); ++i) {
    if (a[i] != b[i]) {
      ++differ;
      axis = i;
    }
    reversed = reversed && a[i] == b[a.rank() - 1 - i];
  }
  if (reversed) return "the shapes are each other's transposes";
  if (differ != 1) return {};
  const std::int64_t low = std::min(a[axis], b[axis]);
  const std::int64_t high = std::max(a[axis], b[axis]);
  const std::string head = "shape differs only in axis " + std::to_string(axis);
  if (low > 0 && high % low == 0) {
    return head + ", by a factor of " + std::to_string(high / low) +
           ": the shape of a shard instead of the whole?";
  }
  return head + (axis == 0 ? ": different vocabulary padding?" : "");
}

}  // namespace tensormount
