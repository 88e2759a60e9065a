// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_PICKLE_CONTAINERS_H_
#define TENSORMOUNT_INDEX_FOREIGN_PICKLE_CONTAINERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "index/foreign/pickle_record.h"

// What grows while a pickle is parsed. Every call that may need memory returns false where the
// arena has none left.

namespace tensormount::pickle {

// Memory of rows: from 128 KiB on whole huge pages, which grow without being copied.
std::size_t GrownBytes(std::size_t wanted);
// `before` and `bytes`: results of GrownBytes; 0: there was none. Null: there is no memory, and
// `data` is as it was.
void* Regrow(void* data, std::size_t before, std::size_t bytes);
void Release(void* data, std::size_t bytes);

// A growing row of values on the machine's side: what it holds counts while the parse lasts.
template <typename T>
class Row {
 public:
  explicit Row(Arena& arena) : arena_(arena) {}
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  ~Row() {
    Release(data_, capacity_ * sizeof(T));
    arena_.Refund(capacity_ * sizeof(T));
  }

  // False where there is no memory for it.
  bool Push(const T& v) {
    if (size_ == capacity_ && !Grow()) return false;
    data_[size_++] = v;
    return true;
  }
  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  std::size_t size() const { return size_; }
  void Shrink(std::size_t size) { size_ = size; }

 private:
  bool Grow() {
    // By a quarter where it is large: the budget is a multiple of the stream.
    const std::size_t wanted = capacity_ + (capacity_ < 4096 ? capacity_ + 64 : capacity_ / 4);
    const std::size_t bytes = GrownBytes(wanted * sizeof(T));
    const std::size_t before = capacity_ * sizeof(T);
    if (!arena_.Charge(bytes - before)) return false;
    void* grown = Regrow(data_, before, bytes);
    if (grown == nullptr) {
      arena_.Refund(bytes - before);
      return false;
    }
    data_ = static_cast<T*>(grown);
    capacity_ = bytes / sizeof(T);
    return true;
  }

  Arena& arena_;
  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

// Fills lists, sets and dicts.
class ContainerMaker {
 public:
  explicit ContainerMaker(Arena& arena) : arena_(arena), large_(arena) {}

  bool Append(Container& c, const Value* from, std::size_t n);
  // `values`: keys and values by turns, an even number. Of equal keys the first stays, with the
  // last value: at once where there are few, else when the indexes are built.
  bool AddPairs(Container& c, const Value* from, std::size_t values);
  // What dict(from) holds: a copy of the pairs of a dict or, where `listed`, of a list of pairs.
  enum class Took { kAll, kNoMemory, kNothing };
  Took TakeItems(Container& c, const Value& from, bool listed);
  // Once, at the end: large dicts get an index of their keys.
  bool BuildIndexes();

 private:
  static constexpr std::uint32_t kIndexedFrom = 32;  // Values: 16 pairs.

  // The keys of a small dict; kept: where others share them.
  struct Seen {
    std::uint32_t keys = 0;
    Shape shape;
    const Value* kept = nullptr;
  };

  Value* TakeArray(std::size_t n);
  void GiveArray(Value* array, std::size_t n);
  bool Reserve(Container& c, std::size_t more);
  const Value* ShapeOf(const Value* pairs, std::size_t n);
  bool Unshape(Container& c, std::size_t more);
  static void DropEqual(Container& c, std::size_t first);
  bool BuildIndex(Container& c);

  Arena& arena_;
  Row<Container*> large_;
  // Arrays that were outgrown, by size, to be used again: growing costs no more than twice the
  // largest.
  std::array<Value*, 48> free_{};
  std::array<Seen, 64> shapes_;
};

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_FOREIGN_PICKLE_CONTAINERS_H_
