// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_RANGE_MAP_H_
#define TENSORMOUNT_FS_SAVE_RANGE_MAP_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/byte_range.h"

namespace tensormount::fs {

// Bytes of a target, side by side, and where they are stored side by side. `source` is a number of
// whoever owns the map, and `offset` a position within that source:
//   what a target wrote   source: a data file by its number in the journal; offset: in that file
//   replay of a journal   source: a record of the target; offset: in the bytes it stored
//   claims                source: the target that owns the bytes; offset: as `bytes`
struct StoredRange {
  ByteRange bytes;
  std::uint64_t offset = 0;
  std::uint32_t source = 0;
  // Written at its fixed position (target_writer.h): `offset - bytes.begin` is then the same for
  // all such bytes of the target.
  bool grid = false;

  std::uint64_t size() const { return bytes.size(); }
  // The part of it that lies in [from, to), which must be within `bytes`.
  // For example [100, 200) at offset 5000, cut to [150, 180), is at offset 5050.
  StoredRange Cut(std::uint64_t from, std::uint64_t to) const {
    return {{from, to}, offset + (from - bytes.begin), source, grid};
  }
};

// Which bytes of a target are stored where: disjoint ranges in rising order. Ranges that continue
// each other, in the target and in their source, are one, so a tensor that is written from the
// front by the megabyte needs one entry, not one for each write. 80 bytes of memory a range;
// O(log n), plus the ranges that a call removes or visits. Thread-compatible.
class RangeMap {
 public:
  // Replaces what was known of these bytes.
  void Insert(StoredRange range);
  // As Insert, unless a byte of the range has another source: then false, and nothing is changed.
  // All ranges of the map must be claims, which have the offset of their bytes.
  bool Claim(const ByteRange& bytes, std::uint32_t owner);
  // Forgets these bytes; a range that reaches over an end of `bytes` keeps its other part, with the
  // offset moved along.
  void Erase(const ByteRange& bytes);
  void Clear() { ranges_.clear(); }

  bool empty() const { return ranges_.empty(); }
  std::size_t size() const { return ranges_.size(); }
  // How many of these bytes are known.
  // Counts each byte once, since ranges are disjoint.
  std::uint64_t Covered(const ByteRange& bytes) const;
  // The range that ends, or begins, exactly here.
  std::optional<StoredRange> EndingAt(std::uint64_t at) const;
  std::optional<StoredRange> BeginningAt(std::uint64_t at) const;

  // fn(const StoredRange&) for the known parts of `bytes`, in order. `fn` must not change the map.
  template <typename Fn>
  void ForEach(const ByteRange& bytes, Fn fn) const {
    for (auto it = First(bytes.begin); it != ranges_.end() && it->first < bytes.end; ++it) {
      const ByteRange& known = it->second.bytes;
      fn(it->second.Cut(std::max(bytes.begin, known.begin), std::min(bytes.end, known.end)));
    }
  }
  // known(const StoredRange&) and gap(const ByteRange&) in order over all of `bytes`.
  template <typename Known, typename Gap>
  void Walk(ByteRange bytes, Known known, Gap gap) const {
    ForEach(bytes, [&](const StoredRange& r) {
      if (r.bytes.begin > bytes.begin) gap(ByteRange{bytes.begin, r.bytes.begin});
      known(r);
      bytes.begin = r.bytes.end;
    });
    if (bytes.begin < bytes.end) gap(bytes);
  }
  std::vector<StoredRange> All() const;

 private:
  // Keyed by the first byte, which the value repeats: with glibc a node takes 80 bytes either way,
  // and callers get ranges as they are.
  using Ranges = std::map<std::uint64_t, StoredRange>;  // By where they begin.
  // The first range that ends behind `at`.
  Ranges::const_iterator First(std::uint64_t at) const;

  Ranges ranges_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_RANGE_MAP_H_
