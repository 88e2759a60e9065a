// SPDX-License-Identifier: Apache-2.0
// Many regions of one shape as columns of numbers instead of an object each, because a job of 4,096
// ranks brings millions of them to the ranks that check them.
#include "shard/region_set.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/checked.h"
#include "shard/box_access.h"

namespace tensormount {
namespace {

// Whether region `i` of `a` equals region `j` of `b`; both sets have the same shape.
bool Equal(const RegionSet& a, std::size_t i, const RegionSet& b, std::size_t j) {
  const auto words = static_cast<std::size_t>(a.rank()) * 2;
  if (!std::equal(a.low(i), a.low(i) + words, b.low(j))) return false;
  if (a.is_flat(i) != b.is_flat(j)) return false;
  return !a.is_flat(i) ||
         (a.flat_first(i) == b.flat_first(j) && a.flat_count(i) == b.flat_count(j));
}

// The hash is neither stored nor sent, so the function may change. The multiplications spread
// regions that differ in one bound by a power of two, as in grids, over the high bits, which the
// table uses.
std::uint64_t HashOf(const RegionSet& set, std::size_t i) {
  std::uint64_t h = 0;
  const auto add = [&h](std::int64_t word) {
    h = (h ^ static_cast<std::uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  };
  const std::int64_t* words = set.low(i);
  for (int a = 0; a < 2 * set.rank(); ++a) add(words[a]);
  if (set.is_flat(i)) {
    add(set.flat_first(i));
    add(set.flat_count(i));
  }
  return h * 0xD6E8FEB86659FD93u;
}

}  // namespace

void RegionSet::Reset(const Dims& shape) {
  shape_ = shape;
  stride_ = 2 * static_cast<std::size_t>(shape.rank());
  bounds_.clear();
  owners_.clear();
  flats_.clear();
}

void RegionSet::Reserve(std::size_t regions) {
  bounds_.reserve(regions * stride_);
  owners_.reserve(regions);
}

bool RegionSet::Within(const std::int64_t* begin, const std::int64_t* extent, bool* empty) const {
  bool within = true;
  bool none = false;
  for (int a = 0; a < shape_.rank(); ++a) {
    // No overflow: an extent is subtracted only if the difference is not negative.
    within &= begin[a] >= 0 && extent[a] >= 0 && extent[a] <= shape_[a] &&
              begin[a] <= shape_[a] - extent[a];
    none |= extent[a] == 0;
  }
  *empty = none;
  return within;
}

bool RegionSet::AddBox(const std::int64_t* begin, const std::int64_t* extent, std::uint32_t owner) {
  bool empty = false;
  if (!Within(begin, extent, &empty)) return false;
  if (empty) return true;
  const std::size_t at = bounds_.size();
  bounds_.resize(at + stride_);
  std::int64_t* low = bounds_.data() + at;
  std::int64_t* high = low + shape_.rank();
  for (int a = 0; a < shape_.rank(); ++a) {
    low[a] = begin[a];
    high[a] = begin[a] + extent[a];
  }
  owners_.push_back(owner);
  if (!flats_.empty()) flats_.emplace_back();
  return true;
}

// The same algorithm as Region::Flat (region.cc), where the canonical form is explained. It works
// on plain numbers, because a job brings millions of regions in messages, and each Region would
// cost two Dims and a Result.
bool RegionSet::AddFlat(const std::int64_t* begin, const std::int64_t* extent, std::int64_t first,
                        std::int64_t count, std::uint32_t owner) {
  bool empty = false;
  if (!Within(begin, extent, &empty) || first < 0 || count < 0) return false;
  const int rank = shape_.rank();
  std::int64_t volume = 1;  // Cannot overflow for a non-empty box within a checked shape.
  for (int a = 0; a < rank && !empty; ++a) volume *= extent[a];
  if (empty) volume = 0;
  const auto end = CheckedAdd(first, count);
  if (!end || *end > volume) return false;
  if (count == 0) return true;
  std::array<std::int64_t, kMaxAxes> low;
  std::array<std::int64_t, kMaxAxes> size;
  std::copy(begin, begin + rank, low.begin());
  std::copy(extent, extent + rank, size.begin());
  bool flat = false;
  std::int64_t row = volume;
  for (int a = 0; a < rank; ++a) {
    const auto u = static_cast<std::size_t>(a);
    row /= extent[a];
    const std::int64_t from = first / row;
    const std::int64_t to = (first + count - 1) / row + 1;
    low[u] += from;
    size[u] = to - from;
    first -= from * row;
    if (to - from > 1) {
      flat = count != (to - from) * row;
      break;
    }
  }
  if (!AddBox(low.data(), size.data(), owner)) return false;
  if (flat) {
    // With the first flat range, flats_ gets an entry with count 0 (a box) for each earlier region.
    flats_.resize(owners_.size());
    flats_.back() = {first, count};
  }
  return true;
}

bool RegionSet::Add(const Region& region, std::uint32_t owner) {
  const Box& box = region.box();
  if (box.rank() != rank()) return false;
  if (!region.is_flat()) return AddBox(box.begin().begin(), box.extent().begin(), owner);
  return AddFlat(box.begin().begin(), box.extent().begin(), region.flat_first(), region.volume(),
                 owner);
}

void RegionSet::AddFrom(const RegionSet& other, std::size_t i, std::uint32_t owner) {
  bounds_.insert(bounds_.end(), other.low(i), other.low(i) + stride_);
  owners_.push_back(owner);
  if (other.is_flat(i)) {
    flats_.resize(owners_.size());
    flats_.back() = other.flats_[i];
  } else if (!flats_.empty()) {
    flats_.emplace_back();
  }
}

// The product fits, because the box is within a checked shape.
std::int64_t RegionSet::volume(std::size_t i) const {
  if (is_flat(i)) return flats_[i].count;
  std::int64_t volume = 1;
  for (int a = 0; a < shape_.rank(); ++a) volume *= high(i)[a] - low(i)[a];
  return volume;
}

Region RegionSet::At(std::size_t i) const {
  Dims begin;
  Dims extent;
  for (int a = 0; a < shape_.rank(); ++a) {
    begin.push_back(low(i)[a]);
    extent.push_back(high(i)[a] - low(i)[a]);
  }
  const Box box = BoxAccess::Make(begin, extent);
  if (!is_flat(i)) return box;
  return Region::Flat(box, flats_[i].first, flats_[i].count).value();
}

// Data-parallel ranks hold equal regions: 4,096 ranks may bring 8 distinct ones, each 512 times.
// The table holds distinct regions only, and two guesses avoid most look-ups.
std::vector<std::uint32_t> GroupEqual(const RegionSet& all, RegionSet* distinct) {
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  distinct->Reset(all.shape());
  std::vector<std::uint32_t> group_of(all.size());
  // Open addressing; grows with the number of distinct regions, which is often small.
  std::vector<std::uint32_t> table(64, kNone);
  std::vector<std::uint64_t> hashes;
  std::uint32_t last = 0;
  const auto place = [&](std::uint64_t hash) {
    return static_cast<std::size_t>(hash >> (64 - std::countr_zero(table.size())));
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Ranks come in order, so a region mostly equals the previous one, or the distinct region that
    // was found next after that one.
    const auto groups = static_cast<std::uint32_t>(distinct->size());
    if (groups > 0) {
      if (Equal(all, i, *distinct, last)) {
        group_of[i] = last;
        continue;
      }
      const std::uint32_t next = last + 1 < groups ? last + 1 : 0;
      if (Equal(all, i, *distinct, next)) {
        group_of[i] = last = next;
        continue;
      }
    }
    const std::uint64_t hash = HashOf(all, i);
    std::size_t at = place(hash);
    while (table[at] != kNone &&
           (hashes[table[at]] != hash || !Equal(all, i, *distinct, table[at]))) {
      at = (at + 1) & (table.size() - 1);
    }
    if (table[at] == kNone) {
      table[at] = groups;
      hashes.push_back(hash);
      distinct->AddFrom(all, i, groups);
      if (2 * hashes.size() > table.size()) {
        table.assign(4 * table.size(), kNone);
        for (std::uint32_t g = 0; g < hashes.size(); ++g) {
          std::size_t to = place(hashes[g]);
          while (table[to] != kNone) to = (to + 1) & (table.size() - 1);
          table[to] = g;
        }
      }
      last = groups;
    } else {
      last = table[at];
    }
    group_of[i] = last;
  }
  return group_of;
}

}  // namespace tensormount
