// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "index/archives/pickle_classes.h"

// Python pickles, read as data (the opcodes are those of CPython's Lib/pickletools.py). Nothing is
// imported, called or constructed: what a stream says to build becomes records of what it said.
// Time and memory are linear in the size of the stream, whatever is in it.

namespace tensormount::pickle {

// Two kinds for integers, since almost all fit 64 bits and the rest is text to everybody.
enum class Kind : std::uint8_t {
  kNone = 0,
  kBool,
  kInt,   // Fits 64 bits.
  kLong,  // Does not: text() is two's complement, little-endian.
  kFloat,
  kString,  // UTF-8, checked.
  kBytes,
  kTuple,
  kList,
  kSet,
  kDict,
  kGlobal,      // A name "module.name".
  kObject,      // What the stream wants made by calling callee() with args(): never done.
  kPersistent,  // BINPERSID; args() is its id.
};

// A position in a Document, cheap to copy; valid as long as the document. Reads below answer for
// the kinds that they name only (asserted); look at kind() first. Values may be shared and may form
// cycles: whoever walks them counts depth.
// 16 bytes and no destructor: records of a pickle are in the arena of its document, and nothing is
// counted or freed one by one.
class Value {
 public:
  Value() = default;  // None.

  Kind kind() const { return static_cast<Kind>(rep_ & 0xff); }
  bool boolean() const;
  std::int64_t integer() const;
  double real() const;
  // kString, kBytes, kLong.
  // Valid as long as the document.
  std::string_view text() const;
  // kGlobal.
  std::string_view module() const;
  std::string_view name() const;
  KnownClass known() const;  // KnownClass::kUnknown only where the parse was told to let them be.

  // Items of kTuple, kList, kSet; pairs of kDict; also those that a kObject (OrderedDict) was made
  // from, that were put into it by SETITEMS, and appended by APPENDS. Of equal keys, as in Python,
  // there is one pair: at the position of the first with the value of the last. Keys over 2,048
  // bytes are not compared.
  std::size_t size() const;
  Value item(std::size_t i) const;  // Of kDict and of pairs in a kObject: the value.
  Value key(std::size_t i) const;   // kDict, kObject: None for what was appended.

  // kObject. `state`: what BUILD set; None where there was no BUILD.
  Value callee() const;  // A kGlobal.
  Value args() const;    // A kTuple; of kPersistent anything.
  Value state() const;
  bool built() const;  // Whether there was a BUILD, of None too.
  // Whether it is a kObject made by that class or function.
  bool Is(KnownClass of) const;

  // The value under a string key: of a kDict, or of the dict that is a kObject's state (its
  // attributes; of a pair (dict, slots) either). nullopt: none.
  std::optional<Value> Find(std::string_view key) const;

  // Tells records of the document apart that a stream may change after it made them: lists, sets,
  // dicts and objects.
  std::uint64_t record() const { return bits_; }
  // The same record in the document (not equality).
  // True of two references to one record; of two equal texts only where the stream memoized them.
  bool SameAs(const Value& other) const { return rep_ == other.rep_ && bits_ == other.bits_; }

 private:
  friend struct Access;
  // kind, form and length; the scalar itself or a pointer into the document (pickle_record.h).
  std::uint64_t rep_ = 0;
  std::uint64_t bits_ = 0;
};

// A parsed stream. Movable; keeps the bytes that it was made from.
// Immutable once parsed, so any number of threads may read it.
class Document {
 public:
  Document(Document&&) noexcept;
  Document& operator=(Document&&) noexcept;
  ~Document();

  // What STOP left on the stack.
  Value root() const;
  // Every kPersistent in the order of the stream, also those that nothing refers to.
  std::size_t persistent_count() const;
  Value persistent(std::size_t i) const;
  // Bytes of the stream, STOP included: what follows is not the pickle's.
  std::size_t bytes() const;
  // What it takes: arena and stream.
  std::size_t memory() const;

 private:
  friend class Machine;
  friend struct Access;
  struct Rep;
  explicit Document(std::unique_ptr<Rep> rep);
  std::unique_ptr<Rep> rep_;
};

enum class Unknown {
  kRefuse,  // A name that is not in pickle_classes.h ends the parse.
  kInert,   // It stays a name. For listings, which show what a stream would have asked for.
  // A class of a package that is not ours to know stays a name, and what is made of it a value
  // without a meaning (IsForeignName); names of Python's own modules, and of torch but for its
  // modules and optimizers, end the parse. Everything else is as with kRefuse.
  kForeignClasses,
};

// Defaults are for metadata, which must be all of their file and know every name in it.
struct Options {
  Unknown unknown = Unknown::kRefuse;
  bool trailing_bytes = false;  // Whether bytes after STOP are allowed.
  std::size_t max_bytes = std::size_t{2} << 30;
};

// kDataLoss "pickle: byte 17: ..." for what is truncated or no pickle: unknown opcode, stack or
// mark underflow, a memo slot that was never filled or lies outside of what its number of entries
// allows, lengths past the end, text that is not UTF-8, numbers out of range, no STOP.
// kUnsupported "pickle: byte 17: asks for os.system, which ..." for names outside of the
// allow-list, for opcodes of the language that these formats never use (INST, OBJ, EXT*, PERSID,
// out-of-band buffers), and where records would not be what Python makes: dicts made from what is
// neither a dict nor a list of pairs, keys that are lists or dicts, dicts that mix keys made by
// calls (which may equal others) with others, a dict that is changed after Python has copied it
// into an object, functions that are asked to be made instead of called. kResourceExhausted where
// the records would pass 48 MiB + 4 x the stream.
// Takes the bytes over: texts of values are views of them.
Result<Document> Parse(std::string bytes, const Options& options = {});

// Whether the value is a name that the parse let be (kForeignClasses), or was made by one.
bool IsForeign(const Value& value);

// What the document holds, for a person: one line a value, indented, names that were asked for
// marked "(not called)", long ones cut, at most `max_lines`. Shared values are shown once.
std::string Describe(const Document& document, std::size_t max_lines = 1000);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_H_
