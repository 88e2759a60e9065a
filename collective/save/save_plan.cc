// SPDX-License-Identifier: Apache-2.0
// The plan of one owner (a rank that checks keys) for its keys: which holder writes which part of
// each region, and into which kind of file (a file of the tensor, the rank's shard or its pack).
// Tensor files cost a file each and can be read without a daemon; rank shards store cuts of any
// shape at no extra cost. Rank 0 decides the number of tensor files, which depends on all keys,
// from the owners' surveys.
#include "collective/save/save_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "base/coding.h"
#include "base/hash.h"
#include "collective/save/even_shares.h"
#include "index/records/extent_lookup.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// With PlacementRule::kTensorFile a shard may have at most this many runs, or up to kMaxRuns runs
// of at least kForcedRunBytes on average, because each run becomes a chunk.
constexpr std::uint64_t kForcedRuns = 4096;
constexpr std::uint64_t kForcedRunBytes = 64 * 1024;
constexpr std::uint64_t kMaxRuns = std::uint64_t{1} << 20;

// Size classes, by power of two, of tensors that want a file of their own: enough to find the
// largest tensors of all owners without naming any.
constexpr std::size_t kSizeClasses = 64;
std::size_t SizeClass(std::uint64_t bytes) {
  return static_cast<std::size_t>(std::bit_width(bytes)) - 1;  // `bytes` is not 0.
}

// The number of runs of a region in the tensor's row-major bytes, or slightly more, because boxes
// of a flat range may touch.
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

}  // namespace

struct SavePlanner::Rep {
  Rep(const GlobalLayout& layout, const PlanRules& rules) : layout_(layout), rules_(rules) {
    plan_.ranks.resize(static_cast<std::size_t>(layout.world));
    plan_.placement.assign(layout.tensors.size(), Placement::kRankShard);
    plan_.writers.assign(layout.tensors.size(), 0);
    parts_.assign(layout.tensors.size(), 0);
    ahead_.assign(plan_.ranks.size(), 0);
  }

  Result<std::string> Survey() {
    if (rules_.placement == PlacementRule::kSafetensors) return SurveySafetensors();
    std::array<std::uint32_t, kSizeClasses> classes{};
    for (std::uint32_t t = 0; t < layout_.tensors.size(); ++t) {
      const std::uint64_t bytes = meta(t).bytes();
      if (rules_.placement == PlacementRule::kTensorFile) {
        TENSORMOUNT_RETURN_IF_ERROR(CheckTensorFile(t));
        plan_.placement[t] = Placement::kTensorFile;
      } else if (rules_.placement == PlacementRule::kAuto && bytes < kPackBytes) {
        plan_.placement[t] = Placement::kPack;
      } else if (rules_.placement == PlacementRule::kAuto && bytes >= kTensorFileBytes &&
                 HasLongRuns(t)) {
        own_file_.push_back(t);
        ++classes[SizeClass(bytes)];
      }
    }
    ByteWriter out;
    for (const std::uint32_t n : classes) out.U32(n);
    return std::move(out.bytes());
  }

  Result<SavePlan> Plan(std::string_view decision, std::uint32_t owner) {
    TENSORMOUNT_RETURN_IF_ERROR(ApplyDecision(decision, owner));
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
    std::uint32_t group = 0;
  };

  const TensorMeta& meta(std::size_t tensor) const { return layout_.tensors[tensor].meta; }
  RankPlan& rank(int r) { return plan_.ranks[static_cast<std::size_t>(r)]; }
  std::uint64_t& ahead(int r) { return ahead_[static_cast<std::size_t>(r)]; }
  bool main_only() const { return rules_.strategy == SaveStrategy::kMain; }

  // ---- Placement ----
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

  // A bit for each rank that holds all of this owner's tensors whole.
  Result<std::string> SurveySafetensors() {
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
    std::string bits((whole.size() + 7) / 8, '\0');
    for (std::size_t r = 0; r < whole.size(); ++r) {
      if (whole[r] == with_cells) bits[r / 8] = static_cast<char>(bits[r / 8] | 1 << (r % 8));
    }
    return bits;
  }

