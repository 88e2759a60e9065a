// SPDX-License-Identifier: Apache-2.0
// Chooses how each tensor is read (directly by every rank, or by exchange) and how it is verified
// (by leaves, or by digest). By measurement leaves are cheapest if ranks want whole leaves, digests
// if they want parts.
#include "collective/load/load_plan.h"

#include <algorithm>
#include <map>

#include "shard/copy_plan.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// How a region lies in the chunks of its tensor: wanted bytes, bytes that are read in addition if
// whole leaves are read, and the shortest run in a file.
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
                               index.Extents(entry));
  std::size_t seen = 0;
  for (std::size_t i = 0; i < extents->size() && seen < max_chunks; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, extents->At(i));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::vector<PlacedBox> boxes_of_chunk,
        PlaceChunk(entry.meta.dtype(), entry.meta.shape(), chunk.region, 0, chunk.strides));
    bool met = false;
    for (const PlacedBox& placed : boxes_of_chunk) {
      for (const Box& box : boxes) {
        const Box part = Intersect(placed.box, box);
        if (part.empty()) continue;
        met = true;
        const StridedCopy runs = PlanCopy(part, placed, placed);
        const std::uint64_t size = runs.bytes();
        g.wanted += size;
        g.shortest_run = std::min(g.shortest_run, runs.run);
        // At most the range from the first to the last wanted byte is read, widened to leaves.
        const std::uint64_t begin = static_cast<std::uint64_t>(runs.src_offset);
        const std::uint64_t end = begin + runs.src_span();
        const std::uint64_t from = begin / kLeafBytes * kLeafBytes;
        const std::uint64_t to =
            std::min((end + kLeafBytes - 1) / kLeafBytes * kLeafBytes, chunk.length);
        const std::uint64_t span = std::max(to, end) - from;
        // A strided chunk may use one stored element for many cells; then the file has fewer bytes
        // than are wanted.
        g.widened_by += std::min(span - std::min(span, size), (span - (end - begin)) * runs.runs());
      }
    }
    if (met) ++seen;
  }
  return g;
}

// Limits for an exchange. Ranks on one machine share a page cache, and reading short runs from it
// costs at most as much as passing them on (measured: docs/performance.md, "Resharding and the
// mount: what was tried"). On several machines each rank would read whole pages, in the end the
// whole tensor, for a few bytes of each page.
constexpr std::uint64_t kExchangeRun = 64u << 10;
constexpr std::uint64_t kExchangeBytes = 8u << 20;
// Behind a server: gaps between shorter runs are read, too (kJoinedGap in remote/remote_file.cc).
constexpr std::uint64_t kFarRun = 1u << 20;

// Whether a tensor can be exchanged. Units of an exchange are cut along whole bytes, and each is
// read as one run of a file. Pending items, whose place in a file is not known yet, are not
// exchanged, because every rank would have to read every item.
bool MayExchange(const TensorEntry& entry) {
  return entry.meta.bits() % 8 == 0 && !entry.wide && !entry.pending;
}

Result<bool> IsShort(const CheckpointIndex& index, const TensorEntry& entry, const Region& region) {
  if (entry.meta.bytes() < kExchangeBytes || !MayExchange(entry)) return false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Geometry g, Measure(index, entry, region, 4));
  return g.shortest_run <= kExchangeRun;
}

// Whether a rank that reads the region from a server asks for bytes that it does not want.
Result<bool> HasGapsFromServer(const CheckpointIndex& index, const TensorEntry& entry,
                               const Region& region) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Geometry g, Measure(index, entry, region, 4));
  return g.shortest_run <= kFarRun;
}

bool IsWhole(const TensorEntry& entry, const Region& region) {
  return static_cast<std::uint64_t>(region.volume()) == entry.meta.elements();
}

// Whether several ranks of a group would ask a server for the same bytes.
Result<bool> IsAskedTwice(const CheckpointIndex& index, const PlannedTensor& tensor,
                          const std::vector<int>& groups) {
  std::map<int, std::vector<const RequestedRegion*>> by_group;
  for (const RequestedRegion& want : tensor.wants) {
    if (!want.convert) by_group[groups[static_cast<std::size_t>(want.rank)]].push_back(&want);
  }
  for (const auto& [group, wants] : by_group) {
    if (wants.empty() || wants.front()->rank == wants.back()->rank) continue;
    std::uint64_t cells = 0;
    for (const RequestedRegion* want : wants) {
      cells += static_cast<std::uint64_t>(want->region.volume());
    }
    // Regions that overlap without being equal, and leave cells to nobody, are not found here.
    if (cells > tensor.entry().meta.elements()) return true;
    for (std::size_t i = 0; i < wants.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (wants[i]->rank != wants[j]->rank && wants[i]->region == wants[j]->region) return true;
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool gaps,
                                 HasGapsFromServer(index, tensor.entry(), wants.front()->region));
    if (gaps) return true;
  }
  return false;
}

