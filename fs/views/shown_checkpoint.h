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

// Object parts in the order of their paths, with the shown keys. A part's number is its position in
// this order, and also the ordinal of kObject segments. All parts are in memory, because objects
// are few and their records small.
class ShownObjects {
 public:
  // `index` is read here and not kept.
  static Result<std::unique_ptr<const ShownObjects>> Make(const CheckpointIndex& index);
  const KeyTree& tree() const { return tree_; }  // Its paths are KEY, or KEY/0.3 for a grid.
  // The records of all parts, with shown keys.
  const std::vector<ObjectRecord>& parts() const { return parts_; }

 private:
  explicit ShownObjects(std::vector<std::string> paths) : keys_(std::move(paths)), tree_(keys_) {}
  ListedKeys keys_;
  KeyTree tree_;
  std::vector<ObjectRecord> parts_;
};

// The inputs of a checkpoint's views. With --map, `opened` is the mapped checkpoint, whose keys are
// those that are shown. All referenced objects outlive the views.
// The struct has only references and a pointer, so it is cheap to copy. CheckpointView owns the
// objects.
struct ShownCheckpoint {
  const OpenedCheckpoint& opened;
  const ShownTensors& tensors;
  const KeyTree& tensor_tree;
  const LayerFiles& layers;
  const ShownObjects& objects;

  // The tensor with this number in `tensors`, or in `layers` if the key is hidden. kStale or
  // kNotFound if no tensor has the number.
  Result<ShownTensor> TensorAt(const KeyNumber& key) const;
  // The stored key of tensor number `n`, which is shown as `shown_key`; empty if it is put together
  // from parts of other tensors.
  Result<std::string> StoredTensorKey(std::uint32_t n, std::string_view shown_key) const;
  // The tree that the number of a key belongs to.
  const KeyTree& TreeOf(const KeyNumber& key) const {
    return key.hidden ? layers.tree() : tensor_tree;
  }
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SHOWN_CHECKPOINT_H_
