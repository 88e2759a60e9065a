// SPDX-License-Identifier: Apache-2.0
// CheckLayout of layout.h: pure checks of the keys that one rank checks. Dtypes and shapes agree,
// shards cover each tensor exactly once except for replicas, object grids are complete. Add new
// checks here: the command `check` and saves that validate a new layout run this code.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "collective/layout/layout.h"
#include "collective/layout/layout_cause.h"
#include "collective/layout/layout_table.h"
#include "index/records/layer_names.h"
#include "shard/coverage.h"

namespace tensormount {
namespace {

using TableTensor = LayoutTable::Rep::Tensor;
using Object = LayoutTable::Rep::Object;
constexpr std::uint32_t kNone = LayoutTable::Rep::kNone;

// Limit of faults of one kind that are distinguished within one tensor; further ones are counted as
// one.
constexpr std::size_t kToldApart = 4096;
constexpr std::size_t kRanksListed = 64;
// Reported number of replica bytes if the count overflows.
constexpr std::uint64_t kTooMany = ~std::uint64_t{0};

class LayoutChecker {
 public:
  LayoutChecker(const LayoutTable::Rep& table, const LayoutRules& rules)
      : table_(table), rules_(rules) {
    if (rules.layer_names != nullptr) layers_ = LayerNames(*rules.layer_names);
  }

  LayoutReport Run() {
    report_.world = rules_.world;
    report_.boxes = table_.boxes;
    report_.layouts = table_.layouts();
    const std::vector<std::uint32_t> keys = table_.KeysInOrder();
    const std::vector<std::uint32_t> objects = table_.ObjectsInOrder();
    std::size_t k = 0;
    std::size_t o = 0;
    while (k < keys.size() || o < objects.size()) {
      const TableTensor* tensor = k < keys.size() ? &table_.tensors[keys[k]] : nullptr;
      const Object* object = o < objects.size() ? &table_.objects[objects[o]] : nullptr;
      int order = 0;  // Negative: the tensor's key comes first; positive: the object's.
      if (tensor == nullptr || object == nullptr) {
        order = tensor == nullptr ? 1 : -1;
      } else {
        order = tensor->meta.key().compare(object->part.key);
      }
      key_ = order <= 0 ? tensor->meta.key() : object->part.key;
      if (order <= 0) {
        CheckTensor(*tensor);
        ++k;
      }
      if (order >= 0) {
        std::size_t end = o;
        while (end < objects.size() && table_.objects[objects[end]].part.key == key_) ++end;
        CheckObject(std::span(objects).subspan(o, end - o));
        o = end;
      }
      if (order == 0) {
        Add(FindingKind::kKind, Both(*tensor, *object),
            "key " + key_ + " is a tensor on " + RankName(table_.FirstRank(*tensor)) +
                " and an object on " + RankName(table_.RanksOf(object->layout)[0]));
      }
      CheckLayerName(tensor != nullptr && order <= 0 ? tensor : nullptr, object);
      FinishKey();
    }
    return std::move(report_);
  }

 private:
  // ---- Findings of one key -------------------------------------------------------------------

  // Number of findings that can still be listed.
  std::size_t room() const {
    const std::size_t used = report_.findings.size();
    return used < rules_.limit ? rules_.limit - used : 0;
  }
  void Count(std::uint64_t findings) { report_.finding_count += findings; }
  // Adds a finding that is already counted; `ranks` in any order.
  Finding& AddListed(FindingKind kind, std::vector<int> ranks, std::string message) {
    Finding& finding = key_findings_.emplace_back();
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    finding.rank_count = ranks.size();
    if (ranks.size() > kRanksListed) ranks.resize(kRanksListed);
    finding.ranks = std::move(ranks);
    finding.kind = kind;
    finding.key = key_;
    finding.message = std::move(message);
    return finding;
  }
  Finding& Add(FindingKind kind, std::vector<int> ranks, std::string message) {
    Count(1);
    return AddListed(kind, std::move(ranks), std::move(message));
  }
  void FinishKey() {
    if (key_findings_.empty()) return;
    std::stable_sort(key_findings_.begin(), key_findings_.end(),
                     [](const Finding& a, const Finding& b) {
                       if (a.kind != b.kind) return a.kind < b.kind;
                       if (!a.box || !b.box) return false;
                       return CompareDims(a.box->begin(), b.box->begin()) < 0;
                     });
    if (key_findings_.size() > room()) key_findings_.resize(room());
    for (Finding& finding : key_findings_) report_.findings.push_back(std::move(finding));
    key_findings_.clear();
  }

