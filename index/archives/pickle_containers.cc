// SPDX-License-Identifier: Apache-2.0
// The lists, sets and dicts of a pickle (pickle_containers.h). They are arrays of values in the
// arena that double when full. A small dict is searched linearly; a large dict gets an index of its
// keys when it is complete.
#include "index/archives/pickle_containers.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "index/archives/pickle_calls.h"

namespace tensormount::pickle {

// Free lists by power of two, linked through the first value of each array. Only a request for a
// power of two is served from a free list; a container that grows makes no other requests after its
// first.
Value* ContainerMaker::TakeArray(std::size_t n) {
  const auto size_class = static_cast<std::size_t>(std::bit_width(n) - 1);
  if (std::has_single_bit(n) && free_[size_class] != nullptr) {
    Value* out = free_[size_class];
    free_[size_class] = Access::PointerTo<Value>(out[0]);
    return out;
  }
  return static_cast<Value*>(arena_.Take(n * sizeof(Value)));
}

void ContainerMaker::GiveArray(Value* array, std::size_t n) {
  if (n < 4) return;
  const auto size_class = static_cast<std::size_t>(std::bit_width(n) - 1);
  array[0] = Access::At(Kind::kNone, free_[size_class]);
  free_[size_class] = array;
}

// The capacity doubles, so each value is copied O(1) times on average.
bool ContainerMaker::Reserve(Container& c, std::size_t more) {
  if (more > Container::kMaxCount - c.count) return false;
  const std::size_t wanted = c.count + more;
  if (wanted <= c.capacity) return true;
  // The first request gets exactly its size, because it is often the only request.
  const std::size_t capacity = c.capacity == 0 ? wanted : std::bit_ceil(wanted);
  Value* grown = TakeArray(capacity);
  if (grown == nullptr) return false;
  std::copy_n(c.items, c.count, grown);
  if (c.capacity > 0) GiveArray(c.items, c.capacity);
  c.items = grown;
  c.capacity = static_cast<std::uint32_t>(capacity);
  return true;
}

bool ContainerMaker::Append(Container& c, const Value* from, std::size_t n) {
  if (n == 0) return true;
  if (!Reserve(c, n)) return false;
  std::copy_n(from, n, c.items + c.count);
  c.count += static_cast<std::uint32_t>(n);
  return true;
}

// Merges the pairs from `first` on into the pairs before them, whose keys are distinct.
void ContainerMaker::DropEqual(Container& c, std::size_t first) {
  const std::size_t pairs = c.count / 2;
  std::size_t kept = first;
  for (std::size_t i = first; i < pairs; ++i) {
    const Value key = c.items[2 * i];
    const Value value = c.items[2 * i + 1];
    std::size_t same = 0;
    while (same < kept && !SameKey(c.items[2 * same], key)) ++same;
    c.items[2 * same + 1] = value;
    if (same < kept) continue;
    c.items[2 * kept++] = key;
  }
  c.count = static_cast<std::uint32_t>(2 * kept);
}

// While the dict has fewer than kIndexedFrom values, equal keys are merged at once by comparing all
// pairs. That would be quadratic in a larger dict, so a larger dict is added to large_ once and
// merged in one pass at the end.
bool ContainerMaker::AddPairs(Container& c, const Value* from, std::size_t values) {
  if (values == 0) return true;
  const std::size_t before = c.count;
  if (!Append(c, from, values)) return false;
  if (c.count < kIndexedFrom) {
    DropEqual(c, before / 2);
    return true;
  }
  return before >= kIndexedFrom || large_.Push(&c);
}

ContainerMaker::TakeResult ContainerMaker::TakeItems(Container& c, const Value& from, bool listed) {
  const auto add = [&](const Value& key, const Value& value) {
    const Value pair[2] = {key, value};
    if (!KeyFault(c.count > 0 ? PairKey(c, 0) : key, key).empty()) return TakeResult::kNothing;
    return AddPairs(c, pair, 2) ? TakeResult::kAll : TakeResult::kNoMemory;
  };
  TakeResult took = TakeResult::kAll;
  if (IsPythonDict(from)) {
    for (std::size_t i = 0; i < from.size() && took == TakeResult::kAll; ++i) {
      took = add(from.key(i), from.item(i));
    }
    return took;
  }
  // Only if `listed`: a Counter would count the items of a list. An item that is not a pair is an
  // error in Python.
  const auto is_row = [](const Value& v) {
    return v.kind() == Kind::kList || v.kind() == Kind::kTuple;
  };
  if (!listed || !is_row(from)) return TakeResult::kNothing;
  for (std::size_t i = 0; i < from.size() && took == TakeResult::kAll; ++i) {
    const Value pair = from.item(i);
    if (!is_row(pair) || pair.size() != 2) return TakeResult::kNothing;
    took = add(pair.item(0), pair.item(1));
  }
  return took;
}

bool ContainerMaker::BuildIndexes() {
  for (std::size_t i = 0; i < large_.size(); ++i) {
    if (!BuildIndex(*large_[i])) return false;
  }
  return true;
}

// Open addressing with at most half of the slots used. O(pairs), because the stream cannot predict
// the hash. Afterwards `items` points to the index, which points to the pairs.
bool ContainerMaker::BuildIndex(Container& c) {
  if (c.capacity == Container::kIndexed) return true;
  const std::size_t pairs = c.count / 2;
  const std::size_t slots = std::bit_ceil(2 * pairs);
  auto* index = static_cast<KeyIndex*>(arena_.Take(sizeof(KeyIndex)));
  auto* table = static_cast<std::uint32_t*>(arena_.Take(slots * sizeof(std::uint32_t)));
  if (index == nullptr || table == nullptr) return false;
  std::memset(table, 0, slots * sizeof(std::uint32_t));
  *index = {slots - 1, table, c.items};
  std::size_t kept = 0;
  for (std::size_t i = 0; i < pairs; ++i) {
    const Value key = c.items[2 * i];
    const Value value = c.items[2 * i + 1];
    std::uint64_t at = 0;
    if (KeyHash(key, at)) {
      at &= index->mask;
      while (table[at] != 0 && !SameKey(c.items[2 * (table[at] - 1)], key)) {
        at = (at + 1) & index->mask;
      }
      if (table[at] != 0) {
        c.items[2 * (table[at] - 1) + 1] = value;
        continue;
      }
      table[at] = static_cast<std::uint32_t>(kept + 1);
    }
    c.items[2 * kept] = key;
    c.items[2 * kept + 1] = value;
    ++kept;
  }
  c.count = static_cast<std::uint32_t>(2 * kept);
  c.items = reinterpret_cast<Value*>(index);
  c.capacity = Container::kIndexed;
  return true;
}

}  // namespace tensormount::pickle
