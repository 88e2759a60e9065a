// SPDX-License-Identifier: Apache-2.0
#include "shard/partition_proof.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <vector>

#include "base/checked.h"
#include "shard/linear_order.h"

namespace tensormount {
namespace {

__extension__ using Wide = unsigned __int128;

// Linear hashing of places keeps their pattern (places are sums of multiples of strides), so mix.
std::uint64_t Mix(std::uint64_t key) {
  key = (key ^ (key >> 32)) * 0x9E3779B97F4A7C15u;
  return (key ^ (key >> 29)) * 0xD6E8FEB86659FD93u;
}

// Where boxes begin and end on one axis.
class Cuts {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // The number of [low, high), in order of first appearance; kNone where another cut begins at
  // `low` as well, which no grid has.
  std::uint32_t Find(std::int64_t low, std::int64_t high) {
    if (!low_.empty()) {
      // In order boxes repeat the cut before, go to the next one, or start again.
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

  // Whether the cuts follow each other from 0 to `end`, none left over. Without sorting: each is
  // looked up by the end of the one before.
  bool Tile(std::int64_t end) const {
    std::int64_t at = 0;
    std::uint32_t guess = 0;
    for (std::size_t n = 0; n < low_.size(); ++n, ++guess) {
      if (guess >= low_.size() || low_[guess] != at) guess = Lookup(at);
      if (guess == kNone) return false;
      at = high_[guess];  // Rises, so no cut is met twice.
    }
    return at == end;
  }

 private:
  std::size_t Place(std::int64_t low) const {
    return static_cast<std::size_t>(Mix(static_cast<std::uint64_t>(low)) >>
                                    (64 - std::countr_zero(table_.size())));
  }

  std::uint32_t Lookup(std::int64_t low) const {
    for (std::size_t at = Place(low);; at = (at + 1) & (table_.size() - 1)) {
      if (table_[at] == kNone || low_[table_[at]] == low) return table_[at];
    }
  }

  void Enter(std::uint32_t cut) {
    std::size_t at = Place(low_[cut]);
    while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
    table_[at] = cut;
  }

  std::uint32_t Append(std::int64_t low, std::int64_t high) {
    const auto cut = static_cast<std::uint32_t>(low_.size());
    low_.push_back(low);
    high_.push_back(high);
    if (2 * low_.size() > table_.size()) {
      table_.assign(std::max<std::size_t>(16, 4 * table_.size()), kNone);
      for (std::uint32_t i = 0; i < cut; ++i) Enter(i);
    }
    Enter(cut);
    return cut;
  }

  std::vector<std::int64_t> low_;
  std::vector<std::int64_t> high_;
  std::vector<std::uint32_t> table_;  // Open addressing by low.
  std::uint32_t last_ = 0;
};

// Counts at places; places whose count has come back to zero take no memory.
class CornerTable {
 public:
  CornerTable() : slots_(1024) {}

  // Additions are held back a while, so that their slots are on the way when they are needed.
  void Add(std::uint64_t place, std::int32_t sign) {
    pending_[held_] = {place, sign};
    __builtin_prefetch(&slots_[Home(place)]);
    if (++held_ == pending_.size()) Flush();
  }

  bool AllZero() {
    Flush();
    return used_ == 0;
  }

 private:
  struct Slot {
    std::uint64_t place = 0;
    std::int32_t count = 0;  // 0: free.
  };

  std::size_t Home(std::uint64_t place) const {
    return static_cast<std::size_t>(Mix(place) >> (64 - std::countr_zero(slots_.size())));
  }
  std::size_t After(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }

  void Flush() {
    for (std::size_t i = 0; i < held_; ++i) AddNow(pending_[i]);
    held_ = 0;
  }

  void AddNow(const Slot& add) {
    std::size_t at = Home(add.place);
    while (slots_[at].count != 0 && slots_[at].place != add.place) at = After(at);
    if (slots_[at].count == 0) {
      slots_[at] = add;
      if (2 * ++used_ > slots_.size()) Grow();
    } else {
      slots_[at].count += add.count;
      if (slots_[at].count == 0) Free(at);
    }
  }

  // What stands behind a freed slot moves up where its own home allows it, so that no search ends
  // early.
  void Free(std::size_t hole) {
    --used_;
    for (std::size_t at = After(hole); slots_[at].count != 0; at = After(at)) {
      const std::size_t mask = slots_.size() - 1;
      const std::size_t moved = (at - Home(slots_[at].place)) & mask;
      if (moved >= ((at - hole) & mask)) {
        slots_[hole] = slots_[at];
        slots_[at].count = 0;
        hole = at;
      }
    }
  }

  void Grow() {
    std::vector<Slot> old(4 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.count == 0) continue;
      std::size_t at = Home(slot.place);
      while (slots_[at].count != 0) at = After(at);
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;
  std::array<Slot, 64> pending_;
  std::size_t held_ = 0;
};

constexpr std::size_t kMaxCornerAxes = 6;

// Boxes as numbers of corner places.
class Corners {
 public:
  // The axes on which some region does not span the shape. On the others all agree, so they do not
  // matter.
  static std::optional<Corners> Of(const RegionSet& regions) {
    Corners corners;
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
    // Corners lie between cells: one more than these on each axis. Their numbers must be distinct.
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

  void Add(const std::int64_t* low, const std::int64_t* high, std::int32_t sign) {
    std::array<std::uint64_t, std::size_t{1} << kMaxCornerAxes> place;
    place[0] = 0;
    std::size_t count = 1;
    for (std::size_t k = 0; k < axes_; ++k) {
      const std::uint64_t begin = static_cast<std::uint64_t>(low[axis_[k]]) * stride_[k];
      const std::uint64_t end = static_cast<std::uint64_t>(high[axis_[k]]) * stride_[k];
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

  void Add(const Box& box, std::int32_t sign) {
    Dims high;
    for (int a = 0; a < box.rank(); ++a) high.push_back(box.end(a));
    Add(box.begin().begin(), high.begin(), sign);
  }

  bool AllZero() { return table_.AllZero(); }

 private:
  Corners() = default;

  std::size_t axes_ = 0;
  std::array<std::size_t, kMaxCornerAxes> axis_{};
  std::array<std::uint64_t, kMaxCornerAxes> stride_{};
  CornerTable table_;
};

}  // namespace

Proof ProveByOrder(const RegionSet& regions, bool* linear) {
  const LinearOrder order(regions.shape());
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
  std::size_t product = 1;
  for (std::size_t a = 0; a < rank; ++a) {
    if (cuts[a].size() > regions.size() / product) return Proof::kUnknown;
    product *= cuts[a].size();
    if (!cuts[a].Tile(regions.shape()[static_cast<int>(a)])) return Proof::kUnknown;
  }
  if (product != regions.size()) return Proof::kUnknown;
  // As many boxes as cells, so each has its box unless one has two.
  std::vector<bool> seen(product);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    std::size_t cell = 0;
    for (std::size_t a = 0; a < rank; ++a) cell = cell * cuts[a].size() + cells[i * rank + a];
    if (seen[cell]) return Proof::kNotPartition;
    seen[cell] = true;
  }
  return Proof::kPartition;
}

Proof ProveByCorners(const RegionSet& regions) {
  std::optional<Corners> corners = Corners::Of(regions);
  if (!corners) return Proof::kUnknown;
  corners->Add(Box::Whole(regions.shape()), -1);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (!regions.is_flat(i)) {
      corners->Add(regions.low(i), regions.high(i), 1);
      continue;
    }
    for (const Box& box : regions.At(i).Boxes()) corners->Add(box, 1);
  }
  return corners->AllZero() ? Proof::kPartition : Proof::kNotPartition;
}

Proof ProveByEnds(const RegionSet& regions) {
  const LinearOrder order(regions.shape());
  CornerTable table;
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
