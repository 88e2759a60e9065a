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

// The memory layout of a parsed pickle. Only pickle*.cc use it.
//
// A Value is two words. The first word has the kind (8 bits), the form (8 bits) and the length (48
// bits). The second word is the scalar itself, or a pointer to a text in the stream or to a record
// in the arena. Tuples of integers (sizes and offsets, most of the values in metadata) are arrays
// of plain integers.

// The layout is compact because a .metadata of 100,000 chunks is a stream of 14 MB, with several
// dicts, tuples and strings for each chunk. A chunk takes about 730 bytes in this layout; with one
// allocation for each record it would take several times as much. The pointer and the length of
// each kind:
//   kString, kBytes, kLong   pointer into the stream, length
//   kTuple                   array of Values or of integers (Form), length
//   kList, kSet, kDict       Container
//   kGlobal                  ClassRow, of the table or of the arena
//   kObject                  PickledObject, or a tuple of integers (torch.Size, Form::kInts)
//   kPersistent              the Value of its id
//
// Records are trivially destructible, since the arena runs no destructors.
namespace tensormount::pickle {

// A name and its meaning. The texts are literals of the table, or views of the stream.
struct ClassRow {
  std::string_view module;
  std::string_view name;
  KnownClass known = KnownClass::kUnknown;
};
// The table row of a name; null if the name is not in the table. If the name is not in the table,
// but looks like a class and its module allows every class name, `*prefix` (if not null) is set to
// the meaning of those names. Table rows live as long as the program.
const ClassRow* FindClassRow(std::string_view module, std::string_view name, KnownClass* prefix);

// Layout of a tuple or object. Three values can share one array of integers: (1, 2) is a kTuple of
// form kInts, ((1, 2),), the argument tuple of torch.Size, is a kTuple of form kOneInts, and
// torch.Size((1, 2)) is a kObject of form kInts.
enum class Form : std::uint8_t {
  // The second word of a kTuple is a Value*, of a kObject a PickledObject*.
  kPlain = 0,
  // The second word is a std::int64_t*. A kObject is the torch.Size of these integers.
  kInts = 1,
  // A kTuple with one item, which is a kTuple of form kInts.
  kOneInts = 2,
};

// The values of a list or set, or the pairs of a dict (key, value, key, value). `capacity` is also
// a flag (kIndexed), because a container with an index does not grow.
struct Container {
  // Value of `capacity` in a finished large dict. `items` then points to a KeyIndex.
  static constexpr std::uint32_t kIndexed = 0xfffffffe;
  static constexpr std::uint32_t kMaxCount = 0x7fffffff;

  Value* items = nullptr;
  std::uint32_t count = 0;  // Number of values. A dict has two for each pair.
  std::uint32_t capacity = 0;
  // Whether the dict is the state in a BUILD. Python copies the items of that dict into an object,
  // so the parser refuses later changes of the dict (Machine::NoteCopied).
  bool copied = false;
};

// Arguments and items of an object. Separate from PickledObject, because most objects of metadata
// have only a state.
struct ObjectExtra {
  Value args;
  Container pairs;
};

// The record of an object. All values that refer to the object share it, so that they all see a
// later BUILD or SETITEMS, as in Python.
struct PickledObject {
  const ClassRow* callee = nullptr;
  Value state;
  ObjectExtra* extra = nullptr;
};

// A hash index of the text and number keys of a large dict, with open addressing. It has `mask` + 1
// slots, a power of two, of which at most half are used. A slot holds the number of a pair plus
// one; 0 means empty. Texts over kMaxKey are not in the index, because a stream may use one long
// text for every key. `items` are the pairs.
struct KeyIndex {
  static constexpr std::size_t kMaxKey = 2048;

