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

// A reader of Python pickles; the opcodes are those of CPython's Lib/pickletools.py. Nothing is
// imported, called or constructed: the reader makes a record of each object that the stream tells
// Python to build. Time and memory are linear in the size of the stream, also for hostile streams.

namespace tensormount::pickle {

// Kind of a value. Integers have two kinds, because almost all fit in 64 bits and the others are
// needed only as bytes.
enum class Kind : std::uint8_t {
  kNone = 0,
  kBool,
  kInt,   // Fits in 64 bits.
  kLong,  // Does not fit in 64 bits: text() is two's complement, little-endian.
  kFloat,
  kString,  // UTF-8, checked.
  kBytes,
  kTuple,
  kList,
  kSet,
  kDict,
  kGlobal,      // A name "module.name".
  kObject,      // A call of callee() with args() in the stream; recorded, never called.
  kPersistent,  // An object that the stream names by a persistent id, which is args().
};

// A reference to a value of a Document, cheap to copy and valid as long as the document. Most
// accessors work only for the kinds in their name or comment (asserted), so look at kind() first.
// Several values may refer to one record, also in cycles, so a recursive walk must limit its depth.
//
// Takes 16 bytes and has no destructor: the records are in the arena of the document.
class Value {
 public:
  Value() = default;  // None.

  Kind kind() const { return static_cast<Kind>(rep_ & 0xff); }
  bool boolean() const;
  std::int64_t integer() const;
  double real() const;
  // The bytes of a kString, kBytes or kLong. Valid as long as the document.
  std::string_view text() const;
  // The two parts of the name of a kGlobal, "module.name".
  std::string_view module() const;
  std::string_view name() const;
  // Meaning of the name of a kGlobal. kUnknown only if the options accept unknown names.
  KnownClass known() const;

  // Number of items of a kTuple, kList or kSet, or of pairs of a kDict or kObject. The pairs of a
  // kObject are those that it was made from (OrderedDict) or that SETITEMS added, and the items
  // that APPENDS added. As in Python, equal texts or numbers as keys give one pair, with the
  // position of the first key and the value of the last. Other keys (tuples, objects) and texts
  // over 2,048 bytes are not compared, so each has its own pair.
  std::size_t size() const;
  // Item i. For a kDict, and for pairs of a kObject: the value of pair i.
  Value item(std::size_t i) const;
  // The key of pair i of a kDict or kObject. None for an item that APPENDS added.
  Value key(std::size_t i) const;

  // The function or class that a kObject calls, as a kGlobal.
  Value callee() const;
  // The arguments of a kObject, a kTuple. For a kPersistent: the persistent id, a value of any
  // kind.
  Value args() const;
  // The state that the opcode BUILD gave to a kObject. None if the stream has no BUILD for it.
  Value state() const;
  // Whether the stream has a BUILD for this kObject, even one whose state is None.
  bool built() const;
  // Whether this is a kObject made by the class or function `of`.
  bool Is(KnownClass of) const;

  // The value under a string key of a kDict, or under the name of an attribute of a kObject.
  // Attributes are in the state of the object, which is a dict or a pair of dict and slots. nullopt
  // if there is no such key.
  std::optional<Value> Find(std::string_view key) const;

  // Identifies the record of a list, set, dict or object in the document. Only these kinds of
  // records may be changed by the stream after it made them.
  std::uint64_t record() const { return bits_; }
  // Whether both values refer to the same record. That is not equality: two equal texts are the
  // same record only if the stream memoized the text.
  bool SameAs(const Value& other) const { return rep_ == other.rep_ && bits_ == other.bits_; }

 private:
  friend struct Access;
  // First word: kind, form and length. Second word: the scalar itself, or a pointer to the text or
  // record (pickle_record.h).
  std::uint64_t rep_ = 0;
  std::uint64_t bits_ = 0;
};

// A parsed stream and the bytes that it was parsed from. Movable. Immutable, so any number of
// threads may read it.
class Document {
 public:
  Document(Document&&) noexcept;
  Document& operator=(Document&&) noexcept;
  ~Document();

  // The pickled value: the value on the stack at the opcode STOP.
  Value root() const;
  // All kPersistent values in the order of the stream, including those that no other value refers
  // to.
  std::size_t persistent_count() const;
  Value persistent(std::size_t i) const;
  // Size of the pickle including STOP. Bytes after STOP do not belong to the pickle.
  std::size_t bytes() const;
  // Bytes of memory that the arena and the stream take.
  std::size_t memory() const;

 private:
  friend class Machine;
  friend struct Access;
  struct Rep;
  explicit Document(std::unique_ptr<Rep> rep);
  std::unique_ptr<Rep> rep_;
};

enum class Unknown {
  kRefuse,  // A name that is not in pickle_classes.h fails the parse.
  // Names that are not in pickle_classes.h are kept as names. For listings, which show every name
  // in a stream.
  kInert,
  // A name of another package (IsForeignName) is kept as a name, and an object made by it as a
  // value without a meaning. All other names must be in pickle_classes.h, as with kRefuse.
  kForeignClasses,
};

// Options of a parse. The defaults are for metadata files: the pickle is the whole file, and every
// name must be known.
struct Options {
  Unknown unknown = Unknown::kRefuse;
  bool trailing_bytes = false;  // Whether bytes after STOP are allowed.
  std::size_t max_bytes = std::size_t{2} << 30;
};

// Parses a pickle and takes over its bytes, because texts of values are views of them.
//
// kDataLoss "pickle: byte 17: ...": the stream is truncated or malformed (for example: unknown
// opcode, stack or mark underflow, a memo slot that is empty or too far ahead, lengths past the
// end, text that is not UTF-8, numbers out of range, a function used as a class, no STOP).
//
// kUnsupported "pickle: byte 17: contains a Python object (os.system) ...": a name outside of the
// allow-list; an opcode that checkpoints never use (INST, OBJ, EXT*, PERSID, the text opcodes of
// protocol 0, out-of-band buffers); a call of getattr for anything but an enum, or of a value that
// is not a name; a protocol other than 2 to 5; or records that would differ from what Python makes:
// a dict made from neither a dict nor a list of pairs, keys that are lists or dicts, keys made by
// calls (which may equal any key) beside other keys, a change of a dict that Python has already
// copied into an object.
//
// kResourceExhausted: the stream is over Options::max_bytes or 2^31 - 1 bytes, or the records would
// need more than 48 MiB + 4 x the stream.
Result<Document> Parse(std::string bytes, const Options& options = {});

// Whether `value` is a name outside of the allow-list, which kForeignClasses or kInert accepted, or
// an object made by such a name.
bool IsForeign(const Value& value);

// A listing for people, at most `max_lines` lines. Each value has one indented line; names of calls
// are marked "(not called)", and long texts are cut. A shared container or object is expanded once.
std::string Describe(const Document& document, std::size_t max_lines = 1000);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_H_
