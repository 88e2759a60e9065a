// SPDX-License-Identifier: Apache-2.0
#include "collective/validate/layout_check.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "base/checked.h"
#include "shard/coverage.h"

namespace tensormount {
inline namespace descriptor_layout {
namespace {

std::string RankName(int rank) { return "rank " + std::to_string(rank); }

Status Invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

int CompareDims(const Dims& a, const Dims& b) {
  const auto x = a.span();
  const auto y = b.span();
  if (std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end())) return -1;
  if (std::lexicographical_compare(y.begin(), y.end(), x.begin(), x.end())) return 1;
  return 0;
}

// By first element where regions do not overlap; equal regions compare equal.
int CompareRegions(const Region& a, const Region& b) {
  if (int c = CompareDims(a.box().begin(), b.box().begin()); c != 0) return c;
  if (a.flat_first() != b.flat_first()) return a.flat_first() < b.flat_first() ? -1 : 1;
  if (int c = CompareDims(a.box().extent(), b.box().extent()); c != 0) return c;
  if (a.volume() != b.volume()) return a.volume() < b.volume() ? -1 : 1;
  return static_cast<int>(a.is_flat()) - static_cast<int>(b.is_flat());
}

Status CheckRanks(std::span<const RankDescriptor> ranks) {
  std::vector<int> failed;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (!ranks[r].status.ok()) failed.push_back(static_cast<int>(r));
  }
  if (failed.empty()) return Status();
  Status status =
      ranks[static_cast<std::size_t>(failed[0])].status.WithContext(RankName(failed[0]));
  if (failed.size() == 1) return status;
  return Status::FromParts(
      status.code(), status.ToErrno(),
      status.message() + " (and " + std::to_string(failed.size() - 1) + " more ranks failed)");
}

Status CheckOptions(std::span<const RankDescriptor> ranks) {
  const RankDescriptor& first = ranks[0];
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const RankDescriptor& d = ranks[r];
    const std::string who = " on rank 0 and rank " + std::to_string(r);
    if (d.path != first.path) {
      return Invalid("rank 0 saves to " + first.path + ", rank " + std::to_string(r) + " to " +
                     d.path);
    }
    if (d.placement != first.placement) return Invalid("option placement differs" + who);
    if (d.replicas != first.replicas) return Invalid("option replicas differs" + who);
    if (d.if_exists != first.if_exists) {
      return Invalid("option if_exists differs" + who);
    }
    if (d.producer != first.producer) return Invalid("option producer differs" + who);
    if (d.now != first.now) return Invalid("option now differs" + who);
  }
  return Status();
}

// The shards of one key.
struct Naming {
  std::string_view key;
  int rank = 0;
  std::uint32_t tensor = 0;  // In that rank's table.
};

struct Claim {
  const Region* region = nullptr;
  Holder holder;
};

Status CheckNamings(std::span<const RankDescriptor> ranks, std::span<const Naming> namings) {
  const auto meta = [&](const Naming& n) -> const TensorMeta& {
    return ranks[static_cast<std::size_t>(n.rank)].tensors[n.tensor];
  };
  const TensorMeta& first = meta(namings[0]);
  for (const Naming& n : namings.subspan(1)) {
    const TensorMeta& other = meta(n);
    const std::string head = "tensor " + first.key() + ": ";
    if (other.dtype() != first.dtype()) {
      return Invalid(head + "dtype is " + std::string(InfoOf(first.dtype()).name) + " on " +
                     RankName(namings[0].rank) + " and " + std::string(InfoOf(other.dtype()).name) +
                     " on " + RankName(n.rank));
    }
    if (!(other.shape() == first.shape())) {
      return Invalid(head + "shape is " + first.shape().ToString() + " on " +
                     RankName(namings[0].rank) + " and " + other.shape().ToString() + " on " +
                     RankName(n.rank));
    }
  }
  return Status();
}

std::string More(std::size_t boxes, std::uint64_t elements) {
  std::string text;
  if (boxes > 0) {
    text = " (in all " + std::to_string(elements) + " elements of " + std::to_string(boxes + 1) +
           " boxes or more)";
  }
  return text;
}