  void AddRanks(std::uint32_t layout, std::vector<int>& to) const {
    const std::span<const int> ranks = table_.RanksOf(layout);
    to.insert(to.end(), ranks.begin(), ranks.end());
  }
  std::vector<int> RanksWithTensor(const TableTensor& tensor) const {
    std::vector<int> ranks;
    for (const std::uint32_t layout : tensor.layouts_with_tensor) AddRanks(layout, ranks);
    return ranks;
  }
  std::vector<int> Both(const TableTensor& tensor, const Object& object) const {
    std::vector<int> ranks = RanksWithTensor(tensor);
    AddRanks(object.layout, ranks);
    return ranks;
  }

  // ---- Tensors -------------------------------------------------------------------------------

  void CheckTensor(const TableTensor& first) {
    ++report_.tensors;
    report_.bytes = CheckedAdd(report_.bytes, first.meta.bytes()).value_or(UINT64_MAX);
    const TableTensor* tensor = &first;
    TableTensor joined;
    if (first.variant != kNone) {
      if (!CompareVariants(first)) return;
      joined = Join(first);
      tensor = &joined;
    }
    const RegionSet& regions = tensor->regions;
    // The regions of a partition are all different, so they need no grouping.
    if (IsPartition(regions)) {
      CountReplicas(*tensor, nullptr);
      if (!tensor->labels.empty()) CheckLabels(*tensor, regions, nullptr);
      return;
    }
    RegionSet distinct;
    const std::vector<std::uint32_t> group_of = GroupEqual(regions, &distinct);
    Groups groups(group_of, distinct.size());
    CountReplicas(*tensor, &groups);
    CheckRepeatedRegions(*tensor, distinct, groups);
    if (CoverageReport coverage = CheckCoverage(distinct, kToldApart); !coverage.complete()) {
      ReportCoverage(*tensor, distinct, groups, coverage);
    }
    if (!tensor->labels.empty()) CheckLabels(*tensor, distinct, &groups);
  }

  // Groups of claims with equal regions. A claim is the region of one layout in the tensor's
  // columns (TableTensor::regions), referred to by its position there.
  struct Groups {
    Groups(const std::vector<std::uint32_t>& group_of, std::size_t groups)
        : begin(groups + 1), claims(group_of.size()) {
      for (const std::uint32_t g : group_of) ++begin[g + 1];
      for (std::size_t g = 0; g < groups; ++g) begin[g + 1] += begin[g];
      std::vector<std::uint32_t> at(begin.begin(), begin.end() - 1);
      for (std::uint32_t i = 0; i < group_of.size(); ++i) claims[at[group_of[i]]++] = i;
    }
    std::span<const std::uint32_t> of(std::size_t g) const {
      return std::span(claims).subspan(begin[g], begin[g + 1] - begin[g]);
    }
    std::vector<std::uint32_t> begin;
    std::vector<std::uint32_t> claims;  // Sorted by group, then by position in the table.
  };

  // Calls fn for each claim (see Groups) of distinct region `g`. Without groups, claim `g` is the
  // only one.
  template <typename Fn>
  static void ForEachClaim(std::uint32_t g, const Groups* groups, Fn fn) {
    if (groups == nullptr) {
      fn(g);
      return;
    }
    for (const std::uint32_t claim : groups->of(g)) fn(claim);
  }

