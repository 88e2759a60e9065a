// SPDX-License-Identifier: Apache-2.0
#include "collective/save/save_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// A forced tensor file takes shards of this many runs, or of any number of runs that are longer
// than kForcedRunBytes: each run becomes a chunk of its own.
constexpr std::uint64_t kForcedRuns = 4096;
constexpr std::uint64_t kForcedRunBytes = 64 * 1024;
// Under kAuto no more tensors than this, the largest ones, have files of their own.
constexpr std::size_t kMaxTensorFiles = 4096;
constexpr std::uint64_t kMaxRuns = std::uint64_t{1} << 20;

// How many runs, at least nearly: boxes of a flat range may touch.
std::uint64_t CountRuns(const TensorMeta& meta, const Holding& holding) {
  Result<Region> bytes = ByteRegion(meta.dtype(), meta.shape(), holding.region);
  if (!bytes.ok()) return holding.bytes;
  const Region whole = Box::Whole(ByteShape(meta.dtype(), meta.shape()));
  const PlacedBox global = PlacePacked(whole, 0)[0];
  std::uint64_t runs = 0;
  std::int64_t end = -1;
  for (const PlacedBox& placed : PlacePacked(bytes.value(), 0)) {
    const StridedCopy copy = PlanCopy(placed.box, placed, global);
    const std::uint64_t n = copy.runs();
    runs += n - (copy.dst_offset == end ? 1 : 0);
    end = n == 1 ? copy.dst_offset + static_cast<std::int64_t>(copy.run) : -1;
  }
  return runs;
}

class Planner {
 public:
  Planner(const GlobalLayout& layout, PlacementRule rule) : layout_(layout), rule_(rule) {
    plan_.ranks.resize(static_cast<std::size_t>(layout.world));
    plan_.placement.assign(layout.tensors.size(), Placement::kRankShard);
    plan_.writers.assign(layout.tensors.size(), 0);
    parts_.assign(layout.tensors.size(), 0);
  }