  // Applies rank 0's decision: which tensors get a file of their own, or which rank writes
  // everything.
  Status ApplyDecision(std::string_view decision, std::uint32_t owner) {
    ByteReader in(decision, "the plan that rank 0 sent");
    if (rules_.placement == PlacementRule::kSafetensors) {
      safetensors_writer_ = static_cast<int>(in.U32());
      if (safetensors_writer_ < 0 || safetensors_writer_ >= layout_.world) {
        return Status(Code::kInternal,
                      "the plan that rank 0 sent refers to a rank that does not exist");
      }
      return in.Finish();
    }
    const bool limited = in.U8() != 0;
    if (limited) {
      const std::size_t size_class = in.U8();
      const std::string_view quotas = in.Raw(std::size_t{4} * rules_.owners);
      TENSORMOUNT_RETURN_IF_ERROR(in.status());
      auto quota = LoadLittle<std::uint32_t>(quotas.data() + std::size_t{4} * owner);
      std::stable_sort(own_file_.begin(), own_file_.end(), [&](std::uint32_t a, std::uint32_t b) {
        return meta(a).bytes() > meta(b).bytes();
      });
      std::erase_if(own_file_, [&](std::uint32_t t) {
        const std::size_t mine = SizeClass(meta(t).bytes());
        if (mine != size_class) return mine < size_class;
        return quota == 0 || quota-- == 0;
      });
    }
    TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
    for (const std::uint32_t t : own_file_) plan_.placement[t] = Placement::kTensorFile;
    return Status();
  }

  // ---- Who writes what ----
  void AssignObjects() {
    for (std::uint32_t o = 0; o < layout_.objects.size(); ++o) {
      const LayoutObject& object = layout_.objects[o];
      const int writer =
          main_only() ? object.holders[0].rank : LeastLoaded(object.holders, object.key);
      rank(writer).objects.push_back(o);
      rank(writer).bytes += object.length;
    }
  }

  Status AssignTensors() {
    std::vector<Replicated> replicated;
    for (std::uint32_t t = 0; t < layout_.tensors.size(); ++t) {
      const LayoutTensor& tensor = layout_.tensors[t];
      if (tensor.holdings.empty()) {
        const bool safetensors = rules_.placement == PlacementRule::kSafetensors;
        rank(safetensors ? safetensors_writer_ : tensor.first_rank).recorded.push_back(t);
      }
      for (std::uint32_t h = 0; h < tensor.holdings.size(); ++h) {
        const Holding& holding = tensor.holdings[h];
        if (rules_.placement == PlacementRule::kSafetensors || main_only() ||
            holding.holders.size() == 1) {
          TENSORMOUNT_ASSIGN_OR_RETURN(const Holder writer, OnlyWriter(holding));
          TENSORMOUNT_RETURN_IF_ERROR(Write(t, h, writer, 0, holding.bytes));
        } else {
          replicated.push_back({t, h, holding.bytes});
        }
      }
    }
    FindShares(replicated);
    // Large regions first, so that the small ones even out the remaining differences.
    std::stable_sort(replicated.begin(), replicated.end(),
                     [](const Replicated& a, const Replicated& b) { return a.bytes > b.bytes; });
    for (const Replicated& r : replicated) {
      TENSORMOUNT_RETURN_IF_ERROR(SplitInGroup(r));
    }
    return Status();
  }

