// SPDX-License-Identifier: Apache-2.0
// RangeMap: a std::map keyed by first byte. Ranges never overlap, so their ends are sorted like
// their begins, and one upper_bound finds the first range that a call affects.
#include "fs/save/range_map.h"

#include <iterator>

namespace tensormount::fs {
namespace {

// Whether `b`, which begins where `a` ends in the target, also begins where `a` ends in the same
// source, and both or none are grid bytes.
bool Continues(const StoredRange& a, const StoredRange& b) {
  return a.source == b.source && a.grid == b.grid && a.offset + a.size() == b.offset;
}

}  // namespace

// upper_bound finds the first range that begins after `at`; only the one before it can reach over
// `at`.
RangeMap::Ranges::const_iterator RangeMap::First(std::uint64_t at) const {
  auto it = ranges_.upper_bound(at);
  if (it != ranges_.begin()) {
    const auto before = std::prev(it);
    if (before->second.bytes.end > at) return before;
  }
  return it;
}

void RangeMap::Erase(const ByteRange& bytes) {
  if (bytes.begin >= bytes.end) return;
  // The range is looked up again, because First() returns a const iterator.
  const auto first = First(bytes.begin);
  auto it = first == ranges_.end() ? ranges_.end() : ranges_.find(first->first);
  while (it != ranges_.end() && it->first < bytes.end) {
    const StoredRange known = it->second;
    if (known.bytes.begin < bytes.begin) {
      it->second.bytes.end = bytes.begin;
      ++it;
    } else {
      it = ranges_.erase(it);
    }
    if (known.bytes.end > bytes.end) {
      ranges_.emplace_hint(it, bytes.end, known.Cut(bytes.end, known.bytes.end));
      return;
    }
  }
}

void RangeMap::Insert(StoredRange range) {
  if (range.bytes.empty()) return;
  Erase(range.bytes);
  // After the Erase nothing overlaps, so only the two neighbours can be merged.
  auto next = ranges_.lower_bound(range.bytes.begin);
  if (next != ranges_.end() && next->first == range.bytes.end && Continues(range, next->second)) {
    range.bytes.end = next->second.bytes.end;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    StoredRange& before = std::prev(next)->second;
    if (before.bytes.end == range.bytes.begin && Continues(before, range)) {
      before.bytes.end = range.bytes.end;
      return;
    }
  }
  ranges_.emplace_hint(next, range.bytes.begin, range);
}

// With offset == begin, adjacent claims of one owner always merge, so a target that writes its file
// in order needs one range here too.
bool RangeMap::Claim(const ByteRange& bytes, std::uint32_t owner) {
  bool free = true;
  ForEach(bytes, [&](const StoredRange& r) { free = free && r.source == owner; });
  if (free) Insert({bytes, bytes.begin, owner, false});
  return free;
}

std::uint64_t RangeMap::Covered(const ByteRange& bytes) const {
  std::uint64_t covered = 0;
  ForEach(bytes, [&](const StoredRange& r) { covered += r.size(); });
  return covered;
}

std::optional<StoredRange> RangeMap::EndingAt(std::uint64_t at) const {
  const auto it = ranges_.lower_bound(at);
  if (it == ranges_.begin()) return std::nullopt;
  const auto before = std::prev(it);
  if (before->second.bytes.end != at) return std::nullopt;
  return before->second;
}

std::optional<StoredRange> RangeMap::BeginningAt(std::uint64_t at) const {
  const auto it = ranges_.find(at);
  if (it == ranges_.end()) return std::nullopt;
  return it->second;
}

std::vector<StoredRange> RangeMap::All() const {
  std::vector<StoredRange> all;
  all.reserve(ranges_.size());
  for (const auto& [begin, range] : ranges_) all.push_back(range);
  return all;
}

}  // namespace tensormount::fs
