// SPDX-License-Identifier: Apache-2.0
// The layouts of all ranks, by key. Regions are stored as columns of numbers, because one rank of a
// large job gets millions of regions.
#include "collective/layout/layout_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/errors.h"

namespace tensormount {

int CompareDims(const Dims& a, const Dims& b) {
  const auto x = a.span();
  const auto y = b.span();
  if (std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end())) return -1;
  if (std::lexicographical_compare(y.begin(), y.end(), x.begin(), x.end())) return 1;
  return 0;
}

int CompareRegions(const Region& a, const Region& b) {
  if (int c = CompareDims(a.box().begin(), b.box().begin()); c != 0) return c;
  if (a.flat_first() != b.flat_first()) return a.flat_first() < b.flat_first() ? -1 : 1;
  if (int c = CompareDims(a.box().extent(), b.box().extent()); c != 0) return c;
  if (a.volume() != b.volume()) return a.volume() < b.volume() ? -1 : 1;
  return static_cast<int>(a.is_flat()) - static_cast<int>(b.is_flat());
}

std::string RankName(int rank) { return "rank " + std::to_string(rank); }

std::string RankList(std::vector<int> ranks) {
  constexpr std::size_t kShown = 16;  // Maximum number of ranks or runs of ranks in the text.
  constexpr std::size_t kStretch = 4;
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.empty()) return "no rank";
  if (ranks.size() == 1) return RankName(ranks[0]);
  std::string text;
  std::size_t i = 0;
  for (std::size_t shown = 0; i < ranks.size() && shown < kShown; ++shown) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += (i == 0 ? "ranks " : ", ") + std::to_string(ranks[i]);
    if (end - i >= kStretch) {
      text += "-" + std::to_string(ranks[end - 1]);
      i = end;
    } else {
      ++i;
    }
  }
  if (i < ranks.size()) text += " and " + std::to_string(ranks.size() - i) + " more";
  return text;
}

LayoutTable::LayoutTable() : rep_(std::make_unique<Rep>()) {}
LayoutTable::~LayoutTable() = default;
LayoutTable::LayoutTable(LayoutTable&&) noexcept = default;
LayoutTable& LayoutTable::operator=(LayoutTable&&) noexcept = default;

std::uint64_t LayoutTable::boxes() const { return rep_->boxes; }

std::uint32_t LayoutTable::Rep::FindOrAdd(TensorMeta meta, std::string_view encoded) {
  const auto fresh = static_cast<std::uint32_t>(tensors.size());
  const auto [at, added] = by_key.try_emplace(meta.key(), fresh);
  if (!added) {
    std::uint32_t id = at->second;
    while (tensors[id].encoded != encoded) {
      if (tensors[id].variant == kNone) {
        tensors[id].variant = fresh;
        id = fresh;
        break;
      }
      id = tensors[id].variant;
    }
    if (id != fresh) return id;
  }
  Tensor& tensor = tensors.emplace_back();
  tensor.regions.Reset(meta.shape());
  tensor.encoded = encoded;
  tensor.meta = std::move(meta);
  return fresh;
}

Status LayoutTable::Rep::AddTensors(ByteReader& in, std::string_view encoded, std::uint32_t count,
                                    std::string_view what) {
  const std::uint32_t layout = layouts();
  ids.clear();
  std::uint32_t before = kNone;
  for (std::uint32_t t = 0; t < count; ++t) {
    std::uint32_t id = before == kNone ? first : tensors[before].next;
    // The encoding of a tensor is self-delimiting, so equal bytes are an equal tensor.
    if (id != kNone && in.left() >= tensors[id].encoded.size() &&
        std::memcmp(encoded.data() + in.position(), tensors[id].encoded.data(),
                    tensors[id].encoded.size()) == 0) {
      in.Raw(tensors[id].encoded.size());
    } else {
      const std::size_t begin = in.position();
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, ReadMeta(in, what));
      id = FindOrAdd(std::move(meta), encoded.substr(begin, in.position() - begin));
      (before == kNone ? first : tensors[before].next) = id;
    }
    std::vector<std::uint32_t>& layouts_with_tensor = tensors[id].layouts_with_tensor;
    if (layouts_with_tensor.empty() || layouts_with_tensor.back() != layout)
      layouts_with_tensor.push_back(layout);
    ids.push_back(id);
    before = id;
  }
  return in.status();
}

