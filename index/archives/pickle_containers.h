// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CONTAINERS_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CONTAINERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "index/archives/pickle_record.h"

// What grows while a pickle is parsed. Every call that may need memory returns false where the
// arena has none left.

namespace tensormount::pickle {

// A growing row of values on the machine's side: what it holds counts while the parse lasts.
// T is trivially copyable. The bytes are charged to the budget of the arena, so that stack and memo
// cannot pass the limit that records have, and are given back at the end of the parse.
template <typename T>
class Row {
 public:
  explicit Row(Arena& arena) : arena_(arena) {}
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  ~Row() {
    std::free(data_);
    arena_.Refund(capacity_ * sizeof(T));
  }

  // False where there is no memory for it.
  // Amortised O(1).
  bool Push(const T& v) {
    if (size_ == capacity_ && !Grow()) return false;
    data_[size_++] = v;
    return true;
  }
  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  std::size_t size() const { return size_; }
  // To a size that it has or had; memory stays.
  void Shrink(std::size_t size) { size_ = size; }

 private:
  bool Grow() {
    // By a quarter where it is large: the budget is a multiple of the stream.
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

// Fills lists, sets and dicts.
// Lives for one parse, since it remembers free arrays. A container is plain while it grows and,
// where it is a large dict, indexed at the end (pickle_record.h). All reads go through PairKey and
// PairValue, which know both.
class ContainerMaker {
 public:
  explicit ContainerMaker(Arena& arena) : arena_(arena), large_(arena) {}

  // Of lists and sets, and of pairs that need no look at their keys. False: no memory, and the
  // container is as it was.
  bool Append(Container& c, const Value* from, std::size_t n);
  // `values`: keys and values by turns, an even number. Of equal keys the first stays, with the
  // last value: at once where there are few, else when the indexes are built.
  bool AddPairs(Container& c, const Value* from, std::size_t values);
  // What dict(from) holds: a copy of the pairs of a dict or, where `listed`, of a list of pairs.
  // kNothing: `from` is neither, or a key is one that Python refuses.
  enum class Took { kAll, kNoMemory, kNothing };
  Took TakeItems(Container& c, const Value& from, bool listed);
  // Once, at the end: large dicts get an index of their keys.
  bool BuildIndexes();

 private:
  static constexpr std::uint32_t kIndexedFrom = 32;  // Values: 16 pairs.

  // Arrays of values, of which outgrown ones are used again.
  Value* TakeArray(std::size_t n);
  void GiveArray(Value* array, std::size_t n);
  // Room for so many values more in a plain container.
  bool Reserve(Container& c, std::size_t more);
  // Quadratic in the pairs, of which there are at most kIndexedFrom / 2.
  static void DropEqual(Container& c, std::size_t first);
  // Of one dict: equal keys become one, and the index is made.
  bool BuildIndex(Container& c);

  Arena& arena_;
  // Dicts that want an index, each once.
  Row<Container*> large_;
  // Arrays that were outgrown, by size, to be used again: growing costs no more than twice the
  // largest.
  std::array<Value*, 48> free_{};
};

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CONTAINERS_H_
