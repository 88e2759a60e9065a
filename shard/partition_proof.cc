// SPDX-License-Identifier: Apache-2.0
// Proofs that regions cover a shape exactly, each O(n) for the layouts that training makes.
//
// ByOrder    one pass: volumes add up, and each region begins where the one before ends.
// AsGrid     boxes are the cells of a grid, in any order: the cuts on each axis are found by
//            hashing, must tile the axis, and the cells must be distinct and as many as the
//            product.
// ByCorners  the sum of the indicator functions of all boxes equals the one of the shape. Taking
//            differences along each axis leaves 2^axes signed corners of a box; those of a
//            partition cancel except for the corners of the shape. If few are left over, the holes
//            and overlaps are computed from them.
// ByEnds     like ByCorners, for ranges of the row-major order, which have two corners each.
//
// No step compares two boxes, so no arrangement of them is quadratic.
#include "shard/partition_proof.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <vector>

#include "base/checked.h"
#include "shard/box_access.h"
#include "shard/linear_order.h"

namespace tensormount {
namespace {

__extension__ using Wide = unsigned __int128;

// Mixes bits, because keys (indexes, or sums of multiples of strides) have a regular pattern.
std::uint64_t Mix(std::uint64_t key) {
  key = (key ^ (key >> 32)) * 0x9E3779B97F4A7C15u;
  return (key ^ (key >> 29)) * 0xD6E8FEB86659FD93u;
}

// The cuts on one axis: the intervals [low, high) of the boxes there. In a grid all boxes with one
// begin have the same end, so cuts are found by their begin; a second end for a known begin proves
// that the boxes are not a grid.
class Cuts {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // The number of the cut [low, high), in order of first appearance; kNone if another cut begins at
  // `low`, so that the boxes are not a grid.
  std::uint32_t Find(std::int64_t low, std::int64_t high) {
    if (!low_.empty()) {
      // Sorted boxes repeat the previous cut, go to the next one, or start again at the first. So
      // these are tried before a look-up in the table.
      if (low_[last_] != low) {
        const auto next = static_cast<std::uint32_t>(last_ + 1 < low_.size() ? last_ + 1 : 0);
        last_ = low_[next] == low ? next : Lookup(low);
      }
      if (last_ != kNone) {
        if (high_[last_] == high) return last_;
        return kNone;
      }
    }
    last_ = Append(low, high);
    return last_;
  }

  std::size_t size() const { return low_.size(); }

  // Whether the cuts exactly tile [0, end). Without sorting: each cut is looked up by the end of
  // the previous one.
  bool Tile(std::int64_t end) {
    std::int64_t at = 0;
    std::uint32_t guess = 0;
    for (std::size_t n = 0; n < low_.size(); ++n, ++guess) {
      if (guess >= low_.size() || low_[guess] != at) guess = Lookup(at);
      if (guess == kNone) return false;
      at = high_[guess];  // `at` increases, so no cut is visited twice.
    }
    return at == end;
  }

 private:
  std::size_t Place(std::int64_t low) const {
    return static_cast<std::size_t>(Mix(static_cast<std::uint64_t>(low)) >>
                                    (64 - std::countr_zero(table_.size())));
  }

  std::uint32_t Lookup(std::int64_t low) {
    if (rising_ && low > low_.back()) return kNone;
    if (2 * low_.size() > table_.size()) {
      table_.assign(std::bit_ceil(8 * low_.size()), kNone);
      entered_ = 0;
    }
    for (; entered_ < low_.size(); ++entered_) {
      std::size_t at = Place(low_[entered_]);
      while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
      table_[at] = entered_;
    }
    for (std::size_t at = Place(low);; at = (at + 1) & (table_.size() - 1)) {
      if (table_[at] == kNone || low_[table_[at]] == low) return table_[at];
    }
  }

  std::uint32_t Append(std::int64_t low, std::int64_t high) {
    rising_ = rising_ && (low_.empty() || low > low_.back());
    low_.push_back(low);
    high_.push_back(high);
    return static_cast<std::uint32_t>(low_.size() - 1);
  }

