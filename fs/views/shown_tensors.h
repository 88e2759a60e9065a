// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SHOWN_TENSORS_H_
#define TENSORMOUNT_FS_VIEWS_SHOWN_TENSORS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/key_tree.h"
#include "index/records/checkpoint_index.h"

// Defines which tensors of a checkpoint a mount shows, and under which names.

namespace tensormount::fs {

// The number of a key in a view. Listed keys and hidden keys are numbered separately, each from 0
// in byte order. Hidden keys can only be opened by name; they are the layers of stacked tensors.
struct KeyNumber {
  bool hidden = false;
  std::uint32_t number = 0;
};

// A tensor as a mount shows it: a tensor of the checkpoint, or a layer of a stacked one.
struct ShownTensor {
  TensorEntry shown;        // The record with shown key and shape.
  TensorEntry source;       // The record of the stored tensor.
  std::uint64_t skip = 0;   // Offset in `source` of the first byte of `shown`.
  std::int64_t layer = -1;  // Index on the first axis of `source`; -1: not a layer.
  std::string stacked_key;  // For a layer: the shown key of its stack.
};

// The tensors of a checkpoint, in the byte order of their keys; the number of a tensor is its
// ordinal in the index. Numbers are part of node ids, so they are stable while the checkpoint is
// open. Reads the index on demand and keeps nothing in memory. Thread-safe.
class ShownTensors : public KeySource {
 public:
  // `index` must outlive this object.
  explicit ShownTensors(const CheckpointIndex& index) : index_(index) {}
  std::uint32_t count() const override { return index_.tensor_count(); }
  Result<std::string> KeyAt(std::uint32_t number) const override;
  Result<std::uint32_t> LowerBound(std::string_view key) const override {
    return index_.LowerBound(key);
  }
  Status Scan(std::uint32_t first, const Visit& fn) const override;
  Result<TensorEntry> EntryAt(std::uint32_t number) const { return index_.At(number); }
  // Calls fn for the tensors [first, end) in order, until fn fails. kDataLoss: the index has fewer
  // tensors. Scans the index once.
  Status ForEachEntry(
      std::uint32_t first, std::uint32_t end,
      const std::function<Status(std::uint32_t number, const TensorEntry& entry)>& fn) const;

 private:
  const CheckpointIndex& index_;
};

// Layers of stacked tensors as separate files, opened by name but not listed, so that programs that
// copy trees read each byte once.
//
// Models with stacked layers have one tensor of shape [layers, ...] where other programs expect a
// tensor for each layer. The checkpoint records the names of the layers ("$layers.KEY":
// "layers.{}.w"). The first axis is the outermost, so a layer is one range of the stack's row-major
// bytes and its file one kTensor segment.
class LayerFiles {
 public:
  // Largest number of names; a stack that would exceed it has no layer files. A pattern for a first
  // axis of 2^40 would otherwise exhaust the memory of the opening process.
  static constexpr std::uint64_t kMaxNames = 1u << 18;
  // Patterns of tensors that are missing, or cannot be stacks (scalars), are ignored, because the
  // stored data are not affected.
  static Result<std::unique_ptr<const LayerFiles>> Make(const CheckpointIndex& index);
  LayerFiles(const LayerFiles&) = delete;
  LayerFiles& operator=(const LayerFiles&) = delete;

  // A stacked tensor with names for its layers.
  struct Stack {
    std::uint32_t ordinal = 0;
    std::string key;      // Shown key.
    std::string pattern;  // "layers.{}.w"
  };
  const std::vector<Stack>& stacks() const { return stacks_; }
  const KeyTree& tree() const { return tree_; }
  // The layer with this number. `index`: the argument of Make. mtime and ordinal are those of the
  // stack. Layers have no digest, since only whole tensors have digests.
  Result<ShownTensor> At(const CheckpointIndex& index, std::uint32_t number) const;

 private:
  // The name of one layer. `key` is empty after Make, which moves the sorted keys to keys_.
  struct Name {
    std::string key;
    std::uint32_t stack = 0;  // Index in stacks_.
    std::int64_t layer = 0;
  };
  LayerFiles(std::vector<std::string> keys, std::vector<Name> names, std::vector<Stack> stacks)
      : keys_(std::move(keys)),
        tree_(keys_),
        names_(std::move(names)),
        stacks_(std::move(stacks)) {}

  ListedKeys keys_;
  KeyTree tree_;
  std::vector<Name> names_;  // By number of the layer; the keys are in keys_.
  std::vector<Stack> stacks_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SHOWN_TENSORS_H_