  // Computes how much each rank of a group of replicas writes, for all overlapping groups together.
  // If groups were split one by one, the first groups would give too much to ranks that are the
  // only ones to write the last groups.
  void FindShares(std::vector<Replicated>& replicated) {
    std::unordered_map<std::string, std::uint32_t> known;  // Key: the bytes of the rank list.
    for (Replicated& r : replicated) {
      const Holding& holding = layout_.tensors[r.tensor].holdings[r.holding];
      SharedBytes group;
      for (const Holder& h : holding.holders) group.ranks.push_back(h.rank);
      std::sort(group.ranks.begin(), group.ranks.end());
      group.ranks.erase(std::unique(group.ranks.begin(), group.ranks.end()), group.ranks.end());
      std::string key(reinterpret_cast<const char*>(group.ranks.data()),
                      group.ranks.size() * sizeof(int));
      r.group = known.try_emplace(std::move(key), static_cast<std::uint32_t>(groups_.size()))
                    .first->second;
      if (r.group == groups_.size()) groups_.push_back(std::move(group));
      groups_[r.group].bytes += r.bytes;
    }
    std::vector<std::uint64_t> loads;
    for (const RankPlan& plan : plan_.ranks) loads.push_back(plan.bytes);
    shares_ = EvenShares(groups_, loads);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (std::size_t i = 0; i < shares_[g].size(); ++i)
        ahead(groups_[g].ranks[i]) += shares_[g][i];
    }
  }

  // Splits a replicated region among the ranks of its group. The load of a rank includes the shares
  // that other groups still have for this rank.
  Status SplitInGroup(const Replicated& r) {
    const std::vector<int>& ranks = groups_[r.group].ranks;
    std::vector<std::uint64_t>& share = shares_[r.group];
    std::vector<std::uint64_t> before(share.size());
    for (std::size_t i = 0; i < share.size(); ++i) {
      ahead(ranks[i]) -= share[i];
      before[i] = rank(ranks[i]).bytes;
    }
    TENSORMOUNT_RETURN_IF_ERROR(SplitReplicas(r.tensor, r.holding));
    for (std::size_t i = 0; i < share.size(); ++i) {
      share[i] -= std::min(share[i], rank(ranks[i]).bytes - before[i]);
      ahead(ranks[i]) += share[i];
    }
    return Status();
  }

  Result<Holder> OnlyWriter(const Holding& holding) const {
    int wanted = holding.holders[0].rank;
    if (rules_.placement == PlacementRule::kSafetensors) {
      wanted = safetensors_writer_;
    } else if (main_only() && holding.main >= 0) {
      wanted = holding.main;
    }
    for (const Holder& h : holding.holders) {
      if (h.rank == wanted) return h;
    }
    return Status(Code::kInternal, "internal error: the plan has rank " + std::to_string(wanted) +
                                       " write " + holding.region.ToString() +
                                       ", which it does not hold");
  }

  // Index of the holder that is first among equal loads: 0 if all keys are planned together, else
  // by a hash of the key, so that independent owners do not all begin with the same rank.
  std::size_t FirstOf(const std::vector<Holder>& holders, std::string_view key) const {
    return rules_.owners > 1 ? Xxh3Low64(key) % holders.size() : 0;
  }
  std::uint64_t LoadOf(const Holder& h) const {
    const auto r = static_cast<std::size_t>(h.rank);
    return plan_.ranks[r].bytes + ahead_[r];
  }

  int LeastLoaded(const std::vector<Holder>& holders, std::string_view key) const {
    const std::size_t first = FirstOf(holders, key);
    const Holder* best = &holders[first];
    for (std::size_t i = 1; i < holders.size(); ++i) {
      const Holder& h = holders[(first + i) % holders.size()];
      if (LoadOf(h) < LoadOf(*best)) best = &h;
    }
    return best->rank;
  }

  std::vector<Holder> ByLoad(const std::vector<Holder>& holders, std::string_view key) const {
    std::vector<Holder> by_load = holders;
    std::rotate(by_load.begin(),
                by_load.begin() + static_cast<std::ptrdiff_t>(FirstOf(holders, key)),
                by_load.end());
    std::stable_sort(by_load.begin(), by_load.end(),
                     [&](const Holder& a, const Holder& b) { return LoadOf(a) < LoadOf(b); });
    return by_load;
  }

  // Distributes the bytes of a holding so that loads even out: the holders with the lowest load
  // take most, and no part is much smaller than kMinPartBytes.
  Status SplitReplicas(std::uint32_t t, std::uint32_t h) {
    const Holding& holding = layout_.tensors[t].holdings[h];
    std::vector<Holder> by_load = ByLoad(holding.holders, meta(t).key());
    const bool whole_bytes = meta(t).bits() % 8 == 0;
    std::size_t n = by_load.size();
    std::uint64_t level = 0;
    if (!whole_bytes || holding.bytes < 2 * kMinPartBytes) n = 1;
    for (; n > 1; --n) {
      std::uint64_t sum = holding.bytes;
      for (std::size_t i = 0; i < n; ++i) sum += LoadOf(by_load[i]);
      level = sum / n;
      if (level >= LoadOf(by_load[n - 1]) + kMinPartBytes) break;
    }
    if (n == 1) return Write(t, h, by_load[0], 0, holding.bytes);
    // Parts in order of rank, so that adjacent parts of the file are written by adjacent ranks.
    by_load.resize(n);
    std::sort(by_load.begin(), by_load.end(),
              [](const Holder& a, const Holder& b) { return a.rank < b.rank; });
    const auto [base, step] = CutRule(t, holding);
    std::uint64_t begin = 0;
    std::uint64_t want = 0;
    for (std::size_t i = 0; i < n; ++i) {
      want += level - LoadOf(by_load[i]);
      std::uint64_t end = holding.bytes;
      if (i + 1 < n) {
        const std::uint64_t down = (want + base) / step * step;
        end = std::clamp(down > base ? down - base : 0, begin, holding.bytes);
      }
      if (end > begin) TENSORMOUNT_RETURN_IF_ERROR(Write(t, h, by_load[i], begin, end - begin));
      begin = end;
    }
    return Status();
  }

  // Where a holding may be cut: (base, step), at packed bytes b with (base + b) % step == 0.
  std::pair<std::uint64_t, std::uint64_t> CutRule(std::uint32_t t, const Holding& holding) const {
    if (plan_.placement[t] == Placement::kTensorFile) {
      const std::optional<ByteBounds> run = RunInTensor(meta(t), holding.region);
      return {run ? run->first % kPageBytes : 0, kPageBytes};
    }
    // Cuts at whole rows give boxes, which read better than flat ranges, but only if rows are short
    // enough to split evenly.
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

  // Makes chunks of `writer` from bytes [begin, begin + bytes) of a holding.
  Status Write(std::uint32_t t, std::uint32_t h, const Holder& writer, std::uint64_t begin,
               std::uint64_t bytes) {
    const Holding& holding = layout_.tensors[t].holdings[h];
    rank(writer.rank).bytes += bytes;
    PlannedChunk chunk;
    chunk.tensor = t;
    chunk.holding = h;
    chunk.item = writer.item;
    chunk.begin = begin;
    chunk.bytes = bytes;
    if (plan_.placement[t] != Placement::kTensorFile) {
      chunk.part = parts_[t]++;
      rank(writer.rank).chunks.push_back(chunk);
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region mine,
                                 PartOfRegion(meta(t), holding.region, begin, bytes));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<GlobalRun> runs,
                                 GlobalRuns(meta(t), mine, kMaxRuns));
    for (const GlobalRun& run : runs) {
      chunk.begin = begin + run.packed;
      chunk.bytes = run.bytes;
      chunk.offset = run.offset;
      if (!PartOfRegion(meta(t), holding.region, chunk.begin, chunk.bytes).ok()) {
        return Status(Code::kUnsupported,
                      "placement tensor-file: tensor " + meta(t).key() + ": shard " +
                          holding.region.ToString() +
                          " has runs that end inside an element; use rank-shard or auto");
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
      std::sort(chunks.begin(), chunks.end(), [](const PlannedChunk& a, const PlannedChunk& b) {
        return a.tensor != b.tensor ? a.tensor < b.tensor : a.part < b.part;
      });
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        const std::uint32_t t = chunks[i].tensor;
        if (i > 0 && chunks[i - 1].tensor == t) continue;
        if (lowest[t] < 0) lowest[t] = r;
        ++plan_.writers[t];
      }
    }
    plan_.sealers.assign(layout_.tensors.size(), -1);
    for (std::uint32_t t = 0; t < layout_.tensors.size(); ++t) {
      if (plan_.placement[t] == Placement::kTensorFile && plan_.writers[t] > 1) {
        plan_.sealers[t] = lowest[t];
      }
    }
  }

  const GlobalLayout& layout_;
  const PlanRules rules_;
  SavePlan plan_;
  std::vector<std::uint32_t> own_file_;  // Tensors that want a file of their own.
  std::vector<std::uint32_t> parts_;
  std::vector<SharedBytes> groups_;                 // Replicated regions with the same holders.
  std::vector<std::vector<std::uint64_t>> shares_;  // By group, then rank: bytes not assigned yet.
  // By rank: estimated bytes that other groups will still assign.
  std::vector<std::uint64_t> ahead_;
  int safetensors_writer_ = 0;
};

