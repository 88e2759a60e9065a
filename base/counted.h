// SPDX-License-Identifier: Apache-2.0
// Counts in messages: "1 tensor", "2 tensors", "12.3 MB". Thread-safe.
#ifndef TENSORMOUNT_BASE_COUNTED_H_
#define TENSORMOUNT_BASE_COUNTED_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace tensormount {

// A number and what it counts: "1 tensor". `what` is the singular; the plural adds an "s".
inline std::string Counted(std::uint64_t number, std::string_view what) {
  std::string text = std::to_string(number);
  text += ' ';
  text += what;
  if (number != 1) text += 's';
  return text;
}

// "12.3 MB" (powers of ten), "512 B". For people only.
std::string HumanBytes(std::uint64_t bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_COUNTED_H_
