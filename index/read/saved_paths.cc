// SPDX-License-Identifier: Apache-2.0
// Reads the three forms in which a checkpoint records how its state dict was nested.
#include "index/read/saved_paths.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

namespace tensormount {
namespace {

using StepKind = PathStep::Kind;

// Largest depth of nesting, so that no input can exhaust the stack.
constexpr std::size_t kMostNested = 64;
// Limit of the size of all paths of a structure. Each leaf repeats the keys above it, so a short
// input can expand to very long paths.
constexpr std::size_t kMostPathBytes = std::size_t{64} << 20;
constexpr std::size_t kMostKeyBytes = 2048;
// A list may lack items that were left out. Its last position must be less than kListGaps +
// kListGapsPerItem times the number of its items.
constexpr std::int64_t kListGaps = 64;
constexpr std::int64_t kListGapsPerItem = 4;

// Converts a sequence of names and positions. Empty if `value` is anything else.
SavedPath PathFrom(const CommonValue& value) {
  const std::vector<CommonValue>* items = ListItems(value);
  SavedPath path;
  if (items == nullptr || items->size() > kMostNested) return path;
  for (const CommonValue& item : *items) {
    const auto* one = item.get_if<CommonList>();
    const bool number_key = one != nullptr && one->items.size() == 1;
    if (const auto* number = (number_key ? one->items.front() : item).get_if<std::int64_t>()) {
      if (!number_key && *number < 0) return {};
      path.push_back({*number, number_key ? StepKind::kNumberKey : StepKind::kListItem});
    } else if (const auto* name = item.get_if<std::string>()) {
      path.push_back({*name, StepKind::kName});
    } else {
      return {};
    }
  }
  return path;
}

// Marks in `bad` the paths that no nested state dict can have. Paths [begin, end) are sorted and
// equal in the first `depth` steps. The recursion depth is bounded by the length of the paths.
void FindImpossible(const std::vector<const SavedPath*>& paths, std::size_t begin, std::size_t end,
                    std::size_t depth, std::vector<bool>& bad) {
  // A path is bad if it is the beginning of another path. Of equal paths only the last can be good.
  while (begin + 1 < end && paths[begin]->size() == depth) bad[begin++] = true;
  if (begin == end || paths[begin]->size() == depth) return;
  std::size_t items = 0;
  bool names = false;
  std::int64_t last = -1;
  std::vector<std::pair<std::size_t, std::size_t>> steps;
  for (std::size_t at = begin; at < end;) {
    const PathStep& step = (*paths[at])[depth];
    std::size_t next = at;
    while (next < end && (*paths[next])[depth] == step) ++next;
    const bool item = step.kind == StepKind::kListItem;
    names = names || !item;
    if (item) {
      ++items;
      last = std::max(last, std::get<std::int64_t>(step.key));
    }
    steps.emplace_back(at, next);
    at = next;
  }
  const bool list =
      !names && last < kListGaps + kListGapsPerItem * static_cast<std::int64_t>(items);
  for (const auto& [from, to] : steps) {
    if (!list && (*paths[from])[depth].kind == StepKind::kListItem) {
      std::fill(bad.begin() + static_cast<std::ptrdiff_t>(from),
                bad.begin() + static_cast<std::ptrdiff_t>(to), true);
    } else {
      FindImpossible(paths, from, to, depth + 1, bad);
    }
  }
}

// Python's repr of a float.
std::string ReprOf(double number) {
  if (std::isnan(number)) return "nan";
  std::array<char, 64> text;
  const double size = std::abs(number);
  const bool fixed = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number,
                                 fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string found(text.data(), end.ptr);
  if (fixed && found.find('.') == std::string::npos) found += ".0";
  return found;
}

// The text of a dict key that is neither text nor an integer in a dotted name, as the Python
// package makes it (step_text in _tree.py).
std::string TextOfKey(const CommonValue& key) {
  if (key.get_if<CommonNone>() != nullptr) return "None";
  if (const bool* flag = key.get_if<bool>()) return *flag ? "True" : "False";
  if (const double* number = key.get_if<double>()) return ReprOf(*number);
  // An integer of more than 64 bits is stored as {"int": "0x..."}.
  const auto* tagged = key.get_if<CommonDict>();
  const CommonValue* digits = tagged != nullptr ? tagged->Find(std::string("int")) : nullptr;
  const auto* text = digits != nullptr ? digits->get_if<std::string>() : nullptr;
  return text != nullptr ? *text : CommonToJson(key);
}

// Reads the structure of a state dict that the Python package stored (tensormount.tree), entry by
// entry.
class StructureReader {
 public:
  using OtherKeys = SavedPaths::OtherKeys;
  explicit StructureReader(const CommonValue& structure, OtherKeys keep = OtherKeys::kAtRoot)
      : keep_(keep) {
    const auto* dict = structure.get_if<CommonDict>();
    const CommonValue* nodes = dict != nullptr ? dict->Find(std::string("nodes")) : nullptr;
    const CommonValue* version = dict != nullptr ? dict->Find(std::string("version")) : nullptr;
    if (nodes == nullptr || version == nullptr || !(*version == CommonValue(1))) return;
    nodes_ = ListItems(*nodes);
    if (nodes_ == nullptr || !Read() || next_ != nodes_->size()) {
      leaves.clear();
      empty.clear();
      containers.clear();
      other_keys.clear();
    }
  }

