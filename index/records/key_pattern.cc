// SPDX-License-Identifier: Apache-2.0
// Keys with captures. Text captures cut the pattern into parts of literals and indices; each part
// is searched from left to right, so a match never has to be undone.
#include "index/records/key_pattern.h"

#include <algorithm>

#include "tensormount/box.h"

#include "shard/axis_names.h"

namespace tensormount {
namespace {

constexpr std::size_t kMostDigits = 10;  // Of an index below 2^31.

bool IsIndexDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

Result<KeyPattern> KeyPattern::Parse(std::string_view text) {
  const auto invalid = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "key \"" + std::string(text) + "\": " + why);
  };
  KeyPattern pattern;
  pattern.text_ = text;
  bool has_text = false;
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    if ((c == '{' || c == '}') && at + 1 < text.size() && text[at + 1] == c) {
      pattern.literals_.back() += c;
      at += 2;
      continue;
    }
    if (c == '}') return invalid("\"}\" without \"{\"; the character itself is \"}}\"");
    if (c != '{') {
      pattern.literals_.back() += c;
      ++at;
      continue;
    }
    const std::size_t close = text.find('}', at);
    if (close == std::string_view::npos) return invalid("\"{\" without \"}\"");
    std::string_view name = text.substr(at + 1, close - at - 1);
    const bool is_index = !name.ends_with('*');
    if (!is_index) name.remove_suffix(1);
    if (!AxisNames::IsName(name)) {
      return invalid("\"" + std::string(name) + "\" is not a name: letters, digits and _");
    }
    for (const Capture& capture : pattern.captures_) {
      if (capture.name == name) return invalid("{" + std::string(name) + "} occurs twice");
    }
    if (pattern.captures_.size() == kMaxRank) {
      return invalid("more than " + std::to_string(kMaxRank) + " captures");
    }
    if (!pattern.captures_.empty() && pattern.literals_.back().empty()) {
      return invalid("there is no text between {" + pattern.captures_.back().name + "} and {" +
                     std::string(name) + "}");
    }
    pattern.captures_.push_back({std::string(name), is_index});
    pattern.literals_.emplace_back();
    at = close + 1;
  }
  for (std::size_t i = 0; i < pattern.literals_.size(); ++i) {
    const std::string& literal = pattern.literals_[i];
    has_text = has_text || !literal.empty();
    if (i > 0 && pattern.captures_[i - 1].is_index && !literal.empty() &&
        IsIndexDigit(literal[0])) {
      return invalid("a digit after {" + pattern.captures_[i - 1].name +
                     "} would be part of the index");
    }
  }
  if (!has_text && pattern.captures_.empty()) return invalid("the key is empty");
  return pattern;
}

std::optional<std::int64_t> KeyPattern::IndexOf(std::string_view digits) {
  if (digits.empty() || digits.size() > kMostDigits || (digits[0] == '0' && digits.size() > 1) ||
      !std::all_of(digits.begin(), digits.end(), IsIndexDigit)) {
    return std::nullopt;
  }
  std::int64_t value = 0;
  for (const char c : digits) value = value * 10 + (c - '0');
  if (value > INT32_MAX) return std::nullopt;
  return value;
}

std::optional<std::size_t> KeyPattern::MatchPart(std::string_view key, std::size_t at,
                                                 std::size_t& capture,
                                                 std::vector<std::string_view>& found) const {
  for (std::size_t c = capture;; ++c) {
    if (!key.substr(at).starts_with(literals_[c])) return std::nullopt;
    at += literals_[c].size();
    if (c == captures_.size() || !captures_[c].is_index) {
      capture = c;
      return at;
    }
    std::size_t end = at;
    // One digit more than an index may have makes it invalid.
    while (end < key.size() && end - at <= kMostDigits && IsIndexDigit(key[end])) ++end;
    if (!IndexOf(key.substr(at, end - at))) return std::nullopt;
    found[c] = key.substr(at, end - at);
    at = end;
  }
}

std::optional<std::vector<std::string_view>> KeyPattern::Match(std::string_view key) const {
  if (!key.starts_with(literals_[0])) return std::nullopt;  // Most keys, without an allocation.
  std::vector<std::string_view> found(captures_.size());
  std::size_t capture = 0;
  std::optional<std::size_t> end = MatchPart(key, 0, capture, found);
  while (end && capture < captures_.size()) {
    // The text of this capture ends where the part after it matches first; the last part must reach
    // the end of the key.
    const std::size_t begin = *end;
    const std::size_t text = capture;
    end.reset();
    for (std::size_t at = begin; at <= key.size(); ++at) {
      at = key.find(literals_[text + 1], at);
      if (at == std::string_view::npos) break;
      std::size_t next = text + 1;
      const std::optional<std::size_t> after = MatchPart(key, at, next, found);
      if (!after || (next == captures_.size() && *after != key.size())) continue;
      found[text] = key.substr(begin, at - begin);
      capture = next;
      end = after;
      break;
    }
  }
  if (!end || *end != key.size()) return std::nullopt;
  return found;
}

std::string KeyPattern::Fill(std::span<const std::string> captures) const {
  std::string key = literals_[0];
  for (std::size_t c = 0; c < captures_.size(); ++c) {
    key += captures[c];
    key += literals_[c + 1];
  }
  return key;
}

}  // namespace tensormount
