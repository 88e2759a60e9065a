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

namespace tensormount::fs {

// Keys in byte order, by ordinal.
class KeySource {
 public:
  virtual ~KeySource() = default;
  virtual std::uint32_t count() const = 0;
  virtual Result<std::string> KeyAt(std::uint32_t ordinal) const = 0;
  // First ordinal whose key is >= `key`; count() where there is none.
  virtual Result<std::uint32_t> LowerBound(std::string_view key) const = 0;
  // From `first` on until fn returns false. `entry` is null for what is no tensor.
  using Visit =
      std::function<bool(std::uint32_t ordinal, const std::string& key, const TensorEntry* entry)>;
  virtual Status Scan(std::uint32_t first, const Visit& fn) const = 0;
};

// Keys held in memory.
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

// A folder of the tree: the first `depth` names of the path of key number `first`, which is the
// first key that has these names. The root has depth 0.
struct TreeFolder {
  std::uint32_t first = 0;
  std::uint32_t depth = 0;
};

struct TreeChild {
  std::string name;
  bool is_folder = false;
  std::uint32_t ordinal = 0;         // Of the file's key, or of the folder's first key.
  std::uint32_t depth = 0;           // Of the folder.
  std::optional<TensorEntry> entry;  // Of a file, where the listing had it at hand.
};

// Folders and files computed from sorted keys, nothing stored: every call costs some searches in
// the index. Thread-safe where the source is, which must outlive this.
class KeyTree {
 public:
  explicit KeyTree(const KeySource& keys) : keys_(keys) {}

  // kNotFound where the folder has no such child; names must be spelled as PathParts spells them.
  Result<TreeChild> Lookup(const TreeFolder& folder, std::string_view name) const;
  // Children in key order, from `from` on: 0, or what came with the child before the wanted one.
  // Until fn returns false (that child was not taken).
  using Visit = std::function<bool(TreeChild& child, std::uint64_t next)>;
  Status List(const TreeFolder& folder, std::uint64_t from, const Visit& fn) const;
  // Names that lead to a folder or file (depth 0 = the whole path of the key).
  Result<std::string> PathOf(std::uint32_t ordinal, std::uint32_t depth) const;
  // Whether other keys lie below `key`.
  Result<bool> IsFolder(std::string_view key) const;

 private:
  struct NamedFolder;  // A folder with its names and the bytes that its keys begin with.
  struct Listing;
  Result<NamedFolder> NamesOf(const TreeFolder& folder) const;
  // First ordinal whose path has `name`, a "%+" one, after the names of `place`.
  Result<std::uint32_t> FirstContinued(const NamedFolder& place, std::string_view raw,
                                       std::string_view name) const;
  Status ListFrom(Listing& listing) const;

  const KeySource& keys_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEY_TREE_H_
