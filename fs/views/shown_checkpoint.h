// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_
#define TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "fs/views/key_tree.h"
#include "fs/views/shown_tensors.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// Parts of objects in the order of their paths, with the keys that are shown.
// A part is numbered by its position in the order of paths; the number is the ordinal of kObject
// segments. In memory, because objects are few beside tensors and their records small.
class ShownObjects {
 public:
  // `renames` null: the checkpoint's own keys.
  // `index` is read here and not kept.
  static Result<std::unique_ptr<const ShownObjects>> Make(const CheckpointIndex& index,
                                                          const KeyRenames* renames);
  const KeyTree& tree() const { return tree_; }  // Of paths: KEY, or KEY/0.3 of a grid.
  // With the shown key in `key`.
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
  // By part, as parts_.
  std::vector<std::string> stored_keys_;  // Of each part; empty without a map of keys.
};

// What the views of a checkpoint are made from: the keys that are shown, which are the stored ones
// unless the mount has a map of keys. A view takes names from here and bytes from `opened`, never
// names from there: else a map would hold in some views and not in others. Everything outlives the
// views.
// A structure of references and not of objects: CheckpointView owns them, tests make their own. It
// is cheap to copy; HfParts keeps a copy.
// Why names and bytes are apart: with --map a tensor is found under another key, at another number,
// in another folder, and its bytes are found in the index by ordinal. Every view that mixes both
// shows stored keys in some corner.
struct ShownCheckpoint {
  const OpenedCheckpoint& opened;
  const ShownTensors& tensors;
  const KeyTree& tensor_tree;
  const LayerFiles& layers;
  const ShownObjects& objects;
  const KeyMap* map = nullptr;  // Null: keys are shown as they are stored.

  // The tensor of a number of `tensors`, or, where hidden, of `layers`. kStale where there is none.
  Result<ShownTensor> TensorAt(const KeyNumber& key) const;
  // The tree in which the number of a key counts.
  const KeyTree& TreeOf(const KeyNumber& key) const {
    return key.hidden ? layers.tree() : tensor_tree;
  }
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_