  std::vector<std::int64_t> low_;
  std::vector<std::int64_t> high_;
  // Whether each cut begins after the one before it. Then a cut that begins after the last one is
  // known to be new without a look-up.
  bool rising_ = true;
  std::vector<std::uint32_t> table_;  // Open addressing by low, for the entered cuts.
  std::uint32_t entered_ = 0;
  std::uint32_t last_ = 0;
};

// A count for each corner, which `place` numbers, in an open-addressing table that is at most half
// full. Most counts return to zero when the neighbouring box is added, so the table stays small if
// neighbours come soon after each other. Zero counts are removed when space is needed.
class CornerTable {
 public:
  CornerTable() : slots_(1024) {}

  // Adds `sign` to the count of `place`, which must be less than 2^64 - 1. Additions are delayed,
  // so that their slots can be prefetched.
  void Add(std::uint64_t place, std::int32_t sign) {
    const std::uint64_t hash = Mix(place);
    pending_[held_] = {place, hash, sign};
    __builtin_prefetch(&slots_[Home(hash)]);
    if (++held_ == pending_.size()) Flush();
  }

  // Reserves space for `places` nonzero counts, to avoid growing step by step.
  void Reserve(std::size_t places) {
    Flush();
    if (std::bit_ceil(2 * places) > slots_.size()) Rebuild(std::bit_ceil(2 * places));
  }

  std::size_t NonZero() {
    Flush();
    return nonzero_;
  }
  bool AllZero() { return NonZero() == 0; }

  // Calls f(place, count) for every nonzero count, in no particular order.
  template <typename F>
  void ForEachNonZero(F f) const {
    for (const Slot& slot : slots_) {
      if (slot.count != 0) f(slot.place, slot.count);
    }
  }

 private:
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};
  struct Slot {
    std::uint64_t place = kFree;
    std::int32_t count = 0;
  };
  struct Addition {
    std::uint64_t place;
    std::uint64_t hash;
    std::int32_t sign;
  };

  std::size_t Home(std::uint64_t hash) const {
    return static_cast<std::size_t>(hash >> (64 - std::countr_zero(slots_.size())));
  }

  // The slot of the place, or a free slot for it.
  Slot& Find(std::uint64_t place, std::uint64_t hash) {
    std::size_t at = Home(hash);
    while (slots_[at].place != place && slots_[at].place != kFree) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return slots_[at];
  }

  // Executes the delayed additions. Branch-free, because whether a place is new is unpredictable.
  void Flush() {
    if (2 * (used_ + held_) > slots_.size()) {
      Rebuild(4 * nonzero_ > slots_.size() ? 2 * slots_.size() : slots_.size());
    }
    for (std::size_t i = 0; i < held_; ++i) {
      const Addition& add = pending_[i];
      Slot& slot = Find(add.place, add.hash);
      const std::int32_t count = slot.count + add.sign;
      used_ += slot.place == kFree ? 1 : 0;
      nonzero_ += static_cast<std::size_t>(count != 0) - static_cast<std::size_t>(slot.count != 0);
      slot = {add.place, count};
    }
    held_ = 0;
  }