  std::vector<int> HoldersOf(const TableTensor& tensor, std::uint32_t g,
                             const Groups* groups) const {
    std::vector<int> ranks;
    ForEachClaim(g, groups,
                 [&](std::uint32_t claim) { AddRanks(tensor.regions.owner(claim), ranks); });
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  void CountReplicas(const TableTensor& tensor, const Groups* groups) {
    const std::uint64_t bits = tensor.meta.bits();
    const auto add = [&](std::size_t claim, std::uint64_t extra) {
      if (extra == 0) return;
      const auto cells = static_cast<std::uint64_t>(tensor.regions.volume(claim));
      const auto bytes = CheckedMul(cells * bits / 8, extra);
      report_.replica_bytes =
          bytes ? CheckedAdd(report_.replica_bytes, *bytes).value_or(kTooMany) : kTooMany;
    };
    if (groups == nullptr) {
      if (!AnyShared(tensor)) return;
      for (std::size_t i = 0; i < tensor.regions.size(); ++i) {
        add(i, table_.RanksOf(tensor.regions.owner(i)).size() - 1);
      }
      return;
    }
    for (std::size_t g = 0; g + 1 < groups->begin.size(); ++g) {
      std::uint64_t holders = 0;
      for (const std::uint32_t claim : groups->of(g)) {
        holders += table_.RanksOf(tensor.regions.owner(claim)).size();
      }
      add(groups->of(g)[0], holders - 1);
    }
  }
  // Whether several ranks share a layout that has the tensor.
  bool AnyShared(const TableTensor& tensor) const {
    return table_.ranks.size() != table_.layouts() &&
           std::any_of(tensor.layouts_with_tensor.begin(), tensor.layouts_with_tensor.end(),
                       [&](std::uint32_t layout) { return table_.RanksOf(layout).size() > 1; });
  }

  // Reports differing dtypes and shapes of a key. Returns false if shapes differ, so that regions
  // cannot be compared.
  bool CompareVariants(const TableTensor& first) {
    bool same_shape = true;
    for (std::uint32_t v = first.variant; v != kNone; v = table_.tensors[v].variant) {
      const TableTensor& other = table_.tensors[v];
      // Messages name the lower rank first.
      const bool in_order = table_.FirstRank(first) <= table_.FirstRank(other);
      const TableTensor& a = in_order ? first : other;
      const TableTensor& b = in_order ? other : first;
      const auto tell = [&](FindingKind kind, const std::string& what, const std::string& of_a,
                            const std::string& of_b) -> Finding& {
        std::vector<int> ranks = RanksWithTensor(a);
        const std::vector<int> more = RanksWithTensor(b);
        ranks.insert(ranks.end(), more.begin(), more.end());
        return Add(kind, std::move(ranks),
                   "tensor " + key_ + ": " + what + " is " + of_a + " on " +
                       RankList(RanksWithTensor(a)) + " and " + of_b + " on " +
                       RankList(RanksWithTensor(b)));
      };
      if (a.meta.dtype() != b.meta.dtype()) {
        tell(FindingKind::kDType, "dtype", std::string(InfoOf(a.meta.dtype()).name),
             std::string(InfoOf(b.meta.dtype()).name));
      }
      if (!(a.meta.shape() == b.meta.shape())) {
        same_shape = false;
        tell(FindingKind::kShape, "shape", a.meta.shape().ToString(), b.meta.shape().ToString())
            .cause = CauseOfShapes(a.meta.shape(), b.meta.shape());
      }
    }
    return same_shape;
  }

  // Merges variants that differ only in dtype.
  TableTensor Join(const TableTensor& first) const {
    TableTensor joined;
    joined.meta = first.meta;
    joined.regions.Reset(first.meta.shape());
    bool labelled = false;
    for (const TableTensor* t = &first;; t = &table_.tensors[t->variant]) {
      for (std::size_t i = 0; i < t->regions.size(); ++i) {
        joined.regions.AddFrom(t->regions, i, t->regions.owner(i));
        joined.labels.push_back(t->label(i));
        labelled |= t->label(i) != Replica::kUnlabelled;
      }
      joined.items.insert(joined.items.end(), t->items.begin(), t->items.end());
      joined.layouts_with_tensor.insert(joined.layouts_with_tensor.end(),
                                        t->layouts_with_tensor.begin(),
                                        t->layouts_with_tensor.end());
      if (t->variant == kNone) break;
    }
    if (!labelled) joined.labels.clear();
    return joined;
  }

  // Reports regions that one rank added twice.
  void CheckRepeatedRegions(const TableTensor& tensor, const RegionSet& distinct,
                            const Groups& groups) {
    std::vector<std::uint32_t> layouts;
    for (std::uint32_t g = 0; g < distinct.size(); ++g) {
      layouts.clear();
      for (const std::uint32_t claim : groups.of(g)) layouts.push_back(tensor.regions.owner(claim));
      if (layouts.size() < 2) continue;
      std::sort(layouts.begin(), layouts.end());
      std::vector<int> ranks;
      for (std::size_t i = 1; i < layouts.size(); ++i) {
        if (layouts[i] == layouts[i - 1]) AddRanks(layouts[i], ranks);
      }
      if (ranks.empty()) continue;
      for (const Box& box : distinct.At(g).Boxes()) {
        Finding& finding = Add(
            FindingKind::kOverlap, ranks,
            "tensor " + key_ + ": " + box.ToString() + " was added twice by " + RankList(ranks));
        finding.box = box;
        finding.elements = static_cast<std::uint64_t>(box.volume());
      }
    }
  }

  void ReportCoverage(const TableTensor& tensor, const RegionSet& distinct, const Groups& groups,
                      const CoverageReport& coverage) {
    // Several overlaps with the same box count as one finding.
    std::vector<std::size_t> starts;
    for (std::size_t i = 0; i < coverage.overlaps.size(); ++i) {
      if (i == 0 || !(coverage.overlaps[i].box == coverage.overlaps[i - 1].box)) {
        starts.push_back(i);
      }
    }
    Count(coverage.missing.size() + starts.size() + (coverage.truncated ? 1 : 0));
    if (room() == 0) return;
    std::vector<std::vector<int>> holders(distinct.size());
    std::vector<int> all;
    for (std::uint32_t g = 0; g < distinct.size(); ++g) {
      holders[g] = HoldersOf(tensor, g, &groups);
      all.insert(all.end(), holders[g].begin(), holders[g].end());
    }
    const LayoutCauses causes(rules_.world, distinct, holders, coverage);
    const std::string head = "tensor " + key_ + ": ";
    const std::string parts = all.empty() ? "" : "; parts are held by " + RankList(all);
    for (std::size_t i = 0; i < std::min(coverage.missing.size(), room()); ++i) {
      const Box& box = coverage.missing[i];
      Finding& finding = AddListed(FindingKind::kMissing, all,
                                   head + box.ToString() + " is held by no rank" + parts);
      finding.box = box;
      finding.elements = static_cast<std::uint64_t>(box.volume());
      finding.cause = causes.CauseOfMissing(box);
    }
    for (std::size_t s = 0; s < std::min(starts.size(), room()); ++s) {
      const std::size_t end = s + 1 < starts.size() ? starts[s + 1] : coverage.overlaps.size();
      std::vector<std::uint32_t> regions;
      for (std::size_t i = starts[s]; i < end; ++i) {
        regions.push_back(coverage.overlaps[i].first);
        regions.push_back(coverage.overlaps[i].second);
      }
      std::sort(regions.begin(), regions.end());
      regions.erase(std::unique(regions.begin(), regions.end()), regions.end());
      ReportOverlap(coverage.overlaps[starts[s]].box, regions, holders, causes);
    }
  }

  void ReportOverlap(const Box& box, const std::vector<std::uint32_t>& regions,
                     const std::vector<std::vector<int>>& holders, const LayoutCauses& causes) {
    std::vector<int> ranks;
    for (const std::uint32_t g : regions) {
      ranks.insert(ranks.end(), holders[g].begin(), holders[g].end());
    }
    std::sort(ranks.begin(), ranks.end());
    std::vector<int> twice;
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      if (ranks[i] == ranks[i - 1]) twice.push_back(ranks[i]);
    }
    std::string who;
    if (!twice.empty()) {
      who = " was added twice by " + RankList(twice);
    } else if (regions.size() == 2) {
      const bool in_order = holders[regions[0]] < holders[regions[1]];
      who = " is held by " + RankList(holders[regions[in_order ? 0 : 1]]) + " and " +
            RankList(holders[regions[in_order ? 1 : 0]]);
    } else {
      who = " is held by " + RankList(ranks);
    }
    Finding& finding = AddListed(FindingKind::kOverlap, twice.empty() ? ranks : twice,
                                 "tensor " + key_ + ": " + box.ToString() + who);
    finding.box = box;
    finding.elements = static_cast<std::uint64_t>(box.volume());
    finding.cause = causes.CauseOfOverlap(box, regions);
  }

