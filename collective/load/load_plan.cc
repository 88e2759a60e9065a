// SPDX-License-Identifier: Apache-2.0
#include "collective/load/load_plan.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "base/hash.h"
#include "shard/copy_plan.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// "KEY" or "KEY[2, 3]".
std::string ObjectName(const std::string& key, const Dims& index) {
  return index.rank() == 0 ? key : key + index.ToString();
}

std::string RankPrefix(std::size_t rank) { return "rank " + std::to_string(rank) + ": "; }

// Entries of the keys that anybody asked for, and what is stored besides.
struct Stored {
  std::map<std::string, TensorEntry> tensors;
  std::vector<std::string> others;
};

Result<Stored> LookUp(const CheckpointIndex& index, const std::set<std::string>& keys,
                      bool need_others) {
  Stored stored;
  if (!need_others && keys.size() < 1000) {
    for (const std::string& key : keys) {
      Result<TensorEntry> entry = index.Find(key);
      if (entry.ok()) {
        stored.tensors.emplace(key, std::move(entry).value());
      } else if (entry.status().code() != Code::kNotFound) {
        return entry.status();
      }
    }
    return stored;
  }
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
    if (keys.contains(entry.meta.key())) {
      stored.tensors.emplace(entry.meta.key(), entry);
    } else if (need_others) {
      stored.others.push_back(entry.meta.key());
    }
    return true;
  }));
  return stored;
}

// Objects that anybody asked for and that are not stored, and stored ones that nobody asked for.
Status MatchObjects(const CheckpointIndex& index, std::span<const RankDescriptor> requests,
                    bool need_others, LoadPlan& plan) {
  std::map<std::string, std::map<std::string, Dims>> stored;  // Key → index text → grid.
  bool any = need_others;
  for (const RankDescriptor& request : requests) any = any || !request.objects.empty();
  if (!any) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectContent> objects, index.Objects());
  for (const ObjectContent& object : objects) {
    stored[object.key].emplace(object.index.ToString(), object.grid);
  }
  std::set<std::string> asked;
  for (std::size_t rank = 0; rank < requests.size(); ++rank) {
    for (const ObjectDescriptor& want : requests[rank].objects) {
      asked.insert(want.key);
      const auto parts = stored.find(want.key);
      const auto part = parts == stored.end() ? std::map<std::string, Dims>::const_iterator()
                                              : parts->second.find(want.index.ToString());
      if (parts == stored.end() || part == parts->second.end()) {
        plan.not_stored.push_back(ObjectName(want.key, want.index));
      } else if (want.grid.rank() != 0 && !(part->second == want.grid) && plan.refusal.ok()) {
        plan.refusal =
            Status(Code::kInvalidArgument, RankPrefix(rank) + "object " + want.key +
                                               ": asked for on a grid of " + want.grid.ToString() +
                                               ", stored on one of " + part->second.ToString());
      }
    }
  }
  if (need_others) {
    for (const auto& [key, parts] : stored) {
      if (!asked.contains(key)) plan.not_requested.push_back(key);
    }
  }
  return {};
}

void SortUnique(std::vector<std::string>& names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
}

// How a region meets the chunks of its tensor: bytes wanted, bytes that whole leaves would add,
// and the shortest run in a file.
struct Geometry {
  std::uint64_t wanted = 0;
  std::uint64_t widened_by = 0;
  std::uint64_t shortest_run = ~std::uint64_t{0};
};

Result<Geometry> Measure(const CheckpointIndex& index, const TensorEntry& entry,
                         const Region& region, std::size_t max_chunks) {
  Geometry g;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region wanted,
                               ByteRegion(entry.meta.dtype(), entry.meta.shape(), region));
  const std::vector<Box> boxes = wanted.Boxes();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents,
                               index.Extents(entry.ordinal));
  std::size_t seen = 0;
  for (std::size_t i = 0; i < extents->size() && seen < max_chunks; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, extents->At(i));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                 ByteRegion(entry.meta.dtype(), entry.meta.shape(), chunk.region));
    bool met = false;
    for (const PlacedBox& placed : PlacePacked(bytes, 0)) {
      for (const Box& box : boxes) {
        const Box part = Intersect(placed.box, box);
        if (part.empty()) continue;
        met = true;
        const StridedCopy runs = PlanCopy(part, placed, placed);
        const std::uint64_t size = runs.bytes();
        g.wanted += size;
        g.shortest_run = std::min(g.shortest_run, runs.run);
        // From the first to the last byte wanted, widened to leaves, is the most that is read.
        std::int64_t last = runs.src_offset;
        for (int a = 0; a < runs.axes; ++a) {
          const auto u = static_cast<std::size_t>(a);
          last += (runs.count[u] - 1) * runs.src_step[u];
        }
        const std::uint64_t begin = static_cast<std::uint64_t>(runs.src_offset);
        const std::uint64_t end = static_cast<std::uint64_t>(last) + runs.run;
        const std::uint64_t from = begin / kLeafBytes * kLeafBytes;
        const std::uint64_t to =
            std::min((end + kLeafBytes - 1) / kLeafBytes * kLeafBytes, chunk.length);
        const std::uint64_t span = std::max(to, end) - from;
        g.widened_by += std::min(span - size, (span - (end - begin)) * runs.runs());
      }
    }
    if (met) ++seen;
  }
  return g;
}

// On one machine the ranks share a page cache, and gathering short runs from it costs no more than
// passing them on (measured: docs/performance.md, "Resharding"). On several machines each would
// fetch whole pages, in the end the whole tensor, for the few bytes of them that it wants.
constexpr std::uint64_t kExchangeRun = 64u << 10;
constexpr std::uint64_t kExchangeBytes = 8u << 20;

