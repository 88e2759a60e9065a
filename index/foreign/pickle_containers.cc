// SPDX-License-Identifier: Apache-2.0
// Dicts with many keys in common, as checkpoints have by the thousand (one for each chunk of each
// tensor): the keys are kept once for all dicts that got the same ones in the same order, as
// JavaScript engines keep hidden classes, and a dict is a row of values. Rows grow in large pages.
#include "index/foreign/pickle_containers.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <sys/mman.h>

#include "index/foreign/pickle_calls.h"

namespace tensormount::pickle {

namespace {

constexpr std::size_t kSmallRow = std::size_t{128} << 10;

}  // namespace

// realloc of small rows is cheap; large ones are whole pages, so that growing is a change of page
// tables (mremap) and not a copy of hundreds of megabytes.
std::size_t GrownBytes(std::size_t wanted) {
  return wanted <= kSmallRow ? wanted : (wanted + kHugePage - 1) / kHugePage * kHugePage;
}

// Three cases by size: realloc, mremap, and the step from one to the other, which copies once.
void* Regrow(void* data, std::size_t before, std::size_t bytes) {
  if (bytes <= kSmallRow) return std::realloc(data, bytes);
  if (before > kSmallRow) {
    void* moved = mremap(data, before, bytes, MREMAP_MAYMOVE);
    return moved == MAP_FAILED ? nullptr : moved;
  }
  void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return nullptr;
  madvise(fresh, bytes, MADV_HUGEPAGE);  // An offer.
  if (before > 0) std::memcpy(fresh, data, before);
  std::free(data);
  return fresh;
}

void Release(void* data, std::size_t bytes) {
  if (bytes > kSmallRow) {
    munmap(data, bytes);
  } else {
    std::free(data);
  }
}

// Free lists by power of two, linked through the first value of each array. Only exact powers are
// asked for again, since those are what growing makes.
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

// Doubling: each value is copied O(1) times on average.
bool ContainerMaker::Reserve(Container& c, std::size_t more) {
  if (more > Container::kMaxCount - c.count) return false;
  const std::size_t wanted = c.count + more;
  if (wanted <= c.capacity) return true;
  // What comes in one go is often all.
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

// Keys in common with a dict seen before; null: none, or not yet.
// The first dict of a kind is only remembered; from the second on all share one array of keys.
// Equal keys mean the same values in the stream (SameAs, not equal texts): writers memoize
// attribute names, so this is what happens, and it costs one compare a key. 64 slots, by hash; a
// collision only loses some sharing.
const Value* ContainerMaker::ShapeOf(const Value* pairs, std::size_t n) {
  std::uint64_t hash = n;
  for (std::size_t i = 0; i < n; ++i) {
    if (pairs[2 * i].kind() != Kind::kString) return nullptr;
    hash = (hash ^ Access::Bits(pairs[2 * i])) * 0x9e3779b97f4a7c15u;
  }
  Shape& shape = shapes_[hash >> 58];
  bool same = shape.count == n;
  for (std::size_t i = 0; i < n && same; ++i) same = shape.keys[i].SameAs(pairs[2 * i]);
  if (!same) {
    // Keys of a shape are all different.
    for (std::size_t i = 1; i < n; ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (SameKey(pairs[2 * i], pairs[2 * j])) return nullptr;
      }
    }
    shape.count = static_cast<std::uint32_t>(n);
    shape.kept = nullptr;
    for (std::size_t i = 0; i < n; ++i) shape.keys[i] = pairs[2 * i];
    return nullptr;
  }
  if (shape.kept == nullptr) {
    auto* keys = static_cast<Value*>(arena_.Take(n * sizeof(Value)));
    if (keys == nullptr) return nullptr;
    std::copy_n(shape.keys, n, keys);
    shape.kept = keys;
  }
  return shape.kept;
}

// A pair is added to a dict that shares its keys: it becomes a plain one, with room for `more`.
bool ContainerMaker::Unshape(Container& c, std::size_t more) {
  Container plain;
  if (!Reserve(plain, c.count + more)) return false;
  for (std::size_t i = 0; i < c.count / 2; ++i) {
    plain.items[2 * i] = PairKey(c, i);
    plain.items[2 * i + 1] = PairValue(c, i);
  }
  plain.count = c.count;
  c = plain;
  return true;
}

// Pairs from `first` on were added to others, which have different keys.
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

// Equal keys are dropped at once while there are fewer than kIndexedFrom values, by comparing each
// with each. A larger dict is put on the list once (when it passes the limit) and cleaned in one
// pass at the end: comparing there would be quadratic.
bool ContainerMaker::AddPairs(Container& c, const Value* from, std::size_t values) {
  if (values == 0) return true;
  const std::size_t pairs = values / 2;
  if (c.count == 0 && pairs >= 2 && pairs <= kMaxSharedKeys) {
    if (const Value* keys = ShapeOf(from, pairs); keys != nullptr) {
      auto* items = static_cast<Value*>(arena_.Take((pairs + 1) * sizeof(Value)));
      if (items == nullptr) return false;
      items[0] = Access::At(Kind::kNone, keys);
      for (std::size_t i = 0; i < pairs; ++i) items[1 + i] = from[2 * i + 1];
      c.items = items;
      c.count = static_cast<std::uint32_t>(values);
      c.capacity = Container::kShaped;
      return true;
    }
  }
  if (c.capacity == Container::kShaped && !Unshape(c, values)) return false;
  const std::size_t before = c.count;
  if (!Append(c, from, values)) return false;
  if (c.count < kIndexedFrom) {
    DropEqual(c, before / 2);
    return true;
  }
  return before >= kIndexedFrom || large_.Push(&c);
}

ContainerMaker::Took ContainerMaker::TakeItems(Container& c, const Value& from, bool listed) {
  const auto add = [&](const Value& key, const Value& value) {
    const Value pair[2] = {key, value};
    if (!KeyFault(c.count > 0 ? PairKey(c, 0) : key, key).empty()) return Took::kNothing;
    return AddPairs(c, pair, 2) ? Took::kAll : Took::kNoMemory;
  };
  Took took = Took::kAll;
  if (IsPythonDict(from)) {
    for (std::size_t i = 0; i < from.size() && took == Took::kAll; ++i) {
      took = add(from.key(i), from.item(i));
    }
    return took;
  }
  // A Counter counts the items of a list instead, and a pair that is no pair is an error in Python.
  const auto is_row = [](const Value& v) {
    return v.kind() == Kind::kList || v.kind() == Kind::kTuple;
  };
  if (!listed || !is_row(from)) return Took::kNothing;
  for (std::size_t i = 0; i < from.size() && took == Took::kAll; ++i) {
    const Value pair = from.item(i);
    if (!is_row(pair) || pair.size() != 2) return Took::kNothing;
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

// Open addressing at a load of at most one half; O(pairs) with a hash that the stream cannot
// foresee. Afterwards `items` is a pointer to the index, which has the pairs.
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
