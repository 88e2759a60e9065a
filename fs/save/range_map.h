// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_RANGE_MAP_H_
#define TENSORMOUNT_FS_SAVE_RANGE_MAP_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace tensormount::fs {

// Where bytes of a target are.
struct StoredRange {
  std::uint64_t length = 0;
  std::uint64_t offset = 0;  // In the data file.
  std::uint32_t file = 0;
  bool grid = false;  // Offset - begin is the same for all of the target's grid bytes.
};
struct PlacedRange {
  std::uint64_t begin = 0;  // In the target.
  StoredRange place;
  std::uint64_t end() const { return begin + place.length; }
};

// Which bytes of a target are where: disjoint ranges, merged where they continue each other in the
// target and in the file. 80 bytes of memory a range. Thread-compatible.
class RangeMap {
 public:
  // Replaces what was known of these bytes.
  void Insert(const PlacedRange& range);
  void Erase(std::uint64_t begin, std::uint64_t end);
  void Clear() { ranges_.clear(); }

  bool empty() const { return ranges_.empty(); }
  std::size_t size() const { return ranges_.size(); }
  // Bytes of [begin, end) that are known.
  std::uint64_t Covered(std::uint64_t begin, std::uint64_t end) const;
  // The range that ends, or begins, exactly here.
  std::optional<PlacedRange> EndingAt(std::uint64_t at) const;
  std::optional<PlacedRange> BeginningAt(std::uint64_t at) const;

  // fn(const PlacedRange&) for the known parts of [begin, end), in order.
  template <typename Fn>
  void ForEach(std::uint64_t begin, std::uint64_t end, Fn fn) const {
    for (auto it = First(begin); it != ranges_.end() && it->first < end; ++it) {
      const std::uint64_t from = std::max(begin, it->first);
      const std::uint64_t to = std::min(end, it->first + it->second.length);
      StoredRange place = it->second;
      place.offset += from - it->first;
      place.length = to - from;
      fn(PlacedRange{from, place});
    }
  }
  // gap(begin, end) for the others, in order with known(range).
  template <typename Known, typename Gap>
  void Walk(std::uint64_t begin, std::uint64_t end, Known known, Gap gap) const {
    ForEach(begin, end, [&](const PlacedRange& r) {
      if (r.begin > begin) gap(begin, r.begin);
      known(r);
      begin = r.end();
    });
    if (begin < end) gap(begin, end);
  }
  std::vector<PlacedRange> All() const;

 private:
  using Ranges = std::map<std::uint64_t, StoredRange>;
  // The first range that ends behind `at`.
  Ranges::const_iterator First(std::uint64_t at) const;

  Ranges ranges_;
};

// A set of bytes of a file, each with an owner; merged.
class ClaimedRanges {
 public:
  // All of [begin, end) becomes `owner`'s, unless a byte of it is somebody else's.
  bool Claim(std::uint64_t begin, std::uint64_t end, std::uint64_t owner);
  // fn(begin, end, claimed) over the parts of [begin, end), in order.
  template <typename Fn>
  void Split(std::uint64_t begin, std::uint64_t end, Fn fn) const {
    auto it = claims_.upper_bound(begin);
    if (it != claims_.begin() && std::prev(it)->second.end > begin) --it;
    for (; begin < end; ++it) {
      if (it == claims_.end() || it->first >= end) {
        fn(begin, end, false);
        return;
      }
      if (it->first > begin) fn(begin, it->first, false);
      const std::uint64_t to = std::min(end, it->second.end);
      fn(std::max(begin, it->first), to, true);
      begin = to;
    }
  }

 private:
  struct Claimed {
    std::uint64_t end = 0;
    std::uint64_t owner = 0;
  };
  std::map<std::uint64_t, Claimed> claims_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_RANGE_MAP_H_