bool OnSeveralMachines(std::span<const RankDescriptor> requests) {
  return std::any_of(requests.begin(), requests.end(),
                     [&](const RankDescriptor& request) { return request.now != requests[0].now; });
}

// A number for this machine since it was started.
std::int64_t ThisMachine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return static_cast<std::int64_t>(Xxh3(id).low >> 1);
}

Result<bool> WorthExchanging(const CheckpointIndex& index, const PlannedTensor& tensor) {
  if (tensor.entry.meta.bytes() < kExchangeBytes) return false;
  if (tensor.wants.front().rank == tensor.wants.back().rank) return false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Geometry g,
                               Measure(index, tensor.entry, tensor.wants.front().region, 4));
  return g.shortest_run <= kExchangeRun;
}

}  // namespace

std::string EncodeLoadRequest(const StateDict& request, std::string_view path,
                              const LoadOptions& options, int rank, int world) {
  SaveOptions call;
  call.producer = "load";
  call.now = ThisMachine();
  for (const int choice :
       {static_cast<int>(options.not_stored), static_cast<int>(options.not_requested),
        static_cast<int>(options.verify), static_cast<int>(options.path)}) {
    call.producer += ' ' + std::to_string(choice);
  }
  return EncodeDescriptor(request, path, call, rank, world);
}

Result<LoadPlan> MakeLoadPlan(const CheckpointIndex& index,
                              std::span<const RankDescriptor> requests,
                              const LoadOptions& options) {
  LoadPlan plan;
  std::set<std::string> keys;
  for (std::size_t rank = 0; rank < requests.size(); ++rank) {
    if (requests[rank].path != requests[0].path ||
        requests[rank].producer != requests[0].producer) {
      plan.refusal = Status(Code::kInvalidArgument,
                            RankPrefix(rank) + "load was called with another path or other " +
                                "options than on rank 0");
      return plan;
    }
    for (const TensorMeta& want : requests[rank].tensors) keys.insert(want.key());
  }

  const bool need_others = options.not_requested != Strict::kIgnore;
  TENSORMOUNT_ASSIGN_OR_RETURN(Stored stored, LookUp(index, keys, need_others));
  TENSORMOUNT_RETURN_IF_ERROR(MatchObjects(index, requests, need_others, plan));
  for (const std::string& key : keys) {
    if (!stored.tensors.contains(key)) plan.not_stored.push_back(key);
  }
  plan.not_requested.insert(plan.not_requested.end(), stored.others.begin(), stored.others.end());
  SortUnique(plan.not_stored);
  SortUnique(plan.not_requested);

  std::map<std::string, std::size_t> position;
  for (std::size_t rank = 0; rank < requests.size() && plan.refusal.ok(); ++rank) {
    for (const TensorMeta& want : requests[rank].tensors) {
      const auto found = stored.tensors.find(want.key());
      if (found == stored.tensors.end()) continue;
      const TensorMeta& meta = found->second.meta;
      if (want.dtype() != meta.dtype() || !(want.shape() == meta.shape())) {
        plan.refusal =
            Status(Code::kInvalidArgument,
                   RankPrefix(rank) + "tensor " + want.key() + ": asked for as " +
                       std::string(InfoOf(want.dtype()).name) + " " + want.shape().ToString() +
                       ", stored as " + std::string(InfoOf(meta.dtype()).name) + " " +
                       meta.shape().ToString());
        break;
      }
    }
    if (!plan.refusal.ok()) break;
    for (const ShardDescriptor& shard : requests[rank].shards) {
      const std::string& key = requests[rank].tensors[shard.tensor].key();
      const auto found = stored.tensors.find(key);
      if (found == stored.tensors.end() || shard.region.empty()) continue;
      const auto [at, fresh] = position.emplace(key, plan.tensors.size());
      if (fresh) {
        plan.tensors.emplace_back();
        plan.tensors.back().entry = found->second;
      }
      plan.tensors[at->second].wants.push_back({static_cast<int>(rank), shard.item, shard.region});
    }
  }
  if (!plan.refusal.ok()) return plan;

  const int ranks = static_cast<int>(requests.size());
  const bool several = OnSeveralMachines(requests);
  for (PlannedTensor& tensor : plan.tensors) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents,
                                 index.Extents(tensor.entry.ordinal));
    if (extents->size() > 0) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord first, extents->At(0));
      tensor.place = {first.file, first.offset};
    }
    // Elements under a byte have no boxes of whole bytes to cut blocks along.
    const bool can_exchange = ranks > 1 && tensor.entry.meta.bits() % 8 == 0;
    if (can_exchange && options.path == LoadPath::kExchange) tensor.exchange = true;
    if (can_exchange && several && options.path == LoadPath::kAuto) {
      TENSORMOUNT_ASSIGN_OR_RETURN(tensor.exchange, WorthExchanging(index, tensor));
    }
    if (options.verify == LoadVerify::kAuto) {
      tensor.proof = PlanProof(tensor.entry, tensor.wants, ranks);
    }
  }
  std::stable_sort(
      plan.tensors.begin(), plan.tensors.end(),
      [](const PlannedTensor& a, const PlannedTensor& b) { return a.place < b.place; });
  return plan;
}

Result<ReadVerify> ChooseReadVerify(const CheckpointIndex& index, const PlannedTensor& tensor,
                                    const Region& region, LoadVerify verify) {
  if (verify == LoadVerify::kOff) return ReadVerify::kOff;
  if (verify == LoadVerify::kLeaves || !tensor.proof.possible) return ReadVerify::kExtendLeaves;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Geometry g,
                               Measure(index, tensor.entry, region, ~std::size_t{0}));
  return g.widened_by <= g.wanted / 8 ? ReadVerify::kExtendLeaves : ReadVerify::kWholeLeaves;
}

}  // namespace tensormount
