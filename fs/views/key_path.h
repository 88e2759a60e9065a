// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_KEY_PATH_H_
#define TENSORMOUNT_FS_VIEWS_KEY_PATH_H_

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

// How a key becomes a path below tensors/, npy/, extents/ and objects/, and back
// (docs/semantics.md, "Names"). '/' makes folders. What a file system cannot hold, or what would
// be ambiguous, is escaped with '%', so that different keys never share a path:
//   %XX   a byte: '%' and '@' always, NUL, the dots of "." and "..", the dot of a final ".npy"
//         (of a folder also ".json"), a final bracket
//   %-    an empty part
//   %+... a folder that holds only the beginning of a part of over kMaxPartBytes; the rest follows
//   ...%= a file whose plain name is taken by a folder (keys "a" and "a/b")

namespace tensormount::fs {

// Longest name that is made of a part of a key. Room is left for "%+", "%=" and ".json" in 255.
inline constexpr std::size_t kMaxPartBytes = 240;

// One name of a path.
struct PathPart {
  std::string name;
  std::size_t raw_end = 0;  // The part stands for key bytes up to here, its '/' not counted.
  bool continues = false;   // "%+": the next part belongs to the same part of the key.
};

// The names that lead to `key`, at least one. `also_folder`: other keys begin with `key` and '/'.
std::vector<PathPart> PathParts(std::string_view key, bool also_folder);

// The names joined by '/'.
std::string PathOfKey(std::string_view key, bool also_folder);

// What one name means by itself; nothing for names that PathParts never makes.
struct DecodedPart {
  std::string text;        // Bytes of the key.
  bool continues = false;  // Was "%+...".
  bool marked = false;     // Was "...%=".
};
std::optional<DecodedPart> DecodePart(std::string_view name);

// The key that a path stands for: kNotFound unless it is spelled exactly as PathParts would.
Result<std::string> KeyOfPath(std::string_view path);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEY_PATH_H_
