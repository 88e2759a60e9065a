// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_TEXT_H_
#define TENSORMOUNT_REMOTE_TEXT_H_

#include <cstdint>
#include <ctime>
#include <optional>
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

// A time as headers have it, in seconds since 1970; nullopt: it is none.
inline std::optional<std::int64_t> ParseHttpDate(std::string_view text) {
  std::tm parts{};
  const std::string copy(text);
  if (strptime(copy.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &parts) == nullptr) return std::nullopt;
  return timegm(&parts);
}

// "2026-11-30T18:00:00", in UTC, whatever follows.
inline std::optional<std::int64_t> ParseIsoTime(std::string_view text) {
  std::tm parts{};
  const std::string copy(text);
  if (strptime(copy.c_str(), "%Y-%m-%dT%H:%M:%S", &parts) == nullptr) return std::nullopt;
  return timegm(&parts);
}

// A decimal number of at most 18 digits; nullopt: it is none.
inline std::optional<std::uint64_t> ParseNumber(std::string_view text) {
  if (text.empty() || text.size() > 18) return std::nullopt;
  std::uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + static_cast<std::uint64_t>(c - '0');
  }
  return value;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_TEXT_H_
