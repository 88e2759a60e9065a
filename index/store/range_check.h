// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_RANGE_CHECK_H_
#define TENSORMOUNT_INDEX_STORE_RANGE_CHECK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/hash.h"
#include "shard/chunk_accumulator.h"

namespace tensormount {

// A byte range of a file, and its recorded hash.
struct CheckedRange {
  std::uint64_t offset = 0;
  // Greater than 0.
  std::uint64_t length = 0;
  // Hash of the range (ChunkHashes::root).
  Hash128 hash;
};

// Compares the bytes of a file, which are added from its beginning on, with the hashes of ranges of
// the file. For one thread.
class RangeCheck {
 public:
  // `ranges` must be disjoint and sorted by offset, and must outlive this object.
  explicit RangeCheck(std::span<const CheckedRange> ranges) : ranges_(ranges) {}

  // Adds the next `size` bytes of the file. Returns false if the range with number next() does not
  // match its hash.
  bool Add(const std::byte* data, std::size_t size) {
    const std::uint64_t end = at_ + size;
    while (next_ < ranges_.size()) {
      const CheckedRange& range = ranges_[next_];
      if (range.offset >= end) break;
      const std::uint64_t range_end = range.offset + range.length;
      const std::uint64_t from = std::max(range.offset, at_);
      const std::uint64_t to = std::min(range_end, end);
      if (to > from) hashes_.Update(data + (from - at_), static_cast<std::size_t>(to - from));
      if (to < range_end) break;
      if (hashes_.Finish().root != range.hash) return false;
      ++next_;
    }
    at_ = end;
    return true;
  }
  // Whether all ranges were added completely and match.
  bool all_good() const { return next_ == ranges_.size(); }
  // Number of the first range that is not proven yet.
  std::size_t next() const { return next_; }

 private:
  const std::span<const CheckedRange> ranges_;
  std::size_t next_ = 0;
  std::uint64_t at_ = 0;
  ChunkAccumulator hashes_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_RANGE_CHECK_H_
