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
// Examples: "a//b" is a/%-/b; "100%" is 100%25; "w.npy" is w%2Enpy, so that npy/w.npy is the file
// of key "w" alone; "a" beside "a/b" is the file a%= beside the folder a.
// The map is one to one both ways: PathParts is total, and KeyOfPath accepts exactly its results.
// That only one spelling is found is what keeps inode numbers, caches of the kernel and copies by
// rsync free of doubles.

namespace tensormount::fs {

// Longest name that is made of a part of a key. Room is left for "%+", "%=" and ".json" in 255.
inline constexpr std::size_t kMaxPartBytes = 240;

// One name of a path.
// `raw_end` makes folders comparable without their names: all keys below a folder begin with the
// same bytes of the key.
struct PathPart {
  std::string name;
  std::size_t raw_end = 0;  // The part stands for key bytes up to here, its '/' not counted.
  bool continues = false;   // "%+": the next part belongs to the same part of the key.
};

// The names that lead to `key`, at least one. `also_folder`: other keys begin with `key` and '/'.
// A part of a key that is longer than kMaxPartBytes becomes several names, cut between characters:
// NAME_MAX is 255 bytes on Linux, and keys may have 2,048.
std::vector<PathPart> PathParts(std::string_view key, bool also_folder);

// The names joined by '/'.
std::string PathOfKey(std::string_view key, bool also_folder);

// What one name means by itself; nothing for names that PathParts never makes.
// The rest of the path can make it wrong still: "%=" is right only where there is a folder of that
// name too.
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
