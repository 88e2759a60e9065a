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

// Keys in byte order, by ordinal.
// Where keys come from: the index (ShownTensors), or a list in memory (ListedKeys). All that a tree
// needs is this order and a binary search, so that trees of a million tensors take no memory.
// Implementations are immutable and thread-safe.
class KeySource {
 public:
  virtual ~KeySource() = default;
  virtual std::uint32_t count() const = 0;
  virtual Result<std::string> KeyAt(std::uint32_t ordinal) const = 0;
  // First ordinal whose key is >= `key`; count() where there is none.
  // O(log count) comparisons; in an index the blocks that hold them are read and cached.
  virtual Result<std::uint32_t> LowerBound(std::string_view key) const = 0;
  // From `first` on until fn returns false. `entry` is null for what is no tensor.
  using Visit =
      std::function<bool(std::uint32_t ordinal, const std::string& key, const TensorEntry* entry)>;
  virtual Status Scan(std::uint32_t first, const Visit& fn) const = 0;
};

// Keys held in memory.
// For keys that no index has in this order: names of layers, paths of objects, keys that a map
// renamed, tensors of a staging. `sorted`: in byte order, each once.
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

// Bits of an item for the depth of a folder, in all views that show keys as paths. A key has at
// most kMaxKeyBytes slashes, so its path has no more folders than this can count.
inline constexpr int kFolderDepthBits = 12;
static_assert(kMaxKeyBytes < (1u << kFolderDepthBits));

// A folder of the tree: the first `depth` names of the path of key number `first`, which is the
// first key that has these names. The root has depth 0.
// The pair names a folder for as long as the source is unchanged, which makes node ids by
// arithmetic: with keys "a.b" (0), "c/d/x" (1), "c/d/y" (2) and "c/e" (3), folder c/ is {1, 1}, and
// c/d/ is {1, 2}.
struct TreeFolder {
  std::uint32_t first = 0;
  std::uint32_t depth = 0;
};

// What a name in a folder is.
struct TreeChild {
  std::string name;
  bool is_folder = false;
  std::uint32_t ordinal = 0;         // Of the file's key, or of the folder's first key.
  std::uint32_t depth = 0;           // Of the folder.
  std::optional<TensorEntry> entry;  // Of a file, where the listing had it at hand.
};

// Folders and files computed from sorted keys, nothing stored: every call costs some searches in
// the index. Thread-safe where the source is, which must outlive this.
//
// Lookup: the name is decoded to the bytes of the key that it stands for; a search for these bytes,
// and one for them and a '/', say whether there is a file, a folder or both. O(log n).
// List: keys are scanned from the cookie on; at the first key of a subfolder that folder is
// reported, and a search for the end of its prefix skips all other keys in it. O((files + folders)
// log n) for a whole listing, whatever lies below the folders.
// Only folders of overlong names ("%+...") need more: which keys are in them cannot be told from a
// prefix alone, since a name of 240 bytes may also be the whole of a shorter part. Their keys are
// looked at one by one, in steps over what certainly belongs to others.
class KeyTree {
 public:
  explicit KeyTree(const KeySource& keys) : keys_(keys) {}
  const KeySource& keys() const { return keys_; }

  // kNotFound where the folder has no such child; names must be spelled as PathParts spells them.
  Result<TreeChild> Lookup(const TreeFolder& folder, std::string_view name) const;
  // Children in key order, from `from` on: 0, or what came with the child before the wanted one.
  // Until fn returns false (that child was not taken).
  // `next` is a position in the keys, so a listing can go on where it stopped, in another request
  // and on another thread, and nothing is kept in between. fn may move from the child.
  using Visit = std::function<bool(TreeChild& child, std::uint64_t next)>;
  Status List(const TreeFolder& folder, std::uint64_t from, const Visit& fn) const;
  // Names that lead to a folder or file (depth 0 = the whole path of the key).
  Result<std::string> PathOf(std::uint32_t ordinal, std::uint32_t depth) const;
  // Whether other keys lie below `key`. `next`: the key after it, null where it is the last one;
  // that one mostly tells without a search.
  Result<bool> IsFolder(std::string_view key, const std::string* next) const;

 private:
  // As IsFolder, by a search.
  Result<bool> HasKeysBelow(std::string_view key) const;
  struct NamedFolder;  // A folder with its names and the bytes that its keys begin with.
  struct Listing;
  Result<NamedFolder> NamesOf(const TreeFolder& folder) const;
  // First ordinal whose path has `name`, a "%+" one, after the names of `folder`.
  Result<std::uint32_t> FirstContinued(const NamedFolder& folder, std::string_view raw,
                                       std::string_view name) const;
  Status ListFrom(Listing& listing) const;

  const KeySource& keys_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEY_TREE_H_
