// SPDX-License-Identifier: Apache-2.0
// Applies a key map to all keys of a checkpoint at once, so that collisions are refused.
#include "index/records/key_renames.h"

#include "index/records/layer_names.h"

namespace tensormount {

namespace {

// New names of the kept keys; dropped keys get an empty name.
Result<std::vector<std::string>> NamesOf(const std::vector<std::string>& keys, const KeyMap& map,
                                         const std::function<bool(const std::string& key)>& keeps) {
  if (!keeps) return map.ApplyToAll(keys);
  std::vector<std::size_t> kept;
  std::vector<std::string> of_kept;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!keeps(keys[i])) continue;
    kept.push_back(i);
    of_kept.push_back(keys[i]);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(of_kept, map.ApplyToAll(of_kept));
  std::vector<std::string> names(keys.size());
  for (std::size_t i = 0; i < kept.size(); ++i) names[kept[i]] = std::move(of_kept[i]);
  return names;
}

}  // namespace

Result<KeyRenames> KeyRenames::Make(const CheckpointIndex& index, const KeyMap& map,
                                    const std::function<bool(const std::string& key)>& keeps) {
  std::vector<std::string> keys;
  keys.reserve(index.tensor_count());
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
    keys.push_back(tensor.meta.key());
    return true;
  }));
  const std::size_t tensors = keys.size();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts, index.Objects());
  // Parts of an object are neighbours, so a key equal to the previous one is skipped.
  for (const ObjectRecord& part : parts) {
    if (keys.size() == tensors || keys.back() != part.key) keys.push_back(part.key);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<std::string> names, NamesOf(keys, map, keeps));

  KeyRenames out;
  for (std::size_t i = tensors; i < keys.size(); ++i) {
    out.objects_.emplace(std::move(keys[i]), std::move(names[i]));
  }
  names.resize(tensors);
  out.tensors_ = std::move(names);

  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> layers, index.Layers());
  for (const auto& [key, pattern] : layers->patterns()) {
    const Result<TensorEntry> entry = index.Find(key);
    if (!entry.ok()) {
      if (entry.status().code() == Code::kNotFound) continue;
      return entry.status();
    }
    std::string name = map.Apply(pattern);
    // A dropped stack has no layers, and an invalid pattern (without "{}") names no layer. Neither
    // is an error, because the tensor's own name is valid.
    if (out.tensors_[entry.value().ordinal].empty() || !CheckLayerPattern(name).ok()) continue;
    out.layers_.emplace_back(entry.value().ordinal, std::move(name));
  }
  return out;
}

Status KeyRenames::Apply(Inventory& inventory) const {
  std::erase_if(inventory.common,
                [](const auto& value) { return value.first.starts_with(kLayersRecordPrefix); });
  for (const auto& [ordinal, pattern] : layers_) {
    inventory.common.emplace(std::string(kLayersRecordPrefix) + tensors_[ordinal], pattern);
  }

  std::vector<TensorRecord> kept;
  for (std::size_t i = 0; i < inventory.tensors.size(); ++i) {
    TensorRecord& tensor = inventory.tensors[i];
    if (tensors_[i].empty()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        tensor.meta, TensorMeta::Make(tensors_[i], tensor.meta.dtype(), tensor.meta.shape()));
    kept.push_back(std::move(tensor));
  }
  std::sort(kept.begin(), kept.end(), [](const TensorRecord& a, const TensorRecord& b) {
    return a.meta.key() < b.meta.key();
  });
  inventory.tensors = std::move(kept);

  for (ObjectRecord& object : inventory.objects) object.key = Object(object.key);
  std::erase_if(inventory.objects, [](const ObjectRecord& object) { return object.key.empty(); });
  // A stable sort keeps the order of an object's parts.
  std::stable_sort(inventory.objects.begin(), inventory.objects.end(),
                   [](const ObjectRecord& a, const ObjectRecord& b) { return a.key < b.key; });
  return Status();
}

const std::string& KeyRenames::Object(const std::string& key) const {
  static const std::string none;
  const auto it = objects_.find(key);
  return it == objects_.end() ? none : it->second;
}

}  // namespace tensormount