Status CheckCovered(const LayoutTensor& tensor) {
  std::vector<OwnedRegion> owned;
  owned.reserve(tensor.holdings.size());
  std::vector<int> holders;
  for (std::size_t i = 0; i < tensor.holdings.size(); ++i) {
    owned.push_back({tensor.holdings[i].region, static_cast<std::uint32_t>(i)});
    if (holders.size() < 1000) {
      for (const Holder& h : tensor.holdings[i].holders) holders.push_back(h.rank);
    }
  }
  const CoverageReport report = CheckCoverage(tensor.meta.shape(), owned);
  if (report.complete()) return Status();
  const std::string head = "tensor " + tensor.meta.key() + ": ";
  // An overlap first: it usually is the cause of a gap elsewhere.
  if (!report.overlaps.empty()) {
    const Overlap& overlap = report.overlaps[0];
    const std::vector<Holder>& a = tensor.holdings[overlap.first].holders;
    const std::vector<Holder>& b = tensor.holdings[overlap.second].holders;
    for (const Holder& x : a) {
      for (const Holder& y : b) {
        if (x.rank == y.rank) {
          return Invalid(head + overlap.box.ToString() + " is held twice by " + RankName(x.rank));
        }
      }
    }
    const auto [low, high] = std::minmax(a[0].rank, b[0].rank);
    return Invalid(head + overlap.box.ToString() + " is held by " + RankName(low) + " and " +
                   RankName(high));
  }
  return Invalid(head + report.missing[0].ToString() + " is held by no rank" +
                 (holders.empty() ? "" : "; parts are held by " + RankList(holders)) +
                 More(report.missing.size() - 1, report.missing_elements));
}

Result<LayoutTensor> JoinTensor(const TensorMeta& meta, std::vector<Claim>& claims) {
  LayoutTensor tensor{meta, {}, 0};
  std::stable_sort(claims.begin(), claims.end(), [](const Claim& a, const Claim& b) {
    const int c = CompareRegions(*a.region, *b.region);
    return c != 0 ? c < 0 : a.holder.rank < b.holder.rank;
  });
  for (const Claim& claim : claims) {
    if (claim.region->empty()) continue;
    if (!tensor.holdings.empty() && tensor.holdings.back().region == *claim.region) {
      Holding& same = tensor.holdings.back();
      if (same.holders.back().rank == claim.holder.rank) {
        return Invalid("tensor " + meta.key() + ": " + claim.region->ToString() +
                       " is held twice by " + RankName(claim.holder.rank));
      }
      same.holders.push_back(claim.holder);
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                                 RegionBytes(meta.dtype(), meta.shape(), *claim.region));
    tensor.holdings.push_back({*claim.region, bytes, {claim.holder}});
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckCovered(tensor));
  return tensor;
}

Status JoinTensors(std::span<const RankDescriptor> ranks, GlobalLayout& layout) {
  std::vector<Naming> namings;
  // Per rank and tensor, its shards: shards are grouped by tensor without a copy.
  std::vector<std::vector<std::vector<std::uint32_t>>> shards_of(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const RankDescriptor& d = ranks[r];
    shards_of[r].resize(d.tensors.size());
    for (std::size_t s = 0; s < d.shards.size(); ++s) {
      shards_of[r][d.shards[s].tensor].push_back(static_cast<std::uint32_t>(s));
    }
    for (std::size_t t = 0; t < d.tensors.size(); ++t) {
      namings.push_back({d.tensors[t].key(), static_cast<int>(r), static_cast<std::uint32_t>(t)});
    }
  }
  std::sort(namings.begin(), namings.end(), [](const Naming& a, const Naming& b) {
    return std::pair(a.key, a.rank) < std::pair(b.key, b.rank);
  });
  std::vector<Claim> claims;
  for (std::size_t from = 0; from < namings.size();) {
    std::size_t to = from + 1;
    while (to < namings.size() && namings[to].key == namings[from].key) ++to;
    const std::span<const Naming> same(&namings[from], to - from);
    TENSORMOUNT_RETURN_IF_ERROR(CheckNamings(ranks, same));
    claims.clear();
    for (const Naming& n : same) {
      const auto r = static_cast<std::size_t>(n.rank);
      for (const std::uint32_t s : shards_of[r][n.tensor]) {
        const ShardDescriptor& shard = ranks[r].shards[s];
        claims.push_back({&shard.region, {n.rank, shard.item}});
      }
    }
    const auto first_rank = static_cast<std::size_t>(same[0].rank);
    TENSORMOUNT_ASSIGN_OR_RETURN(LayoutTensor tensor,
                                 JoinTensor(ranks[first_rank].tensors[same[0].tensor], claims));
    tensor.first_rank = same[0].rank;
    const auto sum = CheckedAdd(layout.tensor_bytes, tensor.meta.bytes());
    if (!sum) return Invalid("the tensors have more than 2^64 bytes in all");
    layout.tensor_bytes = *sum;
    for (const Holding& h : tensor.holdings)
      layout.replica_bytes += h.bytes * (h.holders.size() - 1);
    layout.tensors.push_back(std::move(tensor));
    from = to;
  }
  return Status();
}