  void Rebuild(std::size_t size) {
    std::vector<Slot> old(size);
    old.swap(slots_);
    used_ = nonzero_;
    for (const Slot& slot : old) {
      if (slot.count != 0) Find(slot.place, Mix(slot.place)) = slot;
    }
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;  // Slots with a place, also those whose count is zero.
  std::size_t nonzero_ = 0;
  std::array<Addition, 64> pending_;
  std::size_t held_ = 0;
};

constexpr std::size_t kMaxCornerAxes = 6;
// Limits for converting leftover corners to boxes: their number, and the number of cells of the
// grid through them.
constexpr std::size_t kMaxRest = std::size_t{1} << 14;
constexpr std::size_t kMaxRestCells = std::size_t{1} << 18;

// Adds up the corners of boxes. Example on one axis, shape [6], regions [0, 2) and [3, 6): corners
// are +1 at 0, -1 at 2, +1 at 3, -1 at 6; subtracting those of the shape (+1 at 0, -1 at 6) leaves
// -1 at 2 and +1 at 3. Prefix sums (Rest) give -1 from 2 to 3 and 0 elsewhere: cell 2 is in no
// region. Boxes in a nested order (a grid by rows, a tensor cut repeatedly) are first joined to
// larger ones, which have the same sum and fewer corners.
class Corners {
 public:
  // Finds the axes on which some region does not span the shape (all axes if some region is a flat
  // range); other axes do not matter. nullopt if there are more than kMaxCornerAxes, or too many
  // corners to number them.
  static std::optional<Corners> Of(const RegionSet& regions) {
    Corners corners;
    corners.regions_ = regions.size();
    for (int a = 0; a < regions.rank(); ++a) {
      const std::int64_t extent = regions.shape()[a];
      bool cut = false;
      for (std::size_t i = 0; i < regions.size() && !cut; ++i) {
        cut = regions.high(i)[a] - regions.low(i)[a] != extent || regions.is_flat(i);
      }
      if (!cut) continue;
      if (corners.axes_ == kMaxCornerAxes) return std::nullopt;
      corners.axis_[corners.axes_++] = static_cast<std::size_t>(a);
    }
    // Corners lie between cells, so an axis has one more corner than cells. Each corner gets a
    // different number.
    std::uint64_t places = 1;
    for (std::size_t k = corners.axes_; k-- > 0;) {
      corners.stride_[k] = places;
      const auto extent = regions.shape()[static_cast<int>(corners.axis_[k])];
      const auto product = CheckedMul(places, static_cast<std::uint64_t>(extent) + 1);
      if (!product) return std::nullopt;
      places = *product;
    }
    return corners;
  }

  void Add(const std::int64_t* low, const std::int64_t* high) {
    if (!joining_) {
      Part part;
      Project(low, high, part);
      AddCorners(part, 1);
      return;
    }
    if (depth_ == stack_.size()) FlushHalf();
    Project(low, high, stack_[depth_++]);
    while (depth_ > 1 && Join(stack_[depth_ - 2], stack_[depth_ - 1])) {
      --depth_;
      ++joined_;
    }
    // Joining pays off only if boxes come in a nested order.
    if (++added_ % 1024 == 0) {
      joining_ = joined_ > added_ / 8;
      // A sparse table is faster while it fits into a cache.
      if (!joining_) table_.Reserve((regions_ >> 16) == 0 ? 4 * regions_ : 2 * regions_);
    }
  }

  void Add(const Box& box) {
    Dims high;
    for (int a = 0; a < box.rank(); ++a) high.push_back(box.end(a));
    Add(box.begin().begin(), high.begin());
  }

  // Whether the sum of the added boxes equals the box of the whole shape.
  bool SumIsWhole(const Dims& shape) {
    FlushAll();
    Part whole;
    const Dims zero = Dims::Filled(shape.rank(), 0);
    Project(zero.begin(), shape.begin(), whole);
    AddCorners(whole, -1);
    return table_.AllZero();
  }

  // After SumIsWhole: computes the differing cells from the leftover corners, on the grid through
  // these corners. Empty if there are too many.
  std::vector<Miscount> Rest(const Dims& shape);

 private:
  // A box, on the axes of `axis_` only.
  struct Part {
    std::array<std::int64_t, kMaxCornerAxes> low;
    std::array<std::int64_t, kMaxCornerAxes> high;
  };

  Corners() = default;

  void Project(const std::int64_t* low, const std::int64_t* high, Part& part) const {
    for (std::size_t k = 0; k < axes_; ++k) {
      part.low[k] = low[axis_[k]];
      part.high[k] = high[axis_[k]];
    }
  }

  // Replaces `a` by the union of both if that is a box, and returns whether it is.
  bool Join(Part& a, const Part& b) const {
    std::size_t differs = axes_;
    for (std::size_t k = 0; k < axes_; ++k) {
      if (a.low[k] == b.low[k] && a.high[k] == b.high[k]) continue;
      if (differs != axes_) return false;
      differs = k;
    }
    if (differs == axes_) return false;
    if (a.high[differs] == b.low[differs]) {
      a.high[differs] = b.high[differs];
      return true;
    }
    if (b.high[differs] == a.low[differs]) {
      a.low[differs] = b.low[differs];
      return true;
    }
    return false;
  }