  std::vector<StructureLeaf> leaves;
  std::vector<SavedPaths::Empty> empty;
  std::map<SavedPath, SavedPaths::Container> containers;
  std::map<std::string, CommonValue> other_keys;

 private:
  using Container = SavedPaths::Container;
  // Adds the container at path_. Returns null below a key that is neither text nor an integer.
  Container* AddContainer(Container::Kind kind, std::int64_t items) {
    if (odd_ > 0) return nullptr;
    bytes_ += path_bytes_ + path_.size() * sizeof(PathStep);
    return &containers.insert_or_assign(path_, Container{.kind = kind, .order = {}, .items = items})
                .first->second;
  }

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
      // Per-rank values have no single position in an export, so they are skipped.
      if (*word == "rank") return true;
      bytes_ += path_bytes_ + path_.size() * sizeof(PathStep);
      if (bytes_ > kMostPathBytes) return false;
      std::string found = name != nullptr ? *name : Dotted(path_);
      // A leaf below a key that is neither text nor an integer gets a path of one step, its name.
      SavedPath path = odd_ > 0 ? SavedPath{{found, StepKind::kName}} : path_;
      leaves.push_back({std::move(path), std::move(found), *word == "tensor"});
      return true;
    }
    if (more == nullptr) return false;
    if (*word == "dict" || *word == "odict") return ReadDict(*more, *word == "odict");
    if (*word == "list" || *word == "tuple") return ReadList(*more, *word == "tuple");
    return false;
  }

