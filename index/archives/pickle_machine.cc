// SPDX-License-Identifier: Apache-2.0
// The machine that reads a pickle: pickle::Parse of pickle.h. A stack, a memo and marks as Python's
// has them, over the opcodes that checkpoints use; every other one is refused by name. It makes
// values and calls nothing, so the worst that a hostile pickle can do is to be refused, or to be
// large, which is bounded.
//
// The loop is Step(): read one byte, do what the operation says to the stack. A step that fails
// writes status_ and returns false, which ends the loop; there are no exceptions. Code that words
// failures is marked cold, so that the loop stays in the instruction cache.
//
// What every operation may rely on is checked by the few helpers below: Need (bytes of the stream),
// Have and PopMark (values above the last mark), arena_.Take and Row::Push (memory within the
// budget).
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "base/coding.h"
#include "index/archives/pickle_calls.h"
#include "index/archives/pickle_containers.h"
#include "index/archives/pickle_record.h"
#include "shard/utf8.h"

namespace tensormount::pickle {
namespace {

// BINFLOAT is the only operation whose operand is big-endian.
std::uint64_t BigEndian64(const char* p) { return __builtin_bswap64(LoadLittle<std::uint64_t>(p)); }

}  // namespace

// One parse. A step that fails leaves its reason in status_ and returns false.
class Machine {
 public:
  Machine(std::string bytes, const Options& options)
      : rep_(std::make_unique<Access::Rep>()),
        options_(options),
        arena_(rep_->arena),
        stack_(arena_),
        marks_(arena_),
        memo_(arena_) {
    rep_->bytes = std::move(bytes);
    at_ = begin_ = rep_->bytes.data();
    end_ = begin_ + rep_->bytes.size();
    // Linear in the stream: a stream of n bytes cannot make this process take more.
    arena_.set_limit((std::size_t{48} << 20) + 4 * rep_->bytes.size());
  }

  Result<Document> Run();

 private:
  // What tells of failures is kept out of what every operation runs.
  [[gnu::cold, gnu::noinline]] bool Fail(Code code, std::string_view what) {
    status_ =
        Status(code, "pickle: byte " + std::to_string(op_ - begin_) + ": " + std::string(what));
    return false;
  }
  bool Damaged(std::string_view what) { return Fail(Code::kDataLoss, what); }
  [[gnu::cold, gnu::noinline]] bool Exhausted() {
    return Fail(Code::kResourceExhausted, "its records would need over " +
                                              std::to_string((48 << 20) + 4 * rep_->bytes.size()) +
                                              " bytes, which is more than a stream of " +
                                              std::to_string(rep_->bytes.size()) + " bytes may");
  }

  // Compared with what is left, never added to a pointer: n may be 2^64 - 1.
  bool Need(std::uint64_t n) { return n <= static_cast<std::uint64_t>(end_ - at_) || Truncated(n); }
  [[gnu::cold, gnu::noinline]] bool Truncated(std::uint64_t n) {
    return Damaged("truncated: " + std::to_string(n) + " bytes wanted, " +
                   std::to_string(end_ - at_) + " left");
  }
  template <typename T>
  bool Number(T& out) {
    if (!Need(sizeof(T))) return false;
    out = LoadLittle<T>(at_);
    at_ += sizeof(T);
    return true;
  }
  bool Push(const Value& v) { return stack_.Push(v) || Exhausted(); }

  // Values that the operation may take: those above the last mark.
  std::size_t Free() { return stack_.size() - floor_; }
  bool Have(std::size_t n) { return n <= Free() || TooFew(n); }
  [[gnu::cold, gnu::noinline]] bool TooFew(std::size_t n) {
    return Damaged("takes " + std::to_string(n) + " values, there are " + std::to_string(Free()));
  }
  // Where the values above the last mark begin; the mark is gone.
  bool PopMark(std::size_t& first) {
    if (marks_.size() == 0) return Damaged("there is no mark");
    first = floor_;
    DropMark();
    return true;
  }
  bool Mark() {
    if (!marks_.Push(stack_.size())) return Exhausted();
    floor_ = stack_.size();
    return true;
  }
  void DropMark() {
    marks_.Shrink(marks_.size() - 1);
    floor_ = marks_.size() == 0 ? 0 : marks_.back();
  }

