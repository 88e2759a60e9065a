// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_KEY_TREE_H_
#define TENSORMOUNT_FS_VIEWS_KEY_TREE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/key_path.h"
#include "index/records/checkpoint_index.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {

// Keys in byte order, by ordinal, from the index (ShownTensors) or from memory (ListedKeys). Trees
// need only this order and a binary search, so a tree of a million tensors takes no memory.
// Implementations are immutable and thread-safe.
class KeySource {
 public:
  virtual ~KeySource() = default;
  virtual std::uint32_t count() const = 0;
  virtual Result<std::string> KeyAt(std::uint32_t ordinal) const = 0;
  // First ordinal whose key is >= `key`; count() if there is none. O(log count) comparisons; an
  // index reads and caches the blocks of the compared keys.
  virtual Result<std::uint32_t> LowerBound(std::string_view key) const = 0;
  // Calls fn for each key from ordinal `first` on, until fn returns false. `entry`: the tensor's
  // record, or null if the source reads no records in a scan.
  using Visit =
      std::function<bool(std::uint32_t ordinal, const std::string& key, const TensorEntry* entry)>;
  virtual Status Scan(std::uint32_t first, const Visit& fn) const = 0;
};

// Keys in memory, for keys that no index has in this order: layer names, object paths, renamed
// keys, tensors of a staging. `sorted`: in byte order, without duplicates.
class ListedKeys : public KeySource {
 public:
  explicit ListedKeys(std::vector<std::string> sorted) : keys_(std::move(sorted)) {}
  std::uint32_t count() const override { return static_cast<std::uint32_t>(keys_.size()); }
  Result<std::string> KeyAt(std::uint32_t ordinal) const override;
  Result<std::uint32_t> LowerBound(std::string_view key) const override;
  Status Scan(std::uint32_t first, const Visit& fn) const override;

 private:
  std::vector<std::string> keys_;
};

// Bits of an item for the depth of a directory, in all views that show keys as paths: a key has at
// most kMaxKeyBytes slashes.
inline constexpr int kFolderDepthBits = 12;
static_assert(kMaxKeyBytes < (1u << kFolderDepthBits));

// A directory of the tree: the first `depth` names of the path of key number `first`, which is the
// first key with these names. The root has depth 0.
// These two numbers identify a directory while the source is unchanged, so node ids can be
// computed: with keys "a.b" (0), "c/d/x" (1), "c/d/y" (2) and "c/e" (3), directory c/ is {1, 1},
// and c/d/ is {1, 2}.
struct TreeFolder {
  std::uint32_t first = 0;
  std::uint32_t depth = 0;
};

// A name in a directory.
struct TreeChild {
  std::string name;
  bool is_folder = false;
  std::uint32_t ordinal = 0;         // Ordinal of the file's key, or of the directory's first key.
  std::uint32_t depth = 0;           // Depth of the directory.
  std::optional<TensorEntry> entry;  // The file's record, if the listing had read it.
};

// Directories and files computed from sorted keys, without stored state; every call costs some
// searches in the index. Thread-safe if the source is. The source must outlive this object.
//
// Lookup: decodes the name to bytes of the key. A search for these bytes finds a file, and a search
// for these bytes and a '/' finds a directory. O(log n), except for "%+..." names (below).
// List: scans keys from the cookie on; the first key of a subdirectory reports it, and a search for
// the end of its prefix skips its other keys. O((files + directories) log n) for a whole listing. A
// directory of an overlong name ("%+...") costs more: not every key with its prefix is in it,
// because the first 240 bytes of an overlong part may be a whole part of another key. So its keys
// are checked one by one, except keys that certainly belong to other directories.
class KeyTree {
 public:
  explicit KeyTree(const KeySource& keys) : keys_(keys) {}
  const KeySource& keys() const { return keys_; }

  // Finds a child of a directory. kNotFound if it has no child of this name; names must be spelled
  // as by PathParts.
  Result<TreeChild> Lookup(const TreeFolder& folder, std::string_view name) const;
  // Lists children in key order until fn returns false, which means that it did not take the child.
  // `from`: 0, or the `next` that was reported with the last child that was taken.
  // `next` is a position in the keys, so another request, on another thread, can continue the
  // listing without kept state. fn may move from the child.
  using Visit = std::function<bool(TreeChild& child, std::uint64_t next)>;
  Status List(const TreeFolder& folder, std::uint64_t from, const Visit& fn) const;
  // The first `depth` names of the path of a key, joined by '/'; all names for depth 0.
  Result<std::string> PathOf(std::uint32_t ordinal, std::uint32_t depth) const;
  // Whether other keys lie below `key`. `next`: the key after `key`, or null if `key` is the last.
  // Mostly `next` is enough to decide without a search.
  Result<bool> IsFolder(std::string_view key, const std::string* next) const;

 private:
  // The same result as IsFolder, found by a search.
  Result<bool> HasKeysBelow(std::string_view key) const;
  struct NamedFolder;  // A directory with the common prefix of its keys.
  struct Listing;
  Result<NamedFolder> NamesOf(const TreeFolder& folder) const;
  // First ordinal of a key in the directory `name` of `folder`. `name` begins with "%+"; `raw` are
  // the bytes that all keys in that directory begin with.
  Result<std::uint32_t> FirstContinued(const NamedFolder& folder, std::string_view raw,
                                       std::string_view name) const;
  Status ListFrom(Listing& listing) const;

  const KeySource& keys_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEY_TREE_H_
