// SPDX-License-Identifier: Apache-2.0
// The tensors that a checkpoint shows: its own, those renamed by a key map, and layers of stacks.
#include "fs/views/shown_tensors.h"

#include <algorithm>

#include "base/log.h"
#include "index/records/layer_names.h"

namespace tensormount::fs {
namespace {

// Tensors under their stored keys; the number of a tensor is its ordinal.
class OwnTensors : public ShownTensors {
 public:
  explicit OwnTensors(const CheckpointIndex& index) : index_(index) {}
  std::uint32_t count() const override { return index_.tensor_count(); }
  Result<std::uint32_t> LowerBound(std::string_view key) const override {
    return index_.LowerBound(key);
  }
  Status Scan(std::uint32_t first, const Visit& fn) const override {
    if (first >= count()) return {};
    return index_.ForEachTensor(first, [&](const TensorEntry& entry) {
      return fn(entry.ordinal, entry.meta.key(), &entry);
    });
  }
  Result<TensorEntry> EntryAt(std::uint32_t number) const override { return index_.At(number); }
  Result<std::string> StoredKeyAt(std::uint32_t number) const override { return KeyAt(number); }
  bool has_own_keys() const override { return true; }
  std::uint64_t bytes() const override { return index_.tensor_bytes(); }
  std::uint64_t chunks() const override { return index_.chunk_count(); }

 private:
  const CheckpointIndex& index_;
};

// Tensors renamed by a key map. The new keys are in memory, sorted; everything else is read from
// the index.
class RenamedTensors : public ShownTensors {
 public:
  static Result<std::unique_ptr<const ShownTensors>> Make(const CheckpointIndex& index,
                                                          const KeyRenames& renames) {
    const std::vector<std::string>& names = renames.tensors();
    // Ordinals of the shown tensors, sorted by new key; `keys` below has the same order.
    std::vector<std::uint32_t> ordinals;
    for (std::uint32_t i = 0; i < names.size(); ++i) {
      if (!names[i].empty()) ordinals.push_back(i);
    }
    std::sort(ordinals.begin(), ordinals.end(),
              [&](std::uint32_t a, std::uint32_t b) { return names[a] < names[b]; });
    std::vector<std::string> keys;
    keys.reserve(ordinals.size());
    for (const std::uint32_t ordinal : ordinals) keys.push_back(names[ordinal]);
    std::unique_ptr<RenamedTensors> shown(
        new RenamedTensors(index, std::move(keys), std::move(ordinals)));
    TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
      if (entry.ordinal >= names.size() || names[entry.ordinal].empty()) return true;
      shown->bytes_ += entry.meta.bytes();
      shown->chunks_ += entry.chunks;
      return true;
    }));
    return std::unique_ptr<const ShownTensors>(std::move(shown));
  }

  std::uint32_t count() const override { return keys_.count(); }
  Result<std::string> KeyAt(std::uint32_t number) const override { return keys_.KeyAt(number); }
  Result<std::uint32_t> LowerBound(std::string_view key) const override {
    return keys_.LowerBound(key);
  }
  Status Scan(std::uint32_t first, const Visit& fn) const override { return keys_.Scan(first, fn); }
  Result<TensorEntry> EntryAt(std::uint32_t number) const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string key, keys_.KeyAt(number));
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, index_.At(ordinals_[number]));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        entry.meta, TensorMeta::Make(std::move(key), entry.meta.dtype(), entry.meta.shape()));
    return entry;
  }
  Result<std::string> StoredKeyAt(std::uint32_t number) const override {
    if (number >= ordinals_.size())
      return Status(Code::kStale, "stale inode number: no tensor has it");
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, index_.At(ordinals_[number]));
    return entry.meta.key();
  }
  bool has_own_keys() const override { return false; }
  std::uint64_t bytes() const override { return bytes_; }
  std::uint64_t chunks() const override { return chunks_; }

 private:
  RenamedTensors(const CheckpointIndex& index, std::vector<std::string> keys,
                 std::vector<std::uint32_t> ordinals)
      : index_(index), keys_(std::move(keys)), ordinals_(std::move(ordinals)) {}

  const CheckpointIndex& index_;
  const ListedKeys keys_;
  const std::vector<std::uint32_t> ordinals_;  // The ordinal in the index of each key.
  std::uint64_t bytes_ = 0;
  std::uint64_t chunks_ = 0;
};

}  // namespace

