// SPDX-License-Identifier: Apache-2.0
// Folders over a sorted list of keys, without building a tree: a folder is a range of keys with one
// prefix, found by binary search. So a checkpoint of a million tensors costs nothing until it is
// listed.
#include "fs/views/key_tree.h"

#include <algorithm>

#include "fs/answers.h"

namespace tensormount::fs {
namespace {

// The least string that is greater than all strings beginning with `prefix` (which does not end
// in 0xFF: it ends in '/').
// Skips a folder: the search for After("layers/0/") = "layers/00" lands behind all keys below it.
std::string After(std::string prefix) {
  prefix.back() = static_cast<char>(prefix.back() + 1);
  return prefix;
}

}  // namespace

Result<std::string> ListedKeys::KeyAt(std::uint32_t ordinal) const {
  if (ordinal >= keys_.size()) return Status(Code::kStale, "no such key");
  return keys_[ordinal];
}

Result<std::uint32_t> ListedKeys::LowerBound(std::string_view key) const {
  return static_cast<std::uint32_t>(std::lower_bound(keys_.begin(), keys_.end(), key) -
                                    keys_.begin());
}

Status ListedKeys::Scan(std::uint32_t first, const Visit& fn) const {
  for (std::uint32_t i = first; i < keys_.size(); ++i) {
    if (!fn(i, keys_[i], nullptr)) break;
  }
  return {};
}

// What NamesOf finds for a folder: the names of the path are not kept, only what its keys have in
// common.
struct KeyTree::NamedFolder {
  std::uint32_t depth = 0;
  std::string prefix;     // Every key in the folder begins with this.
  std::string last_name;  // Of the folder itself, where it is a "%+" one: not every such key is in.
  // Whether the key with these parts lies in the folder, given that it has the prefix.
  bool Has(const std::vector<PathPart>& parts) const {
    return parts.size() > depth && (last_name.empty() || parts[depth - 1].name == last_name);
  }
};

Result<KeyTree::NamedFolder> KeyTree::NamesOf(const TreeFolder& folder) const {
  NamedFolder named;
  named.depth = folder.depth;
  if (folder.depth == 0) return named;
  if (folder.first >= keys_.count()) return Status(Code::kStale, "no such folder");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(folder.first));
  const std::vector<PathPart> parts = PathParts(key, false);
  // A key that has no more names than the folder is a file, not a folder: a stale number.
  if (parts.size() <= folder.depth) return Status(Code::kStale, "no such folder");
  const PathPart& own = parts[folder.depth - 1];
  named.prefix = key.substr(0, own.raw_end + (own.continues ? 0 : 1));
  if (own.continues) named.last_name = own.name;
  return named;
}

Result<bool> KeyTree::IsFolder(std::string_view key, const std::string* next) const {
  if (next == nullptr || next->size() <= key.size() || !next->starts_with(key)) return false;
  const char c = (*next)[key.size()];
  // Keys like "a-b" stand between "a" and "a/b".
  if (c < '/') return HasKeysBelow(key);
  return c == '/';
}

Result<bool> KeyTree::HasKeysBelow(std::string_view key) const {
  // Sorted order puts the first key below it at the lower bound, wherever others stand in between.
  const std::string prefix = std::string(key) + '/';
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t at, keys_.LowerBound(prefix));
  if (at >= keys_.count()) return false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string found, keys_.KeyAt(at));
  return found.starts_with(prefix);
}

Result<std::uint32_t> KeyTree::FirstContinued(const NamedFolder& folder, std::string_view raw,
                                              std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::uint32_t at, keys_.LowerBound(raw));
  while (at < keys_.count()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(at));
    if (!key.starts_with(raw)) break;
    const std::vector<PathPart> parts = PathParts(key, false);
    if (parts.size() > folder.depth + 1 && parts[folder.depth].name == name) return at;
    if (key.size() > raw.size() && key[raw.size()] == '/') {
      // All keys below the folder of the short name in one step.
      // Such keys begin with the same bytes and are in another folder.
      TENSORMOUNT_ASSIGN_OR_RETURN(at, keys_.LowerBound(After(std::string(raw) + '/')));
    } else {
      ++at;
    }
  }
  return NoSuch(name);
}

Result<TreeChild> KeyTree::Lookup(const TreeFolder& folder, std::string_view name) const {
  const std::optional<DecodedPart> decoded = DecodePart(name);
  if (!decoded) return NoSuch(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NamedFolder named, NamesOf(folder));
  // The bytes that a key must begin with to be this child, or to be below it. Spelling is checked
  // at the end, by comparing with what PathParts makes of the key that was found.
  const std::string raw = named.prefix + decoded->text;
  TreeChild child;
  child.name = name;
  if (decoded->continues) {
    TENSORMOUNT_ASSIGN_OR_RETURN(child.ordinal, FirstContinued(named, raw, name));
    child.is_folder = true;
    child.depth = folder.depth + 1;
    return child;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t below, keys_.LowerBound(raw + '/'));
  bool also_folder = false;
  if (below < keys_.count()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(below));
    also_folder = key.starts_with(raw + '/');
    if (also_folder && !decoded->marked) {
      const std::vector<PathPart> parts = PathParts(key, false);
      if (!named.Has(parts) || parts[folder.depth].name != name) return NoSuch(name);
      child.is_folder = true;
      child.ordinal = below;
      child.depth = folder.depth + 1;
      return child;
    }
  }
  // "a%=" is the file where there is a folder "a"; "a" is the file where there is none.
  if (decoded->marked != also_folder) return NoSuch(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t at, keys_.LowerBound(raw));
  if (at >= keys_.count()) return NoSuch(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(at));
  if (key != raw) return NoSuch(name);
  const std::vector<PathPart> parts = PathParts(key, also_folder);
  if (!named.Has(parts) || parts.size() != folder.depth + 1 || parts.back().name != name) {
    return NoSuch(name);
  }
  child.ordinal = at;
  return child;
}