bool WantedByOneRank(const PlannedTensor& tensor) {
  return tensor.wants.front().rank == tensor.wants.back().rank;
}

constexpr std::uint64_t kReadTogether = 4096;

// Whether leaves verify a region with little more reading than the region itself. One more page
// costs less than the messages for a digest.
Result<bool> IsCheapByLeaf(const CheckpointIndex& index, const TensorEntry& entry,
                           const Region& region) {
  // The whole tensor consists of whole chunks, so nothing is widened and no lookup is needed.
  if (IsWhole(entry, region)) return true;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Geometry g, Measure(index, entry, region, ~std::size_t{0}));
  return g.widened_by <= std::max(g.wanted / 8, kReadTogether);
}

}  // namespace

Result<LoadNeeds> FindNeeds(const CheckpointIndex& index, const ResolvedRequest& mine, bool far,
                            const LoadOptions& options) {
  LoadNeeds needs;
  for (const ResolvedItem& item : mine.items) {
    if (item.convert) continue;
    const TensorEntry& entry = *mine.Stored(item);
    for (const Region& region : item.regions) {
      if (MayProveByDigest(options.verify) && entry.has_digest && !needs.proof) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool cheap, IsCheapByLeaf(index, entry, region));
        needs.proof = !cheap;
      }
      if (options.path == LoadPath::kAuto && !needs.short_runs) {
        TENSORMOUNT_ASSIGN_OR_RETURN(needs.short_runs, IsShort(index, entry, region));
      }
      if (options.path == LoadPath::kAuto && far && !needs.shared_requests && MayExchange(entry)) {
        needs.shared_requests = IsWhole(entry, region);
        if (needs.shared_requests) continue;
        TENSORMOUNT_ASSIGN_OR_RETURN(needs.shared_requests,
                                     HasGapsFromServer(index, entry, region));
      }
    }
  }
  return needs;
}

void LoadPlanner::Add(int rank, const ResolvedRequest& wanted) {
  for (const ResolvedItem& item : wanted.items) {
    if (item.regions.empty()) continue;
    const auto [at, fresh] = position_.emplace(item.stored, plan_.tensors.size());
    if (fresh) plan_.tensors.push_back({.stored = wanted.Stored(item)});
    for (const Region& region : item.regions) {
      plan_.tensors[at->second].wants.push_back({rank, item.item, region, item.convert});
    }
  }
}

Result<LoadPlan> LoadPlanner::Finish(int ranks, bool all_known, std::vector<int> groups,
                                     ExchangeScope scope, const LoadOptions& options) {
  position_.clear();
  plan_.groups = std::move(groups);
  for (PlannedTensor& tensor : plan_.tensors) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents,
                                 index_.Extents(tensor.entry()));
    if (extents->size() > 0) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord first, extents->At(0));
      tensor.place = {first.file, first.offset};
    }
    if (!all_known) continue;
    const bool can_exchange = ranks > 1 && MayExchange(tensor.entry());
    if (can_exchange && options.path == LoadPath::kExchange) tensor.exchange = true;
    if (can_exchange && options.path == LoadPath::kAuto && !WantedByOneRank(tensor)) {
      Result<bool> exchange = false;
      if (scope == ExchangeScope::kJob) {
        exchange = IsShort(index_, tensor.entry(), tensor.wants.front().region);
      } else if (scope == ExchangeScope::kMachine) {
        exchange = IsAskedTwice(index_, tensor, plan_.groups);
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(tensor.exchange, std::move(exchange));
    }
    if (MayProveByDigest(options.verify)) {
      tensor.proof = PlanProof(tensor.entry(), tensor.wants, ranks);
    }
  }
  std::stable_sort(
      plan_.tensors.begin(), plan_.tensors.end(),
      [](const PlannedTensor& a, const PlannedTensor& b) { return a.place < b.place; });
  return std::move(plan_);
}

Result<ReadVerify> ChooseReadVerify(const CheckpointIndex& index, const PlannedTensor& tensor,
                                    const Region& region, LoadVerify verify, bool on_device) {
  if (verify == LoadVerify::kOff) return ReadVerify::kOff;
  if (verify == LoadVerify::kLeaves || !tensor.proof.possible) return ReadVerify::kExtendLeaves;
  // The tensor is proved after the load, by a digest that the device computes of its memory, which
  // is faster than hashing the bytes while the host reads them.
  if (on_device && tensor.proof.completed.empty()) return ReadVerify::kOff;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool cheap, IsCheapByLeaf(index, tensor.entry(), region));
  return cheap ? ReadVerify::kExtendLeaves : ReadVerify::kWholeLeaves;
}

}  // namespace tensormount
