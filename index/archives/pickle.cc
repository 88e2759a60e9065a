// SPDX-License-Identifier: Apache-2.0
// Document and Value of pickle.h: a parsed pickle, and checked access to its values. The values are
// in an arena that the Document owns, beside the bytes of the stream.
#include "index/archives/pickle.h"

#include <bit>
#include <cassert>
#include <cstring>
#include <random>

#include "index/archives/pickle_record.h"

namespace tensormount::pickle {
namespace {

// The callee of a torch.Size of integers. Such an object is a form of Value without an object
// record (pickle_record.h).
const ClassRow& SizeRow() {
  static const ClassRow* const row = FindClassRow("torch", "Size", nullptr);
  return *row;
}

Value IntsItem(const Value& v, std::size_t i) {
  return Access::Make(Kind::kInt,
                      static_cast<std::uint64_t>(Access::PointerTo<const std::int64_t>(v)[i]));
}

// The pairs of a kDict or kObject; null if it has none.
const Container* PairsOf(const Value& v) {
  if (v.kind() == Kind::kDict) return Access::PointerTo<const Container>(v);
  if (v.kind() != Kind::kObject || Access::FormOf(v) != Form::kPlain) return nullptr;
  const ObjectExtra* extra = Access::PointerTo<const PickledObject>(v)->extra;
  return extra == nullptr ? nullptr : &extra->pairs;
}

// Finds a text key. A finished large dict has an index of the keys up to kMaxKey. In all other
// cases the pairs are searched from the end, because the same key may occur twice, and the last
// value counts.
std::optional<Value> FindIn(const Container& c, std::string_view key) {
  const std::size_t pairs = c.count / 2;
  if (c.capacity == Container::kIndexed && key.size() <= KeyIndex::kMaxKey) {
    const KeyIndex& index = *reinterpret_cast<const KeyIndex*>(c.items);
    for (std::uint64_t at = HashKey(key) & index.mask; index.slots[at] != 0;
         at = (at + 1) & index.mask) {
      const std::size_t pair = index.slots[at] - 1;
      const Value k = PairKey(c, pair);
      if (k.kind() == Kind::kString && k.text() == key) return PairValue(c, pair);
    }
    return std::nullopt;
  }
  for (std::size_t i = pairs; i-- > 0;) {
    const Value k = PairKey(c, i);
    if (k.kind() == Kind::kString && k.text() == key) return PairValue(c, i);
  }
  return std::nullopt;
}

}  // namespace

// The seed is random in every process, so that no stream can choose keys that collide. Each word of
// eight bytes is multiplied to a product of 128 bits, whose halves are XORed; that takes a few
// cycles.
std::uint64_t HashKey(std::string_view key) {
  static const std::uint64_t seed = [] {
    std::random_device device;
    return static_cast<std::uint64_t>(device()) << 32 | device();
  }();
  const auto mix = [](std::uint64_t a, std::uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  };
  std::uint64_t h = seed ^ key.size();
  const char* p = key.data();
  std::size_t left = key.size();
  for (; left >= 8; left -= 8, p += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, 8);
    h = mix(h ^ word, seed | 1) + 0x9e3779b97f4a7c15u;
  }
  std::uint64_t word = 0;
  if (left > 0) std::memcpy(&word, p, left);
  return mix(h ^ word, 0xd6e8feb86659fd93u ^ seed);
}

