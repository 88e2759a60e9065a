// SPDX-License-Identifier: Apache-2.0
// Which bytes of a file are where: ordered disjoint ranges, merged where they continue each other
// on both sides, so that a file that is written in order is one entry.
#include "fs/save/range_map.h"

namespace tensormount::fs {
namespace {

// Whether `b`, which begins where `a` ends in the target, continues it in the file.
bool Continues(const StoredRange& a, const StoredRange& b) {
  return a.file == b.file && a.grid == b.grid && a.offset + a.length == b.offset;
}

}  // namespace

RangeMap::Ranges::const_iterator RangeMap::First(std::uint64_t at) const {
  auto it = ranges_.upper_bound(at);
  if (it != ranges_.begin()) {
    const auto before = std::prev(it);
    if (before->first + before->second.length > at) return before;
  }
  return it;
}

void RangeMap::Erase(std::uint64_t begin, std::uint64_t end) {
  if (begin >= end) return;
  const auto first = First(begin);
  auto it = first == ranges_.end() ? ranges_.end() : ranges_.find(first->first);
  while (it != ranges_.end() && it->first < end) {
    const std::uint64_t from = it->first;
    const StoredRange place = it->second;
    const std::uint64_t to = from + place.length;
    if (from < begin) {
      it->second.length = begin - from;
      ++it;
    } else {
      it = ranges_.erase(it);
    }
    if (to > end) {
      StoredRange rest = place;
      rest.offset += end - from;
      rest.length = to - end;
      ranges_.emplace_hint(it, end, rest);
      return;
    }
  }
}

void RangeMap::Insert(const PlacedRange& range) {
  if (range.place.length == 0) return;
  Erase(range.begin, range.end());
  std::uint64_t begin = range.begin;
  StoredRange place = range.place;
  auto next = ranges_.lower_bound(begin);
  if (next != ranges_.end() && next->first == range.end() && Continues(place, next->second)) {
    place.length += next->second.length;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.length == begin && Continues(before->second, place)) {
      before->second.length += place.length;
      return;
    }
  }
  ranges_.emplace_hint(next, begin, place);
}

std::uint64_t RangeMap::Covered(std::uint64_t begin, std::uint64_t end) const {
  std::uint64_t bytes = 0;
  ForEach(begin, end, [&](const PlacedRange& r) { bytes += r.place.length; });
  return bytes;
}

std::optional<PlacedRange> RangeMap::EndingAt(std::uint64_t at) const {
  const auto it = ranges_.lower_bound(at);
  if (it == ranges_.begin()) return std::nullopt;
  const auto before = std::prev(it);
  if (before->first + before->second.length != at) return std::nullopt;
  return PlacedRange{before->first, before->second};
}

std::optional<PlacedRange> RangeMap::BeginningAt(std::uint64_t at) const {
  const auto it = ranges_.find(at);
  if (it == ranges_.end()) return std::nullopt;
  return PlacedRange{it->first, it->second};
}

std::vector<PlacedRange> RangeMap::All() const {
  std::vector<PlacedRange> all;
  all.reserve(ranges_.size());
  for (const auto& [begin, place] : ranges_) all.push_back({begin, place});
  return all;
}

bool ClaimedRanges::Claim(std::uint64_t begin, std::uint64_t end, std::uint64_t owner) {
  if (begin >= end) return true;
  auto it = claims_.lower_bound(begin);
  if (it != claims_.begin() && std::prev(it)->second.end >= begin) --it;
  for (auto other = it; other != claims_.end() && other->first < end; ++other) {
    if (other->second.owner != owner && other->second.end > begin) return false;
  }
  // What touches the new claim and is the owner's becomes one with it.
  while (it != claims_.end() && it->first <= end) {
    if (it->second.owner != owner) {
      ++it;
      continue;
    }
    begin = std::min(begin, it->first);
    end = std::max(end, it->second.end);
    it = claims_.erase(it);
  }
  claims_.emplace(begin, Claimed{end, owner});
  return true;
}

}  // namespace tensormount::fs
