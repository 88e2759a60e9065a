// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_RECORD_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "index/archives/pickle.h"
#include "index/archives/pickle_classes.h"

// How a parsed pickle lies in memory; known to pickle*.cc only.
//
// A Value is two words. The first: kind (8 bits), form (8 bits), length (48 bits). The second: the
// scalar, or a pointer: into the stream (text), or to a record in the arena. Sizes, which metadata
// is full of, are rows of plain integers.

// Why so tight: a .metadata of 100,000 chunks is 14 MB of stream, in which every chunk is some
// dicts, tuples and strings. With an allocation for each of them it would take several times that
// memory; here a chunk takes about 730 bytes, all records are in one arena, and freeing the
// document frees a few blocks.
//
//   kString, kBytes, kLong   pointer into the stream, length
//   kTuple                   array of Values or of integers (Form), length
//   kList, kSet, kDict       Container
//   kGlobal                  ClassRow, of the table or of the arena
//   kObject                  PickledObject, or a tuple of integers (torch.Size, Form::kInts)
//   kPersistent              the Value of its id
//
// Records are trivially destructible, since the arena runs no destructors.
namespace tensormount::pickle {

// A name and what it means; texts are literals of the table, or views of the stream.
struct ClassRow {
  std::string_view module;
  std::string_view name;
  KnownClass known = KnownClass::kUnknown;
};
// Null where the name is not in the table; `prefix` is set where a whole module is allowed.
// Rows of the table live as long as the program.
const ClassRow* FindClassRow(std::string_view module, std::string_view name, KnownClass* prefix);

// (1, 2) is kInts; ((1, 2),), which is the argument of torch.Size, is kOneInts of the same
// integers; torch.Size((1, 2)) is a kObject of form kInts. So all three share one array.
enum class Form : std::uint8_t {
  kPlain = 0,    // kTuple: Value*. kObject: PickledObject*.
  kInts = 1,     // kTuple: std::int64_t*. kObject: torch.Size of such a tuple.
  kOneInts = 2,  // kTuple of one item, a kTuple of form kInts.
};

// Values of a list or set; pairs, key before value, of a dict.
// 16 bytes and a flag. `capacity` doubles as the form: it is not needed once a container is
// indexed.
struct Container {
  // In `capacity`: finished, and `items` points at a KeyIndex.
  static constexpr std::uint32_t kIndexed = 0xfffffffe;
  static constexpr std::uint32_t kMaxCount = 0x7fffffff;

  Value* items = nullptr;
  std::uint32_t count = 0;  // Of values; of a dict twice the pairs.
  std::uint32_t capacity = 0;
  bool copied = false;  // Python took a copy of it; what is put in afterwards is not in that.
};

// Apart, because most objects of metadata have a state and neither arguments nor items.
struct ObjectExtra {
  Value args;
  Container pairs;
};

// Shared by all values that refer to it, so what BUILD and SETITEMS do to it later is seen by all,
// as in Python.
struct PickledObject {
  const ClassRow* callee = nullptr;
  Value state;
  ObjectExtra* extra = nullptr;
};

// String keys of a large dict: open addressing, slots hold the number of the pair plus one. Long
// ones are not in it: a stream may say one text once and make it every key.
// `mask` + 1 slots, a power of two, at most half of them taken. `items` are the pairs.
struct KeyIndex {
  static constexpr std::size_t kMaxKey = 2048;

  std::uint64_t mask = 0;
  std::uint32_t* slots = nullptr;
  Value* items = nullptr;
};
// Not the same in two runs of a program, so nothing may depend on its order.
std::uint64_t HashKey(std::string_view key);

// The document's only way to memory: counts, frees nothing before its own end.
// Not thread-safe: one parse writes it, and afterwards it is only read. The limit is on what was
// taken from the system, not on what was asked for, so it bounds the process.
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
  // Rows of the machine use this.
  bool Charge(std::size_t bytes) {
    if (bytes > limit_ - used_) return false;
    used_ += bytes;
    return true;
  }
  void Refund(std::size_t bytes) { used_ -= bytes; }
  // Before the first Take.
  void set_limit(std::size_t limit) { limit_ = limit; }
  std::size_t used() const { return used_; }

 private:
  // A new block.
  void* TakeSlow(std::size_t bytes);

  std::vector<void*> blocks_;
  char* at_ = nullptr;
  char* end_ = nullptr;
  std::size_t used_ = 0;
  std::size_t limit_ = 0;
};

// The stream first: texts point into it, so it never moves (the Rep is on the heap and its string
// is not touched).
struct Document::Rep {
  std::string bytes;
  Arena arena;
  Value root;
  Container persistent;  // All of them, in the order of the stream.
  std::size_t consumed = 0;
};

// The only friend of Value and Document: the layout of the two words is known here and nowhere
// else.
struct Access {
  static Value Make(Kind kind, std::uint64_t bits, std::uint64_t length = 0,
                    Form form = Form::kPlain) {
    Value v;
    v.rep_ =
        static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(form) << 8 | length << 16;
    v.bits_ = bits;
    return v;
  }
  // The pointer must be to something in the arena, the stream or the table of classes, which all
  // live as long as the document.
  static Value At(Kind kind, const void* record, std::uint64_t length = 0,
                  Form form = Form::kPlain) {
    return Make(kind, reinterpret_cast<std::uintptr_t>(record), length, form);
  }
  static Form FormOf(const Value& v) { return static_cast<Form>(v.rep_ >> 8 & 0xff); }
  // 48 bits.
  static std::size_t Length(const Value& v) { return static_cast<std::size_t>(v.rep_ >> 16); }
  static std::uint64_t Bits(const Value& v) { return v.bits_; }
  // Only where kind and form say that there is a T.
  template <typename T>
  static T* PointerTo(const Value& v) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(v.bits_));
  }
  // A memo has holes where a stream numbers its slots with gaps.
  static bool Empty(const Value& v) { return v.rep_ == kEmptyRep; }
  // Of a memo only; no value that anybody gets to see is one.
  static Value EmptySlot() {
    Value v;
    v.rep_ = kEmptyRep;
    return v;
  }
  // When the stream is read to its STOP.
  static Result<Document> Finish(std::unique_ptr<Document::Rep> rep) {
    return Document(std::move(rep));
  }
  using Rep = Document::Rep;

  static constexpr std::uint64_t kEmptyRep = 0xff;  // No kind: a memo slot that was not filled.
};

// Of a dict: key, value, key, value.
inline const Value* PairRow(const Container& c) {
  return c.capacity == Container::kIndexed ? reinterpret_cast<const KeyIndex*>(c.items)->items
                                           : c.items;
}
// `pair` is below count / 2.
inline Value PairKey(const Container& c, std::size_t pair) { return PairRow(c)[2 * pair]; }
// Of a kDict, or of the pairs of a kObject.
inline Value PairValue(const Container& c, std::size_t pair) { return PairRow(c)[2 * pair + 1]; }

// Whether Python takes two keys of a dict for one: equal texts, and equal numbers whatever their
// type (True, 1 and 1.0). What cannot equal a text or an integer is not looked at. What a call made
// (tuples, objects) is never the same key as anything here: a strict parse refuses dicts in which
// that would matter (KeyFault).
bool SameKey(const Value& a, const Value& b);
// Whether SameKey can be true of it, and the hash that then is the same.
bool KeyHash(const Value& key, std::uint64_t& hash);

// For messages: printable, cut.
// Control characters become \xNN, and what is over 120 bytes is cut at a character.
std::string ShownName(std::string_view text);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_RECORD_H_