  std::uint64_t mask = 0;
  std::uint32_t* slots = nullptr;
  Value* items = nullptr;
};
// Hash of a text. The seed is different in each process, so nothing may depend on the order of
// hashes.
std::uint64_t HashKey(std::string_view key);

// Allocates the memory of a document, and frees it only when the document is destroyed. Not
// thread-safe: one parse writes the arena, and afterwards it is only read. The limit counts the
// memory taken from the system, so it bounds the memory of one parse.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Returns memory aligned to 8 bytes. Null if the limit would be exceeded or the system has no
  // memory.
  void* Take(std::size_t bytes) {
    bytes = (bytes + 7) & ~std::size_t{7};
    if (bytes <= static_cast<std::size_t>(end_ - at_)) {
      void* out = at_;
      at_ += bytes;
      return out;
    }
    return TakeSlow(bytes);
  }
  // Counts memory outside of the arena (BudgetedArray) against the same limit. Returns false if the
  // limit would be exceeded.
  bool Charge(std::size_t bytes) {
    if (bytes > limit_ - used_) return false;
    used_ += bytes;
    return true;
  }
  void Refund(std::size_t bytes) { used_ -= bytes; }
  // Sets the limit. Call this before the first Take.
  void set_limit(std::size_t limit) { limit_ = limit; }
  std::size_t used() const { return used_; }

 private:
  // Take for a request that does not fit in the current block.
  void* TakeSlow(std::size_t bytes);

  std::vector<void*> blocks_;
  char* at_ = nullptr;
  char* end_ = nullptr;
  std::size_t used_ = 0;
  std::size_t limit_ = 0;
};

// The parts of a document. `bytes` comes first and never moves or changes, because texts point into
// it.
struct Document::Rep {
  std::string bytes;
  Arena arena;
  Value root;
  Container persistent;  // All kPersistent values in the order of the stream.
  std::size_t consumed = 0;
};

// Makes and reads the two words of a Value. A friend of Value and Document, so that only the files
// of the parser reach their private parts.
struct Access {
  static Value Make(Kind kind, std::uint64_t bits, std::uint64_t length = 0,
                    Form form = Form::kPlain) {
    Value v;
    v.rep_ =
        static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(form) << 8 | length << 16;
    v.bits_ = bits;
    return v;
  }
  // A value that points to `record`. The record must be in the arena, the stream or the table of
  // classes, which live as long as the document.
  static Value At(Kind kind, const void* record, std::uint64_t length = 0,
                  Form form = Form::kPlain) {
    return Make(kind, reinterpret_cast<std::uintptr_t>(record), length, form);
  }
  static Form FormOf(const Value& v) { return static_cast<Form>(v.rep_ >> 8 & 0xff); }
  // The length, which has 48 bits of the first word.
  static std::size_t Length(const Value& v) { return static_cast<std::size_t>(v.rep_ >> 16); }
  static std::uint64_t Bits(const Value& v) { return v.bits_; }
  // The pointer of a value. Valid only if kind and form say that it points to a T.
  template <typename T>
  static T* PointerTo(const Value& v) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(v.bits_));
  }
  // Whether a memo slot was never filled. A stream may leave gaps between the numbers of its slots.
  static bool Empty(const Value& v) { return v.rep_ == kEmptyRep; }
  // The value of an empty memo slot. It occurs only in the memo; callers of the parser never see
  // it.
  static Value EmptySlot() {
    Value v;
    v.rep_ = kEmptyRep;
    return v;
  }
  // Makes the document after STOP.
  static Result<Document> Finish(std::unique_ptr<Document::Rep> rep) {
    return Document(std::move(rep));
  }
  using Rep = Document::Rep;

  // First word of an unfilled memo slot; no valid kind.
  static constexpr std::uint64_t kEmptyRep = 0xff;
};

// The array of the pairs of a dict: key, value, key, value.
inline const Value* PairRow(const Container& c) {
  return c.capacity == Container::kIndexed ? reinterpret_cast<const KeyIndex*>(c.items)->items
                                           : c.items;
}
// The key of a pair. `pair` must be less than count / 2.
inline Value PairKey(const Container& c, std::size_t pair) { return PairRow(c)[2 * pair]; }
// The value of a pair, also for the pairs of a kObject.
inline Value PairValue(const Container& c, std::size_t pair) { return PairRow(c)[2 * pair + 1]; }

// Whether Python treats two keys of a dict as the same: equal texts, and equal numbers of any type
// (True, 1 and 1.0). Other keys (tuples, objects, bytes) are never the same in this function, so
// equal ones stay separate pairs. A strict parse refuses objects that may equal a text or number of
// the same dict (KeyFault).
bool SameKey(const Value& a, const Value& b);
// Whether SameKey can be true for `key`. If so, sets the hash that all equal keys share.
bool KeyHash(const Value& key, std::uint64_t& hash);

// `text` for messages: control characters become \xNN, and text over 120 bytes is cut between
// characters.
std::string ShownName(std::string_view text);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_RECORD_H_