  // Texts are not copied: the value points into the stream, which the document keeps.
  template <typename Length>
  bool Text(Kind kind) {
    Length length = 0;
    if (!Number(length) || !Need(length)) return false;
    const std::string_view text(at_, static_cast<std::size_t>(length));
    at_ += length;
    if (kind == Kind::kString && !IsUtf8(text)) return Damaged("text that is no UTF-8");
    return Push(Access::At(kind, text.data(), text.size()));
  }

  // Two's complement of any length, little-endian. Redundant sign bytes are taken off, so that a
  // number that fits 64 bits is kInt however it was written.
  bool Long(std::uint64_t length) {
    if (!Need(length)) return false;
    const char* p = at_;
    at_ += length;
    // Without what only repeats the sign.
    while (length > 1) {
      const auto last = static_cast<unsigned char>(p[length - 1]);
      const bool below = (static_cast<unsigned char>(p[length - 2]) & 0x80) != 0;
      if (!((last == 0 && !below) || (last == 0xff && below))) break;
      --length;
    }
    if (length > 8) return Push(Access::At(Kind::kLong, p, length));
    std::uint64_t v = 0;
    if (length > 0) {
      if ((static_cast<unsigned char>(p[length - 1]) & 0x80) != 0) v = ~std::uint64_t{0};
      std::memcpy(&v, p, length);
    }
    return Push(Access::Make(Kind::kInt, v));
  }

  bool Int(std::int64_t v) { return Push(Access::Make(Kind::kInt, static_cast<std::uint64_t>(v))); }

  // The top n values become a tuple.
  // Three layouts: ((1, 2),) around an existing tuple of integers takes no memory at all (the
  // argument of torch.Size); only integers are a row of 8 bytes each; everything else a row of
  // values.
  bool Tuple(std::size_t n) {
    Value* from = stack_.data() + stack_.size() - n;
    if (n == 1 && from->kind() == Kind::kTuple &&
        (Access::FormOf(*from) == Form::kInts || from->size() == 0)) {
      *from =
          Access::Make(Kind::kTuple, Access::Bits(*from), Access::Length(*from), Form::kOneInts);
      return true;
    }
    bool ints = n > 0;
    for (std::size_t i = 0; i < n && ints; ++i) ints = from[i].kind() == Kind::kInt;
    Value made = Access::Make(Kind::kTuple, 0);
    if (n > 0) {
      void* items = arena_.Take(n * (ints ? sizeof(std::int64_t) : sizeof(Value)));
      if (items == nullptr) return Exhausted();
      if (ints) {
        auto* out = static_cast<std::uint64_t*>(items);
        for (std::size_t i = 0; i < n; ++i) out[i] = Access::Bits(from[i]);
      } else {
        std::memcpy(items, static_cast<const void*>(from), n * sizeof(Value));
      }
      made = Access::At(Kind::kTuple, items, n, ints ? Form::kInts : Form::kPlain);
    }
    stack_.Shrink(stack_.size() - n);
    return Push(made);
  }

  bool NewContainer(Kind kind) {
    auto* c = static_cast<Container*>(arena_.Take(sizeof(Container)));
    if (c == nullptr) return Exhausted();
    *c = Container();
    return Push(Access::At(kind, c));
  }

  // --- Objects ---
  // "Callable" by name: nothing is called. A torch.dtype is a value, which a stream cannot call
  // without being damaged.
  bool Callable(const Value& callee, std::string_view how) {
    return (callee.kind() == Kind::kGlobal && callee.known() != KnownClass::kTorchDtype) ||
           NotCallable(callee, how);
  }
  [[gnu::cold, gnu::noinline]] bool NotCallable(const Value& callee, std::string_view how) {
    if (callee.kind() != Kind::kGlobal) {
      return Fail(Code::kUnsupported,
                  std::string(how) + ": asks to call " + std::string(KindName(callee.kind())));
    }
    return Damaged("asks to call " + FullName(callee) + ", which is no function");
  }

