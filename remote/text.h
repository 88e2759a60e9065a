// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_TEXT_H_
#define TENSORMOUNT_REMOTE_TEXT_H_

#include <string>
#include <string_view>

namespace tensormount {

// `text` with the letters A to Z in lower case, as names of headers and hosts are compared.
inline std::string Lowered(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

// `text` without blanks, tabs and ends of lines at its begin and end.
inline std::string_view Trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_TEXT_H_
