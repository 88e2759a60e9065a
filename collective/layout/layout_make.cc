// SPDX-License-Identifier: Apache-2.0
// MakeLayout of layout.h: turns a table without findings into the layout that saves plan with,
// joining equal regions with all their holders. Separate from the checks, because a validation
// without a save does not need this layout.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "collective/layout/layout.h"
#include "collective/layout/layout_table.h"

namespace tensormount {
namespace {

Status Invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

// Fills `tensor.holdings`: the distinct regions of one tensor, each with the ranks that hold it.
Status MakeHoldings(const LayoutTable::Rep& table, const LayoutTable::Rep::Tensor& from,
                    LayoutTensor& tensor) {
  const TensorMeta& meta = tensor.meta;
  RegionSet distinct;
  const std::vector<std::uint32_t> group_of = GroupEqual(from.regions, &distinct);
  tensor.holdings.resize(distinct.size());
  for (std::size_t g = 0; g < distinct.size(); ++g) {
    Holding& holding = tensor.holdings[g];
    holding.region = distinct.At(g);
    TENSORMOUNT_ASSIGN_OR_RETURN(holding.bytes,
                                 RegionBytes(meta.dtype(), meta.shape(), holding.region));
  }
  for (std::size_t i = 0; i < from.regions.size(); ++i) {
    Holding& holding = tensor.holdings[group_of[i]];
    for (const int rank : table.RanksOf(from.regions.owner(i))) {
      holding.holders.push_back({rank, from.items[i]});
      if (from.label(i) == Replica::kMain && (holding.main < 0 || rank < holding.main)) {
        holding.main = rank;
      }
    }
  }
  const auto by_rank = [](const Holder& a, const Holder& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.item < b.item;
  };
  for (Holding& holding : tensor.holdings) {
    if (!std::is_sorted(holding.holders.begin(), holding.holders.end(), by_rank)) {
      std::sort(holding.holders.begin(), holding.holders.end(), by_rank);
    }
    // Happens only if the caller skipped CheckLayout. Replicas are compared between ranks only, so
    // a duplicate on one rank would not be compared.
    const auto twice =
        std::adjacent_find(holding.holders.begin(), holding.holders.end(),
                           [](const Holder& a, const Holder& b) { return a.rank == b.rank; });
    if (twice != holding.holders.end()) {
      return Invalid("tensor " + meta.key() + ": " + holding.region.ToString() +
                     " was added twice by rank " + std::to_string(twice->rank));
    }
  }
  const auto in_place = [](const Holding& a, const Holding& b) {
    return CompareRegions(a.region, b.region) < 0;
  };
  if (!std::is_sorted(tensor.holdings.begin(), tensor.holdings.end(), in_place)) {
    std::sort(tensor.holdings.begin(), tensor.holdings.end(), in_place);
  }
  return Status();
}

Status MakeTensors(const LayoutTable::Rep& table, GlobalLayout& layout) {
  for (const std::uint32_t id : table.KeysInOrder()) {
    const LayoutTable::Rep::Tensor& from = table.tensors[id];
    if (from.variant != LayoutTable::Rep::kNone) {
      return Invalid("tensor " + from.meta.key() + ": dtype or shape differ between ranks");
    }
    LayoutTensor tensor{from.meta, {}, table.FirstRank(from)};
    TENSORMOUNT_RETURN_IF_ERROR(MakeHoldings(table, from, tensor));
    const auto sum = CheckedAdd(layout.tensor_bytes, tensor.meta.bytes());
    if (!sum) return Invalid("the tensors have more than 2^64 bytes in all");
    layout.tensor_bytes = *sum;
    for (const Holding& h : tensor.holdings) {
      layout.replica_bytes += h.bytes * (h.holders.size() - 1);
    }
    layout.tensors.push_back(std::move(tensor));
  }
  return Status();
}

Status MakeObjects(const LayoutTable::Rep& table, bool keep_lowest, GlobalLayout& layout) {
  Hash128 hash;
  for (const std::uint32_t i : table.ObjectsInOrder()) {
    const LayoutTable::Rep::Object& from = table.objects[i];
    const DecodedLayout::ObjectItem& part = from.part;
    if (table.by_key.contains(part.key)) {
      return Invalid("key " + part.key + " is a tensor on some ranks and an object on others");
    }
    const bool again = !layout.objects.empty() && layout.objects.back().key == part.key;
    if (again && !(layout.objects.back().grid == part.grid)) {
      return Invalid("object " + part.key + ": grids differ between ranks");
    }
    if (again && layout.objects.back().index == part.index) {
      LayoutObject& kept = layout.objects.back();
      if (hash != part.hash || kept.length != part.length) {
        if (!keep_lowest) return Invalid("object " + part.key + ": contents differ between ranks");
        const std::span<const int> ranks = table.RanksOf(from.layout);
        const auto lowest = std::ranges::min(kept.holders, {}, &Holder::rank);
        if (ranks.empty() || lowest.rank < std::ranges::min(ranks)) continue;
        kept.length = part.length;
        kept.holders.clear();
        hash = part.hash;
      }
    } else {
      layout.objects.push_back({part.key, part.index, part.grid, part.length, {}});
      hash = part.hash;
    }
    for (const int rank : table.RanksOf(from.layout)) {
      layout.objects.back().holders.push_back({rank, part.item});
    }
  }
  for (LayoutObject& object : layout.objects) {
    std::sort(object.holders.begin(), object.holders.end(),
              [](const Holder& a, const Holder& b) { return a.rank < b.rank; });
  }
  return Status();
}

}  // namespace

Result<GlobalLayout> MakeLayout(const LayoutTable& table, int world, bool keep_lowest) {
  GlobalLayout layout;
  layout.world = world;
  TENSORMOUNT_RETURN_IF_ERROR(MakeTensors(table.rep(), layout));
  TENSORMOUNT_RETURN_IF_ERROR(MakeObjects(table.rep(), keep_lowest, layout));
  return layout;
}

}  // namespace tensormount
