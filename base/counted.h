// SPDX-License-Identifier: Apache-2.0
// Numbers of things and of bytes in messages: "1 tensor", "2 tensors", "12.3 MB". Threads: any.
#ifndef TENSORMOUNT_BASE_COUNTED_H_
#define TENSORMOUNT_BASE_COUNTED_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace tensormount {

// `what` in the singular, of a word whose plural has an "s" more.
inline std::string Counted(std::uint64_t number, std::string_view what) {
  std::string text = std::to_string(number);
  text += ' ';
  text += what;
  if (number != 1) text += 's';
  return text;
}

// "12.3 MB" (powers of ten), "512 B". For people; programs want the number.
std::string HumanBytes(std::uint64_t bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_COUNTED_H_
