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
#include "index/records/key_renames.h"

// Which tensors a mount shows of a checkpoint, and what they are called.

namespace tensormount::fs {

// Keys of tensors, numbered in byte order. A number is a tensor's ordinal only where no map of keys
// is in force: the index sorts by stored keys, folders are listed by shown ones. Numbers go into
// node ids, so they are the same as long as the checkpoint is open. Thread-safe.
class ShownTensors : public KeySource {
 public:
  // With the key that is shown; its ordinal is the index's.
  virtual Result<TensorEntry> EntryAt(std::uint32_t number) const = 0;
  virtual Result<std::string> StoredKeyAt(std::uint32_t number) const = 0;
  // Whether keys are those that are stored, and all of them, so that numbers are ordinals.
  virtual bool has_own_keys() const = 0;
  virtual std::uint64_t bytes() const = 0;  // Of all that are shown.
  virtual std::uint64_t chunks() const = 0;
  Result<std::string> KeyAt(std::uint32_t number) const override;
  // Calls fn for [first, end) in order, until it fails. kDataLoss where the index ends before.
  Status ForEachEntry(
      std::uint32_t first, std::uint32_t end,
      const std::function<Status(std::uint32_t number, const TensorEntry& entry)>& fn) const;
};

// `renames` null: the checkpoint's own keys, nothing kept in memory. Otherwise new names are kept,
// sorted. `index` must outlive it.
Result<std::unique_ptr<const ShownTensors>> MakeShownTensors(const CheckpointIndex& index,
                                                             const KeyRenames* renames);

// Layers of stacked tensors as files of their own: opened by name, never listed, so that programs
// that copy trees see each byte once.
class LayerFiles {
 public:
  // More names than this are not made: their stacks are read whole.
  static constexpr std::uint64_t kMaxNames = 1u << 18;
  static Result<std::unique_ptr<const LayerFiles>> Make(const CheckpointIndex& index,
                                                        const KeyRenames* renames);
  LayerFiles(const LayerFiles&) = delete;
  LayerFiles& operator=(const LayerFiles&) = delete;

  const KeySource& keys() const { return keys_; }
  const KeyTree& tree() const { return tree_; }
  // Shown names: (stacked key, pattern).
  const std::vector<std::pair<std::string, std::string>>& patterns() const { return patterns_; }

  struct Layer {
    TensorEntry entry;       // Key, shape and size of the layer; mtime and ordinal of the stack.
    TensorEntry stack;       // With the key that is stored.
    std::uint64_t skip = 0;  // Bytes of the stack before it.
    std::int64_t number = 0;
    std::string stacked_key;  // As it is shown.
  };
  Result<Layer> At(const CheckpointIndex& index, std::uint32_t number) const;

 private:
  // Of one layer; its stack's key is said once.
  struct Name {
    std::string key;
    std::uint32_t stack = 0;  // Position in stacks_.
    std::int64_t layer = 0;
  };
  struct Stack {
    std::uint32_t ordinal = 0;
    std::string key;  // As it is shown.
  };
  LayerFiles(std::vector<std::string> keys, std::vector<Name> names, std::vector<Stack> stacks,
             std::vector<std::pair<std::string, std::string>> patterns)
      : keys_(std::move(keys)),
        tree_(keys_),
        names_(std::move(names)),
        stacks_(std::move(stacks)),
        patterns_(std::move(patterns)) {}

  ListedKeys keys_;
  KeyTree tree_;
  std::vector<Name> names_;  // By number; their keys are in keys_.
  std::vector<Stack> stacks_;
  std::vector<std::pair<std::string, std::string>> patterns_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SHOWN_TENSORS_H_
