// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CONTAINERS_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CONTAINERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "index/archives/pickle_record.h"

// Containers that grow while a pickle is parsed. A function that allocates returns false if the
// arena has reached its limit.

namespace tensormount::pickle {

// A growing array of a trivially copyable T for the parser's stack and memo. Its bytes count
// against the limit of the arena, so that stack and memo cannot exceed it. At the end of the parse
// the bytes are subtracted again.
template <typename T>
class BudgetedArray {
 public:
  explicit BudgetedArray(Arena& arena) : arena_(arena) {}
  BudgetedArray(const BudgetedArray&) = delete;
  BudgetedArray& operator=(const BudgetedArray&) = delete;
  ~BudgetedArray() {
    std::free(data_);
    arena_.Refund(capacity_ * sizeof(T));
  }

  // Appends a value, in amortised O(1). Returns false if there is no memory.
  bool Push(const T& v) {
    if (size_ == capacity_ && !Grow()) return false;
    data_[size_++] = v;
    return true;
  }
  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  std::size_t size() const { return size_; }
  // Reduces the array to a smaller size. The memory is kept.
  void Shrink(std::size_t size) { size_ = size; }

 private:
  bool Grow() {
    // A large array grows by a quarter only, because the limit is a small multiple of the stream's
    // size.
    const std::size_t more = capacity_ < 4096 ? capacity_ + 64 : capacity_ / 4;
    if (!arena_.Charge(more * sizeof(T))) return false;
    void* grown = std::realloc(data_, (capacity_ + more) * sizeof(T));
    if (grown == nullptr) {
      arena_.Refund(more * sizeof(T));
      return false;
    }
    data_ = static_cast<T*>(grown);
    capacity_ += more;
    return true;
  }

  Arena& arena_;
  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

// Fills lists, sets and dicts during one parse. A container is a plain array while it grows; a
// large dict gets an index at the end (pickle_record.h). PairKey and PairValue read a dict in both
// forms.
class ContainerMaker {
 public:
  explicit ContainerMaker(Arena& arena) : arena_(arena), large_(arena) {}

  // Appends values to a list or set, or pairs to a dict without comparing their keys. Returns false
  // if there is no memory; the container is then unchanged.
  bool Append(Container& c, const Value* from, std::size_t n);
  // Adds `values` / 2 pairs; keys and values alternate in `from`. Equal keys become one pair with
  // the position of the first key and the last value. A small dict is merged at once, a large one
  // by BuildIndexes.
  bool AddPairs(Container& c, const Value* from, std::size_t values);
  // Fills `c` with the pairs that Python's dict(from) would have. `from` is a dict or, if `listed`,
  // a list of pairs. kNothing: `from` is something else, or KeyFault refuses a key.
  enum class TakeResult { kAll, kNoMemory, kNothing };
  TakeResult TakeItems(Container& c, const Value& from, bool listed);
  // Indexes the keys of large dicts. Call it once, at the end.
  bool BuildIndexes();

 private:
  // Number of values (16 pairs) from which a dict gets an index.
  static constexpr std::uint32_t kIndexedFrom = 32;

  // TakeArray returns an array of n values. GiveArray returns an outgrown array for reuse.
  Value* TakeArray(std::size_t n);
  void GiveArray(Value* array, std::size_t n);
  // Makes room for `more` values in a container that is a plain array.
  bool Reserve(Container& c, std::size_t more);
  // Merges pairs with equal keys in a small dict, from pair number `first` on. Quadratic in the
  // number of pairs, which is less than kIndexedFrom / 2.
  static void DropEqual(Container& c, std::size_t first);
  // Merges pairs with equal keys in a large dict, and makes its index.
  bool BuildIndex(Container& c);

  Arena& arena_;
  // The dicts that get an index, each listed once.
  BudgetedArray<Container*> large_;
  // Outgrown arrays for reuse: entry k links arrays of at least 2^k and less than 2^(k+1) values.
  std::array<Value*, 48> free_{};
};

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CONTAINERS_H_