namespace {

// The integer that a key equals in Python, or nullopt. A float is a whole number if it survives the
// conversion to an integer and back. The range is checked first, because a conversion out of range
// is undefined.
std::optional<std::int64_t> KeyInteger(const Value& key) {
  switch (key.kind()) {
    case Kind::kBool:
      return key.boolean() ? 1 : 0;
    case Kind::kInt:
      return key.integer();
    case Kind::kFloat: {
      const double v = key.real();
      constexpr double kEnd = 9223372036854775808.0;  // 2^63
      if (!(v >= -kEnd && v < kEnd)) return std::nullopt;
      const auto whole = static_cast<std::int64_t>(v);
      const auto back = static_cast<double>(whole);
      if (back < v || back > v) return std::nullopt;
      return whole;
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

// Texts over kMaxKey are never the same, so that the cost of comparing a million keys is bounded.
bool SameKey(const Value& a, const Value& b) {
  if (a.kind() == Kind::kString || b.kind() == Kind::kString) {
    return a.kind() == b.kind() && a.text().size() <= KeyIndex::kMaxKey && a.text() == b.text();
  }
  const std::optional<std::int64_t> number = KeyInteger(a);
  return number && number == KeyInteger(b);
}

bool KeyHash(const Value& key, std::uint64_t& hash) {
  if (key.kind() == Kind::kString) {
    if (key.text().size() > KeyIndex::kMaxKey) return false;
    hash = HashKey(key.text());
    return true;
  }
  const std::optional<std::int64_t> number = KeyInteger(key);
  if (!number) return false;
  hash = HashKey({reinterpret_cast<const char*>(&*number), sizeof(*number)});
  return true;
}

// The text comes from the stream and is shown on terminals and in logs, so it is made printable.
std::string ShownName(std::string_view text) {
  constexpr std::size_t kMax = 120;
  std::string out;
  for (const char c : text.substr(0, kMax)) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= 0x20 && u != 0x7f) {
      out += c;
    } else {
      constexpr char kHex[] = "0123456789abcdef";
      out += "\\x";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    }
  }
  if (text.size() > kMax) {
    // The cut must not be within a UTF-8 character.
    while (!out.empty() && (static_cast<unsigned char>(out.back()) & 0xc0) == 0x80) out.pop_back();
    if (!out.empty() && static_cast<unsigned char>(out.back()) >= 0xc0) out.pop_back();
    out += "...";
  }
  return out;
}

Arena::~Arena() {
  for (void* block : blocks_) std::free(block);
}

// Blocks grow from 16 KiB to 2 MiB, so that a small pickle takes little memory and a large one few
// blocks. A large request gets a block of its own, and the current block stays in use. The whole
// block is counted before it is allocated, so used() is the memory taken from the system.
void* Arena::TakeSlow(std::size_t bytes) {
  constexpr std::size_t kFirst = std::size_t{16} << 10;
  constexpr std::size_t kMost = std::size_t{2} << 20;
  const bool large = bytes > kMost / 8;
  const std::size_t grown =
      kFirst << std::min<std::size_t>(blocks_.size(), std::bit_width(kMost / kFirst) - 1);
  std::size_t size = large ? bytes : std::max(grown, bytes);
  // Near the limit the block has only the requested size.
  if (size > limit_ - used_) size = bytes;
  if (!Charge(size)) return nullptr;
  void* block = std::malloc(size);
  if (block == nullptr) {
    Refund(size);
    return nullptr;
  }
  blocks_.push_back(block);
  if (!large) {
    at_ = static_cast<char*>(block) + bytes;
    end_ = static_cast<char*>(block) + size;
  }
  return block;
}

bool Value::boolean() const {
  assert(kind() == Kind::kBool);
  return bits_ != 0;
}

std::int64_t Value::integer() const {
  assert(kind() == Kind::kInt);
  return static_cast<std::int64_t>(bits_);
}

double Value::real() const {
  assert(kind() == Kind::kFloat);
  return std::bit_cast<double>(bits_);
}

std::string_view Value::text() const {
  assert(kind() == Kind::kString || kind() == Kind::kBytes || kind() == Kind::kLong);
  return {Access::PointerTo<const char>(*this), Access::Length(*this)};
}

std::string_view Value::module() const {
  assert(kind() == Kind::kGlobal);
  return Access::PointerTo<const ClassRow>(*this)->module;
}

std::string_view Value::name() const {
  assert(kind() == Kind::kGlobal);
  return Access::PointerTo<const ClassRow>(*this)->name;
}

KnownClass Value::known() const {
  assert(kind() == Kind::kGlobal);
  return Access::PointerTo<const ClassRow>(*this)->known;
}

// A tuple of form kOneInts is ((1, 2),): it has one item, and its length field is the length of the
// inner tuple.
std::size_t Value::size() const {
  switch (kind()) {
    case Kind::kTuple:
      return Access::FormOf(*this) == Form::kOneInts ? 1 : Access::Length(*this);
    case Kind::kList:
    case Kind::kSet:
      return Access::PointerTo<const Container>(*this)->count;
    default: {
      assert(kind() == Kind::kDict || kind() == Kind::kObject);
      const Container* pairs = PairsOf(*this);
      return pairs == nullptr ? 0 : pairs->count / 2;
    }
  }
}

Value Value::item(std::size_t i) const {
  assert(i < size());
  switch (kind()) {
    case Kind::kTuple:
      switch (Access::FormOf(*this)) {
        case Form::kPlain:
          return Access::PointerTo<const Value>(*this)[i];
        case Form::kInts:
          return IntsItem(*this, i);
        case Form::kOneInts:
          return Access::Make(Kind::kTuple, bits_, Access::Length(*this), Form::kInts);
      }
      return {};
    case Kind::kList:
    case Kind::kSet:
      return Access::PointerTo<const Container>(*this)->items[i];
    default:
      return PairValue(*PairsOf(*this), i);
  }
}

Value Value::key(std::size_t i) const {
  assert(i < size());
  assert(kind() == Kind::kDict || kind() == Kind::kObject);
  return PairKey(*PairsOf(*this), i);
}

Value Value::callee() const {
  assert(kind() == Kind::kObject);
  if (Access::FormOf(*this) == Form::kInts) return Access::At(Kind::kGlobal, &SizeRow());
  return Access::At(Kind::kGlobal, Access::PointerTo<const PickledObject>(*this)->callee);
}

// An object without an ObjectExtra has an empty tuple of arguments.
Value Value::args() const {
  if (kind() == Kind::kPersistent) return *Access::PointerTo<const Value>(*this);
  assert(kind() == Kind::kObject);
  if (Access::FormOf(*this) == Form::kInts) {
    return Access::Make(Kind::kTuple, bits_, Access::Length(*this), Form::kOneInts);
  }
  const ObjectExtra* extra = Access::PointerTo<const PickledObject>(*this)->extra;
  return extra == nullptr ? Access::Make(Kind::kTuple, 0) : extra->args;
}

Value Value::state() const {
  assert(kind() == Kind::kObject);
  if (Access::FormOf(*this) == Form::kInts) return {};
  return Access::PointerTo<const PickledObject>(*this)->state;
}

// If the opcode BUILD gives the state None, the parser stores a None of length 1. That differs from
// the default None of an object without a BUILD.
bool Value::built() const { return !state().SameAs(Value()); }

bool Value::Is(KnownClass of) const {
  if (kind() != Kind::kObject) return false;
  if (Access::FormOf(*this) == Form::kInts) return of == KnownClass::kTorchSize;
  return Access::PointerTo<const PickledObject>(*this)->callee->known == of;
}

// Slots are the second dict of the state. They are searched first, because Python sets them last,
// so that their values win.
std::optional<Value> Value::Find(std::string_view key) const {
  if (kind() == Kind::kDict) return FindIn(*Access::PointerTo<const Container>(*this), key);
  assert(kind() == Kind::kObject);
  const Value attributes = state();
  if (attributes.kind() == Kind::kDict) return attributes.Find(key);
  if (attributes.kind() != Kind::kTuple || attributes.size() != 2) return std::nullopt;
  for (const std::size_t i : {std::size_t{1}, std::size_t{0}}) {
    const Value part = attributes.item(i);
    if (part.kind() != Kind::kDict) continue;
    if (std::optional<Value> found = part.Find(key)) return found;
  }
  return std::nullopt;
}

Document::Document(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}
Document::Document(Document&&) noexcept = default;
Document& Document::operator=(Document&&) noexcept = default;
Document::~Document() = default;

Value Document::root() const { return rep_->root; }
std::size_t Document::persistent_count() const { return rep_->persistent.count; }
Value Document::persistent(std::size_t i) const {
  assert(i < persistent_count());
  return rep_->persistent.items[i];
}
std::size_t Document::bytes() const { return rep_->consumed; }
std::size_t Document::memory() const { return rep_->arena.used() + rep_->bytes.capacity(); }

}  // namespace tensormount::pickle
