// SPDX-License-Identifier: Apache-2.0
// CheckSpec of tensormount/validate.h: the layout checks of a save for a described job that does
// not run. Ranks with equal shards are found from the description, so that the cost of a job of
// 4,096 ranks depends mostly on its distinct layouts, and tensors are checked in batches of bounded
// memory.
// spec.cc parses the description.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "tensormount/validate.h"

#include "base/hash.h"
#include "collective/layout/layout.h"
#include "collective/layout/spec.h"
#include "collective/layout/wire.h"

namespace tensormount {
namespace {

// About the most shards of a batch of tensors, as encoded layouts and in the table. Dumped layouts
// and objects are not checked in batches.
constexpr std::uint64_t kBatchBoxes = std::uint64_t{2} << 20;

// Classes of ranks that hold the same shards. All ranks begin in one class; every part of the spec
// that distinguishes ranks splits the classes. The cost is one step for each rank and split,
// independent of the number of tensors.
class LayoutClasses {
 public:
  explicit LayoutClasses(int world) : class_of_(static_cast<std::size_t>(world), 0), count_(1) {}

  void CutBySet(const SpecRanks& ranks) {
    std::unordered_map<std::uint32_t, std::uint32_t> moved;
    for (const int rank : ranks) {
      std::uint32_t& of = class_of_[static_cast<std::size_t>(rank)];
      of = moved.try_emplace(of, count_ + static_cast<std::uint32_t>(moved.size())).first->second;
    }
    count_ += static_cast<std::uint32_t>(moved.size());
    Pack();
  }
  void CutByMeshAxis(const JobSpec::MeshAxis& axis) {
    for (std::size_t r = 0; r < class_of_.size(); ++r) {
      // A number that is unique for the class and the position on the axis; the product is below
      // 2^48.
      keys_.push_back(std::uint64_t{class_of_[r]} * static_cast<std::uint64_t>(axis.size) +
                      r / static_cast<std::size_t>(axis.stride) %
                          static_cast<std::size_t>(axis.size));
    }
    std::unordered_map<std::uint64_t, std::uint32_t> numbers;
    for (std::size_t r = 0; r < class_of_.size(); ++r) {
      class_of_[r] =
          numbers.try_emplace(keys_[r], static_cast<std::uint32_t>(numbers.size())).first->second;
    }
    keys_.clear();
    count_ = static_cast<std::uint32_t>(numbers.size());
  }
  void CutAll() {
    std::iota(class_of_.begin(), class_of_.end(), 0u);
    count_ = static_cast<std::uint32_t>(class_of_.size());
  }

  std::uint32_t count() const { return count_; }
  std::uint32_t operator[](int rank) const { return class_of_[static_cast<std::size_t>(rank)]; }
  std::vector<std::vector<int>> Members() const {
    std::vector<std::vector<int>> members(count_);
    for (std::size_t r = 0; r < class_of_.size(); ++r) {
      members[class_of_[r]].push_back(static_cast<int>(r));
    }
    return members;
  }

 private:
  // Renumbers the classes once there are many numbers without ranks.
  void Pack() {
    if (count_ <= 2 * class_of_.size()) return;
    std::unordered_map<std::uint32_t, std::uint32_t> numbers;
    for (std::uint32_t& of : class_of_) {
      of = numbers.try_emplace(of, static_cast<std::uint32_t>(numbers.size())).first->second;
    }
    count_ = static_cast<std::uint32_t>(numbers.size());
  }

