// SPDX-License-Identifier: Apache-2.0
// Directories over a sorted list of keys, without a tree in memory: a directory is a range of keys
// with one prefix, found by binary search. So a checkpoint of a million tensors costs nothing until
// it is listed.
#include "fs/views/key_tree.h"

#include <algorithm>

#include "fs/answers.h"

namespace tensormount::fs {
namespace {

// The smallest string that is greater than all strings with `prefix`, whose last byte must not be
// 0xFF. A search for it skips a directory: PrefixSuccessor("layers/0/") = "layers/00" is after all
// keys below layers/0/.
std::string PrefixSuccessor(std::string prefix) {
  prefix.back() = static_cast<char>(prefix.back() + 1);
  return prefix;
}

}  // namespace

Result<std::string> ListedKeys::KeyAt(std::uint32_t ordinal) const {
  if (ordinal >= keys_.size()) return Status(Code::kStale, "stale inode number: no key has it");
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

// A directory with the prefix that its keys share; made by NamesOf.
struct KeyTree::NamedFolder {
  std::uint32_t depth = 0;
  std::string prefix;  // Every key in the directory begins with this.
  // The directory's own name if it begins with "%+", because then not every key with the prefix is
  // in the directory. For other directories it is empty.
  std::string last_name;
  // Whether the key with these parts is in the directory, given that it has the prefix.
  bool Has(const std::vector<PathPart>& parts) const {
    return parts.size() > depth && (last_name.empty() || parts[depth - 1].name == last_name);
  }
};

Result<KeyTree::NamedFolder> KeyTree::NamesOf(const TreeFolder& folder) const {
  NamedFolder named;
  named.depth = folder.depth;
  if (folder.depth == 0) return named;
  if (folder.first >= keys_.count())
    return Status(Code::kStale, "stale inode number: no directory has it");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(folder.first));
  const std::vector<PathPart> parts = PathParts(key, false);
  // A key with at most `depth` names is not below a directory of that depth: the node id is stale.
  if (parts.size() <= folder.depth)
    return Status(Code::kStale, "stale inode number: no directory has it");
  const PathPart& own = parts[folder.depth - 1];
  named.prefix = key.substr(0, own.raw_end + (own.continues ? 0 : 1));
  if (own.continues) named.last_name = own.name;
  return named;
}

Result<bool> KeyTree::IsFolder(std::string_view key, const std::string* next) const {
  if (next == nullptr || next->size() <= key.size() || !next->starts_with(key)) return false;
  const char c = (*next)[key.size()];
  // Keys like "a-b" sort between "a" and "a/b", so here only a search can tell.
  if (c < '/') return HasKeysBelow(key);
  return c == '/';
}

Result<bool> KeyTree::HasKeysBelow(std::string_view key) const {
  // The lower bound of `prefix` is the first key below `key`, even if other keys sort between the
  // two.
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
      // Here `raw` is a whole part, and so a directory of its own. A search skips all keys in that
      // directory.
      TENSORMOUNT_ASSIGN_OR_RETURN(at, keys_.LowerBound(PrefixSuccessor(std::string(raw) + '/')));
    } else {
      ++at;
    }
  }
  return NoSuchNameError(name);
}

Result<TreeChild> KeyTree::Lookup(const TreeFolder& folder, std::string_view name) const {
  const std::optional<DecodedPart> decoded = DecodePart(name);
  if (!decoded) return NoSuchNameError(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NamedFolder named, NamesOf(folder));
  // The bytes that the child's key, or a key below it, must begin with. The spelling is checked at
  // the end, against PathParts of the found key.
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
      if (!named.Has(parts) || parts[folder.depth].name != name) return NoSuchNameError(name);
      child.is_folder = true;
      child.ordinal = below;
      child.depth = folder.depth + 1;
      return child;
    }
  }
  // If a directory "a" exists, the file is named "a%="; if not, "a".
  if (decoded->marked != also_folder) return NoSuchNameError(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t at, keys_.LowerBound(raw));
  if (at >= keys_.count()) return NoSuchNameError(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, keys_.KeyAt(at));
  if (key != raw) return NoSuchNameError(name);
  const std::vector<PathPart> parts = PathParts(key, also_folder);
  if (!named.Has(parts) || parts.size() != folder.depth + 1 || parts.back().name != name) {
    return NoSuchNameError(name);
  }
  child.ordinal = at;
  return child;
}

// State of one List: the remaining keys, and a file that is reported one key late, because only the
// next key tells whether it needs the mark "%=".
struct KeyTree::Listing {
  const NamedFolder& folder;
  const Visit& fn;
  std::uint32_t at = 0;
  bool done = false;
  std::string continued;  // The "%+" directory that was seen last.
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

// Lists files and the first directory after them, and moves `at` behind that directory (behind its
// first key if its keys need not be adjacent). Each call scans the source once: to list a hundred
// subdirectories with a million keys below them, it scans a few keys a hundred times.
Status KeyTree::ListFrom(Listing& l) const {
  std::optional<TreeChild> folder;
  std::string folder_prefix;  // Common prefix of the directory's keys; empty for "%+" directories.
  // Reports the file that waits for the next key. `next`: that key, or null at the end.
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
        // An earlier key has already led to this "%+" directory.
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
    // Keys of a "%+" directory need not be adjacent, so the directory is reported only at its first
    // key.
    l.continued = folder->name;
    const std::string raw = l.folder.prefix + DecodePart(folder->name)->text;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t first,
                                 FirstContinued(l.folder, raw, folder->name));
    if (first != folder->ordinal) return {};
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(l.at, keys_.LowerBound(PrefixSuccessor(folder_prefix)));
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
  if (depth >= parts.size() && depth > 0)
    return Status(Code::kStale, "stale inode number: no directory has it");
  std::string path;
  for (std::size_t i = 0; i < parts.size() && (depth == 0 || i < depth); ++i) {
    if (i > 0) path += '/';
    path += parts[i].name;
  }
  return path;
}

}  // namespace tensormount::fs