  void AddCorners(const Part& part, std::int32_t sign) {
    std::array<std::uint64_t, std::size_t{1} << kMaxCornerAxes> place;
    place[0] = 0;
    std::size_t count = 1;
    for (std::size_t k = 0; k < axes_; ++k) {
      const std::uint64_t begin = static_cast<std::uint64_t>(part.low[k]) * stride_[k];
      const std::uint64_t end = static_cast<std::uint64_t>(part.high[k]) * stride_[k];
      for (std::size_t c = 0; c < count; ++c) {
        place[count + c] = place[c] + end;
        place[c] += begin;
      }
      count *= 2;
    }
    for (std::size_t c = 0; c < count; ++c) {
      table_.Add(place[c], std::popcount(c) % 2 == 0 ? sign : -sign);
    }
  }

  // Adds the older half of the stack to the table; following boxes can only join with the newer
  // half.
  void FlushHalf() {
    const std::size_t half = depth_ / 2;
    for (std::size_t i = 0; i < half; ++i) AddCorners(stack_[i], 1);
    std::copy(stack_.begin() + static_cast<std::ptrdiff_t>(half),
              stack_.begin() + static_cast<std::ptrdiff_t>(depth_), stack_.begin());
    depth_ -= half;
  }

  void FlushAll() {
    for (std::size_t i = 0; i < depth_; ++i) AddCorners(stack_[i], 1);
    depth_ = 0;
  }

  std::size_t regions_ = 0;
  std::size_t axes_ = 0;
  std::array<std::size_t, kMaxCornerAxes> axis_{};
  std::array<std::uint64_t, kMaxCornerAxes> stride_{};
  std::array<Part, 64> stack_;
  std::size_t depth_ = 0;
  std::size_t added_ = 0;
  std::size_t joined_ = 0;
  bool joining_ = true;
  CornerTable table_;
};

std::vector<Miscount> Corners::Rest(const Dims& shape) {
  if (table_.NonZero() > kMaxRest) return {};
  std::array<std::vector<std::int64_t>, kMaxCornerAxes> cuts;
  const auto at = [&](std::uint64_t place, std::size_t k) {
    const std::uint64_t above = k == 0 ? place : place % stride_[k - 1];
    return static_cast<std::int64_t>(above / stride_[k]);
  };
  table_.ForEachNonZero([&](std::uint64_t place, std::int32_t) {
    for (std::size_t k = 0; k < axes_; ++k) cuts[k].push_back(at(place, k));
  });
  std::size_t cells = 1;
  for (std::size_t k = 0; k < axes_; ++k) {
    std::sort(cuts[k].begin(), cuts[k].end());
    cuts[k].erase(std::unique(cuts[k].begin(), cuts[k].end()), cuts[k].end());
    if (cuts[k].size() > kMaxRestCells / cells) return {};
    cells *= cuts[k].size();
  }
  // Adds each corner's count to its cell of the grid through the corners.
  std::vector<std::int64_t> sum(cells);
  table_.ForEachNonZero([&](std::uint64_t place, std::int32_t count) {
    std::size_t cell = 0;
    for (std::size_t k = 0; k < axes_; ++k) {
      const auto cut = std::lower_bound(cuts[k].begin(), cuts[k].end(), at(place, k));
      cell = cell * cuts[k].size() + static_cast<std::size_t>(cut - cuts[k].begin());
    }
    sum[cell] += count;
  });
  // On each axis in turn each cell adds the sum of the cell before it; after all axes a cell has
  // the sum over everything before it on every axis. O(cells * axes).
  std::size_t step = cells;
  for (std::size_t k = 0; k < axes_; ++k) {
    const std::size_t block = step;
    step /= cuts[k].size();
    for (std::size_t i = 0; i < cells; ++i) {
      if (i % block >= step) sum[i] += sum[i - step];
    }
  }
  std::vector<Miscount> rest;
  for (std::size_t i = 0; i < cells; ++i) {
    if (sum[i] == 0) continue;
    Box box = Box::Whole(shape);
    std::size_t cell = i;
    for (std::size_t k = axes_; k-- > 0;) {
      const std::size_t cut = cell % cuts[k].size();
      cell /= cuts[k].size();
      // The sum is zero after the last cut of an axis, so another cut follows this one.
      box = BoxAccess::WithAxis(box, static_cast<int>(axis_[k]), cuts[k][cut],
                                cuts[k][cut + 1] - cuts[k][cut]);
    }
    rest.push_back({box, sum[i]});
  }
  return rest;
}

}  // namespace

Proof ProveByOrder(const RegionSet& regions, bool* linear) {
  const LinearOrder order(regions.shape());
  // 128 bits: up to 2^31 volumes, each below 2^63.
  Wide volumes = 0;
  std::int64_t next = 0;
  bool chained = true;
  *linear = true;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    LinearRange range;
    std::int64_t volume = 0;
    *linear &= order.RangeOf(regions, i, &range, &volume);
    chained &= range.begin == next;
    next = range.end;
    volumes += static_cast<std::uint64_t>(volume);
  }
  if (volumes != static_cast<std::uint64_t>(order.elements())) return Proof::kNotPartition;
  return *linear && chained && next == order.elements() ? Proof::kPartition : Proof::kUnknown;
}

