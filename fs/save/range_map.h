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

// A range of bytes of a target (StagedTarget of journal.h) and its position in a source, contiguous
// in both. The owner of the map defines `source` and `offset`:
//   bytes of a target     source: a data file by its number in the journal; offset: in that file
//   replay of a journal   source: a record of the target; offset: in the bytes that it stored
//   claims                source: the target that claimed the bytes; offset: bytes.begin
struct StoredRange {
  ByteRange bytes;
  std::uint64_t offset = 0;
  std::uint32_t source = 0;
  // Whether the bytes are stored at their grid position (target_writer.h): `offset - bytes.begin`
  // is the same for all such bytes of the target.
  bool grid = false;

  std::uint64_t size() const { return bytes.size(); }
  // The part in [from, to), which must be within `bytes`: [100, 200) at offset 5000, cut to [150,
  // 180), is at offset 5050.
  StoredRange Cut(std::uint64_t from, std::uint64_t to) const {
    return {{from, to}, offset + (from - bytes.begin), source, grid};
  }
};

// Maps bytes of a target to their positions in sources: disjoint ranges in rising order. Adjacent
// ranges that are also adjacent in the source are merged, so a tensor written in order needs one
// entry. A range takes 80 bytes of memory; a call takes O(log n) time, plus O(1) for each range
// that it removes or visits. Thread-compatible.
class RangeMap {
 public:
  // Adds a range; replaces earlier entries of its bytes.
  void Insert(StoredRange range);
  // Adds a range with `owner` as its source. If another owner has claimed a byte of it, returns
  // false and changes nothing. All ranges of the map must be claims, whose offset equals their
  // begin.
  bool Claim(const ByteRange& bytes, std::uint32_t owner);
  // Removes the entries of these bytes; a range that reaches over an end of `bytes` keeps its other
  // part, with an adjusted offset.
  void Erase(const ByteRange& bytes);
  void Clear() { ranges_.clear(); }

  bool empty() const { return ranges_.empty(); }
  std::size_t size() const { return ranges_.size(); }
  // Number of these bytes that have an entry.
  std::uint64_t Covered(const ByteRange& bytes) const;
  // The range that ends (EndingAt) or begins (BeginningAt) exactly at byte `at`; nullopt if there
  // is none.
  std::optional<StoredRange> EndingAt(std::uint64_t at) const;
  std::optional<StoredRange> BeginningAt(std::uint64_t at) const;

  // Calls fn(const StoredRange&) for the parts of `bytes` with an entry, in order. `fn` must not
  // change the map.
  template <typename Fn>
  void ForEach(const ByteRange& bytes, Fn fn) const {
    for (auto it = First(bytes.begin); it != ranges_.end() && it->first < bytes.end; ++it) {
      const ByteRange& known = it->second.bytes;
      fn(it->second.Cut(std::max(bytes.begin, known.begin), std::min(bytes.end, known.end)));
    }
  }
  // Calls known(const StoredRange&) and gap(const ByteRange&) in order over all of `bytes`.
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
  // and callers get ranges without conversion.
  using Ranges = std::map<std::uint64_t, StoredRange>;
  // The first range that ends after `at`.
  Ranges::const_iterator First(std::uint64_t at) const;

  Ranges ranges_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_RANGE_MAP_H_
