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

// Converts keys to paths below tensors/, objects/ and other views, and back (docs/mounting.md,
// "Names"). '/' makes directories. Bytes that a filesystem cannot hold, or that would be ambiguous,
// are escaped with '%', so that different keys never share a path:
//   %XX   a byte: '%' and '@' always, NUL, the dots of "." and "..", the dot of a final ".npy"
//         (of a directory also ".json"), a final bracket
//   %-    an empty part
//   %+... a directory with only the beginning of a part of over kMaxPartBytes; the rest follows
//   ...%= a file whose plain name is taken by a directory (keys "a" and "a/b")
// Examples: "a//b" is a/%-/b; "100%" is 100%25; "w.npy" is w%2Enpy, so that npy/w.npy is the file
// of key "w" alone; "a" beside "a/b" is the file a%= beside the directory a.
// The mapping is one to one: PathParts accepts every key, and KeyOfPath accepts exactly its
// results. A single valid spelling keeps inode numbers, the kernel's caches and copies by rsync
// free of duplicates.

namespace tensormount::fs {

// Longest name made of a part of a key; leaves room for "%+", "%=" and ".json" in the 255 bytes of
// NAME_MAX.
inline constexpr std::size_t kMaxPartBytes = 240;

// One name of a path. `raw_end` makes directories comparable without their names: all keys below a
// directory begin with the same bytes.
struct PathPart {
  std::string name;
  std::size_t raw_end = 0;  // End of the key bytes that the part stands for, without its '/'.
  bool continues = false;   // "%+": the next name belongs to the same part of the key.
};

// The names that lead to `key`, at least one. `also_folder`: other keys begin with `key` and '/'. A
// part longer than kMaxPartBytes becomes several names, cut between characters: NAME_MAX is 255
// bytes on Linux, and keys may have 2,048.
std::vector<PathPart> PathParts(std::string_view key, bool also_folder);

// The names that PathParts returns, joined by '/'.
std::string PathOfKey(std::string_view key, bool also_folder);

// The decoded form of one name of a path.
struct DecodedPart {
  std::string text;        // Bytes of the key.
  bool continues = false;  // The name was "%+...".
  bool marked = false;     // The name was "...%=".
};
// Decodes one name; nullopt if it is malformed. Some accepted names are never made by PathParts,
// such as "%41", or "%=" without a directory of that name, so callers compare with PathParts of the
// key.
std::optional<DecodedPart> DecodePart(std::string_view name);

// Returns the key of a path; kNotFound unless the path is spelled exactly as PathParts spells it.
Result<std::string> KeyOfPath(std::string_view path);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEY_PATH_H_
