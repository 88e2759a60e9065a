// SPDX-License-Identifier: Apache-2.0
// Whether a string is UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above
// U+10FFFF.
#include "shard/utf8.h"

#include <cstddef>
#include <cstdint>

namespace tensormount {

bool IsUtf8(std::string_view text) {
  std::size_t i = 0;
  const std::size_t n = text.size();
  const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(text[at]); };
  while (i < n) {
    const std::uint8_t lead = byte(i);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    // The lead byte determines the number of following bytes and the range of the second. That
    // range refuses overlong forms (E0 80..9F, F0 80..8F), surrogates (ED A0..BF) and code points
    // past U+10FFFF (F4 90..); C0, C1 and F5 upwards are invalid.
    std::size_t more = 0;
    std::uint8_t low = 0x80;  // The range of the second byte, narrower after some leads.
    std::uint8_t high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      more = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      more = 2;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      more = 3;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    } else {
      return false;
    }
    if (n - i <= more) return false;
    if (byte(i + 1) < low || byte(i + 1) > high) return false;
    for (std::size_t k = 2; k <= more; ++k) {
      if (byte(i + k) < 0x80 || byte(i + k) > 0xBF) return false;
    }
    i += more + 1;
  }
  return true;
}

}  // namespace tensormount
