// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_ADOPT_BYTES_H_
#define TENSORMOUNT_TESTS_ADOPT_BYTES_H_

#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

// Byte strings of tests, piece by piece: a number is one byte, text is itself.

namespace tensormount {

inline void AppendPiece(std::string& out, std::string_view text) { out += text; }
template <std::integral T>
void AppendPiece(std::string& out, T byte) {
  out += static_cast<char>(byte);
}

template <typename... Pieces>
std::string Bytes(const Pieces&... pieces) {
  std::string out;
  (AppendPiece(out, pieces), ...);
  return out;
}

template <typename T>
std::string Little(T v) {
  std::string out(sizeof(T), '\0');
  std::memcpy(out.data(), &v, sizeof(T));
  return out;
}
inline std::string U16(std::uint64_t v) { return Little(static_cast<std::uint16_t>(v)); }
inline std::string U32(std::uint64_t v) { return Little(static_cast<std::uint32_t>(v)); }
inline std::string U64(std::uint64_t v) { return Little(v); }

// SHORT_BINUNICODE.
inline std::string Str(std::string_view text) { return Bytes(0x8c, text.size(), text); }
// GLOBAL.
inline std::string Glob(std::string_view module, std::string_view name) {
  return Bytes('c', module, '\n', name, '\n');
}
// A stream of protocol 4 (or another) from its operations.
inline std::string Pickle(std::string_view operations, int protocol = 4) {
  return Bytes(0x80, protocol, operations, '.');
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_ADOPT_BYTES_H_
