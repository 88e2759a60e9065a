// SPDX-License-Identifier: Apache-2.0
// CommonValue of the public API: equality, look-up by path, the first mismatch of two values as
// text. Recursion is bounded, because decoders limit the depth of values from outside.
#include "tensormount/common_value.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>

#include "index/records/common_tree.h"

namespace tensormount {
namespace {

// Most bytes of a string or byte value that a message shows.
constexpr std::size_t kShown = 48;

bool SameItems(const std::vector<CommonValue>& a, const std::vector<CommonValue>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Whether a path can contain `key` without quotes.
bool IsPlainWord(std::string_view key) {
  return !key.empty() && std::all_of(key.begin(), key.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '/';
  });
}

std::string Hex16(std::uint64_t bits) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(bits >> shift) & 15];
  return text;
}

// A part of `text` for messages, beginning at about byte `from`, cut at UTF-8 boundaries.
std::string Excerpt(std::string_view text, std::size_t from) {
  const auto inside = [&](std::size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  while (from > 0 && inside(from)) --from;
  std::size_t end = std::min(text.size(), from + kShown);
  while (end > from && inside(end)) --end;
  return (from > 0 ? "..." : "") + QuoteJson(text.substr(from, end - from)) +
         (end < text.size() ? "..." : "");
}

std::string BytesText(std::string_view data, std::size_t from) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const std::size_t end = std::min(data.size(), from + kShown / 2);
  std::string text = from > 0 ? "..." : "";
  for (std::size_t i = from; i < end; ++i) {
    const auto byte = static_cast<unsigned char>(data[i]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  if (end < data.size()) text += "...";
  return text + " (" + std::to_string(data.size()) + " bytes)";
}

std::string Items(std::size_t n) {
  return "of " + std::to_string(n) + (n == 1 ? " item" : " items");
}

// Text of a value without its kind. Strings and bytes are shown from about byte `from` on.
std::string Describe(const CommonValue& value, std::size_t from) {
  if (const bool* b = value.get_if<bool>()) return *b ? "true" : "false";
  if (const auto* i = value.get_if<std::int64_t>()) return std::to_string(*i);
  if (const auto* u = value.get_if<std::uint64_t>()) return std::to_string(*u);
  if (const double* d = value.get_if<double>()) {
    if (std::isnan(*d)) return "nan (bits " + Hex16(std::bit_cast<std::uint64_t>(*d)) + ")";
    if (std::isinf(*d)) return *d > 0 ? "inf" : "-inf";
    return FloatText(*d);
  }
  if (const auto* s = value.get_if<std::string>()) return Excerpt(*s, from);
  if (const auto* bytes = value.get_if<CommonBytes>()) return BytesText(bytes->data, from);
  if (const auto* list = value.get_if<CommonList>()) return Items(list->items.size());
  if (const auto* tuple = value.get_if<CommonTuple>()) return Items(tuple->items.size());
  if (const auto* dict = value.get_if<CommonDict>()) return Items(dict->items.size());
  return "";
}

std::string DescribeWithKind(const CommonValue& value) {
  const std::string text = Describe(value, 0);
  return std::string(value.kind_name()) + (text.empty() ? "" : " ") + text;
}

// Byte from which to show two strings so that their difference is visible. Without it, long strings
// that differ at the end would show the same 48 bytes.
std::size_t ShowFrom(std::string_view a, std::string_view b) {
  const auto at = static_cast<std::size_t>(
      std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  return at < kShown / 2 ? 0 : at - kShown / 4;
}

// Compares two values. The path is one buffer that grows during the descent, so that equal trees
// cost few allocations.
class ValueComparison {
 public:
  ValueComparison(std::string path, const CommonExempt& exempt)
      : path_(std::move(path)), exempt_(exempt) {}

  std::optional<CommonSides> Values(const CommonValue& a, const CommonValue& b) {
    if (a.kind() != b.kind()) return ValuesDiffer(DescribeWithKind(a), DescribeWithKind(b));
    if (const auto* list = a.get_if<CommonList>()) {
      return Sequence(list->items, b.get_if<CommonList>()->items, '[', ']');
    }
    if (const auto* tuple = a.get_if<CommonTuple>()) {
      return Sequence(tuple->items, b.get_if<CommonTuple>()->items, '(', ')');
    }
    if (const auto* dict = a.get_if<CommonDict>()) return Dicts(*dict, *b.get_if<CommonDict>());
    if (a == b) return std::nullopt;
    std::size_t from = 0;
    if (const auto* text = a.get_if<std::string>())
      from = ShowFrom(*text, *b.get_if<std::string>());
    if (const auto* bytes = a.get_if<CommonBytes>()) {
      from = ShowFrom(bytes->data, b.get_if<CommonBytes>()->data);
    }
    return ValuesDiffer(Describe(a, from), Describe(b, from));
  }

 private:
  std::optional<CommonSides> ValuesDiffer(std::string first, std::string second) const {
    return CommonSides{path_, CommonSides::Kind::kValues, std::move(first), std::move(second)};
  }
  std::optional<CommonSides> OnlyIn(CommonSides::Kind kind) const {
    return CommonSides{path_, kind, {}, {}};
  }

  std::optional<CommonSides> Sequence(const std::vector<CommonValue>& a,
                                      const std::vector<CommonValue>& b, char open, char close) {
    if (a.size() != b.size()) {
      return ValuesDiffer("has " + std::to_string(a.size()) + (a.size() == 1 ? " item" : " items"),
                          std::to_string(b.size()));
    }
    const std::size_t length = path_.size();
    for (std::size_t i = 0; i < a.size(); ++i) {
      path_ += open + std::to_string(i) + close;
      if (auto found = Values(a[i], b[i])) return found;
      path_.resize(length);
    }
    return std::nullopt;
  }

  std::optional<CommonSides> Dicts(const CommonDict& a, const CommonDict& b) {
    const std::size_t length = path_.size();
    auto x = a.items.begin();
    auto y = b.items.begin();
    while (x != a.items.end() || y != b.items.end()) {
      // Merges two sorted maps. `first` is true if the smaller key is only in `a`, `second` if it
      // is only in `b`. If both are false, both maps have the key.
      const bool first = y == b.items.end() || (x != a.items.end() && x->first < y->first);
      const bool second = x == a.items.end() || (y != b.items.end() && y->first < x->first);
      path_ += CommonPathPart(first ? x->first : y->first, path_.empty());
      if (!exempt_ || !exempt_(path_)) {
        if (first) return OnlyIn(CommonSides::Kind::kOnlyFirst);
        if (second) return OnlyIn(CommonSides::Kind::kOnlySecond);
        if (auto found = Values(x->second, y->second)) return found;
      }
      path_.resize(length);
      if (!second) ++x;
      if (!first) ++y;
    }
    return std::nullopt;
  }

  std::string path_;
  const CommonExempt& exempt_;
};

// One part of a path.
struct PathPart {
  enum class Kind { kKey, kListItem, kTupleItem } kind = Kind::kKey;
  CommonKey key;
  std::size_t index = 0;
  std::string_view text;  // The part as written in the path, for messages.
};

// Takes the part at position `at` from a path, which is a sequence of parts: [n] list item, (n)
// tuple item, {n} integer key. A string key is a word or a JSON string, with a dot before it unless
// it begins the path.
Result<PathPart> TakePart(std::string_view path, std::size_t& at) {
  const std::size_t begin = at;
  const auto bad = [&] {
    return Status(Code::kInvalidArgument,
                  "path " + std::string(path) + ": syntax error at byte " + std::to_string(begin));
  };
  PathPart part;
  const char open = path[at];
  if (open == '[' || open == '(' || open == '{') {
    const char close = open == '[' ? ']' : open == '(' ? ')' : '}';
    const std::size_t end = path.find(close, at);
    if (end == std::string_view::npos) return bad();
    const char* first = path.data() + at + 1;
    const char* last = path.data() + end;
    if (open == '{') {
      std::int64_t key = 0;
      const auto [stop, error] = std::from_chars(first, last, key);
      if (error != std::errc() || stop != last || first == last) return bad();
      part.key = key;
    } else {
      const auto [stop, error] = std::from_chars(first, last, part.index);
      if (error != std::errc() || stop != last || first == last) return bad();
      part.kind = open == '[' ? PathPart::Kind::kListItem : PathPart::Kind::kTupleItem;
    }
    at = end + 1;
  } else {
    if (at > 0 && path[at] != '.') return bad();
    if (at > 0) ++at;
    std::size_t end = at;
    if (at < path.size() && path[at] == '"') {
      end = at + 1;
      while (end < path.size() && path[end] != '"') end += path[end] == '\\' ? 2 : 1;
      if (end >= path.size()) return bad();
      Result<std::string> key = UnquoteJson(path.substr(at, ++end - at));
      if (!key.ok()) return bad();
      part.key = std::move(key).value();
    } else {
      end = std::min(path.find_first_of(".[({\"", at), path.size());
      if (end == at) return bad();
      part.key = std::string(path.substr(at, end - at));
    }
    at = end;
  }
  part.text = path.substr(begin, at - begin);
  return part;
}

const CommonValue* Item(const std::vector<CommonValue>* items, std::size_t index) {
  return items != nullptr && index < items->size() ? &(*items)[index] : nullptr;
}

const CommonValue* Child(const CommonValue& value, const PathPart& part) {
  switch (part.kind) {
    case PathPart::Kind::kKey: {
      const auto* dict = value.get_if<CommonDict>();
      return dict == nullptr ? nullptr : dict->Find(part.key);
    }
    case PathPart::Kind::kListItem: {
      const auto* list = value.get_if<CommonList>();
      return Item(list == nullptr ? nullptr : &list->items, part.index);
    }
    case PathPart::Kind::kTupleItem: {
      const auto* tuple = value.get_if<CommonTuple>();
      return Item(tuple == nullptr ? nullptr : &tuple->items, part.index);
    }
  }
  return nullptr;
}

}  // namespace

const CommonValue* CommonDict::Find(const CommonKey& key) const {
  const auto it = items.find(key);
  return it == items.end() ? nullptr : &it->second;
}

CommonValue::Kind CommonValue::kind() const {
  // Kinds in the order of the variant's alternatives.
  constexpr Kind kKinds[] = {Kind::kNone,  Kind::kBool,   Kind::kInt,   Kind::kUnsigned,
                             Kind::kFloat, Kind::kString, Kind::kBytes, Kind::kList,
                             Kind::kTuple, Kind::kDict};
  static_assert(std::variant_size_v<decltype(value_)> == std::size(kKinds));
  return kKinds[value_.index()];
}

std::string_view CommonValue::kind_name() const {
  switch (kind()) {
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return "string";
    case Kind::kBytes:
      return "bytes";
    case Kind::kNone:
      return "none";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kUnsigned:
      return "unsigned";
  }
  return "";
}

Result<CommonValue> CommonValue::At(std::string_view path) const {
  const CommonValue* value = this;
  std::size_t at = 0;
  while (at < path.size()) {
    const std::size_t begin = at;
    TENSORMOUNT_ASSIGN_OR_RETURN(const PathPart part, TakePart(path, at));
    const CommonValue* child = Child(*value, part);
    if (child == nullptr) {
      return Status(Code::kNotFound,
                    (begin == 0 ? "the value" : std::string(path.substr(0, begin))) + " is " +
                        (value->kind() == Kind::kInt ? "an " : "a ") +
                        std::string(value->kind_name()) + " without " + std::string(part.text));
    }
    value = child;
  }
  return *value;
}

// Compares floats by their bits, so that a stored value equals itself when it is read again, NaN
// included.
bool operator==(const CommonValue& a, const CommonValue& b) {
  if (a.value_.index() != b.value_.index()) return false;
  if (const double* d = a.get_if<double>()) {
    return std::bit_cast<std::uint64_t>(*d) == std::bit_cast<std::uint64_t>(*b.get_if<double>());
  }
  if (const auto* list = a.get_if<CommonList>()) {
    return SameItems(list->items, b.get_if<CommonList>()->items);
  }
  if (const auto* tuple = a.get_if<CommonTuple>()) {
    return SameItems(tuple->items, b.get_if<CommonTuple>()->items);
  }
  if (const auto* dict = a.get_if<CommonDict>()) {
    return dict->items == b.get_if<CommonDict>()->items;
  }
  if (const bool* v = a.get_if<bool>()) return *v == *b.get_if<bool>();
  if (const auto* v = a.get_if<std::int64_t>()) return *v == *b.get_if<std::int64_t>();
  if (const auto* v = a.get_if<std::uint64_t>()) return *v == *b.get_if<std::uint64_t>();
  if (const auto* v = a.get_if<std::string>()) return *v == *b.get_if<std::string>();
  if (const auto* v = a.get_if<CommonBytes>()) return *v == *b.get_if<CommonBytes>();
  return true;  // None.
}

// to_chars gives the shortest text that reads back as the same double, in every locale.
std::string FloatText(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  (void)error;  // 24 characters suffice for every double.
  std::string text(buffer, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string CommonPathPart(const CommonKey& key, bool first) {
  if (const auto* number = std::get_if<std::int64_t>(&key)) {
    return '{' + std::to_string(*number) + '}';
  }
  const std::string& text = *std::get_if<std::string>(&key);
  return (first ? "" : ".") + (IsPlainWord(text) ? text : QuoteJson(text));
}

std::string CommonSides::SidesText(std::string_view where_first,
                                   std::string_view where_second) const {
  const auto at = [](std::string_view where) {
    return where.empty() ? std::string() : ' ' + std::string(where);
  };
  switch (kind) {
    case Kind::kValues:
      return first + at(where_first) + " and " + second + at(where_second);
    case Kind::kOnlyFirst:
      return "only" + at(where_first);
    case Kind::kOnlySecond:
      return "only" + at(where_second);
  }
  return "";
}

std::optional<CommonSides> CompareAt(std::string path, const CommonValue& a, const CommonValue& b,
                                     const CommonExempt& exempt) {
  return ValueComparison(std::move(path), exempt).Values(a, b);
}

std::optional<CommonMismatch> FirstDifference(const CommonValue& a, const CommonValue& b) {
  std::optional<CommonSides> sides = CompareAt({}, a, b, {});
  if (!sides) return std::nullopt;
  const bool values = sides->kind == CommonSides::Kind::kValues;
  std::string what =
      values ? sides->SidesText("", "") : sides->SidesText("in the first", "in the second");
  return CommonMismatch{std::move(sides->path), std::move(what)};
}

}  // namespace tensormount
