// SPDX-License-Identifier: Apache-2.0
// A StateDict of the same shards over memory of a snapshot. Copies are cut into even pieces for
// several threads, and large ones go past the caches, which hold nothing of them when the save
// reads them.
#include "collective/async/snapshot_state.h"

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/stream_copy.h"
#include "collective/guarded.h"
#include "collective/save/block_reader.h"
#include "collective/save/packed_source.h"
#include "collective/save_load.h"

namespace tensormount {
namespace {

// Shards begin at multiples of this in staging memory: a cache line, and what vector loads like.
constexpr std::uint64_t kAlign = 64;
// Larger copies do not stay in a cache until the save reads them.
constexpr std::size_t kStreamBytes = 256 * 1024;

// What stands in host memory, in one copy.
Status CopyBytes(const PackedSource& source, std::byte* to) {
  const auto size = static_cast<std::size_t>(source.bytes());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* from, source.Fetch(0, size, to));
  if (from == to) return {};
  // memcpy goes past the caches for a whole state, but not for its tensors one by one.
  if (size >= kStreamBytes) {
    StreamBytes(from, to, size);
  } else {
    std::memcpy(to, from, size);
  }
  return {};
}

Status Stage(const StateDict& state, SnapshotPool& pool, const DeviceRules& rules,
             std::atomic<std::uint64_t>* staged, std::atomic<std::int64_t>* stalled,
             SnapshotState& out) {
  TENSORMOUNT_RETURN_IF_ERROR(state.status());
  TENSORMOUNT_RETURN_IF_ERROR(CheckHasData(state));
  std::vector<PackedSource> sources;
  std::vector<std::uint64_t> offsets;
  sources.reserve(state.tensors().size());
  std::uint64_t total = 0;
  for (const StateDict::TensorItem& item : state.tensors()) {
    Result<PackedSource> made = PackedSource::Make(item.shard);
    if (!made.ok()) return made.status().WithContext("tensor " + item.key);
    PackedSource source = std::move(made).value();
    offsets.push_back(total);
    const auto end = CheckedAdd(total, source.bytes());
    if (!end || *end > ~std::uint64_t{0} - kAlign) {
      return Status(Code::kInvalidArgument, "the shards have more than 2^64 bytes in all");
    }
    total = (*end + kAlign - 1) / kAlign * kAlign;
    sources.push_back(std::move(source));
  }
  if (total > 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out.memory, pool.Take(total, rules.patience, stalled));
  }
  // What is on devices is on its way while the rest is copied.
  BlockReader blocks(state, BlockRules{rules});
  std::vector<BlockReader::Wanted> pieces;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].device() == nullptr || sources[i].bytes() == 0) continue;
    pieces.push_back({static_cast<std::uint32_t>(i), 0, sources[i].bytes()});
  }
  blocks.Plan(std::move(pieces));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto size = static_cast<std::size_t>(sources[i].bytes());
    if (size == 0) continue;
    std::byte* to = out.memory->data() + offsets[i];
    if (sources[i].device() == nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(CopyBytes(sources[i], to));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(blocks.Next().status());
      for (std::size_t done = 0; done < size;) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const std::byte> block,
                                     blocks.Take(size - done));
        StreamBytes(block.data(), to + done, block.size());
        done += block.size();
      }
    }
    if (staged != nullptr) staged->fetch_add(size, std::memory_order_relaxed);
  }
  EndStream();
  out.dict = WithShards(state, [&](std::size_t i) {
    Shard shard = state.tensors()[i].shard;
    Dims shape = shard.region.is_flat() ? Dims{shard.region.volume()} : shard.region.box().extent();
    void* data = sources[i].bytes() == 0 ? nullptr : out.memory->data() + offsets[i];
    shard.data = BufferView::Host(shard.data.dtype, data, shape);
    return shard;
  });
  if (staged != nullptr) {
    for (const StateDict::ObjectItem& object : state.objects()) {
      staged->fetch_add(object.bytes.size(), std::memory_order_relaxed);
    }
  }
  return out.dict.status();
}

}  // namespace

std::uint64_t BytesOf(const StateDict& state) {
  std::uint64_t total = 0;
  for (const StateDict::TensorItem& item : state.tensors()) {
    const Result<std::uint64_t> bytes =
        RegionBytes(item.shard.data.dtype, item.shard.global_shape, item.shard.region);
    if (bytes.ok()) total += bytes.value();
  }
  for (const StateDict::ObjectItem& object : state.objects()) total += object.bytes.size();
  return total;
}

StateDict WithShards(const StateDict& state, const std::function<Shard(std::size_t)>& shard_of) {
  StateDict out;
  (void)out.Fail(state.status());
  for (std::size_t i = 0; i < state.tensors().size(); ++i) {
    (void)out.AddTensor(state.tensors()[i].key, shard_of(i));  // A failure stays in `out`.
  }
  for (const StateDict::ObjectItem& object : state.objects()) {
    (void)(object.wanted ? out.WantObject(object.key, object.place)
                         : out.AddObject(object.key, object.bytes, object.place));
  }
  for (const auto& [name, value] : state.common()) (void)out.SetCommon(name, value);
  for (const auto& [name, value] : state.rank_common()) (void)out.SetRankCommon(name, value);
  for (const auto& [name, value] : state.locals()) (void)out.SetLocal(name, value);
  if (state.content_metadata() != nullptr) {
    (void)out.SetContentMetadata(*state.content_metadata());
  }
  for (const auto& [key, pattern] : state.layer_names()) (void)out.NameLayers(key, pattern);
  return out;
}

StateDict ShareState(const StateDict& state) {
  return WithShards(state, [&](std::size_t i) { return state.tensors()[i].shard; });
}

SnapshotState StageState(const StateDict& state, SnapshotPool& pool, const DeviceRules& rules,
                         std::atomic<std::uint64_t>* staged, std::atomic<std::int64_t>* stalled) {
  SnapshotState out;
  out.status = Guarded([&] { return Stage(state, pool, rules, staged, stalled, out); });
  if (!out.status.ok()) {
    out.dict = StateDict();
    (void)out.dict.Fail(out.status);
    out.memory.reset();
  }
  return out;
}

}  // namespace tensormount
