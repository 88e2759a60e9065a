// SPDX-License-Identifier: Apache-2.0
// Reads the three forms in which a checkpoint says how its state dict was nested.
#include "fs/export/saved_paths.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace tensormount::fs {
namespace {

using Kind = PathStep::Kind;

constexpr std::string_view kMappings = "tensormount.dcp.";
constexpr std::string_view kStructure = "tensormount.tree.";
// As deep as state dicts may be, so that no input can exhaust a stack.
constexpr std::size_t kMostNested = 64;
// Of all paths of a structure: a leaf has the keys of all that it lies in, so that a short input
// may mean a very long list.
constexpr std::size_t kMostPathBytes = std::size_t{64} << 20;
constexpr std::size_t kMostKeyBytes = 2048;

// Empty where it is no sequence of names and positions.
SavedPath PathFrom(const CommonValue& value) {
  const std::vector<CommonValue>* items = ItemsOf(value);
  SavedPath path;
  if (items == nullptr) return path;
  for (const CommonValue& item : *items) {
    const auto* one = item.get_if<CommonList>();
    const bool number_key = one != nullptr && one->items.size() == 1;
    if (const auto* number = (number_key ? one->items.front() : item).get_if<std::int64_t>()) {
      path.push_back({*number, number_key ? Kind::kNumberKey : Kind::kListItem});
    } else if (const auto* name = item.get_if<std::string>()) {
      path.push_back({*name, Kind::kName});
    } else {
      return {};
    }
  }
  return path;
}

struct Leaf {
  SavedPath path;
  std::string name;
  bool tensor = false;
};

// One structure, node by node.
class StructureReader {
 public:
  explicit StructureReader(const CommonValue& structure) {
    const auto* dict = structure.get_if<CommonDict>();
    const CommonValue* nodes = dict != nullptr ? dict->Find(std::string("nodes")) : nullptr;
    const CommonValue* version = dict != nullptr ? dict->Find(std::string("version")) : nullptr;
    if (nodes == nullptr || version == nullptr || !(*version == CommonValue(1))) return;
    nodes_ = ItemsOf(*nodes);
    if (nodes_ == nullptr || !Read() || next_ != nodes_->size()) {
      leaves.clear();
      empty.clear();
    }
  }

  std::vector<Leaf> leaves;
  std::vector<SavedPaths::Empty> empty;

 private:
  bool Read() {
    if (next_ >= nodes_->size() || path_.size() > kMostNested) return false;
    const CommonValue& node = (*nodes_)[next_++];
    const CommonValue* more = nullptr;
    const auto* word = node.get_if<std::string>();
    if (const auto* pair = node.get_if<CommonList>(); pair != nullptr && pair->items.size() == 2) {
      word = pair->items.front().get_if<std::string>();
      more = &pair->items.back();
    }
    if (word == nullptr) return false;
    if (*word == "tensor" || *word == "value" || *word == "rank") {
      const auto* name = more != nullptr ? more->get_if<std::string>() : nullptr;
      if (more != nullptr && name == nullptr) return false;
      // A value of each rank has no one place in what is exported.
      if (*word == "rank") return true;
      bytes_ += path_bytes_ + path_.size() * sizeof(PathStep);
      if (bytes_ > kMostPathBytes) return false;
      std::string found = name != nullptr ? *name : Dotted(path_);
      // Below a key of another type it stands at the root, by its name.
      SavedPath path = odd_ > 0 ? SavedPath{{found, Kind::kName}} : path_;
      leaves.push_back({std::move(path), std::move(found), *word == "tensor"});
      return true;
    }
    if (more == nullptr) return false;
    if (*word == "dict" || *word == "odict") return ReadDict(*more);
    if (*word == "list" || *word == "tuple") return ReadList(*more, *word == "tuple");
    return false;
  }

  bool ReadDict(const CommonValue& keys) {
    const auto* list = keys.get_if<CommonList>();
    if (list == nullptr) return false;
    if (list->items.empty() && odd_ == 0) empty.push_back({path_, CommonDict{}});
    for (const CommonValue& key : list->items) {
      const auto* name = key.get_if<std::string>();
      const auto* number = key.get_if<std::int64_t>();
      if (name != nullptr && name->size() > kMostKeyBytes) return false;
      const std::size_t size = name != nullptr ? name->size() : 8;
      // None, bools, floats, tuples: what planners of torch name values by has no such keys.
      const bool odd = name == nullptr && number == nullptr;
      if (number != nullptr) {
        path_.push_back({*number, Kind::kNumberKey});
      } else {
        path_.push_back({name != nullptr ? *name : std::string("?"), Kind::kName});
      }
      path_bytes_ += size;
      odd_ += odd ? 1 : 0;
      if (!Read()) return false;
      odd_ -= odd ? 1 : 0;
      path_bytes_ -= size;
      path_.pop_back();
    }
    return true;
  }

  bool ReadList(const CommonValue& count, bool tuple) {
    const auto* items = count.get_if<std::int64_t>();
    if (items == nullptr || *items < 0) return false;
    if (*items == 0 && odd_ == 0)
      empty.push_back({path_, tuple ? CommonValue(CommonTuple{}) : CommonList{}});
    for (std::int64_t i = 0; i < *items; ++i) {
      path_.push_back({i, tuple ? Kind::kTupleItem : Kind::kListItem});
      if (!Read()) return false;
      path_.pop_back();
    }
    return true;
  }