  std::vector<std::uint32_t> class_of_;
  std::uint32_t count_;
  std::vector<std::uint64_t> keys_;
};

// The parts of the spec that distinguish ranks for one tensor.
struct Splitters {
  std::vector<int> mesh_axes;            // Positions in JobSpec::mesh, rising.
  std::vector<std::uint32_t> rank_sets;  // Positions in JobSpec::rank_sets, rising.
  bool all = false;
  friend auto operator<=>(const Splitters&, const Splitters&) = default;
};

Splitters SplittersOf(const JobSpec& spec, const JobSpec::Tensor& tensor) {
  Splitters out;
  if (tensor.kind == JobSpec::Tensor::Kind::kRule) out.all = !spec.whole[tensor.rule];
  for (const JobSpec::Cut& cut : tensor.cuts) {
    out.mesh_axes.insert(out.mesh_axes.end(), cut.over.begin(), cut.over.end());
  }
  out.mesh_axes.insert(out.mesh_axes.end(), tensor.flat.begin(), tensor.flat.end());
  for (const JobSpec::MeshSelection& only : tensor.only) out.mesh_axes.push_back(only.mesh_axis);
  for (const JobSpec::Shard& shard : tensor.shards) out.rank_sets.push_back(shard.ranks);
  const auto tidy = [](auto& v) {
    std::sort(v.begin(), v.end());
    v.erase(std::unique(v.begin(), v.end()), v.end());
  };
  tidy(out.mesh_axes);
  tidy(out.rank_sets);
  return out;
}

class Checker {
 public:
  Checker(const JobSpec& spec, std::size_t limit) : spec_(spec), limit_(limit) {
    rules_.world = spec.world;
    rules_.limit = limit;
    rules_.layer_names = &spec.layers;
    seen_.resize(static_cast<std::size_t>(spec.world), 0);
  }

  Result<LayoutReport> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(Layouts());
    // Tensors with the same splitters are checked together, so that each check has few classes.
    std::map<Splitters, std::vector<const JobSpec::Tensor*>> groups;
    for (const JobSpec::Tensor& tensor : spec_.tensors) {
      groups[SplittersOf(spec_, tensor)].push_back(&tensor);
    }
    for (const auto& [splitters, tensors] : groups) {
      TENSORMOUNT_RETURN_IF_ERROR(Group(splitters, tensors));
    }
    TENSORMOUNT_RETURN_IF_ERROR(Objects());
    LayoutReport report = MergeReports(reports_, limit_);
    report.world = spec_.world;
    std::unordered_set<std::uint64_t> different(seen_.begin(), seen_.end());
    report.layouts = different.size();
    return report;
  }

 private:
  int PositionOnAxis(int mesh_axis, int rank) const {
    const JobSpec::MeshAxis& axis = spec_.mesh[static_cast<std::size_t>(mesh_axis)];
    return rank / axis.stride % axis.size;
  }
  // A rank's position in the product of several mesh axes, and the product's size.
  std::pair<std::int64_t, std::int64_t> PositionOnAxes(const std::vector<int>& axes,
                                                       int rank) const {
    std::int64_t at = 0;
    std::int64_t size = 1;
    for (const int axis : axes) {
      const std::int64_t extent = spec_.mesh[static_cast<std::size_t>(axis)].size;
      at = at * extent + PositionOnAxis(axis, rank);
      size *= extent;
    }
    return {at, size};
  }