SavePlanner::SavePlanner(const GlobalLayout& layout, const PlanRules& rules)
    : rep_(std::make_unique<Rep>(layout, rules)) {}
SavePlanner::~SavePlanner() = default;

Result<std::string> SavePlanner::Survey() { return rep_->Survey(); }

Result<SavePlan> SavePlanner::Plan(std::string_view decision, std::uint32_t owner) {
  return rep_->Plan(decision, owner);
}

Result<std::string> SavePlanner::Decide(std::span<const std::string> surveys,
                                        const PlanRules& rules, int world) {
  ByteWriter out;
  if (surveys.size() != rules.owners) {
    return Status(Code::kInternal,
                  "internal error: save plan: a rank that plans sent no survey of its tensors");
  }
  if (rules.placement == PlacementRule::kSafetensors) {
    const auto ranks = static_cast<std::size_t>(world);
    std::string all((ranks + 7) / 8, '\xff');
    for (const std::string& survey : surveys) {
      if (survey.size() != all.size()) {
        return Status(Code::kInternal, "save plan: the survey that a rank sent has the wrong size");
      }
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i] = static_cast<char>(all[i] & survey[i]);
      }
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      if ((all[r / 8] >> (r % 8) & 1) == 0) continue;
      out.U32(static_cast<std::uint32_t>(r));
      return std::move(out.bytes());
    }
    return Status(Code::kUnsupported, "placement safetensors: no rank holds all tensors whole");
  }
  std::array<std::uint64_t, kSizeClasses> classes{};
  for (const std::string& survey : surveys) {
    if (survey.size() != 4 * kSizeClasses) {
      return Status(Code::kInternal, "save plan: the survey that a rank sent has the wrong size");
    }
    for (std::size_t c = 0; c < kSizeClasses; ++c) {
      classes[c] += LoadLittle<std::uint32_t>(survey.data() + 4 * c);
    }
  }
  // Grants the largest size classes whole, until one does not fit: from that class each owner in
  // turn gets as many files as it has tensors, while any are left.
  std::uint64_t left = rules.max_tensor_files;
  std::size_t c = kSizeClasses;
  while (c > 0 && classes[c - 1] <= left) left -= classes[--c];
  out.U8(c > 0 ? 1 : 0);
  if (c == 0) return std::move(out.bytes());
  const std::size_t limited = c - 1;
  out.U8(static_cast<std::uint8_t>(limited));
  for (const std::string& survey : surveys) {
    const auto has = LoadLittle<std::uint32_t>(survey.data() + 4 * limited);
    const auto quota = static_cast<std::uint32_t>(std::min<std::uint64_t>(has, left));
    left -= quota;
    out.U32(quota);
  }
  return std::move(out.bytes());
}

Result<Region> PartOfRegion(const TensorMeta& meta, const Region& region, std::uint64_t begin,
                            std::uint64_t bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t all,
                               RegionBytes(meta.dtype(), meta.shape(), region));
  if (begin == 0 && bytes == all) return region;
  const std::uint64_t bits = meta.bits();
  const auto first = CheckedMul<std::uint64_t>(begin, 8);
  const auto size = CheckedMul<std::uint64_t>(bytes, 8);
  if (!RangeWithin(begin, bytes, all) || !first || !size || *first % bits != 0 ||
      *size % bits != 0) {
    return Status(Code::kInvalidArgument, "tensor " + meta.key() + ": bytes " +
                                              std::to_string(begin) + " to " +
                                              std::to_string(begin + bytes) + " of shard " +
                                              region.ToString() + " are not whole elements");
  }
  return Region::Flat(region.box(), region.flat_first() + static_cast<std::int64_t>(*first / bits),
                      static_cast<std::int64_t>(*size / bits));
}

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

}  // namespace tensormount
