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

// Tensors whose first axis counts layers, and the names by which one layer of them can be read
// (docs/format.md, "Names of layers"). A layer is a tensor of its own to whoever reads: the bytes
// of the stack from `offset` on. It is not among the keys that are listed.

namespace tensormount {

// The common record that holds the pattern of a stacked key, as a string: each its own, so that
// ranks that have different keys do not differ.
inline constexpr std::string_view kLayersRecordPrefix = "$layers.";

// "layers.{}.w" for number 3: "layers.3.w".
// The inverse of LayerNames::Find.
std::string LayerKey(std::string_view pattern, std::int64_t layer);
// kInvalidArgument unless `pattern` has exactly one "{}", without a digit beside it (then a number
// could not be told from it), and could be part of a key.
Status CheckLayerPattern(std::string_view pattern);

// Which names stand for layers of which stacked key. Immutable.
class LayerNames {
 public:
  LayerNames() = default;
  // Stacked key to pattern. Of two keys with one pattern the first has it; patterns that
  // CheckLayerPattern refuses stand for nothing.
  explicit LayerNames(std::map<std::string, std::string> patterns);

  bool empty() const { return patterns_.empty(); }
  // As given, those that stand for nothing included.
  const std::map<std::string, std::string>& patterns() const { return patterns_; }

  // A name of a layer, taken apart. The view is into this object.
  struct Found {
    std::string_view stacked_key;
    std::int64_t layer = 0;
  };
  // Costs a hash look-up for each run of digits in `key`. Does not know how many layers there are.
  std::optional<Found> Find(std::string_view key) const;

 private:
  std::map<std::string, std::string> patterns_;
  // By pattern.
  std::unordered_map<std::string, std::string> key_of_;
};

// kInvalidArgument, naming both, where a key is the name of a layer of another one, or two stacks
// give one name to their layers: whoever reads that name would get one of two tensors. Keys of
// `inventory` are sorted; patterns are among its common values.
Status CheckLayersApart(const Inventory& inventory);

// One layer of a stacked tensor.
// Who reads it reads `stacked` and adds `offset` (bytes), or maps a region with InStack.
struct LayerEntry {
  TensorEntry stacked;
  std::int64_t layer = 0;
  TensorMeta meta;           // Of the layer: its key, the stack's dtype, its shape less an axis.
  std::uint64_t offset = 0;  // Where its bytes begin in the stack's row-major bytes.

  // A region of the layer as a region of the stack, and memory for it as memory for that.
  Result<Region> InStack(const Region& of_layer) const;
  BufferView InStack(const BufferView& of_layer, const Region& region) const;
};

// The tensor that one layer of a stack is. kNotFound where there is no such layer, or where it is
// no whole number of bytes.
Result<TensorMeta> LayerMeta(const TensorMeta& stack, std::string key, std::int64_t layer);

// CheckpointIndex::ResolveLayer.
Result<std::optional<LayerEntry>> FindLayer(const CheckpointIndex& index, const LayerNames& names,
                                            std::string_view key);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_LAYER_NAMES_H_