  // Listings show whatever a stream asks for.
  bool CheckCall(const Value& callee, const Value& args, bool made_new) {
    if (options_.unknown == Unknown::kInert) return true;
    if (callee.known() == KnownClass::kGetattr) {
      const std::string fault = GetattrFault(args);
      if (!fault.empty()) return Fail(Code::kUnsupported, fault);
    }
    return !made_new || !IsTensorFunction(callee.known()) ||
           Damaged("asks for a new " + FullName(callee) + ", which is a function");
  }
  // A call of OrderedDict, dict, Counter or defaultdict makes a dict from a copy of its last
  // argument as that is now. The first one of a defaultdict makes values that are missing, and is
  // no items. A bag of names (SimpleNamespace) takes none by position.
  bool TakeItems(const Value& object, const Value& args) {
    const bool dict = IsPythonDict(object);
    const bool makes_values = object.Is(KnownClass::kDefaultDict);
    if (args.size() == (makes_values ? 1u : 0u) || args.size() == 0) return true;
    if (!dict && !object.Is(KnownClass::kDictLike)) return true;
    auto took = ContainerMaker::Took::kNothing;
    if (dict && args.size() == (makes_values ? 2u : 1u)) {
      // Of a list a Counter counts the items, where the others take pairs.
      const bool listed = !object.Is(KnownClass::kCounter);
      Container& pairs = Access::PointerTo<PickledObject>(object)->extra->pairs;
      took = containers_.TakeItems(pairs, args.item(args.size() - 1), listed);
    }
    if (took == ContainerMaker::Took::kNoMemory) return Exhausted();
    if (took == ContainerMaker::Took::kAll || options_.unknown == Unknown::kInert) return true;
    return Fail(Code::kUnsupported, "makes a " + FullName(object.callee()) +
                                        " from what is neither a dict nor a list of pairs");
  }

  // Leaves `made` in place of the top `popped` values.
  // torch.Size((1, 2)) stays a form of the tuple, without an object: a .metadata has several for
  // each chunk.
  bool MakeObject(const Value& callee, const Value& args, std::size_t popped) {
    Value made;
    if (callee.known() == KnownClass::kTorchSize && args.kind() == Kind::kTuple &&
        Access::FormOf(args) == Form::kOneInts) {
      made = Access::Make(Kind::kObject, Access::Bits(args), Access::Length(args), Form::kInts);
    } else {
      auto* object = static_cast<PickledObject*>(arena_.Take(sizeof(PickledObject)));
      if (object == nullptr) return Exhausted();
      *object = PickledObject();
      object->callee = Access::PointerTo<const ClassRow>(callee);
      if (args.size() > 0) {
        if (!Extra(*object)) return false;
        object->extra->args = args;
      }
      made = Access::At(Kind::kObject, object);
    }
    stack_.Shrink(stack_.size() - popped);
    return Push(made);
  }
  // Arguments and items are kept apart from the object, which mostly has a state only.
  bool Extra(PickledObject& object) {
    if (object.extra != nullptr) return true;
    object.extra = static_cast<ObjectExtra*>(arena_.Take(sizeof(ObjectExtra)));
    if (object.extra == nullptr) return Exhausted();
    *object.extra = ObjectExtra();
    object.extra->args = Access::Make(Kind::kTuple, 0);
    return true;
  }

  [[gnu::cold, gnu::noinline]] bool Misused(std::string_view how, std::string_view with,
                                            const Value& v) {
    return Damaged(std::string(how) + std::string(with) + std::string(KindName(v.kind())));
  }

  // REDUCE calls a function with a tuple of arguments, NEWOBJ makes an object of a class: both
  // become the same record.
  bool Reduce(bool newobj) {
    const std::string_view how = newobj ? "NEWOBJ" : "REDUCE";
    if (!Have(2)) return false;
    const Value args = stack_.back();
    const Value callee = stack_[stack_.size() - 2];
    if (!Callable(callee, how)) return false;
    if (args.kind() != Kind::kTuple) return Misused(how, " with arguments that are ", args);
    if (!CheckCall(callee, args, newobj)) return false;
    // Made without a call, a dict takes no notice of its arguments.
    return MakeObject(callee, args, 2) &&
           (newobj || args.size() == 0 || TakeItems(stack_.back(), args));
  }

