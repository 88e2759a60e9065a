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

// A key of a view. Numbers are dense from 0, in byte order of the keys: of those that the view
// lists, or of its hidden ones, which open by name only. Hidden are the layers of stacked tensors.
struct KeyNumber {
  bool hidden = false;
  std::uint32_t number = 0;
};

// A tensor as a mount shows it: one of the checkpoint's own, or a layer of a stacked one.
struct ShownTensor {
  TensorEntry shown;        // As it looks from outside: the shown key, shape and size.
  TensorEntry source;       // The stored tensor whose bytes it has, with its ordinal,
  std::uint64_t skip = 0;   // from this byte on.
  std::int64_t layer = -1;  // Index on the first axis of `source`; -1: not a layer.
  std::string stacked_key;  // Of a layer: the shown key of its stack.
};

// Keys of tensors, numbered in byte order. A number is a tensor's ordinal only where no map of keys
// is in force: the index sorts by stored keys, folders are listed by shown ones. Numbers go into
// node ids, so they are the same as long as the checkpoint is open. Thread-safe.
// Two implementations: the keys of the index as they are, read from it on demand, and the keys that
// a map gives, held in memory with the ordinal of each.
class ShownTensors : public KeySource {
 public:
  // With the key that is shown; its ordinal is the index's.
  // kStale where there is no such number.
  virtual Result<TensorEntry> EntryAt(std::uint32_t number) const = 0;
  // For the attribute stored_key, and for exports that follow paths which the checkpoint has by
  // stored keys.
  virtual Result<std::string> StoredKeyAt(std::uint32_t number) const = 0;
  // Whether keys are those that are stored, and all of them, so that numbers are ordinals.
  virtual bool has_own_keys() const = 0;
  virtual std::uint64_t bytes() const = 0;  // Of all that are shown.
  virtual std::uint64_t chunks() const = 0;
  Result<std::string> KeyAt(std::uint32_t number) const override;
  // Calls fn for [first, end) in order, until it fails. kDataLoss where the index ends before.
  // Reads each entry once, in the order of the index where keys are its own; with a map each is a
  // look-up.
  Status ForEachEntry(
      std::uint32_t first, std::uint32_t end,
      const std::function<Status(std::uint32_t number, const TensorEntry& entry)>& fn) const;
};

// `renames` null: the checkpoint's own keys, nothing kept in memory. Otherwise new names are kept,
// sorted. `index` must outlive it.
// O(1) then; with a map O(n log n) for sorting, and a walk over the index for the sums.
Result<std::unique_ptr<const ShownTensors>> MakeShownTensors(const CheckpointIndex& index,
                                                             const KeyRenames* renames);

// Layers of stacked tensors as files of their own: opened by name, never listed, so that programs
// that copy trees see each byte once.
//
// Models with stacked layers have one tensor of shape [layers, ...] where other programs look for a
// tensor a layer. The checkpoint says how layers are called ("$layers.KEY": "layers.{}.w"). A layer
// is a range of the stack's row-major bytes, since the first axis is the outermost, so its file is
// one kTensor segment.
class LayerFiles {
 public:
  // More names than this are not made: their stacks are read whole.
  // A pattern and a first axis of 2^40 would otherwise fill the memory of whoever opens the
  // checkpoint.
  static constexpr std::uint64_t kMaxNames = 1u << 18;
  // `renames`: null, or the map in force, which renames patterns too. Patterns of stacks that are
  // not there, or are no stacks, are passed over: they are no damage to what is there.
  static Result<std::unique_ptr<const LayerFiles>> Make(const CheckpointIndex& index,
                                                        const KeyRenames* renames);
  LayerFiles(const LayerFiles&) = delete;
  LayerFiles& operator=(const LayerFiles&) = delete;

  // A stacked tensor that names its layers.
  struct Stack {
    std::uint32_t ordinal = 0;
    std::string key;      // As it is shown.
    std::string pattern;  // "layers.{}.w"
  };
  const std::vector<Stack>& stacks() const { return stacks_; }
  const KeyTree& tree() const { return tree_; }
  // `index` is the one that Make was called with. mtime and ordinal are the stack's; there is no
  // digest, because that is known of whole tensors only.
  Result<ShownTensor> At(const CheckpointIndex& index, std::uint32_t number) const;

 private:
  // Of one layer; its stack's key is said once.
  // Sorted by key. The keys themselves move on into keys_, so `key` is empty once this is made.
  struct Name {
    std::string key;
    std::uint32_t stack = 0;  // Position in stacks_.
    std::int64_t layer = 0;
  };
  LayerFiles(std::vector<std::string> keys, std::vector<Name> names, std::vector<Stack> stacks)
      : keys_(std::move(keys)),
        tree_(keys_),
        names_(std::move(names)),
        stacks_(std::move(stacks)) {}

  ListedKeys keys_;
  KeyTree tree_;
  std::vector<Name> names_;  // By number; their keys are in keys_.
  std::vector<Stack> stacks_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SHOWN_TENSORS_H_
