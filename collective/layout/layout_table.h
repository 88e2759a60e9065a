// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_TABLE_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_TABLE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "collective/layout/layout.h"
#include "collective/layout/wire.h"
#include "shard/region_set.h"

// The implementation of LayoutTable, for layout_judge.cc and layout_make.cc; all other files use
// layout.h. One rank of a large job gets millions of regions of some thousand tensors, so the
// memory for each region matters: regions are numbers in columns, and ranks with equal layouts
// share one entry.

namespace tensormount {

struct LayoutTable::Rep {
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // The shards of one key with one dtype and shape. `items` and, unless empty, `labels` have an
  // entry for each region.
  struct Tensor {
    TensorMeta meta;
    std::string encoded;               // `meta`, encoded; equal bytes mean equal tensors.
    RegionSet regions;                 // `owner` of a region: the number of its layout.
    std::vector<std::uint32_t> items;  // By region: the shard's position in the state dict.
    std::vector<Replica> labels;       // By region; empty while all are unlabelled.
    // Numbers, rising, of the layouts that have the tensor, including those without any of its
    // cells.
    std::vector<std::uint32_t> layouts_with_tensor;
    // The tensor after this one in the last layout that had this one; predicts the order in the
    // next layout.
    std::uint32_t next = kNone;
    std::uint32_t variant = kNone;  // The next tensor with this key, of another dtype or shape.

    Replica label(std::size_t i) const { return labels.empty() ? Replica::kUnlabelled : labels[i]; }
  };
  struct Object {
    DecodedLayout::ObjectItem part;
    std::uint32_t layout = 0;
  };

  std::vector<Tensor> tensors;
  std::unordered_map<std::string, std::uint32_t> by_key;  // Position of the key's first variant.
  std::vector<Object> objects;
  // Layout i belongs to ranks[rank_begin[i]] to ranks[rank_begin[i + 1] - 1].
  std::vector<int> ranks;
  std::vector<std::size_t> rank_begin = {0};
  std::uint64_t boxes = 0;
  std::uint32_t first = kNone;     // Position of the first tensor of the last layout.
  std::vector<std::uint32_t> ids;  // Positions of the current layout's tensors in `tensors`.

  std::uint32_t layouts() const { return static_cast<std::uint32_t>(rank_begin.size() - 1); }
  std::span<const int> RanksOf(std::uint32_t layout) const {
    return std::span(ranks).subspan(rank_begin[layout],
                                    rank_begin[layout + 1] - rank_begin[layout]);
  }
  // Positions in `tensors` of the first variant of every key, sorted by key.
  std::vector<std::uint32_t> KeysInOrder() const;
  // Positions in `objects`, sorted by key, index and lowest rank.
  std::vector<std::uint32_t> ObjectsInOrder() const;
  // The lowest rank that has a tensor.
  int FirstRank(const Tensor& tensor) const;

  Status AddTensors(ByteReader& in, std::string_view encoded, std::uint32_t count,
                    std::string_view what);
  template <int Slots>
  Status AddShards(std::string_view records, std::string_view what);
  std::uint32_t FindOrAdd(TensorMeta meta, std::string_view encoded);
};

// Compares lexicographically. Returns -1, 0 or 1.
int CompareDims(const Dims& a, const Dims& b);
// Orders regions by the beginning of their box, then by the first element of a flat range in it.
// Returns -1, 0 (equal) or 1.
int CompareRegions(const Region& a, const Region& b);
// The name of a rank in messages: "rank 3".
std::string RankName(int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_TABLE_H_