  // Named arguments become one more, last argument, a dict: listings show them, and no adapter
  // looks for them.
  bool NewobjEx() {
    if (!Have(3)) return false;
    const Value named = stack_.back();
    const Value args = stack_[stack_.size() - 2];
    const Value callee = stack_[stack_.size() - 3];
    if (!Callable(callee, "NEWOBJ_EX")) return false;
    if (args.kind() != Kind::kTuple || named.kind() != Kind::kDict) {
      return Damaged("NEWOBJ_EX without a tuple and a dict");
    }
    if (!CheckCall(callee, args, true)) return false;
    if (named.size() == 0) return MakeObject(callee, args, 3);
    // One more argument: the named ones.
    const std::size_t n = args.size();
    auto* all = static_cast<Value*>(arena_.Take((n + 1) * sizeof(Value)));
    if (all == nullptr) return Exhausted();
    for (std::size_t i = 0; i < n; ++i) all[i] = args.item(i);
    all[n] = named;
    return MakeObject(callee, Access::At(Kind::kTuple, all, n + 1), 3);
  }

  // The state is kept beside the object. A second BUILD would update the attributes in Python,
  // which one value cannot say, so it is refused.
  bool Build() {
    if (!Have(2)) return false;
    const Value state = stack_.back();
    const Value object = stack_[stack_.size() - 2];
    if (object.kind() != Kind::kObject || Access::FormOf(object) != Form::kPlain) {
      return Misused("BUILD", " of ", object);
    }
    auto& record = *Access::PointerTo<PickledObject>(object);
    if (object.built()) return Damaged("a second BUILD of the same object");
    // None is told from no state by its length.
    record.state = state.kind() == Kind::kNone ? Access::Make(Kind::kNone, 0, 1) : state;
    NoteCopied(state);
    for (std::size_t i = 0; state.kind() == Kind::kTuple && i < state.size() && i < 2; ++i) {
      NoteCopied(state.item(i));
    }
    stack_.Shrink(stack_.size() - 1);
    return true;
  }

  // Python copies the items of the state into the object's __dict__, while our record refers to the
  // dict itself: they stay the same only while nobody adds to it.
  static void NoteCopied(const Value& v) {
    if (v.kind() == Kind::kDict) Access::PointerTo<Container>(v)->copied = true;
  }

  // `values` on the top are pairs for what lies below them.
  // `into` may be a dict or an object that is one (OrderedDict). Listings (kInert) take whatever is
  // said.
  bool SetItems(std::size_t values) {
    const std::size_t first = stack_.size() - values;
    if (first <= floor_) return Damaged("there is nothing to set items of");
    if (values % 2 != 0) return Damaged("a key without a value");
    const Value into = stack_[first - 1];
    Container* c = nullptr;
    if (into.kind() == Kind::kDict) {
      c = Access::PointerTo<Container>(into);
    } else if (into.kind() == Kind::kObject && Access::FormOf(into) == Form::kPlain) {
      auto& record = *Access::PointerTo<PickledObject>(into);
      if (!Extra(record)) return false;
      c = &record.extra->pairs;
    } else {
      return Misused("sets", " items of ", into);
    }
    if (options_.unknown != Unknown::kInert) {
      if (c->copied) {
        return Fail(Code::kUnsupported, "changes a dict that was copied into an object");
      }
      const Value beside = c->count > 0 ? PairKey(*c, 0) : stack_[first];
      for (std::size_t i = first; i < stack_.size(); i += 2) {
        if (const auto fault = KeyFault(beside, stack_[i]); !fault.empty()) {
          return Fail(Code::kUnsupported, fault);
        }
      }
    }
    if (!containers_.AddPairs(*c, stack_.data() + first, values)) return Exhausted();
    stack_.Shrink(first);
    return true;
  }

