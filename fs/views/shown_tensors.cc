// SPDX-License-Identifier: Apache-2.0
// The tensors that a checkpoint shows, and layers of stacks.
#include "fs/views/shown_tensors.h"

#include <algorithm>

#include "base/log.h"
#include "index/records/layer_names.h"

namespace tensormount::fs {

Status ShownTensors::Scan(std::uint32_t first, const Visit& fn) const {
  if (first >= count()) return {};
  return index_.ForEachTensor(
      first, [&](const TensorEntry& entry) { return fn(entry.ordinal, entry.meta.key(), &entry); });
}

Status ShownTensors::ForEachEntry(
    std::uint32_t first, std::uint32_t end,
    const std::function<Status(std::uint32_t, const TensorEntry&)>& fn) const {
  if (first >= end) return {};
  std::uint32_t expected = first;
  Status inner;
  TENSORMOUNT_RETURN_IF_ERROR(index_.ForEachTensor(first, [&](const TensorEntry& entry) {
    inner = fn(entry.ordinal, entry);
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

Result<std::unique_ptr<const LayerFiles>> LayerFiles::Make(const CheckpointIndex& index) {
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
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> names, index.Layers());
  for (const auto& [key, pattern] : names->patterns()) {
    const Result<TensorEntry> entry = index.Find(key);
    if (entry.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(entry.status());
    add(entry.value(), key, pattern);
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
