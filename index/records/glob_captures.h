// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_GLOB_CAPTURES_H_
#define TENSORMOUNT_INDEX_RECORDS_GLOB_CAPTURES_H_

#include <optional>
#include <string_view>
#include <vector>

namespace tensormount {

// The text that each '*' of `pattern` matches in `text`, in order; nullopt if `text` does not
// match. '*' is the only special character and matches any bytes, also none. From left to right,
// each '*' takes as few bytes as possible, and the last takes the rest. The captures point into
// `text`. Example: "layers.*.attn.*" on "layers.3.attn.q.weight" gives "3" and "q.weight".
// Takes time linear in the text for each '*'. A shortest match never has to be undone, because the
// rest of the pattern could only match further right.
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
      // The part of the pattern after the last '*' must end the text; the last '*' takes everything
      // before it.
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