  // What is appended to an object is kept as a pair without a key.
  bool AppendTop(std::size_t values, bool to_set) {
    const std::size_t first = stack_.size() - values;
    if (first <= floor_) return Damaged("there is nothing to append to");
    const Value into = stack_[first - 1];
    if (into.kind() == (to_set ? Kind::kSet : Kind::kList)) {
      if (!containers_.Append(*Access::PointerTo<Container>(into), stack_.data() + first, values)) {
        return Exhausted();
      }
    } else if (!to_set && into.kind() == Kind::kObject && Access::FormOf(into) == Form::kPlain) {
      auto& record = *Access::PointerTo<PickledObject>(into);
      if (!Extra(record)) return false;
      for (std::size_t i = 0; i < values; ++i) {
        const Value pair[2] = {Value(), stack_[first + i]};
        if (!containers_.AddPairs(record.extra->pairs, pair, 2)) return Exhausted();
      }
    } else {
      return Misused("appends", " to ", into);
    }
    stack_.Shrink(first);
    return true;
  }

  // --- Names ---
  // A name that is allowed by its module alone gets a row in the arena; its texts point into the
  // stream.
  bool Name(std::string_view module, std::string_view name) {
    KnownClass prefix = KnownClass::kUnknown;
    const ClassRow* row = FindClassRow(module, name, &prefix);
    if (row == nullptr) {
      const bool kept = options_.unknown == Unknown::kInert ||
                        (options_.unknown == Unknown::kForeignClasses && IsForeignName(module));
      if (prefix == KnownClass::kUnknown && !kept) {
        return Fail(Code::kUnsupported,
                    "asks for " + ShownName(std::string(module) + "." + std::string(name)) +
                        ", which is not among the names that a checkpoint may speak of");
      }
      void* memory = arena_.Take(sizeof(ClassRow));
      if (memory == nullptr) return Exhausted();
      row = new (memory) ClassRow{module, name, prefix};
    }
    return Push(Access::At(Kind::kGlobal, row));
  }
  // GLOBAL ends its two names by line feeds, the only text operation that these formats use.
  bool Line(std::string_view& out) {
    const void* end = std::memchr(at_, '\n', static_cast<std::size_t>(end_ - at_));
    if (end == nullptr) return Damaged("truncated: a line without an end");
    out = {at_, static_cast<std::size_t>(static_cast<const char*>(end) - at_)};
    at_ += out.size() + 1;
    return IsUtf8(out) || Damaged("a name that is no UTF-8");
  }
  bool Global() {
    std::string_view module;
    std::string_view name;
    return Line(module) && Line(name) && Name(module, name);
  }
  bool StackGlobal() {
    if (!Have(2)) return false;
    const Value name = stack_.back();
    const Value module = stack_[stack_.size() - 2];
    if (name.kind() != Kind::kString || module.kind() != Kind::kString) {
      return Damaged("STACK_GLOBAL of what is no text");
    }
    stack_.Shrink(stack_.size() - 2);
    return Name(module.text(), name.text());
  }

  // --- Memo ---
  // The memo is a row by slot number, filled mostly in order. A number may skip one slot (Python 2
  // counts from 1); one that is far ahead would only make us allocate what the stream does not pay
  // for.
  bool Put(std::uint64_t slot) {
    if (!Have(1)) return false;
    // Writers number them in order, Python 2's from one; a number far ahead asks for memory only.
    if (slot > filled_ + 1) return FarSlot(slot);
    if (slot == memo_.size()) {
      ++filled_;
      return memo_.Push(stack_.back()) || Exhausted();
    }
    while (memo_.size() <= slot) {
      if (!memo_.Push(Access::EmptySlot())) return Exhausted();
    }
    if (Access::Empty(memo_[slot])) ++filled_;
    memo_[slot] = stack_.back();
    return true;
  }
  bool Get(std::uint64_t slot) {
    if (slot >= memo_.size() || Access::Empty(memo_[slot])) return EmptySlot(slot);
    return Push(memo_[slot]);
  }
  [[gnu::cold, gnu::noinline]] bool FarSlot(std::uint64_t slot) {
    return Damaged("memo slot " + std::to_string(slot) + ", after " + std::to_string(filled_) +
                   " entries");
  }
  [[gnu::cold, gnu::noinline]] bool EmptySlot(std::uint64_t slot) {
    return Damaged("memo slot " + std::to_string(slot) + " was never filled");
  }
  template <typename Index>
  bool PutNumbered() {
    Index slot = 0;
    return Number(slot) && Put(slot);
  }
  template <typename Index>
  bool GetNumbered() {
    Index slot = 0;
    return Number(slot) && Get(slot);
  }