  // Checks that each region has one main replica, if replicas are labelled. `regions` are the
  // distinct regions; without groups, the tensor's own regions.
  void CheckLabels(const TableTensor& tensor, const RegionSet& regions, const Groups* groups) {
    std::vector<int> labelled;
    std::vector<int> unlabelled;
    for (std::size_t i = 0; i < tensor.regions.size(); ++i) {
      const bool plain = tensor.labels[i] == Replica::kUnlabelled;
      AddRanks(tensor.regions.owner(i), plain ? unlabelled : labelled);
    }
    if (labelled.empty()) return;
    if (!unlabelled.empty()) {
      std::vector<int> ranks = labelled;
      ranks.insert(ranks.end(), unlabelled.begin(), unlabelled.end());
      Add(FindingKind::kMixedLabels, std::move(ranks),
          "tensor " + key_ + ": replica ids are given by " + RankList(labelled) +
              " and not given by " + RankList(unlabelled));
      return;
    }
    for (std::uint32_t g = 0; g < regions.size(); ++g) {
      std::size_t mains = 0;
      ForEachClaim(g, groups, [&](std::uint32_t claim) {
        if (tensor.labels[claim] != Replica::kMain) return;
        mains += table_.RanksOf(tensor.regions.owner(claim)).size();
      });
      if (mains == 1) continue;
      if (room() <= key_findings_.size()) {
        Count(1);
        continue;
      }
      const Region region = regions.At(g);
      std::vector<int> ranks;
      ForEachClaim(g, groups, [&](std::uint32_t claim) {
        if (mains > 0 && tensor.labels[claim] != Replica::kMain) return;
        AddRanks(tensor.regions.owner(claim), ranks);
      });
      const std::string head = "tensor " + key_ + ": " + region.ToString();
      Finding& finding =
          mains == 0 ? Add(FindingKind::kNoMain, ranks,
                           head + " has no main replica; copies are held by " + RankList(ranks))
                     : Add(FindingKind::kSeveralMains, ranks,
                           head + " has " + std::to_string(mains) + " main replicas, on " +
                               RankList(ranks));
      if (!region.is_flat()) finding.box = region.box();
      finding.elements = static_cast<std::uint64_t>(region.volume());
    }
  }

