// SPDX-License-Identifier: Apache-2.0
// From what a pickle holds to a common value, for foreign.h. Apart from the adapters, which all use
// it. A value may hold the same other one many times, and that one too: what the tree would come to
// is bounded, not what the stream says.
//
// What has an equal in our value types is converted: None, bool, int, float, str, bytes, tuples,
// lists, dicts with text or integer keys, and what is a dict but for its class. Everything else
// (sets, names, tensors, calls that nobody makes) gives nullopt for the whole value: half a value
// would be taken for all of it. Callers that want a part, as Megatron's `args`, convert its items
// one by one.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/coding.h"
#include "index/archives/pickle.h"
#include "index/foreign/foreign.h"

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::KnownClass;
using pickle::Value;

// Per call. Twenty lists that each hold the one before twice are 40 records of the stream and a
// million nodes as a tree; a reader of metadata must not spend minutes or gigabytes on them.
// ValueBudget bounds all calls of a checkpoint together.
constexpr std::size_t kMaxNodes = std::size_t{1} << 20;
constexpr std::size_t kMaxBytes = std::size_t{64} << 20;

class Converter {
 public:
  // Depth is bounded too, since values may form cycles and the recursion is on the stack.
  std::optional<CommonValue> Convert(const Value& value, int depth) {
    if (++nodes_ > kMaxNodes || depth > kMaxCommonDepth) return std::nullopt;
    switch (value.kind()) {
      case Kind::kNone:
        return CommonValue();
      case Kind::kBool:
        return CommonValue(value.boolean());
      case Kind::kInt:
        return CommonValue(value.integer());
      case Kind::kLong:
        return Long(value.text());
      case Kind::kFloat:
        return CommonValue(value.real());
      case Kind::kString:
        if (!Take(value.text().size())) return std::nullopt;
        return CommonValue(value.text());
      case Kind::kBytes:
        if (!Take(value.text().size())) return std::nullopt;
        return CommonValue(CommonBytes{std::string(value.text())});
      case Kind::kList:
        return Items<CommonList>(value, depth);
      case Kind::kTuple:
        return Items<CommonTuple>(value, depth);
      case Kind::kDict: {
        CommonDict dict;
        if (!AddPairs(value, depth, dict)) return std::nullopt;
        return CommonValue(std::move(dict));
      }
      case Kind::kObject:
        return Object(value, depth);
      case Kind::kSet:
      case Kind::kGlobal:
      case Kind::kPersistent:
        return std::nullopt;
    }
    return std::nullopt;
  }

 private:
  // Texts are counted each time they are copied: one long text may be referred to from everywhere.
  bool Take(std::size_t bytes) {
    if (bytes > kMaxBytes - bytes_) return false;
    bytes_ += bytes;
    return true;
  }

  // Two's complement: 64 bits without a sign are the only ones that we have besides kInt.
  // The machine keeps as kLong what does not fit 64 bits with a sign, without redundant sign bytes.
  // Nine bytes of which the last is zero are the numbers 2^63 to 2^64 - 1, which our unsigned kind
  // holds; longer ones have no type here.
  static std::optional<CommonValue> Long(std::string_view text) {
    if (text.size() != 9 || text[8] != '\0') return std::nullopt;
    return CommonValue(LoadLittle<std::uint64_t>(text.data()));
  }

  template <typename T>
  std::optional<CommonValue> Items(const Value& value, int depth) {
    T out;
    for (std::size_t i = 0; i < value.size(); ++i) {
      std::optional<CommonValue> item = Convert(value.item(i), depth + 1);
      if (!item) return std::nullopt;
      out.items.push_back(*std::move(item));
    }
    return CommonValue(std::move(out));
  }

  // Floats, bools and tuples as keys have no equal in CommonKey. (A bool would become an int and be
  // another key.)
  std::optional<CommonKey> Key(const Value& key) {
    if (key.kind() == Kind::kInt) return CommonKey(key.integer());
    if (key.kind() != Kind::kString || !Take(key.text().size())) return std::nullopt;
    return CommonKey(std::string(key.text()));
  }

  bool AddPair(const Value& key, const Value& value, int depth, CommonDict& dict) {
    std::optional<CommonKey> name = Key(key);
    if (!name) return false;
    std::optional<CommonValue> item = Convert(value, depth + 1);
    if (!item) return false;
    dict.items.insert_or_assign(*std::move(name), *std::move(item));
    return true;
  }

  bool AddPairs(const Value& value, int depth, CommonDict& dict) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (!AddPair(value.key(i), value.item(i), depth, dict)) return false;
    }
    return true;
  }

  std::optional<CommonValue> Object(const Value& value, int depth) {
    // Every callable below is called with a tuple; what is not was kept for a listing.
    if (value.args().kind() != Kind::kTuple) return std::nullopt;
    if (value.Is(KnownClass::kOrderedDict) || value.Is(KnownClass::kCounter) ||
        value.Is(KnownClass::kDefaultDict) || value.Is(KnownClass::kDictLike)) {
      // What they were made from is among their pairs.
      CommonDict dict;
      // A Namespace keeps its attributes in the state that BUILD sets; an OrderedDict may have
      // attributes besides its items, which no trainer uses: they are checked to be a dict and left
      // out.
      const bool bag = value.Is(KnownClass::kDictLike) && value.built();
      if (value.built() && value.state().kind() != Kind::kDict) return std::nullopt;
      if ((bag && !AddPairs(value.state(), depth, dict)) || !AddPairs(value, depth, dict)) {
        return std::nullopt;
      }
      return CommonValue(std::move(dict));
    }
    if (value.Is(KnownClass::kPath)) return Path(value.args());
    if (value.Is(KnownClass::kCodecsEncode)) return Encoded(value.args());
    return std::nullopt;
  }

  // PosixPath('/', 'data', 'run1').
  std::optional<CommonValue> Path(const Value& args) {
    std::string path;
    for (std::size_t i = 0; i < args.size(); ++i) {
      const Value part = args.item(i);
      if (part.kind() != Kind::kString || !Take(part.text().size())) return std::nullopt;
      if (!path.empty() && path.back() != '/') path += '/';
      path += part.text();
    }
    // pathlib shows the empty path as ".", and so do we.
    return CommonValue(path.empty() ? std::string(".") : std::move(path));
  }

  // _codecs.encode('text', 'latin1'): every character is a byte.
  // Protocol 2, which torch.save uses by default, has no operation for bytes: Python writes them as
  // a call that encodes a text whose characters are the bytes.
  std::optional<CommonValue> Encoded(const Value& args) {
    if (args.size() != 2 || args.item(0).kind() != Kind::kString ||
        args.item(1).kind() != Kind::kString || args.item(1).text() != "latin1") {
      return std::nullopt;
    }
    const std::string_view text = args.item(0).text();
    if (!Take(text.size())) return std::nullopt;
    std::string bytes;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      if (c < 0x80) {
        bytes += text[i];
        continue;
      }
      // The text is UTF-8, checked; U+0080 to U+00FF are C2 and C3 with one more byte.
      if ((c != 0xC2 && c != 0xC3) || i + 1 >= text.size()) return std::nullopt;
      const auto next = static_cast<unsigned char>(text[++i]);
      bytes += static_cast<char>(((c & 3) << 6) | (next & 0x3F));
    }
    return CommonValue(CommonBytes{std::move(bytes)});
  }

  std::size_t nodes_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace

std::optional<CommonValue> CommonFromPickle(const pickle::Value& value) {
  return Converter().Convert(value, 0);
}

}  // namespace tensormount