  // Ids are remembered in order too, for torch: the first id that names a storage decides its type.
  bool Persistent() {
    if (!Have(1)) return false;
    auto* id = static_cast<Value*>(arena_.Take(sizeof(Value)));
    if (id == nullptr) return Exhausted();
    *id = stack_.back();
    stack_.back() = Access::At(Kind::kPersistent, id);
    return containers_.Append(rep_->persistent, &stack_.back(), 1) || Exhausted();
  }

  // POP of a mark that nothing stands above takes the mark away, as in Python.
  bool Pop() {
    if (Free() == 0 && marks_.size() > 0) {
      DropMark();
      return true;
    }
    if (!Have(1)) return false;
    stack_.Shrink(stack_.size() - 1);
    return true;
  }

  [[gnu::cold, gnu::noinline]] bool Stop() {
    if (stack_.size() != 1 || marks_.size() != 0) {
      return Damaged("ends with " + std::to_string(stack_.size()) + " values and " +
                     std::to_string(marks_.size()) + " marks instead of one value");
    }
    if (at_ != end_ && !options_.trailing_bytes) {
      return Damaged("ends " + std::to_string(end_ - at_) + " bytes before the stream does");
    }
    rep_->consumed = static_cast<std::size_t>(at_ - begin_);
    rep_->root = stack_.back();
    done_ = true;
    return containers_.BuildIndexes() || Exhausted();
  }

  [[gnu::cold, gnu::noinline]] bool Proto() {
    std::uint8_t version = 0;
    if (!Number(version)) return false;
    if (op_ != begin_) return Damaged("PROTO in the middle");
    if (version >= 2 && version <= 5) return true;
    return Fail(Code::kUnsupported, "protocol " + std::to_string(version) + ", not 2 to 5");
  }

  [[gnu::always_inline]] bool Step();
  [[gnu::cold, gnu::noinline]] bool Refused(unsigned char op);