  // ---- Objects and names ---------------------------------------------------------------------

  const Object& ObjectAt(std::uint32_t i) const { return table_.objects[i]; }

  void CheckObject(std::span<const std::uint32_t> parts) {
    const std::string head = "object " + key_ + ": ";
    const Object& first = ObjectAt(parts[0]);
    bool one_grid = true;
    for (const std::uint32_t i : parts.subspan(1)) {
      const Object& other = ObjectAt(i);
      if (other.part.grid == first.part.grid) continue;
      one_grid = false;
      ReportGrids(head, parts, first, other);
      break;
    }
    std::uint64_t distinct = 0;
    for (std::size_t from = 0; from < parts.size();) {
      std::size_t to = from + 1;
      while (to < parts.size() &&
             ObjectAt(parts[to]).part.index == ObjectAt(parts[from]).part.index) {
        ++to;
      }
      CheckObjectPart(head, parts.subspan(from, to - from));
      ++distinct;
      from = to;
    }
    report_.objects += distinct;
    if (one_grid) CheckGrid(head, parts, distinct);
  }

  void ReportGrids(const std::string& head, std::span<const std::uint32_t> parts, const Object& a,
                   const Object& b) {
    std::vector<int> of_a;
    std::vector<int> of_b;
    for (const std::uint32_t i : parts) {
      const Object& object = ObjectAt(i);
      if (object.part.grid == a.part.grid) AddRanks(object.layout, of_a);
      if (object.part.grid == b.part.grid) AddRanks(object.layout, of_b);
    }
    std::vector<int> ranks = of_a;
    ranks.insert(ranks.end(), of_b.begin(), of_b.end());
    const bool in_order =
        *std::min_element(of_a.begin(), of_a.end()) <= *std::min_element(of_b.begin(), of_b.end());
    const Object& low = in_order ? a : b;
    const Object& high = in_order ? b : a;
    Add(FindingKind::kObjectGrid, std::move(ranks),
        head + "grid is " + low.part.grid.ToString() + " on " + RankList(in_order ? of_a : of_b) +
            " and " + high.part.grid.ToString() + " on " + RankList(in_order ? of_b : of_a));
  }