  // The part of a tensor, cut by a rule or over the mesh, that a rank holds; empty if the rank
  // holds none.
  Result<std::optional<Region>> RegionOfRank(const JobSpec::Tensor& tensor, int rank) const {
    const TensorMeta& meta = tensor.meta;
    if (tensor.kind == JobSpec::Tensor::Kind::kRule) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          Region region,
          spec_.rules[tensor.rule].RegionOf(meta.key(), meta.dtype(), meta.shape(), rank));
      return std::optional<Region>(std::move(region));
    }
    for (const JobSpec::MeshSelection& only : tensor.only) {
      if (!std::binary_search(only.places.begin(), only.places.end(),
                              PositionOnAxis(only.mesh_axis, rank))) {
        return std::optional<Region>();
      }
    }
    Dims parts = Dims::Filled(meta.shape().rank(), 1);
    Dims index = Dims::Filled(meta.shape().rank(), 0);
    for (const JobSpec::Cut& cut : tensor.cuts) {
      const auto [at, size] = PositionOnAxes(cut.over, rank);
      parts[cut.axis] = size;
      index[cut.axis] = at;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, CutBox(meta.dtype(), meta.shape(), parts, index));
    if (tensor.flat.empty()) return std::optional<Region>(Region(box));
    const auto [at, size] = PositionOnAxes(tensor.flat, rank);
    TENSORMOUNT_ASSIGN_OR_RETURN(Region region, CutFlat(meta.dtype(), box, size, at));
    return std::optional<Region>(std::move(region));
  }

  // Adds the layout that all of `ranks` have to the table.
  Status Add(LayoutTable& table, const StateDict& state, const std::vector<int>& ranks) {
    TENSORMOUNT_RETURN_IF_ERROR(state.status());
    if (ranks.empty() || (state.tensors().empty() && state.objects().empty())) return {};
    const std::string encoded = EncodeLayout(state, 0, 1);
    const Hash128 hash = Xxh3(encoded);
    for (const int rank : ranks) {
      std::uint64_t& seen = seen_[static_cast<std::size_t>(rank)];
      // The hash depends on the order of the layouts, which is the same for all ranks.
      seen = (seen ^ hash.low) * 0x9E3779B97F4A7C15u + hash.high;
    }
    return table.Add(encoded, ranks);
  }

  Status Group(const Splitters& splitters, const std::vector<const JobSpec::Tensor*>& tensors) {
    LayoutClasses classes(spec_.world);
    if (splitters.all) {
      classes.CutAll();
    } else {
      for (const int axis : splitters.mesh_axes) {
        classes.CutByMeshAxis(spec_.mesh[static_cast<std::size_t>(axis)]);
      }
      for (const std::uint32_t set : splitters.rank_sets) classes.CutBySet(spec_.rank_sets[set]);
    }
    const std::vector<std::vector<int>> members = classes.Members();
    const std::size_t batch = static_cast<std::size_t>(
        std::max<std::uint64_t>(kBatchBoxes / std::max<std::size_t>(members.size(), 1), 1));
    for (std::size_t first = 0; first < tensors.size(); first += batch) {
      const std::size_t end = std::min(first + batch, tensors.size());
      TENSORMOUNT_RETURN_IF_ERROR(Batch({tensors.begin() + static_cast<std::ptrdiff_t>(first),
                                         tensors.begin() + static_cast<std::ptrdiff_t>(end)},
                                        classes, members));
    }
    return {};
  }

  Status Batch(const std::vector<const JobSpec::Tensor*>& tensors, const LayoutClasses& classes,
               const std::vector<std::vector<int>>& members) {
    // By class: the shards whose ranks the spec lists.
    using Named = std::pair<const JobSpec::Tensor*, const JobSpec::Shard*>;
    std::vector<std::vector<Named>> named(members.size());
    for (const JobSpec::Tensor* tensor : tensors) {
      for (const JobSpec::Shard& shard : tensor->shards) {
        std::uint32_t last = UINT32_MAX;
        std::unordered_set<std::uint32_t> done;
        for (const int rank : spec_.rank_sets[shard.ranks]) {
          const std::uint32_t c = classes[rank];
          if (c == last || !done.insert(c).second) continue;
          last = c;
          named[c].emplace_back(tensor, &shard);
        }
      }
    }
    LayoutTable table;
    for (std::size_t c = 0; c < members.size(); ++c) {
      if (members[c].empty()) continue;
      StateDict state;
      for (const JobSpec::Tensor* tensor : tensors) {
        if (tensor->kind == JobSpec::Tensor::Kind::kShards) continue;
        TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<Region> piece,
                                     RegionOfRank(*tensor, members[c][0]));
        if (!piece) continue;
        const TensorMeta& meta = tensor->meta;
        TENSORMOUNT_RETURN_IF_ERROR(
            state.AddTensor(meta.key(), MetadataOnly(meta.dtype(), meta.shape(), *piece)));
      }
      for (const auto& [tensor, shard] : named[c]) {
        const TensorMeta& meta = tensor->meta;
        TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
            meta.key(), MetadataOnly(meta.dtype(), meta.shape(), shard->region, shard->replica)));
      }
      TENSORMOUNT_RETURN_IF_ERROR(Add(table, state, members[c]));
    }
    // A tensor without any shard is not in the table, so CheckLayout cannot report it.
    for (const JobSpec::Tensor* tensor : tensors) {
      if (tensor->kind == JobSpec::Tensor::Kind::kShards && tensor->shards.empty()) {
        return Status(Code::kInvalidArgument,
                      "spec: tensor " + tensor->meta.key() + " has no shards");
      }
    }
    reports_.push_back(CheckLayout(table, rules_));
    return {};
  }

  Status Objects() {
    if (spec_.objects.empty()) return {};
    LayoutClasses classes(spec_.world);
    bool all = false;
    for (const JobSpec::Object& object : spec_.objects) {
      all = all || object.by_rank;
      for (const JobSpec::ObjectPart& part : object.parts) {
        classes.CutBySet(spec_.rank_sets[part.ranks]);
      }
    }
    if (all) classes.CutAll();
    const std::vector<std::vector<int>> members = classes.Members();
    using Named = std::pair<const JobSpec::Object*, const JobSpec::ObjectPart*>;
    std::vector<std::vector<Named>> named(members.size());
    for (const JobSpec::Object& object : spec_.objects) {
      for (const JobSpec::ObjectPart& part : object.parts) {
        std::unordered_set<std::uint32_t> done;
        for (const int rank : spec_.rank_sets[part.ranks]) {
          if (done.insert(classes[rank]).second) named[classes[rank]].emplace_back(&object, &part);
        }
      }
    }
    LayoutTable table;
    for (std::size_t c = 0; c < members.size(); ++c) {
      if (members[c].empty()) continue;
      StateDict state;
      for (const auto& [object, part] : named[c]) {
        TENSORMOUNT_RETURN_IF_ERROR(state.AddObject(object->key, part->contents,
                                                    {.index = part->index, .grid = part->grid}));
      }
      for (const JobSpec::Object& object : spec_.objects) {
        if (!object.by_rank) continue;
        TENSORMOUNT_RETURN_IF_ERROR(state.AddObject(
            object.key, object.contents, {.index = {members[c][0]}, .grid = {spec_.world}}));
      }
      TENSORMOUNT_RETURN_IF_ERROR(Add(table, state, members[c]));
    }
    reports_.push_back(CheckLayout(table, rules_));
    return {};
  }

  // Checks dumped layouts, all in one table, because any layout may have any key.
  Status Layouts() {
    if (spec_.layouts.empty()) return {};
    LayoutClasses classes(spec_.world);
    for (const JobSpec::Layout& layout : spec_.layouts) {
      classes.CutBySet(spec_.rank_sets[layout.ranks]);
    }
    const std::vector<std::vector<int>> members = classes.Members();
    std::vector<std::vector<const JobSpec::Layout*>> named(members.size());
    for (const JobSpec::Layout& layout : spec_.layouts) {
      std::unordered_set<std::uint32_t> done;
      for (const int rank : spec_.rank_sets[layout.ranks]) {
        if (done.insert(classes[rank]).second) named[classes[rank]].push_back(&layout);
      }
    }
    LayoutTable table;
    for (std::size_t c = 0; c < members.size(); ++c) {
      if (members[c].empty()) continue;
      StateDict state;
      for (const JobSpec::Layout* layout : named[c]) {
        for (const JobSpec::Layout::Item& item : layout->items) {
          TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
              item.meta.key(),
              MetadataOnly(item.meta.dtype(), item.meta.shape(), item.region, item.replica)));
        }
        for (const auto& [key, part] : layout->objects) {
          TENSORMOUNT_RETURN_IF_ERROR(
              state.AddObject(key, part.contents, {.index = part.index, .grid = part.grid}));
        }
      }
      TENSORMOUNT_RETURN_IF_ERROR(Add(table, state, members[c]));
    }
    reports_.push_back(CheckLayout(table, rules_));
    return {};
  }

  const JobSpec& spec_;
  std::size_t limit_;
  LayoutRules rules_;
  std::vector<LayoutReport> reports_;
  std::vector<std::uint64_t> seen_;  // By rank: hash of its layouts.
};

}  // namespace

Result<LayoutReport> CheckSpec(std::string_view json, std::size_t limit) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const JobSpec spec, JobSpec::Parse(json));
  return Checker(spec, limit).Run();
}

}  // namespace tensormount