  std::unique_ptr<Access::Rep> rep_;
  const Options options_;
  Arena& arena_;
  Row<Value> stack_;
  Row<std::size_t> marks_;
  Row<Value> memo_;
  std::size_t floor_ = 0;  // The last mark: values below it are not for the taking.
  ContainerMaker containers_{arena_};
  std::uint64_t filled_ = 0;  // Slots of the memo that hold something.
  const char* begin_ = nullptr;
  const char* at_ = nullptr;
  const char* op_ = nullptr;  // The operation under way.
  const char* end_ = nullptr;
  bool done_ = false;
  Status status_;
};

// The numbers are pickletools.opcodes'.
// Every case either fails, or leaves the stack as pickle.py would with each value replaced by our
// record of it. Always inlined into Run: it is the loop.
inline bool Machine::Step() {
  op_ = at_;
  if (at_ == end_) return Damaged("truncated: no STOP");
  const auto op = static_cast<unsigned char>(*at_++);
  if (op_ == begin_ && op != 0x80) {
    return Damaged("is no pickle of protocol 2 or later");
  }
  std::size_t first = 0;
  switch (op) {
    case 0x80:  // PROTO
      return Proto();
    case 0x95: {  // FRAME: only a hint for readers of pipes.
      std::uint64_t length = 0;
      return Number(length) && Need(length);
    }
    case '.':
      return Stop();
    case 'N':
      return Push(Value());
    case 0x88:
      return Push(Access::Make(Kind::kBool, 1));
    case 0x89:
      return Push(Access::Make(Kind::kBool, 0));
    case 'J': {
      std::int32_t v = 0;
      return Number(v) && Int(v);
    }
    case 'K': {
      std::uint8_t v = 0;
      return Number(v) && Int(v);
    }
    case 'M': {
      std::uint16_t v = 0;
      return Number(v) && Int(v);
    }
    case 0x8a: {  // LONG1
      std::uint8_t length = 0;
      return Number(length) && Long(length);
    }
    case 0x8b: {  // LONG4
      std::int32_t length = 0;
      if (!Number(length)) return false;
      if (length < 0) return Damaged("a number of negative length");
      return Long(static_cast<std::uint64_t>(length));
    }
    case 'G': {  // BINFLOAT: the one that is big-endian.
      if (!Need(8)) return false;
      at_ += 8;
      return Push(Access::Make(Kind::kFloat, BigEndian64(at_ - 8)));
    }
    case 0x8c:
      return Text<std::uint8_t>(Kind::kString);
    case 'X':
      return Text<std::uint32_t>(Kind::kString);
    case 0x8d:
      return Text<std::uint64_t>(Kind::kString);
    case 'C':
      return Text<std::uint8_t>(Kind::kBytes);
    case 'B':
      return Text<std::uint32_t>(Kind::kBytes);
    case 0x8e:
    case 0x96:  // BYTEARRAY8
      return Text<std::uint64_t>(Kind::kBytes);
    case '(':
      return Mark();
    case ')':
      return Push(Access::Make(Kind::kTuple, 0));
    case 't':
      return PopMark(first) && Tuple(stack_.size() - first);
    case 0x85:
    case 0x86:
    case 0x87: {
      const std::size_t n = op - 0x84u;
      return Have(n) && Tuple(n);
    }
    case ']':
      return NewContainer(Kind::kList);
    case 'a':
      return Have(2) && AppendTop(1, false);
    case 'e':
      return PopMark(first) && AppendTop(stack_.size() - first, false);
    case '}':
      return NewContainer(Kind::kDict);
    case 's':
      return Have(3) && SetItems(2);
    case 'u':
      return PopMark(first) && SetItems(stack_.size() - first);
    case 0x8f:  // EMPTY_SET
      return NewContainer(Kind::kSet);
    case 0x90:  // ADDITEMS
      return PopMark(first) && AppendTop(stack_.size() - first, true);
    case 0x91: {  // FROZENSET
      if (!PopMark(first)) return false;
      auto* c = static_cast<Container*>(arena_.Take(sizeof(Container)));
      if (c == nullptr) return Exhausted();
      *c = Container();
      if (!containers_.Append(*c, stack_.data() + first, stack_.size() - first)) return Exhausted();
      stack_.Shrink(first);
      return Push(Access::At(Kind::kSet, c));
    }
    case 0x94:
      return Put(filled_);
    case 'h':
      return GetNumbered<std::uint8_t>();
    case 'j':
      return GetNumbered<std::uint32_t>();
    case 'q':
      return PutNumbered<std::uint8_t>();
    case 'r':
      return PutNumbered<std::uint32_t>();
    case 'c':
      return Global();
    case 0x93:
      return StackGlobal();
    case 0x81:
      return Reduce(true);
    case 0x92:
      return NewobjEx();
    case 'R':
      return Reduce(false);
    case 'b':
      return Build();
    case 'Q':
      return Persistent();
    case '0':
      return Pop();
    case '1':  // POP_MARK
      if (!PopMark(first)) return false;
      stack_.Shrink(first);
      return true;
    default:
      return Refused(op);
  }
}

// No container can have more values than the stream has bytes, so that a stream of at most
// kMaxCount bytes cannot overflow a count.
Result<Document> Machine::Run() {
  if (rep_->bytes.size() > std::min(options_.max_bytes, std::size_t{Container::kMaxCount})) {
    return Status(Code::kResourceExhausted, "pickle: " + std::to_string(rep_->bytes.size()) +
                                                " bytes, over the limit of " +
                                                std::to_string(options_.max_bytes));
  }
  while (Step()) {
    if (done_) return Access::Finish(std::move(rep_));
  }
  return status_;
}

// Known to Python and not used by any of these formats, or unknown to Python as well: two different
// answers.
bool Machine::Refused(unsigned char op) {
  if (const std::string_view name = UnusedOperation(op); !name.empty()) {
    return Fail(Code::kUnsupported,
                "asks for the operation " + std::string(name) + ", which no checkpoint uses");
  }
  return Damaged("operation " + std::to_string(op) + " does not exist");
}

bool IsForeign(const Value& value) {
  if (value.kind() == Kind::kGlobal) return value.known() == KnownClass::kUnknown;
  return value.kind() == Kind::kObject && value.callee().known() == KnownClass::kUnknown;
}

Result<Document> Parse(std::string bytes, const Options& options) {
  return Machine(std::move(bytes), options).Run();
}

}  // namespace tensormount::pickle
