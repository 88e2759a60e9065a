// SPDX-License-Identifier: Apache-2.0
// Encodes a rank's part of a plan as a message and joins the parts of all owners. A part refers to
// the rank's items by number and says nothing about other ranks. Every number is checked when
// decoded, because it decides where bytes are written.
#include "collective/save/rank_task.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "collective/comm/status_wire.h"
#include "collective/layout/wire.h"
#include "shard/coding.h"

// The message of an owner to a rank, little-endian, never on disk:
//
//   status    as WriteStatus writes it; nothing else follows if it is not ok
//   tensors   u32 count; each: u32 item with its key, dtype and shape, or kNoItem and then these
//             three themselves; u8 placement; u8 flags (1 shared, 2 seals, 4 empty); u8 length of
//             the stem of its file, and the stem
//   chunks    u32 count; each: u32 tensor, u32 item, u32 part, u64 begin, u64 bytes, u64 offset
//   objects   u32 count; each: u32 item
//   replicas  u32 count; each: u32 item, u32 holders, u32 replica_index

namespace tensormount {
namespace {

constexpr std::uint32_t kNoItem = 0xFFFFFFFF;
constexpr std::uint8_t kShared = 1;
constexpr std::uint8_t kSeals = 2;
constexpr std::uint8_t kEmpty = 4;
constexpr std::size_t kTensorBytes = 4 + 1 + 1 + 1;  // Least size of an encoded tensor.
constexpr std::size_t kChunkBytes = 4 + 4 + 4 + 8 + 8 + 8;
constexpr std::size_t kReplicaBytes = 4 + 4 + 4;

Status BrokenPlan(const std::string& why) { return Status(Code::kDataLoss, "save plan: " + why); }

std::string Hex16(std::uint64_t v) {
  char text[17];
  (void)std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(v));
  return text;
}

class PartEncoder {
 public:
  PartEncoder(const GlobalLayout& layout, const SavePlan& plan, int rank)
      : layout_(layout), plan_(plan), rank_(rank) {}

  void AddReplica(const Holder& holder, std::size_t holders, std::size_t replica_index) {
    replicas_.U32(holder.item);
    replicas_.U32(static_cast<std::uint32_t>(holders));
    replicas_.U32(static_cast<std::uint32_t>(replica_index));
    ++replica_count_;
  }

  std::string Finish(std::span<const std::string> stems) {
    const RankPlan& mine = plan_.ranks[static_cast<std::size_t>(rank_)];
    ByteWriter tensors;
    ByteWriter chunks;
    std::uint32_t tensor_count = 0;
    const auto add_tensor = [&](std::uint32_t t, std::uint32_t item, std::uint8_t flags) {
      tensors.U32(item);
      if (item == kNoItem) EncodeMeta(tensors, layout_.tensors[t].meta);
      tensors.U8(static_cast<std::uint8_t>(plan_.placement[t]));
      tensors.U8(flags);
      tensors.U8(static_cast<std::uint8_t>(stems[t].size()));
      tensors.Raw(stems[t].data(), stems[t].size());
      ++tensor_count;
    };
    std::uint32_t last = kNoItem;
    for (const PlannedChunk& c : mine.chunks) {
      if (c.tensor != last) {
        const bool shared =
            plan_.placement[c.tensor] == Placement::kTensorFile && plan_.writers[c.tensor] > 1;
        const bool seals = shared && plan_.sealers[c.tensor] == rank_;
        add_tensor(c.tensor, c.item,
                   static_cast<std::uint8_t>((shared ? kShared : 0) | (seals ? kSeals : 0)));
        last = c.tensor;
      }
      chunks.U32(tensor_count - 1);
      chunks.U32(c.item);
      chunks.U32(c.part);
      chunks.U64(c.begin);
      chunks.U64(c.bytes);
      chunks.U64(c.offset);
    }
    // A writer of the whole model may record tensors of which it has no shard.
    for (const std::uint32_t t : mine.recorded) add_tensor(t, kNoItem, kEmpty);

    ByteWriter out;
    WriteStatus(out, Status());
    out.U32(tensor_count);
    out.Raw(tensors.bytes().data(), tensors.size());
    out.U32(static_cast<std::uint32_t>(mine.chunks.size()));
    out.Raw(chunks.bytes().data(), chunks.size());
    out.U32(static_cast<std::uint32_t>(mine.objects.size()));
    for (const std::uint32_t o : mine.objects) out.U32(ItemOf(layout_.objects[o].holders));
    out.U32(replica_count_);
    out.Raw(replicas_.bytes().data(), replicas_.size());
    return std::move(out.bytes());
  }

