// SPDX-License-Identifier: Apache-2.0
// CommonFromPickle of foreign.h. Converts the values that CommonValue can represent: None, bool,
// int, float, str, bytes, paths, tuples, lists, dicts with string or integer keys, and objects of
// dict classes. If a value contains anything else (a set, a class, a tensor, a call), the result is
// nullopt for the whole value, because a partial value would look complete. Callers that accept a
// part (such as of Megatron's `args`) convert the items one by one.
//
// A pickle value may contain another value many times, recursively, so the size of the result is
// limited, not only that of the pickle.
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

// Limits for one call: values in the result, and bytes of text. Twenty lists, each of which
// contains the previous list twice, are 40 records of the pickle but a million values in the
// result. ValueBudget limits all calls for a checkpoint together.
constexpr std::size_t kMaxNodes = std::size_t{1} << 20;
constexpr std::size_t kMaxBytes = std::size_t{64} << 20;

class Converter {
 public:
  // `depth` is limited, because values may contain themselves and the recursion uses the stack.
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
  // Counts bytes of text; false if they exceed the limit. A text counts each time that it is
  // copied, because many values may refer to it.
  bool Take(std::size_t bytes) {
    if (bytes > kMaxBytes - bytes_) return false;
    bytes_ += bytes;
    return true;
  }

  // Converts a kLong, an integer in two's complement. Nine bytes of which the last is zero are a
  // number of 2^63 to 2^64 - 1, which fits u64. Larger and more negative numbers cannot be
  // represented.
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

  // Converts a dict key. CommonKey has only strings and integers. A bool is refused, because it
  // must not become an integer.
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
    if (value.args().kind() != Kind::kTuple) return std::nullopt;
    if (value.Is(KnownClass::kOrderedDict) || value.Is(KnownClass::kCounter) ||
        value.Is(KnownClass::kDefaultDict) || value.Is(KnownClass::kDictLike)) {
      // The pairs of an OrderedDict include the items that its constructor was called with.
      CommonDict dict;
      // The attributes of a Namespace are in its state, which the pickle sets with BUILD. They are
      // converted. Attributes of an OrderedDict are not converted, because no trainer uses them. A
      // state that is not a dict is refused.
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

  // Joins the parts of a path: PosixPath('/', 'data', 'run1').
  std::optional<CommonValue> Path(const Value& args) {
    std::string path;
    for (std::size_t i = 0; i < args.size(); ++i) {
      const Value part = args.item(i);
      if (part.kind() != Kind::kString || !Take(part.text().size())) return std::nullopt;
      if (!path.empty() && path.back() != '/') path += '/';
      path += part.text();
    }
    // pathlib shows the empty path as ".".
    return CommonValue(path.empty() ? std::string(".") : std::move(path));
  }

  // Converts _codecs.encode('text', 'latin1') to one byte for each character. Python writes bytes
  // in this form in protocol 2 (the default of torch.save), which has no opcode for bytes.
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
      // The text is valid UTF-8. U+0080 to U+00FF take two bytes, the first of which is C2 or C3;
      // larger characters are not latin1.
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