  // Compares the replicas of one object part.
  void CheckObjectPart(const std::string& head, std::span<const std::uint32_t> replicas) {
    const Object& first = ObjectAt(replicas[0]);
    const std::string which =
        head + (first.part.index.rank() == 0 ? "" : "part " + first.part.index.ToString() + ": ");
    std::vector<int> like;
    std::vector<int> unlike;
    std::vector<std::uint32_t> layouts;
    for (const std::uint32_t i : replicas) {
      const Object& object = ObjectAt(i);
      const bool same =
          object.part.length == first.part.length && object.part.hash == first.part.hash;
      AddRanks(object.layout, same ? like : unlike);
      layouts.push_back(object.layout);
    }
    std::sort(layouts.begin(), layouts.end());
    std::vector<int> twice;
    for (std::size_t i = 1; i < layouts.size(); ++i) {
      if (layouts[i] == layouts[i - 1]) AddRanks(layouts[i], twice);
    }
    if (!twice.empty()) {
      Add(FindingKind::kObjectTwice, twice, which + "added twice by " + RankList(twice));
      return;
    }
    if (unlike.empty()) return;
    std::vector<int> ranks = like;
    ranks.insert(ranks.end(), unlike.begin(), unlike.end());
    std::sort(like.begin(), like.end());
    std::sort(unlike.begin(), unlike.end());
    const std::string between =
        RankName(std::min(like[0], unlike[0])) + " and " + RankName(std::max(like[0], unlike[0]));
    if (rules_.keep_lowest) {
      if (report_.warnings.size() < rules_.limit) {
        report_.warnings.push_back(which + "contents differ between " + between +
                                   "; the lowest rank's are stored");
      }
      return;
    }
    Finding& finding =
        Add(FindingKind::kObjectContents, ranks, which + "contents differ between " + between);
    if (ranks.size() > 2 && (like.size() == 1 || unlike.size() == 1)) {
      const int odd = unlike.size() == 1 ? unlike[0] : like[0];
      const std::size_t others = ranks.size() - 1;
      // `like` contains the first replica's rank, which is the odd one only if all other replicas
      // are equal.
      if (unlike.size() == 1 || Uniform(replicas.subspan(1))) {
        finding.cause =
            "only " + RankName(odd) + " differs from the " + std::to_string(others) + " others";
      }
    }
  }
  bool Uniform(std::span<const std::uint32_t> replicas) const {
    const DecodedLayout::ObjectItem& first = ObjectAt(replicas[0]).part;
    return std::all_of(replicas.begin(), replicas.end(), [&](std::uint32_t i) {
      return ObjectAt(i).part.hash == first.hash && ObjectAt(i).part.length == first.length;
    });
  }

  // Reports parts of the grid that no rank holds. `parts` are sorted by index.
  void CheckGrid(const std::string& head, std::span<const std::uint32_t> parts,
                 std::uint64_t distinct) {
    const Dims& grid = ObjectAt(parts[0]).part.grid;
    const auto wanted = static_cast<std::uint64_t>(CheckedProduct(grid).value_or(0));
    if (wanted == distinct) return;
    Dims index = Dims::Filled(grid.rank(), 0);
    std::vector<int> ranks;
    for (const std::uint32_t i : parts) AddRanks(ObjectAt(i).layout, ranks);
    for (std::size_t i = 0; i < parts.size();) {
      if (!(ObjectAt(parts[i]).part.index == index)) break;
      for (++i; i < parts.size() && ObjectAt(parts[i]).part.index == index;) ++i;
      for (int a = grid.rank() - 1; a >= 0 && ++index[a] == grid[a]; --a) index[a] = 0;
    }
    const std::uint64_t more = wanted - distinct - 1;
    Add(FindingKind::kObjectMissing, std::move(ranks),
        head + "part " + index.ToString() + " of grid " + grid.ToString() + " is held by no rank" +
            (more == 0 ? "" : ", nor are " + std::to_string(more) + " others"));
  }

  void CheckLayerName(const TableTensor* tensor, const Object* object) {
    if (layers_.empty()) return;
    const std::optional<LayerNames::Found> found = layers_.Find(key_);
    if (!found || found->stacked_key == key_) return;
    std::vector<int> ranks;
    if (tensor != nullptr) {
      ranks = RanksWithTensor(*tensor);
    } else {
      AddRanks(object->layout, ranks);
    }
    std::string message = (tensor != nullptr ? "tensor " : "object ") + key_ +
                          ": this is also the name of layer " + std::to_string(found->layer) +
                          " of tensor " + std::string(found->stacked_key);
    Add(FindingKind::kLayerName, std::move(ranks), std::move(message));
  }

  const LayoutTable::Rep& table_;
  const LayoutRules& rules_;
  LayerNames layers_;
  LayoutReport report_;
  std::string key_;  // The key being checked.
  std::vector<Finding> key_findings_;
};

}  // namespace

LayoutReport CheckLayout(const LayoutTable& table, const LayoutRules& rules) {
  return LayoutChecker(table.rep(), rules).Run();
}

}  // namespace tensormount
