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

constexpr std::string_view kOwn = "tensormount.";
constexpr std::string_view kMappings = "tensormount.dcp.";
constexpr std::string_view kStructure = "tensormount.tree.";
// As deep as state dicts may be, so that no input can exhaust a stack.
constexpr std::size_t kMostNested = 64;

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

std::string Dotted(const SavedPath& path) {
  std::string text;
  for (const PathStep& step : path) {
    if (!text.empty()) text += '.';
    const auto* name = std::get_if<std::string>(&step.key);
    text += name != nullptr ? *name : std::to_string(std::get<std::int64_t>(step.key));
  }
  return text;
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
      if (*word != "rank") {
        leaves.push_back({path_, name != nullptr ? *name : Dotted(path_), *word == "tensor"});
      }
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
    if (list->items.empty()) empty.push_back({path_, CommonDict{}});
    for (const CommonValue& key : list->items) {
      if (const auto* name = key.get_if<std::string>()) {
        path_.push_back({*name, Kind::kName});
      } else if (const auto* number = key.get_if<std::int64_t>()) {
        path_.push_back({*number, Kind::kNumberKey});
      } else {
        return false;  // None, floats, tuples: no format of torch names values by them.
      }
      if (!Read()) return false;
      path_.pop_back();
    }
    return true;
  }

  bool ReadList(const CommonValue& count, bool tuple) {
    const auto* items = count.get_if<std::int64_t>();
    if (items == nullptr || *items < 0) return false;
    if (*items == 0) empty.push_back({path_, tuple ? CommonValue(CommonTuple{}) : CommonList{}});
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
};

}  // namespace

const std::vector<CommonValue>* ItemsOf(const CommonValue& value) {
  if (const auto* tuple = value.get_if<CommonTuple>()) return &tuple->items;
  if (const auto* list = value.get_if<CommonList>()) return &list->items;
  return nullptr;
}

bool SavedPaths::IsInternal(std::string_view name) {
  return name == kPlannerData || name.starts_with(kOwn);
}

void SavedPaths::AddPlannerData(const CommonValue& value) {
  const auto* dict = value.get_if<CommonDict>();
  if (dict == nullptr) return;
  for (const auto& [key, path] : dict->items) {
    const auto* name = std::get_if<std::string>(&key);
    SavedPath found = PathFrom(path);
    if (name != nullptr && !found.empty()) paths_[*name] = {std::move(found)};
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
    const auto* name = pair->front().get_if<std::string>();
    SavedPath found = PathFrom(pair->back());
    if (name != nullptr && !found.empty()) paths_[*name] = {std::move(found)};
  }
}

SavedPaths SavedPaths::Make(const CommonValues& values,
                            const std::function<bool(std::string_view)>& has_tensor) {
  SavedPaths out;
  // Of each path the name; of two structures that differ the one whose name is that path's alone. A
  // rank had it tied where another has it not.
  std::map<SavedPath, std::pair<std::string, bool>> named;
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
      const auto [at, added] = named.try_emplace(leaf.path, found, alone);
      if (!added && alone && !at->second.second) at->second = {found, alone};
    }
    for (const Empty& one : structure.empty) {
      if (empty.insert(one.path).second && !one.path.empty()) out.empty_.push_back(one);
    }
  }
  for (const auto& [path, name] : named) {
    if (!path.empty()) out.paths_[name.first].push_back(path);
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
