// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_UTF8_H_
#define TENSORMOUNT_SHARD_UTF8_H_

#include <cstddef>
#include <string_view>

namespace tensormount {

// Whether `text` is well-formed UTF-8 (Unicode 15, table 3-7: no overlong forms, no surrogates,
// nothing past U+10FFFF). NUL is well-formed; CheckKey refuses it for keys. Strict, because
// programs that decode a malformed key differently would disagree about the keys.
bool IsUtf8(std::string_view text);

// The longest beginning of `text` that has at most `most` bytes and ends at a character boundary.
inline std::string_view CutUtf8(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_UTF8_H_