 private:
  std::uint32_t ItemOf(const std::vector<Holder>& holders) const {
    for (const Holder& h : holders) {
      if (h.rank == rank_) return h.item;
    }
    return kNoItem;  // The receiving rank refuses this number.
  }

  const GlobalLayout& layout_;
  const SavePlan& plan_;
  const int rank_;
  ByteWriter replicas_;
  std::uint32_t replica_count_ = 0;
};

class PartDecoder {
 public:
  PartDecoder(std::string_view bytes, const StateDict& state, int world, RankTask& task)
      : in_(bytes, "save plan"), state_(state), world_(world), task_(task) {}

  Status Run() {
    TENSORMOUNT_RETURN_IF_ERROR(ReadStatus(in_));
    TENSORMOUNT_RETURN_IF_ERROR(Tensors());
    TENSORMOUNT_RETURN_IF_ERROR(Chunks());
    TENSORMOUNT_RETURN_IF_ERROR(Objects());
    TENSORMOUNT_RETURN_IF_ERROR(Replicas());
    return in_.Finish();
  }

 private:
  Result<std::uint32_t> Count(std::size_t least_bytes, const char* what) {
    const std::uint32_t count = in_.U32();
    TENSORMOUNT_RETURN_IF_ERROR(in_.status());
    if (count > in_.left() / least_bytes) {
      return BrokenPlan(std::string("the message is too short for the ") + what +
                        " that it announces");
    }
    return count;
  }

  Result<TensorMeta> MetaOf(std::uint32_t item) {
    if (item == kNoItem) return DecodeMeta(in_, "save plan");
    if (item >= state_.tensors().size())
      return BrokenPlan("a tensor number is not in the state dict");
    const StateDict::TensorItem& mine = state_.tensors()[item];
    return TensorMeta::Make(mine.key, mine.shard.data.dtype, mine.shard.global_shape);
  }