  Result<SavePlan> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(Place());
    AssignObjects();
    TENSORMOUNT_RETURN_IF_ERROR(AssignTensors());
    Finish();
    return std::move(plan_);
  }

 private:
  struct Replicated {
    std::uint32_t tensor;
    std::uint32_t holding;
    std::uint64_t bytes;
  };

  const TensorMeta& meta(std::size_t tensor) const { return layout_.tensors[tensor].meta; }
  RankPlan& rank(int r) { return plan_.ranks[static_cast<std::size_t>(r)]; }

  // ---- Placement ----
  Status Place() {
    if (rule_ == PlacementRule::kSafetensors) return PlaceSafetensors();
    std::vector<std::uint32_t> own_file;
    for (std::uint32_t t = 0; t < layout_.tensors.size(); ++t) {
      const std::uint64_t bytes = meta(t).bytes();
      if (rule_ == PlacementRule::kTensorFile) {
        TENSORMOUNT_RETURN_IF_ERROR(CheckTensorFile(t));
        plan_.placement[t] = Placement::kTensorFile;
      } else if (rule_ == PlacementRule::kAuto && bytes < kPackBytes) {
        plan_.placement[t] = Placement::kPack;
      } else if (rule_ == PlacementRule::kAuto && bytes >= kTensorFileBytes && HasLongRuns(t)) {
        own_file.push_back(t);
      }
    }
    if (own_file.size() > kMaxTensorFiles) {
      std::stable_sort(own_file.begin(), own_file.end(), [&](std::uint32_t a, std::uint32_t b) {
        return meta(a).bytes() > meta(b).bytes();
      });
      own_file.resize(kMaxTensorFiles);
    }
    for (const std::uint32_t t : own_file) plan_.placement[t] = Placement::kTensorFile;
    return Status();
  }

  bool HasLongRuns(std::uint32_t t) const {
    for (const Holding& h : layout_.tensors[t].holdings) {
      const std::uint64_t runs = CountRuns(meta(t), h);
      if (runs > 1 && h.bytes / runs < kLongRunBytes) return false;
    }
    return true;
  }

  Status CheckTensorFile(std::uint32_t t) const {
    for (const Holding& h : layout_.tensors[t].holdings) {
      const std::uint64_t runs = CountRuns(meta(t), h);
      if (runs <= kForcedRuns || (runs <= kMaxRuns && h.bytes / runs >= kForcedRunBytes)) continue;
      return Status(Code::kUnsupported,
                    "placement tensor-file: tensor " + meta(t).key() + ": shard " +
                        h.region.ToString() + " of rank " + std::to_string(h.holders[0].rank) +
                        " consists of " + std::to_string(runs) + " runs of about " +
                        std::to_string(h.bytes / runs) +
                        " bytes, too short to be written in place; use rank-shard or auto");
    }
    return Status();
  }

  Status PlaceSafetensors() {
    std::vector<std::size_t> whole(static_cast<std::size_t>(layout_.world), 0);
    std::size_t with_cells = 0;
    for (std::size_t t = 0; t < layout_.tensors.size(); ++t) {
      plan_.placement[t] = Placement::kSafetensors;
      const LayoutTensor& tensor = layout_.tensors[t];
      if (InfoOf(tensor.meta.dtype()).safetensors.empty()) {
        return Status(Code::kUnsupported, "placement safetensors: tensor " + tensor.meta.key() +
                                              ": the format has no " +
                                              std::string(InfoOf(tensor.meta.dtype()).name));
      }
      if (tensor.holdings.empty()) continue;
      ++with_cells;
      if (tensor.holdings.size() > 1) {
        return Status(Code::kUnsupported,
                      "placement safetensors: one rank must hold all tensors whole, and tensor " +
                          tensor.meta.key() + " is cut into " +
                          std::to_string(tensor.holdings.size()) + " shards");
      }
      for (const Holder& h : tensor.holdings[0].holders) ++whole[static_cast<std::size_t>(h.rank)];
    }
    for (std::size_t r = 0; r < whole.size(); ++r) {
      if (whole[r] == with_cells) {
        safetensors_writer_ = static_cast<int>(r);
        return Status();
      }
    }
    return Status(Code::kUnsupported, "placement safetensors: no rank holds all tensors whole");
  }

  // ---- Who writes what ----
  void AssignObjects() {
    for (std::uint32_t o = 0; o < layout_.objects.size(); ++o) {
      const LayoutObject& object = layout_.objects[o];
      const int writer = LeastLoaded(object.holders);
      rank(writer).objects.push_back(o);
      rank(writer).bytes += object.length;
    }
  }

  Status AssignTensors() {
    std::vector<Replicated> replicated;
    for (std::uint32_t t = 0; t < layout_.tensors.size(); ++t) {
      const LayoutTensor& tensor = layout_.tensors[t];
      if (tensor.holdings.empty()) {
        const bool safetensors = rule_ == PlacementRule::kSafetensors;
        rank(safetensors ? safetensors_writer_ : tensor.first_rank).recorded.push_back(t);
      }
      for (std::uint32_t h = 0; h < tensor.holdings.size(); ++h) {
        const Holding& holding = tensor.holdings[h];
        if (rule_ == PlacementRule::kSafetensors) {
          const auto at =
              std::find_if(holding.holders.begin(), holding.holders.end(),
                           [&](const Holder& x) { return x.rank == safetensors_writer_; });
          TENSORMOUNT_RETURN_IF_ERROR(Write(t, holding, *at, 0, holding.bytes));
        } else if (holding.holders.size() == 1) {
          TENSORMOUNT_RETURN_IF_ERROR(Write(t, holding, holding.holders[0], 0, holding.bytes));
        } else {
          replicated.push_back({t, h, holding.bytes});
        }
      }
    }
    // Large ones first: the small ones then even out what is left.
    std::stable_sort(replicated.begin(), replicated.end(),
                     [](const Replicated& a, const Replicated& b) { return a.bytes > b.bytes; });
    for (const Replicated& r : replicated) {
      TENSORMOUNT_RETURN_IF_ERROR(
          SplitReplicas(r.tensor, layout_.tensors[r.tensor].holdings[r.holding]));
    }
    return Status();
  }

  int LeastLoaded(const std::vector<Holder>& holders) const {
    int best = holders[0].rank;
    for (const Holder& h : holders) {
      if (plan_.ranks[static_cast<std::size_t>(h.rank)].bytes <
          plan_.ranks[static_cast<std::size_t>(best)].bytes) {
        best = h.rank;
      }
    }
    return best;
  }

  // Pours the bytes of a holding over its holders like water: those who have least so far take
  // most, and nobody takes less than kMinPartBytes.
  Status SplitReplicas(std::uint32_t t, const Holding& holding) {
    std::vector<Holder> by_load = holding.holders;
    std::stable_sort(by_load.begin(), by_load.end(), [&](const Holder& a, const Holder& b) {
      return rank(a.rank).bytes < rank(b.rank).bytes;
    });
    const bool whole_bytes = meta(t).bits() % 8 == 0;
    std::size_t n = by_load.size();
    std::uint64_t level = 0;
    if (!whole_bytes || holding.bytes < 2 * kMinPartBytes) n = 1;
    for (; n > 1; --n) {
      std::uint64_t sum = holding.bytes;
      for (std::size_t i = 0; i < n; ++i) sum += rank(by_load[i].rank).bytes;
      level = sum / n;
      if (level >= rank(by_load[n - 1].rank).bytes + kMinPartBytes) break;
    }
    if (n == 1) return Write(t, holding, by_load[0], 0, holding.bytes);
    // Parts in order of rank, so that the file's neighbours are neighbours of ranks.
    by_load.resize(n);
    std::sort(by_load.begin(), by_load.end(),
              [](const Holder& a, const Holder& b) { return a.rank < b.rank; });
    const Cut cut = CutRule(t, holding);
    std::uint64_t begin = 0;
    std::uint64_t want = 0;
    for (std::size_t i = 0; i < n; ++i) {
      want += level - rank(by_load[i].rank).bytes;
      std::uint64_t end = holding.bytes;
      if (i + 1 < n) {
        const std::uint64_t down = (want + cut.base) / cut.step * cut.step;
        end = std::clamp(down > cut.base ? down - cut.base : 0, begin, holding.bytes);
      }
      if (end > begin) {
        TENSORMOUNT_RETURN_IF_ERROR(Write(t, holding, by_load[i], begin, end - begin));
      }
      begin = end;
    }
    return Status();
  }

  // Where a holding may be cut: at packed bytes b with (base + b) % step == 0.
  struct Cut {
    std::uint64_t base = 0;
    std::uint64_t step = 1;
  };
  Cut CutRule(std::uint32_t t, const Holding& holding) const {
    if (plan_.placement[t] == Placement::kTensorFile) {
      Result<std::vector<GlobalRun>> runs = GlobalRuns(meta(t), holding.region, 1);
      return {runs.ok() && runs.value().size() == 1 ? runs.value()[0].offset % kPageBytes : 0,
              kPageBytes};
    }
    // Whole rows make boxes, which are nicer to read than flat ranges; but only where rows are
    // short enough to split evenly.
    const Region& region = holding.region;
    std::uint64_t row = meta(t).bits() / 8;
    int axis = 0;
    while (axis < region.box().rank() - 1 && region.box().extent(axis) == 1) ++axis;
    for (int a = axis + 1; a < region.box().rank(); ++a) {
      row *= static_cast<std::uint64_t>(region.box().extent(a));
    }
    if (row > holding.bytes / holding.holders.size() / 8) return {0, kPageBytes};
    const auto first = static_cast<std::uint64_t>(region.flat_first()) * (meta(t).bits() / 8);
    return {first % row, row};
  }

  // Bytes [begin, begin + bytes) of a holding become chunks of `writer`.
  Status Write(std::uint32_t t, const Holding& holding, const Holder& writer, std::uint64_t begin,
               std::uint64_t bytes) {
    const std::uint64_t bits = meta(t).bits();
    const bool all = begin == 0 && bytes == holding.bytes;
    const auto part_of = [&](std::uint64_t from, std::uint64_t size) -> Result<Region> {
      if (from == 0 && size == holding.bytes) return holding.region;
      return Region::Flat(holding.region.box(),
                          holding.region.flat_first() + static_cast<std::int64_t>(from * 8 / bits),
                          static_cast<std::int64_t>(size * 8 / bits));
    };
    rank(writer.rank).bytes += bytes;
    PlannedChunk chunk;
    chunk.tensor = t;
    chunk.item = writer.item;
    chunk.placement = plan_.placement[t];
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region mine, part_of(begin, bytes));
    if (chunk.placement != Placement::kTensorFile) {
      chunk.begin = begin;
      chunk.bytes = bytes;
      chunk.region = mine;
      chunk.part = parts_[t]++;
      rank(writer.rank).chunks.push_back(chunk);
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<GlobalRun> runs,
                                 GlobalRuns(meta(t), mine, kMaxRuns));
    for (const GlobalRun& run : runs) {
      chunk.begin = begin + run.packed;
      chunk.bytes = run.bytes;
      chunk.offset = run.offset;
      chunk.region = mine;
      if (!all || run.bytes != bytes) {
        if ((run.packed * 8) % bits != 0 || (run.bytes * 8) % bits != 0) {
          return Status(Code::kUnsupported, "placement tensor-file: tensor " + meta(t).key() +
                                                ": shard " + holding.region.ToString() +
                                                " has runs that end inside an element");
        }
        TENSORMOUNT_ASSIGN_OR_RETURN(chunk.region, part_of(begin + run.packed, run.bytes));
      }
      chunk.part = parts_[t]++;
      rank(writer.rank).chunks.push_back(chunk);
    }
    return Status();
  }

  void Finish() {
    std::vector<int> lowest(layout_.tensors.size(), -1);
    for (int r = 0; r < layout_.world; ++r) {
      std::vector<PlannedChunk>& chunks = rank(r).chunks;
      std::stable_sort(chunks.begin(), chunks.end(),
                       [](const PlannedChunk& a, const PlannedChunk& b) {
                         if (a.placement != b.placement) return a.placement < b.placement;
                         return a.tensor != b.tensor ? a.tensor < b.tensor : a.part < b.part;
                       });
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        const std::uint32_t t = chunks[i].tensor;
        if (i > 0 && chunks[i - 1].tensor == t) continue;
        if (lowest[t] < 0) lowest[t] = r;
        ++plan_.writers[t];
      }
    }
    for (std::uint32_t t = 0; t < layout_.tensors.size(); ++t) {
      if (plan_.placement[t] == Placement::kTensorFile && plan_.writers[t] > 1) {
        plan_.shared.push_back({t, lowest[t]});
      }
    }
  }

  const GlobalLayout& layout_;
  const PlacementRule rule_;
  SavePlan plan_;
  std::vector<std::uint32_t> parts_;
  int safetensors_writer_ = 0;
};

}  // namespace

