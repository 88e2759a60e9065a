// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_BYTE_RANGE_H_
#define TENSORMOUNT_BASE_BYTE_RANGE_H_

#include <algorithm>
#include <cstdint>

namespace tensormount {

// Bytes [begin, end) of something that its owner names: a file, a tensor in row-major order, a
// stored part. One type for all of them, so that nobody has to ask whether a second number is a
// length or an end. `begin` <= `end` is the maker's to see to: offsets from outside are added with
// base/checked.h before they come here.
//
// Half open, so that neighbours share a number ([0, 4) and [4, 9) touch and do not overlap), sizes
// are differences without a correction by one, and "nothing" can be said: begin == end. Ranges
// order by begin, then end, which is the order in which files are read.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool Contains(const ByteRange& other) const { return begin <= other.begin && other.end <= end; }
  // The bytes that both have; an empty range, at the later begin, where there are none.
  ByteRange Intersect(const ByteRange& other) const {
    const std::uint64_t from = std::max(begin, other.begin);
    return {from, std::max(from, std::min(end, other.end))};
  }

  friend bool operator==(const ByteRange&, const ByteRange&) = default;
  friend auto operator<=>(const ByteRange&, const ByteRange&) = default;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_BYTE_RANGE_H_
