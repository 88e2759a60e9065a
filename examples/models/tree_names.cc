// SPDX-License-Identifier: Apache-2.0
// Names of leaves from their paths (NameOfPath of tree.h): dotted as in PyTorch, or reversible,
// with escapes for dots and percent signs and with marks for integer keys and items.
#include <algorithm>
#include <charconv>
#include <optional>
#include <string>

#include "examples/models/tree.h"

namespace tensormount::examples {
namespace {

constexpr char kIntegerKey = '#';
constexpr char kListItem = ':';
constexpr char kTupleItem = ',';

std::string KeyText(const CommonKey& key) {
  const auto* number = std::get_if<std::int64_t>(&key);
  return number != nullptr ? std::to_string(*number) : std::get<std::string>(key);
}

// A key in the path of a message, as CommonValue::At reads it: `lr`, `"a.b"`, `{3}`.
std::string KeyInPath(const CommonKey& key) {
  const auto* text = std::get_if<std::string>(&key);
  if (text == nullptr) return "{" + KeyText(key) + "}";
  const bool plain = !text->empty() && std::all_of(text->begin(), text->end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '/';
  });
  return plain ? *text : CommonToJson(CommonValue(*text));
}

void AppendEscaped(std::string& out, const std::string& key) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  if (key.empty()) {
    out += '%';
    return;
  }
  for (std::size_t i = 0; i < key.size(); ++i) {
    const char c = key[i];
    const bool mark = c == kIntegerKey || c == kListItem || c == kTupleItem;
    if (c == '.' || c == '%' || c == '\0' || (i == 0 && mark)) {
      out += '%';
      out += kDigits[static_cast<std::size_t>(c) >> 4];
      out += kDigits[static_cast<std::size_t>(c) & 15];
    } else {
      out += c;
    }
  }
}

std::optional<int> HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return std::nullopt;
}

// One step of a reversible name. PathOfName finds other spellings of a step by naming the path
// again.
std::optional<TreeStep> StepOf(std::string_view part) {
  TreeStep step;
  if (!part.empty() && (part[0] == kIntegerKey || part[0] == kListItem || part[0] == kTupleItem)) {
    std::int64_t number = 0;
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data() + 1, end, number);
    if (error != std::errc() || stop != end) return std::nullopt;
    if (part[0] != kIntegerKey) {
      if (number < 0) return std::nullopt;
      step.kind = part[0] == kListItem ? TreeStep::Kind::kListItem : TreeStep::Kind::kTupleItem;
    }
    step.key = number;
    return step;
  }
  std::string key;
  for (std::size_t i = 0; i < part.size() && part != "%"; ++i) {
    if (part[i] != '%') {
      key += part[i];
      continue;
    }
    if (part.size() - i < 3) return std::nullopt;
    const auto high = HexDigit(part[i + 1]);
    const auto low = HexDigit(part[i + 2]);
    if (!high || !low) return std::nullopt;
    key += static_cast<char>(*high * 16 + *low);
    i += 2;
  }
  step.key = std::move(key);
  return step;
}

}  // namespace

std::string PathText(const TreePath& path) {
  std::string text;
  for (const TreeStep& step : path) {
    switch (step.kind) {
      case TreeStep::Kind::kKey:
        if (!text.empty() && std::holds_alternative<std::string>(step.key)) text += '.';
        text += KeyInPath(step.key);
        break;
      case TreeStep::Kind::kListItem:
        text += "[" + KeyText(step.key) + "]";
        break;
      case TreeStep::Kind::kTupleItem:
        text += "(" + KeyText(step.key) + ")";
        break;
    }
  }
  return text;
}

std::string NameOfPath(const TreePath& path, TreeNames names) {
  std::string name;
  bool first = true;
  for (const TreeStep& step : path) {
    if (!first) name += '.';
    first = false;
    const auto* text = std::get_if<std::string>(&step.key);
    if (names == TreeNames::kDotted || (text == nullptr && step.kind != TreeStep::Kind::kKey)) {
      if (names == TreeNames::kReversible) {
        name += step.kind == TreeStep::Kind::kListItem ? kListItem : kTupleItem;
      }
      name += KeyText(step.key);
    } else if (text == nullptr) {
      name += kIntegerKey + KeyText(step.key);
    } else {
      AppendEscaped(name, *text);
    }
  }
  return name;
}

Result<TreePath> PathOfName(std::string_view name) {
  TreePath path;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::optional<TreeStep> step = StepOf(name.substr(begin, end - begin));
    if (!step) break;
    path.push_back(*step);
    if (end == name.size()) {
      if (NameOfPath(path, TreeNames::kReversible) != name) break;
      return path;
    }
    begin = end + 1;
  }
  return Status(Code::kInvalidArgument,
                "\"" + std::string(name.substr(0, 200)) + "\" is not a reversible name of a path");
}

}  // namespace tensormount::examples
