// SPDX-License-Identifier: Apache-2.0
// Text for a terminal (shown_text.h).
#include "mount-tools/shown_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include <fmt/core.h>

#include "base/counted.h"
#include "shard/utf8.h"

namespace tensormount::tools {
namespace {

// Largest number of bytes of a common value that a list shows.
constexpr std::size_t kShownValueBytes = 100;

// The number of bytes of the character at the start of `text`; 0 if these bytes are not valid
// UTF-8.
std::size_t CharacterBytes(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  const std::size_t bytes = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  return bytes <= text.size() && IsUtf8(text.substr(0, bytes)) ? bytes : 0;
}

std::uint32_t CodePoint(std::string_view character) {
  const auto lead = static_cast<unsigned char>(character.front());
  if (character.size() == 1) return lead;
  std::uint32_t code = lead & (0x7Fu >> character.size());
  for (const char c : character.substr(1)) code = code << 6 | (static_cast<unsigned char>(c) & 63u);
  return code;
}

// Whether a character must be escaped: C0 and C1 controls, the Arabic letter mark, zero-width
// characters and direction marks, line and paragraph separators, direction overrides and isolates,
// invisible operators, and the byte order mark.
bool MustEscape(std::uint32_t c) {
  return c < 0x20 || (c >= 0x7F && c <= 0x9F) || c == 0x061C || (c >= 0x200B && c <= 0x200F) ||
         (c >= 0x2028 && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) || c == 0xFEFF;
}

}  // namespace

// Printable characters are not escaped, so names in all languages are readable.
std::string ShownText(std::string_view text, std::string_view keep) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = CharacterBytes(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(bytes, 1));
    if (bytes == 0) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(character.front()));
    } else if (const std::uint32_t code = CodePoint(character);
               !MustEscape(code) || keep.find(character) != std::string_view::npos) {
      out += character;
    } else {
      out += code == '\n' ? std::string("\\n") : fmt::format("\\u{:04x}", code);
    }
    text.remove_prefix(character.size());
  }
  return out;
}

std::string DateText(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[64] = {};
  if (localtime_r(&time, &parts) == nullptr ||
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M", &parts) == 0) {
    return std::to_string(seconds);
  }
  return text;
}

std::string ShortValue(const CommonValue& value) {
  std::string text = CommonToJson(value);
  if (text.size() <= kShownValueBytes) return text;
  std::size_t end = kShownValueBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  const std::string whole = HumanBytes(text.size());
  return fmt::format("{}... ({} of text)", text.substr(0, end), whole);
}

}  // namespace tensormount::tools
