// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_TENSOR_UNITS_H_
#define TENSORMOUNT_INDEX_READ_TENSOR_UNITS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/glob.h"
#include "base/parallel.h"
#include "index/read/checkpoint.h"

// How several threads read tensors block by block: the blocks of all tensors are numbered, and
// threads take them in order, so that concurrent reads are neighbours in storage and all threads
// are busy to the end.

namespace tensormount {

// Largest number of keys whose tensors are read together. Their metadata and results are in memory.
inline constexpr std::size_t kMostPendingKeys = 4096;

// The number of reading threads: `wanted`, or without it the number of cores, at most 8.
inline int ReadingThreads(int wanted) {
  return wanted > 0 ? wanted : static_cast<int>(std::min(HostCores(), 8U));
}

// The tensors of a checkpoint in the order of their keys, kPage at a time.
class TensorCursor {
 public:
  // Only of keys that match the glob; empty: all. Both arguments must outlive this object.
  TensorCursor(const CheckpointIndex& index, const std::string& glob)
      : index_(index), glob_(glob) {}

  // The current tensor; null at the end. Valid until Pop.
  Result<const TensorEntry*> Peek() {
    while (at_ == page_.size()) {
      if (end_) return static_cast<const TensorEntry*>(nullptr);
      page_.clear();
      at_ = 0;
      TENSORMOUNT_RETURN_IF_ERROR(Fill());
    }
    return &page_[at_];
  }
  void Pop() { ++at_; }

 private:
  static constexpr std::size_t kPage = 1024;

  Status Fill() {
    std::size_t seen = 0;
    TENSORMOUNT_RETURN_IF_ERROR(index_.ForEachTensor(next_, [&](const TensorEntry& tensor) {
      if (glob_.empty() || GlobMatches(glob_, tensor.meta.key())) page_.push_back(tensor);
      return ++seen < kPage;
    }));
    next_ += static_cast<std::uint32_t>(seen);
    end_ = seen < kPage;
    return {};
  }

  const CheckpointIndex& index_;
  const std::string& glob_;
  std::uint32_t next_ = 0;
  std::vector<TensorEntry> page_;
  std::size_t at_ = 0;
  bool end_ = false;
};

class TensorUnits {
 public:
  struct Unit {
    std::size_t tensor = 0;
    std::uint64_t number = 0;  // Within the tensor.
  };
  void Add(std::uint64_t units) { ends_.push_back(count() + units); }
  std::uint64_t count() const { return ends_.empty() ? 0 : ends_.back(); }
  Unit At(std::uint64_t i) const {
    const auto tensor =
        static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), i) - ends_.begin());
    return {tensor, i - (tensor == 0 ? 0 : ends_[tensor - 1])};
  }

 private:
  std::vector<std::uint64_t> ends_;  // The number of units in each tensor and all before it.
};

// Adds up the results of the blocks of a tensor in their order, whatever the order in which threads
// finish the units. In memory are the results of the units that ended while an earlier one was
// still being read.
template <typename Block, typename Sum>
class OrderedSum {
 public:
  // The results of all blocks of a unit.
  void Add(std::uint64_t unit, std::vector<Block> blocks) {
    const std::lock_guard lock(mutex_);
    early_.emplace(unit, std::move(blocks));
    for (auto it = early_.begin(); it != early_.end() && it->first == next_;
         it = early_.erase(it), ++next_) {
      for (const Block& block : it->second) sum_.Add(block);
    }
  }
  // Valid after the units have been added.
  const Sum& sum() const { return sum_; }

 private:
  std::mutex mutex_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, std::vector<Block>> early_;
  Sum sum_;
};

// Reads elements in row-major order as whole bytes, and verifies those that have a hash. `begin` is
// a multiple of 8 elements; the end is too, or it is the tensor's end.
inline Status ReadElements(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                           std::uint64_t begin, std::uint64_t count, std::vector<std::byte>& out) {
  const std::uint64_t bits = tensor.meta.bits();
  out.resize(count * bits / 8);
  return checkpoint.ReadBytes(tensor, begin / 8 * bits, out.data(), out.size(),
                              ReadVerify::kExtendLeaves, nullptr);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_TENSOR_UNITS_H_
