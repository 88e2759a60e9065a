// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_BYTE_RANGE_H_
#define TENSORMOUNT_BASE_BYTE_RANGE_H_

#include <algorithm>
#include <cstdint>

namespace tensormount {

// Bytes [begin, end) of a file, a tensor in row-major order, or a stored part. One type for all, so
// that the second number is never ambiguous (length or end). The creator ensures `begin` <= `end`:
// untrusted offsets are added with base/checked.h before.
//
// Half open, so that neighbours share a number ([0, 4) and [4, 9) touch and do not overlap), sizes
// are plain differences, and empty ranges exist: begin == end. Ranges sort by begin, then end, the
// order in which files are read.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool Contains(const ByteRange& other) const { return begin <= other.begin && other.end <= end; }
  // The intersection; if the ranges do not overlap, an empty range at the later begin.
  ByteRange Intersect(const ByteRange& other) const {
    const std::uint64_t from = std::max(begin, other.begin);
    return {from, std::max(from, std::min(end, other.end))};
  }

  friend bool operator==(const ByteRange&, const ByteRange&) = default;
  friend auto operator<=>(const ByteRange&, const ByteRange&) = default;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_BYTE_RANGE_H_
