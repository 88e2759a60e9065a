// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_RANGE_CHECK_H_
#define TENSORMOUNT_INDEX_STORE_RANGE_CHECK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/hash.h"
#include "shard/leaf_hash.h"

namespace tensormount {

// Bytes of a file, and what a chunk or object record says of them.
struct CheckedRange {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;  // Over 0.
  Hash128 hash;              // The chunk root.
};

// Compares the bytes of a file, which come in order from its begin, with ranges of it. Of one
// thread.
class RangeCheck {
 public:
  // By rising offset, and apart; must outlive this.
  explicit RangeCheck(std::span<const CheckedRange> ranges) : ranges_(ranges) {}

  // The next `size` bytes. False: those of range number next() differ.
  bool Add(const std::byte* data, std::size_t size) {
    const std::uint64_t end = at_ + size;
    while (next_ < ranges_.size()) {
      const CheckedRange& range = ranges_[next_];
      if (range.offset >= end) break;
      const std::uint64_t range_end = range.offset + range.length;
      const std::uint64_t from = std::max(range.offset, at_);
      const std::uint64_t to = std::min(range_end, end);
      if (!hasher_) hasher_.emplace();
      if (to > from) hasher_->Update(data + (from - at_), static_cast<std::size_t>(to - from));
      if (to < range_end) break;
      hasher_->Finish();
      if (hasher_->Root() != range.hash) return false;
      hasher_.reset();
      ++next_;
    }
    at_ = end;
    return true;
  }
  // Whether all ranges came and are what they should be.
  bool all_good() const { return next_ == ranges_.size(); }
  // The first that is not known to be.
  std::size_t next() const { return next_; }

 private:
  const std::span<const CheckedRange> ranges_;
  std::size_t next_ = 0;
  std::uint64_t at_ = 0;
  std::optional<LeafHasher> hasher_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_RANGE_CHECK_H_