template <int Slots>
Status LayoutTable::Rep::AddShards(std::string_view records, std::string_view what) {
  constexpr std::size_t kBytes = 32 + 16 * Slots;
  const std::uint32_t layout = layouts();
  ShardRecord record;
  for (const char* p = records.data(); p != records.data() + records.size(); p += kBytes) {
    if (!ReadShardRecord<Slots>(p, &record) || record.tensor >= ids.size()) {
      return DataLoss(what, "a shard record is damaged");
    }
    Tensor& tensor = tensors[ids[record.tensor]];
    if (ShardSlots(tensor.regions.rank()) != Slots) {
      return DataLoss(what, "tensor " + tensor.meta.key() +
                                ": a shard record has another number of axes than the tensor");
    }
    const std::size_t before = tensor.regions.size();
    const bool within = record.flat ? tensor.regions.AddFlat(record.begin, record.extent,
                                                             record.first, record.count, layout)
                                    : tensor.regions.AddBox(record.begin, record.extent, layout);
    if (!within) {
      return DataLoss(what, "tensor " + tensor.meta.key() + ": a region lies outside of shape " +
                                tensor.meta.shape().ToString());
    }
    if (tensor.regions.size() == before) continue;  // The region is empty.
    tensor.items.push_back(record.item);
    if (record.replica != Replica::kUnlabelled || !tensor.labels.empty()) {
      tensor.labels.resize(before, Replica::kUnlabelled);
      tensor.labels.push_back(record.replica);
    }
  }
  return Status();
}

Status LayoutTable::Add(std::string_view encoded, std::span<const int> ranks) {
  if (encoded.empty() || ranks.empty()) return Status();
  Rep& rep = *rep_;
  const std::string what = "layout of rank " + std::to_string(ranks[0]);
  ByteReader in(encoded, what);
  TENSORMOUNT_ASSIGN_OR_RETURN(const LayoutHeader header, ReadLayoutHeader(in, what));
  TENSORMOUNT_RETURN_IF_ERROR(rep.AddTensors(in, encoded, header.tensors, what));
  const std::string_view short_records = in.Raw(header.short_shards * kShortShardBytes);
  const std::string_view long_records = in.Raw(header.long_shards * kLongShardBytes);
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  TENSORMOUNT_RETURN_IF_ERROR(rep.AddShards<kShortShardRank>(short_records, what));
  TENSORMOUNT_RETURN_IF_ERROR(rep.AddShards<kMaxRank>(long_records, what));
  for (std::uint32_t i = 0; i < header.objects; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(DecodedLayout::ObjectItem part, ReadObjectItem(in, what));
    rep.objects.push_back({std::move(part), rep.layouts()});
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  rep.boxes += (header.short_shards + header.long_shards) * ranks.size();
  rep.ranks.insert(rep.ranks.end(), ranks.begin(), ranks.end());
  rep.rank_begin.push_back(rep.ranks.size());
  return Status();
}

std::vector<std::uint32_t> LayoutTable::Rep::KeysInOrder() const {
  std::vector<std::uint32_t> order;
  order.reserve(by_key.size());
  for (const auto& [key, id] : by_key) order.push_back(id);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return tensors[a].meta.key() < tensors[b].meta.key();
  });
  return order;
}

std::vector<std::uint32_t> LayoutTable::Rep::ObjectsInOrder() const {
  std::vector<std::uint32_t> order(objects.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t x, std::uint32_t y) {
    const Object& a = objects[x];
    const Object& b = objects[y];
    if (const int c = a.part.key.compare(b.part.key); c != 0) return c < 0;
    if (const int c = CompareDims(a.part.index, b.part.index); c != 0) return c < 0;
    const int rank_a = RanksOf(a.layout)[0];
    const int rank_b = RanksOf(b.layout)[0];
    return rank_a != rank_b ? rank_a < rank_b : a.part.item < b.part.item;
  });
  return order;
}

int LayoutTable::Rep::FirstRank(const Tensor& tensor) const {
  int lowest = RanksOf(tensor.layouts_with_tensor[0])[0];
  for (const std::uint32_t layout : tensor.layouts_with_tensor)
    lowest = std::min(lowest, RanksOf(layout)[0]);
  return lowest;
}

}  // namespace tensormount
