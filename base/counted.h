// SPDX-License-Identifier: Apache-2.0
// Numbers of things in messages: "1 tensor", "2 tensors". Threads: any.
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

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_COUNTED_H_
