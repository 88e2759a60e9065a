// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_KEY_PATTERN_H_
#define TENSORMOUNT_INDEX_RECORDS_KEY_PATTERN_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// A key with captures, for rules of a name map (docs/mapping.md):
//
//   "decoder.layers.{l}.mlp.{rest*}"
//
// {l} is an index: decimal digits without leading zeros, below 2^31. {rest*} is any text, also
// none, and takes as few bytes as possible. "{{" and "}}" are the characters themselves. A value
// type; immutable.
class KeyPattern {
 public:
  struct Capture {
    std::string name;
    bool is_index = false;
  };

  KeyPattern() = default;
  // kInvalidArgument: an unclosed or nested brace, an invalid or repeated name, two captures
  // without text between them, no text at all.
  static Result<KeyPattern> Parse(std::string_view text);

  const std::vector<Capture>& captures() const { return captures_; }
  // What each capture of the pattern is in `key`, in order; nullopt if the key does not match. The
  // results point into `key`. Takes time linear in the key for each text capture.
  std::optional<std::vector<std::string_view>> Match(std::string_view key) const;
  // The key with these captures, in order.
  std::string Fill(std::span<const std::string> captures) const;
  const std::string& text() const { return text_; }

  // The value of an index; nullopt if `digits` is not one.
  static std::optional<std::int64_t> IndexOf(std::string_view digits);

 private:
  // Matches the part of the pattern from capture `capture` on, up to its next text capture or its
  // end, at `at`. Returns the end of the match; sets the indices that it meets.
  std::optional<std::size_t> MatchPart(std::string_view key, std::size_t at, std::size_t& capture,
                                       std::vector<std::string_view>& found) const;

  std::string text_;
  // literals_[i] is the text before capture i; the last one is the text after all captures.
  std::vector<std::string> literals_ = {""};
  std::vector<Capture> captures_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_KEY_PATTERN_H_
