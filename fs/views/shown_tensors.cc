// SPDX-License-Identifier: Apache-2.0
// The tensors that a checkpoint shows: its own, those of a map of keys, and layers of stacks.
#include "fs/views/shown_tensors.h"

#include <algorithm>

#include "base/log.h"
#include "index/records/layer_names.h"

namespace tensormount::fs {
namespace {

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

class RenamedTensors : public ShownTensors {
 public:
  explicit RenamedTensors(const CheckpointIndex& index) : index_(index) {}

  Status Fill(const KeyRenames& renames) {
    const std::vector<std::string>& names = renames.tensors();
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < names.size(); ++i) {
      if (!names[i].empty()) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t a, std::uint32_t b) { return names[a] < names[b]; });
    for (const std::uint32_t ordinal : order) shown_.push_back({names[ordinal], ordinal});
    return index_.ForEachTensor(0, [&](const TensorEntry& entry) {
      if (entry.ordinal >= names.size() || names[entry.ordinal].empty()) return true;
      bytes_ += entry.meta.bytes();
      chunks_ += entry.chunks;
      return true;
    });
  }

  std::uint32_t count() const override { return static_cast<std::uint32_t>(shown_.size()); }
  Result<std::string> KeyAt(std::uint32_t number) const override {
    if (number >= shown_.size()) return Status(Code::kStale, "no such tensor");
    return shown_[number].key;
  }
  Result<std::uint32_t> LowerBound(std::string_view key) const override {
    const auto at = std::lower_bound(shown_.begin(), shown_.end(), key,
                                     [](const Shown& s, std::string_view k) { return s.key < k; });
    return static_cast<std::uint32_t>(at - shown_.begin());
  }
  Status Scan(std::uint32_t first, const Visit& fn) const override {
    for (std::uint32_t i = first; i < shown_.size(); ++i) {
      if (!fn(i, shown_[i].key, nullptr)) break;
    }
    return {};
  }
  Result<TensorEntry> EntryAt(std::uint32_t number) const override {
    if (number >= shown_.size()) return Status(Code::kStale, "no such tensor");
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, index_.At(shown_[number].ordinal));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        entry.meta, TensorMeta::Make(shown_[number].key, entry.meta.dtype(), entry.meta.shape()));
    return entry;
  }
  Result<std::string> StoredKeyAt(std::uint32_t number) const override {
    if (number >= shown_.size()) return Status(Code::kStale, "no such tensor");
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, index_.At(shown_[number].ordinal));
    return entry.meta.key();
  }
  bool has_own_keys() const override { return false; }
  std::uint64_t bytes() const override { return bytes_; }
  std::uint64_t chunks() const override { return chunks_; }

 private:
  struct Shown {
    std::string key;
    std::uint32_t ordinal = 0;
  };
  const CheckpointIndex& index_;
  std::vector<Shown> shown_;  // By key.
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
  return expected == end ? Status() : Status(Code::kDataLoss, "index: tensors are missing");
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
  auto renamed = std::make_unique<RenamedTensors>(index);
  TENSORMOUNT_RETURN_IF_ERROR(renamed->Fill(*renames));
  return std::unique_ptr<const ShownTensors>(std::move(renamed));
}

Result<std::unique_ptr<const LayerFiles>> LayerFiles::Make(const CheckpointIndex& index,
                                                           const KeyRenames* renames) {
  struct Named {
    TensorEntry entry;
    std::string key;
    std::string pattern;
  };
  std::vector<Named> named;
  if (renames != nullptr) {
    for (const auto& [ordinal, pattern] : renames->layers()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, index.At(ordinal));
      named.push_back({std::move(entry), renames->tensors()[ordinal], pattern});
    }
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> names, index.Layers());
    for (const auto& [key, pattern] : names->patterns()) {
      Result<TensorEntry> entry = index.Find(key);
      if (entry.status().code() == Code::kNotFound) continue;
      TENSORMOUNT_RETURN_IF_ERROR(entry.status());
      named.push_back({std::move(entry).value(), key, pattern});
    }
  }

  std::vector<Name> all;
  std::vector<Stack> stacks;
  std::vector<std::pair<std::string, std::string>> patterns;
  for (const Named& n : named) {
    const Dims& shape = n.entry.meta.shape();
    if (shape.rank() == 0 || !CheckLayerPattern(n.pattern).ok()) continue;
    if (static_cast<std::uint64_t>(shape[0]) > kMaxNames - all.size()) {
      Log(LogLevel::kWarning, "tensor " + n.key + ": too many layers to be files of their own");
      continue;
    }
    const auto stack = static_cast<std::uint32_t>(stacks.size());
    stacks.push_back({.ordinal = n.entry.ordinal, .key = n.key});
    patterns.emplace_back(n.key, n.pattern);
    for (std::int64_t layer = 0; layer < shape[0]; ++layer) {
      std::string key = LayerKey(n.pattern, layer);
      if (key.size() <= kMaxKeyBytes) all.push_back({std::move(key), stack, layer});
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Name& a, const Name& b) { return a.key < b.key; });
  // Of two stacks with one pattern the first has it.
  all.erase(std::unique(all.begin(), all.end(),
                        [](const Name& a, const Name& b) { return a.key == b.key; }),
            all.end());
  std::vector<std::string> keys;
  keys.reserve(all.size());
  for (Name& name : all) keys.push_back(std::exchange(name.key, {}));
  return std::unique_ptr<const LayerFiles>(
      new LayerFiles(std::move(keys), std::move(all), std::move(stacks), std::move(patterns)));
}

Result<LayerFiles::Layer> LayerFiles::At(const CheckpointIndex& index, std::uint32_t number) const {
  if (number >= names_.size()) return Status(Code::kStale, "no such layer");
  const Name& name = names_[number];
  const Stack& stack = stacks_[name.stack];
  Layer layer;
  TENSORMOUNT_ASSIGN_OR_RETURN(layer.stack, index.At(stack.ordinal));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string key, keys_.KeyAt(number));
  layer.entry = layer.stack;
  layer.entry.has_digest = false;
  TENSORMOUNT_ASSIGN_OR_RETURN(layer.entry.meta,
                               LayerMeta(layer.stack.meta, std::move(key), name.layer));
  layer.number = name.layer;
  layer.skip = static_cast<std::uint64_t>(name.layer) * layer.entry.meta.bytes();
  layer.stacked_key = stack.key;
  return layer;
}

}  // namespace tensormount::fs
