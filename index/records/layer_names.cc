// SPDX-License-Identifier: Apache-2.0
// Stacked tensors: each index of the first axis is readable as a tensor, its layer. A layer is a
// part of the stacked tensor's bytes, so nothing is stored for it. It must be a whole number of
// bytes.
#include "index/records/layer_names.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kSlot = "{}";

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

std::string LayerKey(std::string_view pattern, std::int64_t layer) {
  std::string key(pattern);
  const std::size_t at = key.find(kSlot);
  if (at != std::string::npos) key.replace(at, kSlot.size(), std::to_string(layer));
  return key;
}

Status CheckLayerPattern(std::string_view pattern) {
  const auto bad = [&](std::string_view why) {
    return Status(Code::kInvalidArgument,
                  "layer name pattern \"" + std::string(pattern) + "\": " + std::string(why));
  };
  const std::size_t at = pattern.find(kSlot);
  if (at == std::string_view::npos || pattern.find(kSlot, at + kSlot.size()) != pattern.npos) {
    return bad("the pattern must contain exactly one {}");
  }
  if ((at > 0 && IsDigit(pattern[at - 1])) ||
      (at + kSlot.size() < pattern.size() && IsDigit(pattern[at + kSlot.size()]))) {
    return bad("the pattern must not have a digit next to {}");
  }
  return CheckKey(pattern).WithContext("layer name pattern");
}

LayerNames::LayerNames(std::map<std::string, std::string> patterns)
    : patterns_(std::move(patterns)) {
  for (const auto& [key, pattern] : patterns_) {
    if (CheckLayerPattern(pattern).ok()) key_of_.emplace(pattern, key);
  }
}

std::optional<LayerNames::Found> LayerNames::Find(std::string_view key) const {
  if (key_of_.empty()) return std::nullopt;
  // Each run of digits may be the layer number: the run is replaced by "{}", and the resulting
  // pattern is looked up. Keys have few runs of digits, so the cost does not depend on the number
  // of stacked tensors.
  for (std::size_t i = 0; i < key.size();) {
    if (!IsDigit(key[i])) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < key.size() && IsDigit(key[end])) ++end;
    // Numbers with leading zeros name no layer, because LayerKey writes none.
    std::int64_t layer = 0;
    const auto parsed = std::from_chars(key.data() + i, key.data() + end, layer);
    if (parsed.ec == std::errc() && (key[i] != '0' || end - i == 1)) {
      std::string pattern;
      pattern.reserve(key.size() + kSlot.size());
      pattern.append(key.substr(0, i)).append(kSlot).append(key.substr(end));
      const auto it = key_of_.find(pattern);
      if (it != key_of_.end()) return Found{.stacked_key = it->second, .layer = layer};
    }
    i = end;
  }
  return std::nullopt;
}

Result<Region> LayerEntry::InStack(const Region& of_layer) const {
  if (!of_layer.Within(meta.shape())) {
    return Status(Code::kInvalidArgument, "tensor " + meta.key() + ": region " +
                                              of_layer.ToString() + " lies outside of shape " +
                                              meta.shape().ToString());
  }
  Dims begin{layer};
  Dims extent{1};
  for (const std::int64_t b : of_layer.box().begin()) begin.push_back(b);
  for (const std::int64_t e : of_layer.box().extent()) extent.push_back(e);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
  if (!of_layer.is_flat()) return Region(box);
  return Region::Flat(box, of_layer.flat_first(), of_layer.volume());
}

BufferView LayerEntry::InStack(const BufferView& of_layer, const Region& region) const {
  // Memory of a flat range is one-dimensional and serves the stacked tensor unchanged.
  if (region.is_flat() || of_layer.shape.rank() != region.box().rank()) return of_layer;
  BufferView out = of_layer;
  out.shape = Dims{1};
  std::int64_t whole = 1;
  for (const std::int64_t e : of_layer.shape) {
    out.shape.push_back(e);
    whole *= std::max<std::int64_t>(e, 1);
  }
  out.strides = Dims{whole};
  for (const std::int64_t s : of_layer.strides) out.strides.push_back(s);
  return out;
}

