// SPDX-License-Identifier: Apache-2.0
// The machine that reads a pickle: pickle::Parse of pickle.h. It has a stack, a memo and marks like
// Python's unpickler, and handles the opcodes that checkpoints use. All other opcodes are refused.
// The machine makes values and calls nothing, so a hostile pickle is either refused or
// uses a bounded amount of memory.
//
// Step() reads one opcode and changes the stack. A step that fails sets status_ and returns false,
// which ends the loop; there are no exceptions. Functions that write error messages are marked
// cold, so that the loop stays in the instruction cache.
//
// Helpers make the checks that every opcode needs: CheckBytes (bytes left in the stream),
// CheckStack and PopMark (values above the last mark), arena_.Take and BudgetedArray::Push (memory
// below the limit).
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

// BINFLOAT is the only opcode with a big-endian operand.
std::uint64_t BigEndian64(const char* p) { return __builtin_bswap64(LoadLittle<std::uint64_t>(p)); }

}  // namespace

// State of one parse. A step that fails sets status_ and returns false.
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
    // The limit is linear in the size of the stream, so a small stream cannot exhaust memory.
    arena_.set_limit((std::size_t{48} << 20) + 4 * rep_->bytes.size());
  }

  Result<Document> Run();

 private:
  [[gnu::cold, gnu::noinline]] bool Fail(Code code, std::string_view what) {
    status_ =
        Status(code, "pickle: byte " + std::to_string(op_ - begin_) + ": " + std::string(what));
    return false;
  }
  bool Damaged(std::string_view what) { return Fail(Code::kDataLoss, what); }
  [[gnu::cold, gnu::noinline]] bool Exhausted() {
    return Fail(Code::kResourceExhausted, "reading it would need over " +
                                              std::to_string((48 << 20) + 4 * rep_->bytes.size()) +
                                              " bytes, more than the limit for a stream of " +
                                              std::to_string(rep_->bytes.size()) + " bytes");
  }

  // Checks that the stream has `n` more bytes. `n` may be 2^64 - 1, so it is compared with the rest
  // of the stream and never added to a pointer.
  bool CheckBytes(std::uint64_t n) {
    return n <= static_cast<std::uint64_t>(end_ - at_) || Truncated(n);
  }
  [[gnu::cold, gnu::noinline]] bool Truncated(std::uint64_t n) {
    return Damaged("truncated: " + std::to_string(n) + " bytes wanted, " +
                   std::to_string(end_ - at_) + " left");
  }
  template <typename T>
  bool Number(T& out) {
    if (!CheckBytes(sizeof(T))) return false;
    out = LoadLittle<T>(at_);
    at_ += sizeof(T);
    return true;
  }
  bool Push(const Value& v) { return stack_.Push(v) || Exhausted(); }

  // The number of values above the last mark. An opcode may take only these.
  std::size_t Free() { return stack_.size() - floor_; }
  bool CheckStack(std::size_t n) { return n <= Free() || TooFew(n); }
  [[gnu::cold, gnu::noinline]] bool TooFew(std::size_t n) {
    return Damaged("an operation takes " + std::to_string(n) + " values, but the stack has " +
                   std::to_string(Free()));
  }
  // Removes the last mark; `first` is the position of the first value above it.
  bool PopMark(std::size_t& first) {
    if (marks_.size() == 0)
      return Damaged("there is no mark on the stack, which an operation needs");
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

  // Pushes a text or bytes. They are not copied: the value points into the stream, which the
  // document keeps.
  template <typename Length>
  bool Text(Kind kind) {
    Length length = 0;
    if (!Number(length) || !CheckBytes(length)) return false;
    const std::string_view text(at_, static_cast<std::size_t>(length));
    at_ += length;
    if (kind == Kind::kString && !IsUtf8(text)) return Damaged("a string is not valid UTF-8");
    return Push(Access::At(kind, text.data(), text.size()));
  }

  // Pushes an integer in two's complement of any length, little-endian. Redundant sign bytes are
  // removed, so a number that fits in 64 bits is always kInt.
  bool Long(std::uint64_t length) {
    if (!CheckBytes(length)) return false;
    const char* p = at_;
    at_ += length;
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

  // Replaces the top n values by a tuple, which has one of three layouts. ((1, 2),) around an
  // existing tuple of integers (the argument of torch.Size) takes no memory. A tuple of integers is
  // an array of 8 bytes each. Any other tuple is an array of values.
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
  // Whether REDUCE and NEWOBJ accept `callee`; nothing is called. A torch.dtype is a value: a
  // stream that calls a dtype is damaged.
  bool Callable(const Value& callee, std::string_view how) {
    return (callee.kind() == Kind::kGlobal && callee.known() != KnownClass::kTorchDtype) ||
           NotCallable(callee, how);
  }
  [[gnu::cold, gnu::noinline]] bool NotCallable(const Value& callee, std::string_view how) {
    if (callee.kind() != Kind::kGlobal) {
      return Fail(Code::kUnsupported, std::string(how) + " calls " +
                                          std::string(KindName(callee.kind())) +
                                          ", not a class or function");
    }
    return Damaged("calls " + FullName(callee) + ", which is not a function");
  }

  // Checks a call of an accepted callee: the arguments of getattr, and that NEWOBJ does not name a
  // function that makes tensors. Listings (kInert) accept every call.
  bool CheckCall(const Value& callee, const Value& args, bool made_new) {
    if (options_.unknown == Unknown::kInert) return true;
    if (callee.known() == KnownClass::kGetattr) {
      const std::string fault = GetattrFault(args);
      if (!fault.empty()) return Fail(Code::kUnsupported, fault);
    }
    return !made_new || !IsTensorFunction(callee.known()) ||
           Damaged("creates a new object of " + FullName(callee) + ", which is a function");
  }
  // Copies the items of the argument into the new object, as they are at this moment, for calls
  // of OrderedDict, dict, Counter and defaultdict. The items are the second argument of a
  // defaultdict, after its factory, and the only argument of the others. Calls of other dict-like
  // classes (kDictLike: SimpleNamespace) with positional arguments are refused, except in listings.
  bool TakeItems(const Value& object, const Value& args) {
    const bool dict = IsPythonDict(object);
    const bool makes_values = object.Is(KnownClass::kDefaultDict);
    if (args.size() == (makes_values ? 1u : 0u) || args.size() == 0) return true;
    if (!dict && !object.Is(KnownClass::kDictLike)) return true;
    auto took = ContainerMaker::TakeResult::kNothing;
    if (dict && args.size() == (makes_values ? 2u : 1u)) {
      // A Counter counts the items of a list. The other classes take a list as pairs.
      const bool listed = !object.Is(KnownClass::kCounter);
      Container& pairs = Access::PointerTo<PickledObject>(object)->extra->pairs;
      took = containers_.TakeItems(pairs, args.item(args.size() - 1), listed);
    }
    if (took == ContainerMaker::TakeResult::kNoMemory) return Exhausted();
    if (took == ContainerMaker::TakeResult::kAll || options_.unknown == Unknown::kInert)
      return true;
    return Fail(Code::kUnsupported, "makes a " + FullName(object.callee()) +
                                        " from a value that is neither a dict nor a list of pairs");
  }

  // Replaces the top `popped` values by a new object. torch.Size((1, 2)) becomes a form of the
  // tuple without an object record, because a .metadata has several for each chunk.
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
        if (!EnsureExtra(*object)) return false;
        object->extra->args = args;
      }
      made = Access::At(Kind::kObject, object);
    }
    stack_.Shrink(stack_.size() - popped);
    return Push(made);
  }
  // Makes the record of an object's arguments and items. It is separate from the object's own
  // record, because most objects have only a state.
  bool EnsureExtra(PickledObject& object) {
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

  // REDUCE calls a function with a tuple of arguments; NEWOBJ makes an object of a class. Both make
  // a record of the callee and the arguments. Only REDUCE also copies items of the arguments into a
  // dict.
  bool Reduce(bool newobj) {
    const std::string_view how = newobj ? "NEWOBJ" : "REDUCE";
    if (!CheckStack(2)) return false;
    const Value args = stack_.back();
    const Value callee = stack_[stack_.size() - 2];
    if (!Callable(callee, how)) return false;
    if (args.kind() != Kind::kTuple) return Misused(how, " with arguments that are ", args);
    if (!CheckCall(callee, args, newobj)) return false;
    // NEWOBJ calls dict.__new__, which ignores its arguments.
    return MakeObject(callee, args, 2) &&
           (newobj || args.size() == 0 || TakeItems(stack_.back(), args));
  }

  // Makes an object of a class with keyword arguments. The keyword arguments become one
  // additional last argument, a dict, which listings show. No reader of a format uses this dict.
  bool NewobjEx() {
    if (!CheckStack(3)) return false;
    const Value named = stack_.back();
    const Value args = stack_[stack_.size() - 2];
    const Value callee = stack_[stack_.size() - 3];
    if (!Callable(callee, "NEWOBJ_EX")) return false;
    if (args.kind() != Kind::kTuple || named.kind() != Kind::kDict) {
      return Damaged("the arguments of NEWOBJ_EX are not a tuple and a dict");
    }
    if (!CheckCall(callee, args, true)) return false;
    if (named.size() == 0) return MakeObject(callee, args, 3);
    const std::size_t n = args.size();
    auto* all = static_cast<Value*>(arena_.Take((n + 1) * sizeof(Value)));
    if (all == nullptr) return Exhausted();
    for (std::size_t i = 0; i < n; ++i) all[i] = args.item(i);
    all[n] = named;
    return MakeObject(callee, Access::At(Kind::kTuple, all, n + 1), 3);
  }

  // Stores the state in the record of the object. A second BUILD is refused: in Python it would
  // update the attributes, and a record has only one state.
  bool Build() {
    if (!CheckStack(2)) return false;
    const Value state = stack_.back();
    const Value object = stack_[stack_.size() - 2];
    if (object.kind() != Kind::kObject || Access::FormOf(object) != Form::kPlain) {
      return Misused("BUILD", " of ", object);
    }
    auto& record = *Access::PointerTo<PickledObject>(object);
    if (object.built()) return Damaged("operation BUILD is applied twice to the same object");
    // A None from BUILD has length 1, which tells it from a missing state.
    record.state = state.kind() == Kind::kNone ? Access::Make(Kind::kNone, 0, 1) : state;
    NoteCopied(state);
    for (std::size_t i = 0; state.kind() == Kind::kTuple && i < state.size() && i < 2; ++i) {
      NoteCopied(state.item(i));
    }
    stack_.Shrink(stack_.size() - 1);
    return true;
  }

  // Marks a dict as copied. Python copies the items of the state into the object's __dict__, but
  // our record refers to the dict itself. The two are equal only until the dict is changed.
  static void NoteCopied(const Value& v) {
    if (v.kind() == Kind::kDict) Access::PointerTo<Container>(v)->copied = true;
  }

  // Adds the top `values` values as pairs to the value below them, which is a dict or an object
  // (such as an OrderedDict).
  bool SetItems(std::size_t values) {
    const std::size_t first = stack_.size() - values;
    if (first <= floor_)
      return Damaged("an operation adds items to a dict, but there is no dict on the stack");
    if (values % 2 != 0) return Damaged("an operation adds a key without a value to a dict");
    const Value into = stack_[first - 1];
    Container* c = nullptr;
    if (into.kind() == Kind::kDict) {
      c = Access::PointerTo<Container>(into);
    } else if (into.kind() == Kind::kObject && Access::FormOf(into) == Form::kPlain) {
      auto& record = *Access::PointerTo<PickledObject>(into);
      if (!EnsureExtra(record)) return false;
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

  // Appends the top `values` values to the list, set or object below them. An item of an object
  // becomes a pair with the key None.
  bool AppendTop(std::size_t values, bool to_set) {
    const std::size_t first = stack_.size() - values;
    if (first <= floor_)
      return Damaged("an operation appends to a list, but there is no list on the stack");
    const Value into = stack_[first - 1];
    if (into.kind() == (to_set ? Kind::kSet : Kind::kList)) {
      if (!containers_.Append(*Access::PointerTo<Container>(into), stack_.data() + first, values)) {
        return Exhausted();
      }
    } else if (!to_set && into.kind() == Kind::kObject && Access::FormOf(into) == Form::kPlain) {
      auto& record = *Access::PointerTo<PickledObject>(into);
      if (!EnsureExtra(record)) return false;
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
  // Pushes a name. An accepted name that is not in the table gets a class row in the arena, whose
  // texts point into the stream.
  bool Name(std::string_view module, std::string_view name) {
    KnownClass prefix = KnownClass::kUnknown;
    const ClassRow* row = FindClassRow(module, name, &prefix);
    if (row == nullptr) {
      const bool kept = options_.unknown == Unknown::kInert ||
                        (options_.unknown == Unknown::kForeignClasses && IsForeignName(module));
      if (prefix == KnownClass::kUnknown && !kept) {
        return Fail(Code::kUnsupported,
                    "contains a Python object (" +
                        ShownName(std::string(module) + "." + std::string(name)) +
                        ") that is not loaded for safety; save its state_dict() instead");
      }
      void* memory = arena_.Take(sizeof(ClassRow));
      if (memory == nullptr) return Exhausted();
      row = new (memory) ClassRow{module, name, prefix};
    }
    return Push(Access::At(Kind::kGlobal, row));
  }
  // Reads a text up to a line feed. GLOBAL, which has two such texts, is the only text opcode that
  // these formats use.
  bool Line(std::string_view& out) {
    const void* end = std::memchr(at_, '\n', static_cast<std::size_t>(end_ - at_));
    if (end == nullptr) return Damaged("truncated: a line without an end");
    out = {at_, static_cast<std::size_t>(static_cast<const char*>(end) - at_)};
    at_ += out.size() + 1;
    return IsUtf8(out) || Damaged("a name is not valid UTF-8");
  }
  bool Global() {
    std::string_view module;
    std::string_view name;
    return Line(module) && Line(name) && Name(module, name);
  }
  bool StackGlobal() {
    if (!CheckStack(2)) return false;
    const Value name = stack_.back();
    const Value module = stack_[stack_.size() - 2];
    if (name.kind() != Kind::kString || module.kind() != Kind::kString) {
      return Damaged("the arguments of STACK_GLOBAL are not strings");
    }
    stack_.Shrink(stack_.size() - 2);
    return Name(module.text(), name.text());
  }

  // --- Memo ---
  // Stores the top of the stack in a memo slot. The memo is an array by slot number. Writers number
  // slots in order, Python 2 from 1, so one slot may be skipped. A number further ahead is refused,
  // because it would allocate memory out of proportion to the stream.
  bool Put(std::uint64_t slot) {
    if (!CheckStack(1)) return false;
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
    return Damaged("memo slot " + std::to_string(slot) + " is out of range: there are " +
                   std::to_string(filled_) + " entries");
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

  // Replaces the id on the stack by a kPersistent. All ids are also kept in order, because torch
  // takes the type of a storage from the first id with the key of that storage.
  bool Persistent() {
    if (!CheckStack(1)) return false;
    auto* id = static_cast<Value*>(arena_.Take(sizeof(Value)));
    if (id == nullptr) return Exhausted();
    *id = stack_.back();
    stack_.back() = Access::At(Kind::kPersistent, id);
    return containers_.Append(rep_->persistent, &stack_.back(), 1) || Exhausted();
  }

  // POP removes the top value, or the mark if a mark is on top, as in Python.
  bool Pop() {
    if (Free() == 0 && marks_.size() > 0) {
      DropMark();
      return true;
    }
    if (!CheckStack(1)) return false;
    stack_.Shrink(stack_.size() - 1);
    return true;
  }

  [[gnu::cold, gnu::noinline]] bool Stop() {
    if (stack_.size() != 1 || marks_.size() != 0) {
      return Damaged("ends with " + std::to_string(stack_.size()) + " values and " +
                     std::to_string(marks_.size()) + " marks instead of one value");
    }
    if (at_ != end_ && !options_.trailing_bytes) {
      return Damaged("ends " + std::to_string(end_ - at_) + " bytes before the end of the stream");
    }
    rep_->consumed = static_cast<std::size_t>(at_ - begin_);
    rep_->root = stack_.back();
    done_ = true;
    return containers_.BuildIndexes() || Exhausted();
  }

  [[gnu::cold, gnu::noinline]] bool Proto() {
    std::uint8_t version = 0;
    if (!Number(version)) return false;
    if (op_ != begin_) return Damaged("PROTO is not the first operation");
    if (version >= 2 && version <= 5) return true;
    return Fail(Code::kUnsupported,
                "protocol " + std::to_string(version) + " is not supported (supported: 2 to 5)");
  }

  [[gnu::always_inline]] bool Step();
  [[gnu::cold, gnu::noinline]] bool Refused(unsigned char op);

  std::unique_ptr<Access::Rep> rep_;
  const Options options_;
  Arena& arena_;
  BudgetedArray<Value> stack_;
  BudgetedArray<std::size_t> marks_;
  BudgetedArray<Value> memo_;
  // Stack position of the last mark. An opcode cannot take values below it.
  std::size_t floor_ = 0;
  ContainerMaker containers_{arena_};
  std::uint64_t filled_ = 0;  // Number of filled memo slots.
  const char* begin_ = nullptr;
  const char* at_ = nullptr;
  const char* op_ = nullptr;  // The current opcode.
  const char* end_ = nullptr;
  bool done_ = false;
  Status status_;
};

// Opcode numbers are those of pickletools.opcodes. Each case fails, or leaves the stack as Python's
// pickle.py would, with a record in place of each value. Inlined into Run, because this function is
// the body of the loop.
inline bool Machine::Step() {
  op_ = at_;
  if (at_ == end_) return Damaged("truncated: no STOP");
  const auto op = static_cast<unsigned char>(*at_++);
  if (op_ == begin_ && op != 0x80) {
    return Damaged("not a pickle of protocol 2 or later");
  }
  std::size_t first = 0;
  switch (op) {
    case 0x80:  // PROTO
      return Proto();
    case 0x95: {  // FRAME: its length is only a hint for buffered readers.
      std::uint64_t length = 0;
      return Number(length) && CheckBytes(length);
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
      if (length < 0) return Damaged("an integer has a negative length");
      return Long(static_cast<std::uint64_t>(length));
    }
    case 'G': {  // BINFLOAT
      if (!CheckBytes(8)) return false;
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
      return CheckStack(n) && Tuple(n);
    }
    case ']':
      return NewContainer(Kind::kList);
    case 'a':
      return CheckStack(2) && AppendTop(1, false);
    case 'e':
      return PopMark(first) && AppendTop(stack_.size() - first, false);
    case '}':
      return NewContainer(Kind::kDict);
    case 's':
      return CheckStack(3) && SetItems(2);
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

// Parses the whole stream. The limit on its size also limits the values of a container, so that a
// count cannot overflow.
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

// An opcode that Python knows and checkpoints never use is kUnsupported. An opcode that Python does
// not know is damage.
bool Machine::Refused(unsigned char op) {
  if (const std::string_view name = UnusedOperation(op); !name.empty()) {
    return Fail(Code::kUnsupported,
                "operation " + std::string(name) + " is not supported: checkpoints do not use it");
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