// The first index of `grid` in row-major order that `parts` (sorted by index) lack.
Status CheckGrid(std::span<const LayoutObject> parts) {
  const LayoutObject& first = parts[0];
  const std::int64_t wanted = CheckedProduct(first.grid).value_or(-1);
  if (wanted == static_cast<std::int64_t>(parts.size())) return Status();
  Dims index = Dims::Filled(first.grid.rank(), 0);
  for (std::size_t i = 0;; ++i) {
    if (i >= parts.size() || !(parts[i].index == index)) break;
    for (int a = index.rank() - 1; a >= 0 && ++index[a] == first.grid[a]; --a) index[a] = 0;
  }
  return Invalid("object " + first.key + ": part " + index.ToString() + " of grid " +
                 first.grid.ToString() + " is held by no rank");
}

Status JoinObjects(std::span<const RankDescriptor> ranks, GlobalLayout& layout) {
  struct Part {
    const ObjectDescriptor* object;
    Holder holder;
  };
  std::vector<Part> parts;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (std::size_t i = 0; i < ranks[r].objects.size(); ++i) {
      parts.push_back({&ranks[r].objects[i], {static_cast<int>(r), static_cast<std::uint32_t>(i)}});
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    if (a.object->key != b.object->key) return a.object->key < b.object->key;
    const int c = CompareDims(a.object->index, b.object->index);
    return c != 0 ? c < 0 : a.holder.rank < b.holder.rank;
  });
  std::vector<Hash128> hashes;
  for (const Part& part : parts) {
    const ObjectDescriptor& o = *part.object;
    const std::string head = "object " + o.key + ": ";
    if (!layout.objects.empty() && layout.objects.back().key == o.key) {
      LayoutObject& last = layout.objects.back();
      const std::string between = RankName(std::min(last.holders[0].rank, part.holder.rank)) +
                                  " and " +
                                  RankName(std::max(last.holders[0].rank, part.holder.rank));
      if (!(last.grid == o.grid)) {
        return Invalid(head + "grids " + last.grid.ToString() + " and " + o.grid.ToString() +
                       " on " + between);
      }
      if (last.index == o.index) {
        const std::string which = o.index.rank() == 0 ? "" : "part " + o.index.ToString() + ": ";
        if (last.holders.back().rank == part.holder.rank) {
          return Invalid(head + which + "held twice by " + RankName(part.holder.rank));
        }
        if (last.length != o.length || hashes.back() != o.hash) {
          return Invalid(head + which + "contents differ between " + between);
        }
        last.holders.push_back(part.holder);
        continue;
      }
    }
    layout.objects.push_back({o.key, o.index, o.grid, o.length, {part.holder}});
    hashes.push_back(o.hash);
  }
  for (std::size_t from = 0; from < layout.objects.size();) {
    std::size_t to = from + 1;
    while (to < layout.objects.size() && layout.objects[to].key == layout.objects[from].key) ++to;
    TENSORMOUNT_RETURN_IF_ERROR(CheckGrid(std::span(&layout.objects[from], to - from)));
    from = to;
  }
  return Status();
}

Status CheckKinds(const GlobalLayout& layout) {
  auto tensor = layout.tensors.begin();
  for (const LayoutObject& object : layout.objects) {
    while (tensor != layout.tensors.end() && tensor->meta.key() < object.key) ++tensor;
    if (tensor != layout.tensors.end() && tensor->meta.key() == object.key) {
      return Invalid("key " + object.key + " is a tensor on " + RankName(tensor->first_rank) +
                     " and an object on " + RankName(object.holders[0].rank));
    }
  }
  return Status();
}

Status JoinCommon(std::span<const RankDescriptor> ranks, GlobalLayout& layout) {
  std::map<std::string_view, std::pair<int, Hash128>> first;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const CommonDescriptor& c : ranks[r].common) {
      const auto [at, added] = first.try_emplace(c.name, static_cast<int>(r), c.hash);
      if (!added && at->second.second != c.hash) {
        return Invalid("common value " + c.name + ": differs between " +
                       RankName(at->second.first) + " and " + RankName(static_cast<int>(r)));
      }
    }
  }
  for (const auto& [name, who] : first) layout.common.push_back({std::string(name), who.first});
  return Status();
}

}  // namespace

Result<GlobalLayout> CheckLayout(std::span<const RankDescriptor> ranks) {
  if (ranks.empty()) return Status(Code::kInternal, "a save without ranks");
  GlobalLayout layout;
  layout.world = static_cast<int>(ranks.size());
  TENSORMOUNT_RETURN_IF_ERROR(CheckRanks(ranks));
  TENSORMOUNT_RETURN_IF_ERROR(CheckOptions(ranks));
  TENSORMOUNT_RETURN_IF_ERROR(JoinTensors(ranks, layout));
  TENSORMOUNT_RETURN_IF_ERROR(JoinObjects(ranks, layout));
  TENSORMOUNT_RETURN_IF_ERROR(CheckKinds(layout));
  TENSORMOUNT_RETURN_IF_ERROR(JoinCommon(ranks, layout));
  return layout;
}

}  // namespace descriptor_layout
}  // namespace tensormount