// The state of one List: what is to come, and the file that waits for the key after it (which may
// show that the file's name is also a folder's).
// A file is reported one key late: only the next key tells whether it needs the mark "%=".
struct KeyTree::Listing {
  const NamedFolder& folder;
  const Visit& fn;
  std::uint32_t at = 0;
  bool done = false;
  std::string continued;  // The "%+" folder emitted last.
  bool has_file = false;
  TreeChild file;
  std::string file_key;
  Status status;
};

Status KeyTree::List(const TreeFolder& folder, std::uint64_t from, const Visit& fn) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NamedFolder named, NamesOf(folder));
  Listing listing{.folder = named, .fn = fn};
  if (from > keys_.count()) return {};
  listing.at = from == 0 ? folder.first : static_cast<std::uint32_t>(from);
  while (!listing.done) TENSORMOUNT_RETURN_IF_ERROR(ListFrom(listing));
  return {};
}

// Lists files up to and including the first folder; moves `at` behind it.
// One scan of the source each; then `at` jumps over the folder. So a folder with a million keys
// below a hundred subfolders costs a hundred scans of a few keys.
Status KeyTree::ListFrom(Listing& l) const {
  std::optional<TreeChild> folder;
  std::string folder_prefix;  // Of its keys; empty for "%+" folders.
  // Emits the file that waits. `next`: the key after it, or null at the end.
  const auto emit_file = [&](const std::string* next) {
    if (!l.has_file) return true;
    l.has_file = false;
    const Result<bool> also_folder = IsFolder(l.file_key, next);
    l.status = also_folder.status();
    if (!also_folder.ok()) return false;
    if (also_folder.value()) l.file.name += "%=";
    return l.fn(l.file, std::uint64_t{l.file.ordinal} + 1);
  };

  bool stopped = false;
  std::uint32_t at = l.at;
  const Status scanned = keys_.Scan(
      l.at, [&](std::uint32_t ordinal, const std::string& key, const TensorEntry* entry) {
        at = ordinal + 1;
        if (!emit_file(&key)) {
          stopped = true;
          return false;
        }
        if (!key.starts_with(l.folder.prefix)) {
          stopped = true;
          return false;
        }
        std::vector<PathPart> parts = PathParts(key, false);
        if (!l.folder.Has(parts)) return true;
        PathPart& own = parts[l.folder.depth];
        if (parts.size() == l.folder.depth + 1) {
          l.has_file = true;
          l.file = TreeChild{.name = std::move(own.name), .ordinal = ordinal};
          if (entry != nullptr) l.file.entry = *entry;
          l.file_key = key;
          return true;
        }
        // The same "%+" folder again, in keys that stand side by side.
        if (own.continues && own.name == l.continued) return true;
        folder = TreeChild{.name = std::move(own.name),
                           .is_folder = true,
                           .ordinal = ordinal,
                           .depth = l.folder.depth + 1};
        folder_prefix = own.continues ? std::string() : key.substr(0, own.raw_end + 1);
        return false;
      });
  TENSORMOUNT_RETURN_IF_ERROR(scanned);
  TENSORMOUNT_RETURN_IF_ERROR(l.status);
  l.at = at;
  if (stopped) {
    l.done = true;
    return {};
  }
  if (!folder) {
    (void)emit_file(nullptr);
    l.done = true;
    return l.status;
  }
  if (folder_prefix.empty()) {
    // Keys of a "%+" folder do not stand side by side: only its first one is the folder.
    l.continued = folder->name;
    const std::string raw = l.folder.prefix + DecodePart(folder->name)->text;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t first,
                                 FirstContinued(l.folder, raw, folder->name));
    if (first != folder->ordinal) return {};
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(l.at, keys_.LowerBound(After(folder_prefix)));
  }
  if (!l.fn(*folder, l.at)) l.done = true;
  return {};
}

Result<std::string> KeyTree::PathOf(std::uint32_t ordinal, std::uint32_t depth) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(ordinal));
  bool also_folder = false;
  if (depth == 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(also_folder, HasKeysBelow(key));
  }
  const std::vector<PathPart> parts = PathParts(key, also_folder);
  if (depth >= parts.size() && depth > 0) return Status(Code::kStale, "no such folder");
  std::string path;
  for (std::size_t i = 0; i < parts.size() && (depth == 0 || i < depth); ++i) {
    if (i > 0) path += '/';
    path += parts[i].name;
  }
  return path;
}

}  // namespace tensormount::fs