Proof ProveAsGrid(const RegionSet& regions) {
  if (regions.has_flats()) return Proof::kUnknown;
  const auto rank = static_cast<std::size_t>(regions.rank());
  std::array<Cuts, kMaxAxes> cuts;
  std::vector<std::uint32_t> cells(regions.size() * rank);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    for (std::size_t a = 0; a < rank; ++a) {
      const std::uint32_t cut = cuts[a].Find(regions.low(i)[a], regions.high(i)[a]);
      if (cut == Cuts::kNone) return Proof::kUnknown;
      cells[i * rank + a] = cut;
    }
  }
  // The product is at most the number of regions, so it cannot overflow.
  std::size_t product = 1;
  for (std::size_t a = 0; a < rank; ++a) {
    if (cuts[a].size() > regions.size() / product) return Proof::kUnknown;
    product *= cuts[a].size();
    if (!cuts[a].Tile(regions.shape()[static_cast<int>(a)])) return Proof::kUnknown;
  }
  if (product != regions.size()) return Proof::kUnknown;
  // There are as many boxes as cells, so each cell has one box unless some cell has two.
  std::vector<bool> seen(product);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    std::size_t cell = 0;
    for (std::size_t a = 0; a < rank; ++a) cell = cell * cuts[a].size() + cells[i * rank + a];
    if (seen[cell]) return Proof::kNotPartition;
    seen[cell] = true;
  }
  return Proof::kPartition;
}

Proof ProveByCorners(const RegionSet& regions, std::vector<Miscount>* differences) {
  std::optional<Corners> corners = Corners::Of(regions);
  if (!corners) return Proof::kUnknown;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (!regions.is_flat(i)) {
      corners->Add(regions.low(i), regions.high(i));
      continue;
    }
    for (const Box& box : regions.At(i).Boxes()) corners->Add(box);
  }
  if (corners->SumIsWhole(regions.shape())) return Proof::kPartition;
  if (differences != nullptr) *differences = corners->Rest(regions.shape());
  return Proof::kNotPartition;
}

Proof ProveByEnds(const RegionSet& regions) {
  const LinearOrder order(regions.shape());
  CornerTable table;
  table.Reserve(regions.size() / 2);
  table.Add(0, -1);
  table.Add(static_cast<std::uint64_t>(order.elements()), 1);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    LinearRange range;
    std::int64_t volume = 0;
    if (!order.RangeOf(regions, i, &range, &volume)) return Proof::kUnknown;
    table.Add(static_cast<std::uint64_t>(range.begin), 1);
    table.Add(static_cast<std::uint64_t>(range.end), -1);
  }
  return table.AllZero() ? Proof::kPartition : Proof::kNotPartition;
}

}  // namespace tensormount
