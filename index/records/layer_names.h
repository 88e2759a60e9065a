// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_LAYER_NAMES_H_
#define TENSORMOUNT_INDEX_RECORDS_LAYER_NAMES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"

// Stacked tensors, whose first axis counts layers, and the names of their layers (docs/format.md,
// "Common state"). Readers can open a layer like a tensor. Its bytes are a part of the stacked
// tensor's bytes. Listings do not contain layers.

namespace tensormount {

// Prefix of the common records that hold the pattern of the layer names of a stacked tensor (a
// string). The tensor's key follows the prefix. Each stacked tensor has its own record, so that
// ranks with different keys do not conflict.
inline constexpr std::string_view kLayersRecordPrefix = "$layers.";

// The name of a layer: "layers.{}.w" and 3 give "layers.3.w". LayerNames::Find is the inverse.
std::string LayerKey(std::string_view pattern, std::int64_t layer);
// Checks the pattern of layer names. kInvalidArgument unless `pattern` is a valid key with exactly
// one "{}". A digit next to the "{}" is refused too, because layer names would be ambiguous.
Status CheckLayerPattern(std::string_view pattern);

// Maps layer names to stacked keys. Immutable.
class LayerNames {
 public:
  LayerNames() = default;
  // `patterns` maps keys of stacked tensors to patterns. If two keys have the same pattern, the
  // first key gets it. Find ignores invalid patterns (CheckLayerPattern).
  explicit LayerNames(std::map<std::string, std::string> patterns);

  bool empty() const { return patterns_.empty(); }
  // The patterns that the constructor received, including invalid ones.
  const std::map<std::string, std::string>& patterns() const { return patterns_; }

  // The parts of a layer name. The view points into this object.
  struct Found {
    std::string_view stacked_key;
    std::int64_t layer = 0;
  };
  // Splits a layer name; nullopt if no pattern matches. One hash look-up for each run of digits in
  // `key`. The layer may not exist, because the number of layers is unknown here.
  std::optional<Found> Find(std::string_view key) const;

 private:
  std::map<std::string, std::string> patterns_;
  // Maps a valid pattern to the key of its stacked tensor.
  std::unordered_map<std::string, std::string> key_of_;
};

// Checks that each name belongs to one tensor or layer. kInvalidArgument, with both names, if the
// key of a tensor or object is also the name of a layer, or if two stacked tensors have the same
// pattern. `inventory` has sorted keys and holds the patterns among its common values.
Status CheckLayerNamesUnique(const Inventory& inventory);

// One layer of a stacked tensor. To read the layer, read `stacked` from byte `offset` on, or
// convert a region with InStack.
struct LayerEntry {
  TensorEntry stacked;
  std::int64_t layer = 0;
  // Metadata of the layer: its key, the stack's dtype, the shape without the first axis.
  TensorMeta meta;
  std::uint64_t offset = 0;  // Start of the layer in the stack's row-major bytes.

  // Converts a region of the layer to a region of the stacked tensor.
  Result<Region> InStack(const Region& of_layer) const;
  BufferView InStack(const BufferView& of_layer, const Region& region) const;
};

// Metadata of one layer. kNotFound if the layer does not exist, or if its size is not a whole
// number of bytes.
Result<TensorMeta> LayerMeta(const TensorMeta& stack, std::string key, std::int64_t layer);

// The layer with the name `key`; nullopt if no layer has that name. CheckpointIndex::ResolveLayer
// calls this function.
Result<std::optional<LayerEntry>> FindLayer(const CheckpointIndex& index, const LayerNames& names,
                                            std::string_view key);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_LAYER_NAMES_H_