Result<TensorMeta> LayerMeta(const TensorMeta& stack, std::string key, std::int64_t layer) {
  const Dims& shape = stack.shape();
  if (shape.rank() == 0 || layer < 0 || layer >= shape[0]) {
    return Status(Code::kNotFound, "no layer " + std::to_string(layer) + " of " + stack.key());
  }
  Dims of_layer;
  for (int axis = 1; axis < shape.rank(); ++axis) of_layer.push_back(shape[axis]);
  Result<TensorMeta> meta = TensorMeta::Make(std::move(key), stack.dtype(), of_layer);
  // Make fails if the layer is not a whole number of bytes. A tensor cannot begin inside a byte.
  if (!meta.ok()) return Status(Code::kNotFound, meta.status().message());
  return meta;
}

Result<std::optional<LayerEntry>> FindLayer(const CheckpointIndex& index, const LayerNames& names,
                                            std::string_view key) {
  const std::optional<LayerNames::Found> found = names.Find(key);
  if (!found) return std::optional<LayerEntry>();
  Result<TensorEntry> stacked = index.Find(found->stacked_key);
  if (!stacked.ok()) {
    // The stacked tensor was left out of this checkpoint, but its pattern remains.
    if (stacked.status().code() == Code::kNotFound) return std::optional<LayerEntry>();
    return stacked.status();
  }
  Result<TensorMeta> meta = LayerMeta(stacked.value().meta, std::string(key), found->layer);
  if (meta.status().code() == Code::kNotFound) return std::optional<LayerEntry>();
  TENSORMOUNT_RETURN_IF_ERROR(meta.status());
  LayerEntry entry;
  entry.layer = found->layer;
  entry.meta = std::move(meta).value();
  // The product does not overflow: it is within the stacked tensor's bytes, which fit in 63 bits.
  entry.offset = static_cast<std::uint64_t>(found->layer) * entry.meta.bytes();
  entry.stacked = std::move(stacked).value();
  return std::optional<LayerEntry>(std::move(entry));
}

Status CheckLayerNamesUnique(const Inventory& inventory) {
  const auto find = [&](std::string_view key) -> const TensorMeta* {
    const auto at = std::lower_bound(
        inventory.tensors.begin(), inventory.tensors.end(), key,
        [](const TensorRecord& t, std::string_view wanted) { return t.meta.key() < wanted; });
    return at != inventory.tensors.end() && at->meta.key() == key ? &at->meta : nullptr;
  };
  std::map<std::string, std::string> patterns;
  // Maps a pattern to the key of its stacked tensor.
  std::map<std::string_view, std::string_view> key_of;
  const std::string first(kLayersRecordPrefix);
  for (auto at = inventory.common.lower_bound(first);
       at != inventory.common.end() && at->first.starts_with(first); ++at) {
    const std::string_view key = std::string_view(at->first).substr(first.size());
    const auto* const pattern = at->second.get_if<std::string>();
    if (pattern == nullptr || find(key) == nullptr) continue;
    const auto [known, fresh] = key_of.emplace(*pattern, key);
    if (!fresh) {
      return Status(Code::kInvalidArgument, "layers of tensor " + std::string(known->second) +
                                                " and of tensor " + std::string(key) +
                                                " have the same names, " + *pattern);
    }
    patterns.emplace(key, *pattern);
  }
  if (patterns.empty()) return Status();
  const LayerNames names(std::move(patterns));
  const auto check = [&](const std::string& key) -> Status {
    const auto found = names.Find(key);
    if (!found) return Status();
    const Dims& shape = find(found->stacked_key)->shape();
    if (shape.rank() == 0 || found->layer >= shape[0]) return Status();
    return Status(Code::kInvalidArgument, "\"" + key + "\" is already the name of layer " +
                                              std::to_string(found->layer) + " of tensor " +
                                              std::string(found->stacked_key));
  };
  for (const TensorRecord& tensor : inventory.tensors) {
    TENSORMOUNT_RETURN_IF_ERROR(check(tensor.meta.key()));
  }
  for (const ObjectRecord& object : inventory.objects) {
    TENSORMOUNT_RETURN_IF_ERROR(check(object.key));
  }
  return Status();
}

}  // namespace tensormount