  Status Tensors() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t count, Count(kTensorBytes, "tensors"));
    first_ = task_.tensors.size();
    task_.tensors.reserve(first_ + count);
    for (std::uint32_t i = 0; i < count; ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, MetaOf(in_.U32()));
      RankTask::Tensor tensor{.meta = std::move(meta)};
      const std::uint8_t placement = in_.U8();
      const std::uint8_t flags = in_.U8();
      tensor.file = std::string(in_.Raw(in_.U8()));
      TENSORMOUNT_RETURN_IF_ERROR(in_.status());
      tensor.placement = static_cast<Placement>(placement);
      const bool known =
          tensor.placement == Placement::kTensorFile || tensor.placement == Placement::kRankShard ||
          tensor.placement == Placement::kPack || tensor.placement == Placement::kSafetensors;
      if (!known || (flags & ~(kShared | kSeals | kEmpty)) != 0) {
        return BrokenPlan("a tensor has an unknown placement or unknown flags");
      }
      for (const char c : tensor.file) {
        if (!(c >= 'a' && c <= 'z') && !(c >= '0' && c <= '9') && c != '-') {
          return BrokenPlan("a tensor has an invalid file name");
        }
      }
      if (tensor.file.empty() && tensor.placement == Placement::kTensorFile) {
        return BrokenPlan("a tensor file has no name");
      }
      tensor.shared = (flags & kShared) != 0;
      tensor.seals = (flags & kSeals) != 0;
      tensor.empty = (flags & kEmpty) != 0;
      task_.tensors.push_back(std::move(tensor));
    }
    return Status();
  }

  Status Chunks() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t count, Count(kChunkBytes, "chunks"));
    const std::size_t tensors = task_.tensors.size() - first_;
    task_.chunks.reserve(task_.chunks.size() + count);
    for (std::uint32_t i = 0; i < count; ++i) {
      RankTask::Chunk chunk;
      const std::uint32_t tensor = in_.U32();
      chunk.item = in_.U32();
      chunk.part = in_.U32();
      chunk.begin = in_.U64();
      chunk.bytes = in_.U64();
      chunk.offset = in_.U64();
      TENSORMOUNT_RETURN_IF_ERROR(in_.status());
      if (tensor >= tensors || chunk.item >= state_.tensors().size()) {
        return BrokenPlan("a chunk refers to a tensor that does not exist");
      }
      chunk.tensor = static_cast<std::uint32_t>(first_ + tensor);
      const RankTask::Tensor& of = task_.tensors[chunk.tensor];
      const StateDict::TensorItem& item = state_.tensors()[chunk.item];
      if (item.key != of.meta.key() || item.shard.data.dtype != of.meta.dtype() ||
          !(item.shard.global_shape == of.meta.shape())) {
        return BrokenPlan("a chunk of tensor " + of.meta.key() +
                          " is taken from a shard of tensor " + item.key);
      }
      if (chunk.bytes == 0 || (of.placement == Placement::kTensorFile &&
                               !RangeWithin(chunk.offset, chunk.bytes, of.meta.bytes()))) {
        return BrokenPlan("a chunk of tensor " + of.meta.key() + " lies outside of its file");
      }
      Result<Region> region = PartOfRegion(of.meta, item.shard.region, chunk.begin, chunk.bytes);
      if (!region.ok()) return BrokenPlan(region.status().message());
      chunk.region = std::move(region).value();
      task_.chunks.push_back(std::move(chunk));
    }
    return Status();
  }

  Status Objects() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t count, Count(4, "objects"));
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t item = in_.U32();
      if (item >= state_.objects().size())
        return BrokenPlan("an object number is not in the state dict");
      task_.objects.push_back(item);
    }
    return Status();
  }

  Status Replicas() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t count, Count(kReplicaBytes, "replicas"));
    std::vector<RankTask::Replica>& replicas = task_.replicas.emplace_back();
    replicas.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      RankTask::Replica replica;
      replica.item = in_.U32();
      replica.holders = in_.U32();
      replica.replica_index = in_.U32();
      if (replica.item >= state_.tensors().size() || replica.replica_index >= replica.holders ||
          replica.holders > static_cast<std::uint32_t>(world_)) {
        return BrokenPlan("the record of a replica is invalid");
      }
      const Shard& shard = state_.tensors()[replica.item].shard;
      Result<std::uint64_t> bytes = RegionBytes(shard.data.dtype, shard.global_shape, shard.region);
      if (!bytes.ok()) return BrokenPlan(bytes.status().message());
      replica.bytes = bytes.value();
      replicas.push_back(replica);
    }
    return Status();
  }

  ByteReader in_;
  const StateDict& state_;
  const int world_;
  RankTask& task_;
  std::size_t first_ = 0;  // Index of this part's first tensor in the task.
};

void SortByKey(RankTask& task, const StateDict& state) {
  std::vector<std::uint32_t> order(task.tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return task.tensors[a].meta.key() < task.tensors[b].meta.key();
  });
  std::vector<std::uint32_t> place(order.size());
  std::vector<RankTask::Tensor> tensors;
  tensors.reserve(order.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    tensors.push_back(std::move(task.tensors[order[i]]));
  }
  task.tensors = std::move(tensors);
  for (RankTask::Chunk& c : task.chunks) c.tensor = place[c.tensor];
  std::sort(task.chunks.begin(), task.chunks.end(),
            [](const RankTask::Chunk& a, const RankTask::Chunk& b) {
              return std::tie(a.tensor, a.part) < std::tie(b.tensor, b.part);
            });
  std::sort(task.objects.begin(), task.objects.end(), [&](std::uint32_t a, std::uint32_t b) {
    const StateDict::ObjectItem& x = state.objects()[a];
    const StateDict::ObjectItem& y = state.objects()[b];
    if (x.key != y.key) return x.key < y.key;
    const auto i = x.place.index.span();
    const auto j = y.place.index.span();
    return std::lexicographical_compare(i.begin(), i.end(), j.begin(), j.end());
  });
}

}  // namespace

