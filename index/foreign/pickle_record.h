// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_PICKLE_RECORD_H_
#define TENSORMOUNT_INDEX_FOREIGN_PICKLE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "index/foreign/pickle.h"
#include "index/foreign/pickle_classes.h"

// How a parsed pickle lies in memory; known to pickle*.cc only.
//
// A Value is two words. The first: kind (8 bits), form (8 bits), length (48 bits). The second: the
// scalar, a place in the stream (text), or a record in the arena. Sizes, which metadata is full of,
// are rows of plain integers; dicts of attributes share their keys.

namespace tensormount::pickle {

struct ClassRow {
  std::string_view module;
  std::string_view name;
  KnownClass known = KnownClass::kUnknown;
};
// Null where the name is not in the table; `prefix` is set where a whole module is allowed.
const ClassRow* FindClassRow(std::string_view module, std::string_view name, KnownClass* prefix);

enum class Form : std::uint8_t {
  kPlain = 0,    // kTuple: Value*. kObject: PickledObject*.
  kInts = 1,     // kTuple: std::int64_t*. kObject: torch.Size of such a tuple.
  kOneInts = 2,  // kTuple of one item, a kTuple of form kInts.
};

// Values of a list or set; pairs, key before value, of a dict.
struct Container {
  // In `capacity`: items[0] is the place of the keys, items[1...] are values only.
  static constexpr std::uint32_t kShaped = 0xffffffff;
  // Finished, and `items` is the place of a KeyIndex.
  static constexpr std::uint32_t kIndexed = 0xfffffffe;
  static constexpr std::uint32_t kMaxCount = 0x7fffffff;

  Value* items = nullptr;
  std::uint32_t count = 0;  // Of values; of a dict twice the pairs, shaped or not.
  std::uint32_t capacity = 0;
  bool copied = false;  // Python took a copy of it; what is put in afterwards is not in that.
};

struct Shape {
  static constexpr std::uint32_t kMaxKeys = 8;  // Larger dicts share none.
  Value keys[kMaxKeys];
};

struct ObjectExtra {
  Value args;
  Container pairs;
};

struct PickledObject {
  const ClassRow* callee = nullptr;
  Value state;
  ObjectExtra* extra = nullptr;
};

// String keys of a large dict: open addressing, slots hold the number of the pair plus one. Long
// ones are not in it: a stream may say one text once and make it every key.
struct KeyIndex {
  static constexpr std::size_t kMaxKey = 2048;

  std::uint64_t mask = 0;
  std::uint32_t* slots = nullptr;
  Value* items = nullptr;
};
std::uint64_t HashKey(std::string_view key);

// Of large streams: faults of small pages would take as long as the parse. For std::free; null:
// there is no memory.
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;
void* TakeHugePage();

// The document's only way to memory: counts, never frees a piece.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Null where `limit` would be passed or there is no memory. Aligned to 8 bytes.
  void* Take(std::size_t bytes) {
    bytes = (bytes + 7) & ~std::size_t{7};
    if (bytes <= static_cast<std::size_t>(end_ - at_)) {
      void* out = at_;
      at_ += bytes;
      return out;
    }
    return TakeSlow(bytes);
  }
  // Memory of the same budget that is not the arena's.
  bool Charge(std::size_t bytes) {
    if (bytes > limit_ - used_) return false;
    used_ += bytes;
    return true;
  }
  void Refund(std::size_t bytes) { used_ -= bytes; }
  void set_limit(std::size_t limit) { limit_ = limit; }
  std::size_t used() const { return used_; }

 private:
  void* TakeSlow(std::size_t bytes);

  std::vector<void*> blocks_;
  char* at_ = nullptr;
  char* end_ = nullptr;
  std::size_t used_ = 0;
  std::size_t limit_ = 0;
};

struct Document::Rep {
  std::string bytes;
  Arena arena;
  Value root;
  Container persistent;  // All of them, in the order of the stream.
  std::size_t consumed = 0;
};

struct Access {
  static Value Make(Kind kind, std::uint64_t bits, std::uint64_t length = 0,
                    Form form = Form::kPlain) {
    Value v;
    v.rep_ =
        static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(form) << 8 | length << 16;
    v.bits_ = bits;
    return v;
  }
  static Value At(Kind kind, const void* place, std::uint64_t length = 0,
                  Form form = Form::kPlain) {
    return Make(kind, reinterpret_cast<std::uintptr_t>(place), length, form);
  }
  static Form FormOf(const Value& v) { return static_cast<Form>(v.rep_ >> 8 & 0xff); }
  static std::size_t Length(const Value& v) { return static_cast<std::size_t>(v.rep_ >> 16); }
  static std::uint64_t Bits(const Value& v) { return v.bits_; }
  template <typename T>
  static T* Place(const Value& v) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(v.bits_));
  }
  static bool Empty(const Value& v) { return v.rep_ == kEmptyRep; }
  static Value EmptySlot() {
    Value v;
    v.rep_ = kEmptyRep;
    return v;
  }
  static Result<Document> Finish(std::unique_ptr<Document::Rep> rep) {
    return Document(std::move(rep));
  }
  using Rep = Document::Rep;

  static constexpr std::uint64_t kEmptyRep = 0xff;  // No kind: a memo slot that was not filled.
};

inline Value PairKey(const Container& c, std::size_t pair) {
  switch (c.capacity) {
    case Container::kShaped:
      return Access::Place<const Value>(c.items[0])[pair];
    case Container::kIndexed:
      return reinterpret_cast<const KeyIndex*>(c.items)->items[2 * pair];
    default:
      return c.items[2 * pair];
  }
}
inline Value PairValue(const Container& c, std::size_t pair) {
  switch (c.capacity) {
    case Container::kShaped:
      return c.items[1 + pair];
    case Container::kIndexed:
      return reinterpret_cast<const KeyIndex*>(c.items)->items[2 * pair + 1];
    default:
      return c.items[2 * pair + 1];
  }
}

// Whether Python takes two keys of a dict for one: equal texts, and equal numbers whatever their
// type (True, 1 and 1.0). What cannot equal a text or an integer is not looked at.
bool SameKey(const Value& a, const Value& b);
// Whether SameKey can be true of it, and the hash that then is the same.
bool KeyHash(const Value& key, std::uint64_t& hash);

// For messages: printable, cut.
std::string ShownName(std::string_view text);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_FOREIGN_PICKLE_RECORD_H_
