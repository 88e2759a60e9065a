// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_GLOB_CAPTURES_H_
#define TENSORMOUNT_INDEX_RECORDS_GLOB_CAPTURES_H_

#include <optional>
#include <string_view>
#include <vector>

namespace tensormount {

// What each '*' of `pattern` stands for in `text`, in order; nothing where it does not match. '*'
// is the only character with a meaning and stands for any bytes, none too; each takes as few as the
// rest of the pattern lets it, from left to right. Time linear in the text for each '*'.
// The captures point into `text`. Example: "layers.*.attn.*" on "layers.3.attn.q.weight" gives "3"
// and "q.weight". Never exponential: a match that takes as few bytes as possible for each star
// never needs to be undone, because what stands behind it can only move to the right.
inline std::optional<std::vector<std::string_view>> GlobCaptures(std::string_view pattern,
                                                                 std::string_view text) {
  std::vector<std::string_view> captures;
  std::size_t star = pattern.find('*');
  if (!text.starts_with(pattern.substr(0, star))) return std::nullopt;
  if (star == std::string_view::npos) {
    if (text.size() != pattern.size()) return std::nullopt;
    return captures;
  }
  text.remove_prefix(star);
  for (;;) {
    pattern.remove_prefix(star + 1);
    star = pattern.find('*');
    const std::string_view literal = pattern.substr(0, star);
    if (star == std::string_view::npos) {
      // The last piece stands at the end; whatever is left before it is the last '*''s.
      if (!text.ends_with(literal)) return std::nullopt;
      captures.push_back(text.substr(0, text.size() - literal.size()));
      return captures;
    }
    const std::size_t at = text.find(literal);
    if (at == std::string_view::npos) return std::nullopt;
    captures.push_back(text.substr(0, at));
    text.remove_prefix(at + literal.size());
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_GLOB_CAPTURES_H_