std::vector<std::string> TensorFileStems(std::span<const std::uint64_t> key_hashes) {
  std::vector<std::string> stems;
  stems.reserve(key_hashes.size());
  std::map<std::uint64_t, std::uint32_t> seen;
  for (const std::uint64_t hash : key_hashes) {
    std::string stem = "t" + Hex16(hash);
    if (const std::uint32_t n = seen[hash]++; n > 0) stem += "-" + std::to_string(n);
    stems.push_back(std::move(stem));
  }
  return stems;
}

std::vector<std::string> EncodeTasks(const GlobalLayout& layout, const SavePlan& plan) {
  std::vector<std::uint64_t> hashes;
  for (std::size_t t = 0; t < layout.tensors.size(); ++t) {
    if (plan.placement[t] == Placement::kTensorFile) {
      hashes.push_back(Xxh3Low64(layout.tensors[t].meta.key()));
    }
  }
  std::vector<std::string> of_files = TensorFileStems(hashes);
  std::vector<std::string> stems(layout.tensors.size());
  for (std::size_t t = 0, f = 0; t < stems.size(); ++t) {
    if (plan.placement[t] == Placement::kTensorFile) stems[t] = std::move(of_files[f++]);
  }
  std::vector<PartEncoder> parts;
  parts.reserve(plan.ranks.size());
  for (int r = 0; r < layout.world; ++r) parts.emplace_back(layout, plan, r);
  for (const LayoutTensor& tensor : layout.tensors) {
    for (const Holding& holding : tensor.holdings) {
      if (holding.holders.size() < 2) continue;
      for (std::size_t k = 0; k < holding.holders.size(); ++k) {
        parts[static_cast<std::size_t>(holding.holders[k].rank)].AddReplica(
            holding.holders[k], holding.holders.size(), k);
      }
    }
  }
  std::vector<std::string> encoded;
  encoded.reserve(parts.size());
  for (PartEncoder& part : parts) encoded.push_back(part.Finish(stems));
  return encoded;
}

std::string EncodeTaskFailure(const Status& failure) {
  ByteWriter out;
  WriteStatus(out, failure);
  return std::move(out.bytes());
}

Status FailureOfOwners(std::span<const std::string> by_owner) {
  for (const std::string& part : by_owner) {
    ByteReader in(part, "save plan");
    TENSORMOUNT_RETURN_IF_ERROR(ReadStatus(in));
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
  }
  return Status();
}

Result<RankTask> DecodeTasks(std::span<const std::string> by_owner, const StateDict& state,
                             int world) {
  RankTask task;
  for (const std::string& part : by_owner) {
    TENSORMOUNT_RETURN_IF_ERROR(PartDecoder(part, state, world, task).Run());
  }
  SortByKey(task, state);
  return task;
}

Hash128 TaskFingerprint(const StateDict& state, PlacementRule placement, SaveStrategy strategy) {
  ByteWriter out;
  out.U8(static_cast<std::uint8_t>(placement));
  out.U8(static_cast<std::uint8_t>(strategy));
  out.U64(state.tensors().size());
  for (const StateDict::TensorItem& item : state.tensors()) {
    EncodeMeta(out, item.key, item.shard.data.dtype, item.shard.global_shape);
    EncodeRegion(out, item.shard.region);
  }
  for (const StateDict::ObjectItem& item : state.objects()) {
    out.String(item.key);
    EncodeDims(out, item.place.index);
    EncodeDims(out, item.place.grid);
  }
  for (const auto& [key, pattern] : state.layer_names()) {
    out.String(key);
    out.String(pattern);
  }
  return Xxh3(out.bytes());
}

}  // namespace tensormount
