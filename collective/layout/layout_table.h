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

// Inside of LayoutTable, for those who judge and plan from it: layout_judge.cc and layout_make.cc.
// All others see layout.h. An owner of a large job holds millions of regions of some thousand
// tensors, so that what is kept for each region decides how much memory it needs: numbers in
// columns, no objects, and nothing said twice.

namespace tensormount {

struct LayoutTable::Rep {
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // The shards of one key under one dtype and shape. Columns are as long as `regions`.
  struct Tensor {
    TensorMeta meta;
    std::string encoded;                // `meta` on the wire: equal bytes are the same tensor.
    RegionSet regions;                  // The owner of a region is the number of a layout.
    std::vector<std::uint32_t> items;   // Positions in the state dicts.
    std::vector<Replica> labels;        // Empty while all are unlabelled.
    std::vector<std::uint32_t> namers;  // Layouts that have it, rising; also with empty regions.
    // Which tensor came after this one in the last layout that had both: mostly it does again.
    std::uint32_t next = kNone;
    std::uint32_t variant = kNone;  // The same key under another dtype or shape.

    Replica label(std::size_t i) const { return labels.empty() ? Replica::kUnlabelled : labels[i]; }
  };
  struct Object {
    DecodedLayout::ObjectItem part;
    std::uint32_t layout = 0;
  };

  std::vector<Tensor> tensors;
  std::unordered_map<std::string, std::uint32_t> by_key;  // To the first variant.
  std::vector<Object> objects;
  // Layout i is that of ranks[rank_begin[i]] to ranks[rank_begin[i + 1] - 1].
  std::vector<int> ranks;
  std::vector<std::size_t> rank_begin = {0};
  std::uint64_t boxes = 0;
  std::uint32_t first = kNone;     // What the last layout began with.
  std::vector<std::uint32_t> ids;  // Of the layout being added: tensor number → in `tensors`.

  std::uint32_t layouts() const { return static_cast<std::uint32_t>(rank_begin.size() - 1); }
  std::span<const int> RanksOf(std::uint32_t layout) const {
    return std::span(ranks).subspan(rank_begin[layout],
                                    rank_begin[layout + 1] - rank_begin[layout]);
  }
  // Positions in `tensors` of the first variant of every key, by key.
  std::vector<std::uint32_t> KeysInOrder() const;
  // Positions in `objects` by key, index, lowest rank.
  std::vector<std::uint32_t> ObjectsInOrder() const;
  // The lowest rank that names a tensor.
  int FirstRank(const Tensor& tensor) const;

  Status AddTensors(ByteReader& in, std::string_view encoded, std::uint32_t count,
                    std::string_view what);
  template <int Slots>
  Status AddShards(std::string_view records, std::string_view what);
  std::uint32_t FindOrAdd(TensorMeta meta, std::string_view encoded);
};

// -1, 0, 1: lexicographic.
int CompareDims(const Dims& a, const Dims& b);
// By first element where regions do not overlap; equal regions compare equal.
int CompareRegions(const Region& a, const Region& b);
// "rank 3".
std::string RankName(int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_TABLE_H_
