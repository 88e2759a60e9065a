// SPDX-License-Identifier: Apache-2.0
// Converts keys to paths and back. A key may contain any bytes: parts that cannot be a file name or
// would be misread ("..", an empty part, a part that is too long) are escaped with a percent sign,
// reversibly.
#include "fs/views/key_path.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kHex = "0123456789ABCDEF";

// Whether a byte is escaped wherever it is: '%' is the escape, '@' begins a slice, NUL ends a name.
bool MustEscape(char c) { return c == '%' || c == '@' || c == '\0'; }

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

void AppendEscaped(std::string& out, char c) {
  const unsigned char byte = static_cast<unsigned char>(c);
  out += '%';
  out += kHex[byte >> 4];
  out += kHex[byte & 15];
}

// Index of the byte of `part` that must be escaped because the part ends with a suffix or bracket;
// npos if it does not. One byte is enough: "w.npy" becomes "w%2Enpy". A final bracket would be read
// as a slice below slices/.
std::size_t SpecialByte(std::string_view part, bool last) {
  if (part.ends_with(".npy")) return part.size() - 4;
  if (!last && part.ends_with(".json")) return part.size() - 5;
  if (part.ends_with('[') || part.ends_with(']')) return part.size() - 1;
  return std::string_view::npos;
}

bool IsDots(std::string_view name) { return name == "." || name == ".."; }

// Appends the names of one part, which begins at byte `begin` of the key.
void AppendPart(std::string_view part, std::size_t begin, bool last, std::vector<PathPart>& out) {
  if (part.empty()) {
    out.push_back({"%-", begin, false});
    return;
  }
  const std::size_t special = SpecialByte(part, last);
  std::string name;
  std::size_t i = 0;
  while (i < part.size()) {
    // One unit: an escaped byte or a whole character. A name that ended inside a character would be
    // invalid UTF-8, which some programs refuse.
    std::size_t n = 1;
    const bool escaped = MustEscape(part[i]) || i == special;
    if (!escaped) {
      while (n < 4 && i + n < part.size() && IsContinuation(part[i + n])) ++n;
    }
    if (name.size() + (escaped ? 3 : n) > kMaxPartBytes) {
      out.push_back({"%+" + name, begin + i, true});
      name.clear();
    }
    if (escaped) {
      AppendEscaped(name, part[i]);
    } else {
      name.append(part.substr(i, n));
    }
    i += n;
  }
  // Only a whole name can be "." or "..", so this is checked after the loop. If the part was cut
  // into several names, `name` is the last of them, which is not empty.
  if (IsDots(name)) {
    std::string dots;
    for (const char c : name) AppendEscaped(dots, c);
    name = std::move(dots);
  }
  out.push_back({std::move(name), begin + part.size(), false});
}

int HexValue(char c) {
  const std::size_t at = kHex.find(c);
  return at == std::string_view::npos ? -1 : static_cast<int>(at);
}

}  // namespace

// Takes time linear in the key's length.
std::vector<PathPart> PathParts(std::string_view key, bool also_folder) {
  std::vector<PathPart> parts;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t slash = key.find('/', begin);
    const bool last = slash == std::string_view::npos;
    AppendPart(key.substr(begin, last ? slash : slash - begin), begin, last, parts);
    if (last) break;
    begin = slash + 1;
  }
  if (also_folder) parts.back().name += "%=";
  return parts;
}

std::string PathOfKey(std::string_view key, bool also_folder) {
  std::string path;
  for (const PathPart& part : PathParts(key, also_folder)) {
    if (!path.empty()) path += '/';
    path += part.name;
  }
  return path;
}

// Does not check that an escape was necessary: "%41" is accepted, although an 'A' needs no escape.
std::optional<DecodedPart> DecodePart(std::string_view name) {
  DecodedPart decoded;
  if (name.empty() || IsDots(name)) return std::nullopt;
  if (name.starts_with("%+")) {
    decoded.continues = true;
    name.remove_prefix(2);
    if (name.empty()) return std::nullopt;
  } else if (name.ends_with("%=")) {
    decoded.marked = true;
    name.remove_suffix(2);
    if (name.empty()) return std::nullopt;
  }
  if (name == "%-" && !decoded.continues) return decoded;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] != '%') {
      decoded.text += name[i];
      continue;
    }
    if (i + 2 >= name.size()) return std::nullopt;
    const int high = HexValue(name[i + 1]);
    const int low = HexValue(name[i + 2]);
    if (high < 0 || low < 0) return std::nullopt;
    decoded.text += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return decoded;
}

Result<std::string> KeyOfPath(std::string_view path) {
  const Status none(Code::kNotFound, "no key has the path " + std::string(path));
  std::string key;
  bool marked = false;
  bool continues = true;  // True at first, because no '/' precedes the first part.
  std::size_t begin = 0;
  while (begin <= path.size()) {
    const std::size_t slash = std::min(path.find('/', begin), path.size());
    const std::optional<DecodedPart> part = DecodePart(path.substr(begin, slash - begin));
    if (!part || marked) return none;
    if (!continues) key += '/';
    key += part->text;
    continues = part->continues;
    marked = part->marked;
    begin = slash + 1;
  }
  // This comparison checks the spelling of all escapes at once.
  if (continues || PathOfKey(key, marked) != path) return none;
  return key;
}

}  // namespace tensormount::fs