  bool ReadDict(const CommonValue& keys, bool ordered) {
    const auto* list = keys.get_if<CommonList>();
    if (list == nullptr) return false;
    if (list->items.empty() && odd_ == 0) empty.push_back({path_, CommonDict{}, ordered});
    Container* const container =
        AddContainer(ordered ? Container::Kind::kOrderedDict : Container::Kind::kDict, 0);
    if (bytes_ > kMostPathBytes) return false;
    for (const CommonValue& key : list->items) {
      const auto* name = key.get_if<std::string>();
      const auto* number = key.get_if<std::int64_t>();
      if (name != nullptr && name->size() > kMostKeyBytes) return false;
      // None, bool, float and tuple keys, which never occur in paths of torch's planners.
      const bool other = name == nullptr && number == nullptr;
      const bool odd = other && keep_ == OtherKeys::kAtRoot;
      std::string step;
      if (other && !odd) {
        step = std::string(1, '\0') + TextOfKey(key);
        if (step.size() > kMostKeyBytes) return false;
        other_keys.try_emplace(step, key);
      }
      const std::size_t size = name != nullptr ? name->size() : step.size() + 8;
      if (number != nullptr) {
        path_.push_back({*number, StepKind::kNumberKey});
      } else if (!step.empty()) {
        path_.push_back({step, StepKind::kOtherKey});
      } else {
        path_.push_back({name != nullptr ? *name : std::string("?"), StepKind::kName});
      }
      path_bytes_ += size;
      bytes_ += size;
      if (container != nullptr && !odd) container->order.push_back(path_.back().key);
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
    (void)AddContainer(tuple ? Container::Kind::kTuple : Container::Kind::kList, *items);
    if (bytes_ > kMostPathBytes) return false;
    for (std::int64_t i = 0; i < *items; ++i) {
      path_.push_back({i, tuple ? StepKind::kTupleItem : StepKind::kListItem});
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
  OtherKeys keep_;
  int odd_ = 0;  // Number of keys in the path that are neither text nor integers.
};

// The pairs in {"dict": [[KEY, PATH], ...]}; null for any other value.
const std::vector<CommonValue>* PairsOf(const CommonValue& mappings) {
  const auto* dict = mappings.get_if<CommonDict>();
  const CommonValue* pairs = dict != nullptr ? dict->Find(std::string("dict")) : nullptr;
  return pairs != nullptr ? ListItems(*pairs) : nullptr;
}

}  // namespace

std::vector<StructureLeaf> StructureLeaves(const CommonValue& structure) {
  return std::move(StructureReader(structure).leaves);
}

std::vector<std::string> MappedKeys(const CommonValue& mappings) {
  std::vector<std::string> keys;
  const std::vector<CommonValue>* items = PairsOf(mappings);
  if (items == nullptr) return keys;
  for (const CommonValue& item : *items) {
    const std::vector<CommonValue>* pair = ListItems(item);
    const auto* key =
        pair != nullptr && !pair->empty() ? pair->front().get_if<std::string>() : nullptr;
    if (key != nullptr) keys.push_back(*key);
  }
  return keys;
}

std::string Dotted(const SavedPath& path) {
  std::string text;
  for (const PathStep& step : path) {
    if (!text.empty()) text += '.';
    const auto* name = std::get_if<std::string>(&step.key);
    text += name == nullptr                    ? std::to_string(std::get<std::int64_t>(step.key))
            : step.kind == StepKind::kOtherKey ? name->substr(1)
                                               : *name;
  }
  return text;
}

const std::vector<CommonValue>* ListItems(const CommonValue& value) {
  if (const auto* tuple = value.get_if<CommonTuple>()) return &tuple->items;
  if (const auto* list = value.get_if<CommonList>()) return &list->items;
  return nullptr;
}

bool SavedPaths::IsInternal(std::string_view name) {
  return name == kPlannerData || name == kStructurePrefix.substr(0, kStructurePrefix.size() - 1) ||
         name.starts_with(kMappingsPrefix) || name.starts_with(kStructurePrefix);
}

// Adds a path of kPlannerData or of mappings. `name` is null if the key is not text.
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

void SavedPaths::DropImpossible() {
  std::vector<std::pair<const SavedPath*, const std::string*>> named;
  for (const auto& [name, path] : value_paths_) named.emplace_back(&path, &name);
  std::ranges::sort(named, [](const auto& a, const auto& b) { return *a.first < *b.first; });
  std::vector<const SavedPath*> paths;
  for (const auto& [path, name] : named) paths.push_back(path);
  std::vector<bool> bad(paths.size(), false);
  FindImpossible(paths, 0, paths.size(), 0, bad);
  for (std::size_t i = 0; i < named.size(); ++i) {
    if (!bad[i]) continue;
    const std::string name = *named[i].second;
    paths_.erase(name);
    value_paths_.erase(name);
  }
}

void SavedPaths::AddMappings(const CommonValue& value) {
  const std::vector<CommonValue>* items = PairsOf(value);
  if (items == nullptr) return;
  for (const CommonValue& item : *items) {
    const std::vector<CommonValue>* pair = ListItems(item);
    if (pair == nullptr || pair->size() != 2) continue;
    AddPath(pair->front().get_if<std::string>(), pair->back());
  }
}

SavedPaths SavedPaths::Make(const CommonValues& values,
                            const std::function<bool(std::string_view)>& has_tensor,
                            OtherKeys other_keys) {
  SavedPaths out;
  // The stored name of each path. If the structures of two ranks differ (tied on one, separate on
  // the other), the name that belongs only to this path is used.
  struct Named {
    std::string name;
    bool tensor = false;
    bool alone = false;
  };
  std::map<SavedPath, Named> named;
  std::set<SavedPath> empty;
  for (const auto& [name, value] : values) {
    if (name == kPlannerData) out.AddPlannerData(value);
    if (name.starts_with(kMappingsPrefix)) out.AddMappings(value);
  }
  out.DropImpossible();
  for (const auto& [name, value] : values) {
    if (!name.starts_with(kStructurePrefix)) continue;
    StructureReader structure(value, other_keys);
    out.other_keys_.merge(structure.other_keys);
    for (auto& [path, container] : structure.containers) {
      const auto at = out.containers_.find(path);
      if (at == out.containers_.end()) {
        out.containers_.emplace(path, std::move(container));
        continue;
      }
      Container& first = at->second;
      first.items = std::max(first.items, container.items);
      if (first.order == container.order) continue;
      const std::set<CommonKey> known(first.order.begin(), first.order.end());
      std::ranges::copy_if(container.order, std::back_inserter(first.order),
                           [&](const CommonKey& key) { return !known.contains(key); });
    }
    std::map<std::string_view, int> count;
    for (const StructureLeaf& leaf : structure.leaves) count[leaf.name] += leaf.tensor ? 1 : 0;
    for (const StructureLeaf& leaf : structure.leaves) {
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
  // Stored paths apply to stored keys. A key that a key map renamed is its own path.
  if (shown == stored) {
    const auto it = paths_.find(shown);
    if (it != paths_.end()) return it->second;
  }
  return {{{std::string(shown), StepKind::kName}}};
}

SavedPath SavedPaths::OfValue(std::string_view shown, std::string_view stored) const {
  if (shown == stored) {
    const auto it = value_paths_.find(shown);
    if (it != value_paths_.end()) return it->second;
  }
  return {{std::string(shown), StepKind::kName}};
}

std::map<std::string, std::vector<std::string>> SavedPaths::TiedPaths() const {
  std::map<std::string, std::vector<std::string>> tied;
  for (const auto& [key, paths] : paths_) {
    if (paths.size() < 2) continue;
    for (const SavedPath& path : paths) {
      std::string name = Dotted(path);
      if (name != key) tied[key].push_back(std::move(name));
    }
  }
  return tied;
}

std::vector<CommonKey> SavedPaths::ToPlannerPath(const SavedPath& path) {
  std::vector<CommonKey> keys;
  for (const PathStep& step : path) {
    keys.push_back(step.kind == PathStep::Kind::kNumberKey
                       ? CommonKey(std::to_string(std::get<std::int64_t>(step.key)))
                       : step.key);
  }
  return keys;
}

}  // namespace tensormount