Result<std::vector<GlobalRun>> GlobalRuns(const TensorMeta& meta, const Region& region,
                                          std::uint64_t limit) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes, ByteRegion(meta.dtype(), meta.shape(), region));
  std::vector<GlobalRun> runs;
  if (bytes.empty()) return runs;
  const Region whole = Box::Whole(ByteShape(meta.dtype(), meta.shape()));
  const PlacedBox global = PlacePacked(whole, 0)[0];
  for (const PlacedBox& placed : PlacePacked(bytes, 0)) {
    const StridedCopy copy = PlanCopy(placed.box, placed, global);
    if (copy.runs() > limit + 1 || runs.size() > limit) {
      return Status(Code::kUnsupported, "tensor " + meta.key() + ": shard " + region.ToString() +
                                            " consists of too many runs");
    }
    copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
      const auto packed = static_cast<std::uint64_t>(src);
      const auto offset = static_cast<std::uint64_t>(dst);
      if (!runs.empty() && runs.back().offset + runs.back().bytes == offset &&
          runs.back().packed + runs.back().bytes == packed) {
        runs.back().bytes += size;
      } else {
        runs.push_back({packed, offset, size});
      }
    });
  }
  if (runs.size() > limit) {
    return Status(Code::kUnsupported, "tensor " + meta.key() + ": shard " + region.ToString() +
                                          " consists of too many runs");
  }
  return runs;
}

Result<SavePlan> PlanSave(const GlobalLayout& layout, PlacementRule rule) {
  return Planner(layout, rule).Run();
}

}  // namespace tensormount