  const std::vector<CommonValue>* nodes_ = nullptr;
  std::size_t next_ = 0;
  SavedPath path_;
  std::size_t path_bytes_ = 0;
  std::size_t bytes_ = 0;
  int odd_ = 0;  // Keys of other types in the path.
};

}  // namespace

std::string Dotted(const SavedPath& path) {
  std::string text;
  for (const PathStep& step : path) {
    if (!text.empty()) text += '.';
    const auto* name = std::get_if<std::string>(&step.key);
    text += name != nullptr ? *name : std::to_string(std::get<std::int64_t>(step.key));
  }
  return text;
}

const std::vector<CommonValue>* ItemsOf(const CommonValue& value) {
  if (const auto* tuple = value.get_if<CommonTuple>()) return &tuple->items;
  if (const auto* list = value.get_if<CommonList>()) return &list->items;
  return nullptr;
}

bool SavedPaths::IsInternal(std::string_view name) {
  return name == kPlannerData || name == kStructure.substr(0, kStructure.size() - 1) ||
         name.starts_with(kMappings) || name.starts_with(kStructure);
}

// `name` null: a key that is no text.
void SavedPaths::AddPath(const std::string* name, const CommonValue& path) {
  SavedPath found = PathFrom(path);
  if (name == nullptr || found.empty()) return;
  value_paths_[*name] = found;
  paths_[*name] = {std::move(found)};
}

void SavedPaths::AddPlannerData(const CommonValue& value) {
  const auto* dict = value.get_if<CommonDict>();
  if (dict == nullptr) return;
  for (const auto& [key, path] : dict->items) {
    AddPath(std::get_if<std::string>(&key), path);
  }
}

// {"dict": [[KEY, PATH], ...]}
void SavedPaths::AddMappings(const CommonValue& value) {
  const auto* dict = value.get_if<CommonDict>();
  const CommonValue* pairs = dict != nullptr ? dict->Find(std::string("dict")) : nullptr;
  const std::vector<CommonValue>* items = pairs != nullptr ? ItemsOf(*pairs) : nullptr;
  if (items == nullptr) return;
  for (const CommonValue& item : *items) {
    const std::vector<CommonValue>* pair = ItemsOf(item);
    if (pair == nullptr || pair->size() != 2) continue;
    AddPath(pair->front().get_if<std::string>(), pair->back());
  }
}

SavedPaths SavedPaths::Make(const CommonValues& values,
                            const std::function<bool(std::string_view)>& has_tensor) {
  SavedPaths out;
  // Of each path the name; of two structures that differ the one whose name is that path's alone. A
  // rank had it tied where another has it not.
  struct Named {
    std::string name;
    bool tensor = false;
    bool alone = false;
  };
  std::map<SavedPath, Named> named;
  std::set<SavedPath> empty;
  for (const auto& [name, value] : values) {
    if (name == kPlannerData) out.AddPlannerData(value);
    if (name.starts_with(kMappings)) out.AddMappings(value);
    if (!name.starts_with(kStructure)) continue;
    const StructureReader structure(value);
    std::map<std::string_view, int> count;
    for (const Leaf& leaf : structure.leaves) count[leaf.name] += leaf.tensor ? 1 : 0;
    for (const Leaf& leaf : structure.leaves) {
      std::string found = leaf.name;
      const std::string usual = Dotted(leaf.path);
      bool alone = count[leaf.name] < 2 || leaf.name == usual;
      if (!alone && has_tensor(usual) && !count.contains(usual)) {
        found = usual;
        alone = true;
      }
      if (!leaf.tensor) out.encoded_.insert(leaf.name);
      const auto [at, added] = named.try_emplace(leaf.path, Named{found, leaf.tensor, alone});
      if (!added && alone && !at->second.alone) at->second = {found, leaf.tensor, alone};
    }
    for (const Empty& one : structure.empty) {
      if (empty.insert(one.path).second && !one.path.empty()) out.empty_.push_back(one);
    }
  }
  for (const auto& [path, leaf] : named) {
    if (path.empty()) continue;
    if (leaf.tensor) {
      out.paths_[leaf.name].push_back(path);
    } else {
      out.value_paths_.try_emplace(leaf.name, path);
    }
  }
  return out;
}

std::vector<SavedPath> SavedPaths::Of(std::string_view shown, std::string_view stored) const {
  // A path belongs to the key that was stored: a map that renamed the key has said where it goes.
  if (shown == stored) {
    const auto it = paths_.find(shown);
    if (it != paths_.end()) return it->second;
  }
  return {{{std::string(shown), Kind::kName}}};
}

SavedPath SavedPaths::OfValue(std::string_view shown, std::string_view stored) const {
  if (shown == stored) {
    const auto it = value_paths_.find(shown);
    if (it != value_paths_.end()) return it->second;
  }
  return {{std::string(shown), Kind::kName}};
}

std::vector<CommonKey> SavedPaths::ForPlanner(const SavedPath& path) {
  std::vector<CommonKey> keys;
  for (const PathStep& step : path) {
    keys.push_back(step.kind == PathStep::Kind::kNumberKey
                       ? CommonKey(std::to_string(std::get<std::int64_t>(step.key)))
                       : step.key);
  }
  return keys;
}

}  // namespace tensormount::fs
