// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_
#define TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/key_tree.h"
#include "fs/views/shown_tensors.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// Parts of objects in the order of their paths, with the keys that are shown.
class ShownObjects {
 public:
  // `renames` null: the checkpoint's own keys.
  static Result<std::unique_ptr<const ShownObjects>> Make(const CheckpointIndex& index,
                                                          const KeyRenames* renames);
  const ListedKeys& keys() const { return keys_; }  // Paths: KEY, or KEY/0.3 of a grid.
  const KeyTree& tree() const { return tree_; }
  const std::vector<ObjectRecord>& parts() const { return parts_; }
  // Of part `n`, where a map gives another than the shown one; else empty.
  std::string_view stored_key(std::uint32_t n) const {
    return stored_keys_.empty() ? std::string_view() : std::string_view(stored_keys_[n]);
  }

 private:
  explicit ShownObjects(std::vector<std::string> paths) : keys_(std::move(paths)), tree_(keys_) {}
  ListedKeys keys_;
  KeyTree tree_;
  std::vector<ObjectRecord> parts_;
  std::vector<std::string> stored_keys_;  // Of each part; empty without a map of keys.
};

// What the views of a checkpoint are made from: the keys that are shown, which are the stored ones
// unless the mount has a map of keys. A view takes names from here and bytes from `opened`, never
// names from there: else a map would hold in some views and not in others. Everything outlives the
// views.
struct ShownCheckpoint {
  const OpenedCheckpoint& opened;
  const ShownTensors& tensors;
  const KeyTree& tensor_tree;
  const LayerFiles& layers;
  const ShownObjects& objects;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_