Status ShownTensors::ForEachEntry(
    std::uint32_t first, std::uint32_t end,
    const std::function<Status(std::uint32_t, const TensorEntry&)>& fn) const {
  if (first >= end) return {};
  std::uint32_t expected = first;
  Status inner;
  TENSORMOUNT_RETURN_IF_ERROR(
      Scan(first, [&](std::uint32_t number, const std::string&, const TensorEntry* entry) {
        // With a key map a scan reads no records, so the record is looked up.
        std::optional<TensorEntry> read;
        if (entry == nullptr) {
          Result<TensorEntry> at = EntryAt(number);
          inner = at.status();
          if (!inner.ok()) return false;
          entry = &read.emplace(std::move(at).value());
        }
        inner = fn(number, *entry);
        return inner.ok() && ++expected < end;
      }));
  TENSORMOUNT_RETURN_IF_ERROR(inner);
  // If the scan ended early, the index has fewer records than it claims.
  return expected == end
             ? Status()
             : Status(Code::kDataLoss, "the index has fewer tensor records than it says");
}

Result<std::string> ShownTensors::KeyAt(std::uint32_t number) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, EntryAt(number));
  return entry.meta.key();
}

Result<std::unique_ptr<const ShownTensors>> MakeShownTensors(const CheckpointIndex& index,
                                                             const KeyRenames* renames) {
  if (renames == nullptr) {
    return std::unique_ptr<const ShownTensors>(std::make_unique<OwnTensors>(index));
  }
  return RenamedTensors::Make(index, *renames);
}

Result<std::unique_ptr<const LayerFiles>> LayerFiles::Make(const CheckpointIndex& index,
                                                           const KeyRenames* renames) {
  std::vector<Name> all;
  std::vector<Stack> stacks;
  // Adds the names of a stack's layers. An invalid pattern (without "{}") and a scalar have no
  // names.
  const auto add = [&](const TensorEntry& entry, const std::string& key,
                       const std::string& pattern) {
    const Dims& shape = entry.meta.shape();
    if (shape.rank() == 0 || !CheckLayerPattern(pattern).ok()) return;
    if (static_cast<std::uint64_t>(shape[0]) > kMaxNames - all.size()) {
      Log(LogLevel::kWarning, "tensor " + key + ": too many layers to show each as a file");
      return;
    }
    const auto stack = static_cast<std::uint32_t>(stacks.size());
    stacks.push_back({.ordinal = entry.ordinal, .key = key, .pattern = pattern});
    for (std::int64_t layer = 0; layer < shape[0]; ++layer) {
      std::string name = LayerKey(pattern, layer);
      // A longer name cannot be a key, so this layer gets no file.
      if (name.size() <= kMaxKeyBytes) all.push_back({std::move(name), stack, layer});
    }
  };
  if (renames != nullptr) {
    for (const auto& [ordinal, pattern] : renames->layers()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, index.At(ordinal));
      add(entry, renames->tensors()[ordinal], pattern);
    }
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> names, index.Layers());
    for (const auto& [key, pattern] : names->patterns()) {
      const Result<TensorEntry> entry = index.Find(key);
      if (entry.status().code() == Code::kNotFound) continue;
      TENSORMOUNT_RETURN_IF_ERROR(entry.status());
      add(entry.value(), key, pattern);
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Name& a, const Name& b) { return a.key < b.key; });
  // If layers of two stacks have the same name, only that of the first stack is kept, because names
  // are keys of a tree and must be unique.
  all.erase(std::unique(all.begin(), all.end(),
                        [](const Name& a, const Name& b) { return a.key == b.key; }),
            all.end());
  std::vector<std::string> keys;
  keys.reserve(all.size());
  for (Name& name : all) keys.push_back(std::exchange(name.key, {}));
  return std::unique_ptr<const LayerFiles>(
      new LayerFiles(std::move(keys), std::move(all), std::move(stacks)));
}

Result<ShownTensor> LayerFiles::At(const CheckpointIndex& index, std::uint32_t number) const {
  if (number >= names_.size()) return Status(Code::kStale, "stale inode number: no layer has it");
  const Name& name = names_[number];
  const Stack& stack = stacks_[name.stack];
  ShownTensor layer;
  TENSORMOUNT_ASSIGN_OR_RETURN(layer.source, index.At(stack.ordinal));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string key, keys_.KeyAt(number));
  layer.shown = layer.source;
  // The stack's digest covers all its layers, so it is not valid for one of them.
  layer.shown.has_digest = false;
  TENSORMOUNT_ASSIGN_OR_RETURN(layer.shown.meta,
                               LayerMeta(layer.source.meta, std::move(key), name.layer));
  layer.layer = name.layer;
  layer.skip = static_cast<std::uint64_t>(name.layer) * layer.shown.meta.bytes();
  layer.stacked_key = stack.key;
  return layer;
}

}  // namespace tensormount::fs
