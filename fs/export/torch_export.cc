// SPDX-License-Identifier: Apache-2.0
// One file as torch.save writes a state dict; declared in export_plan.h.
// A zip archive: data.pkl, the dict with tensors over storages "0", "1" and so on; data/0, data/1,
// the bytes of these, in the order of the shown keys; and the small entries of torch_text.h. What
// of the dict is nested says saved_paths.h; a checkpoint that does not tell gives one flat dict.
#include <map>
#include <optional>
#include <set>

#include <fmt/core.h>

#include "fs/export/export_plan.h"
#include "fs/formats/torch_text.h"
#include "index/foreign/dcp_objects.h"
#include "index/foreign/value_budget.h"
#include "index/read/saved_paths.h"

namespace tensormount::fs {
namespace {

// Longer paths are keys of the outermost dict, so that no input can exhaust a stack.
constexpr std::size_t kMaxDepth = 64;

// One value of the state dict.
// A tensor, or a common value.
struct StateValue {
  std::string key;                     // As it is shown.
  std::string stored;                  // As the checkpoint has it.
  const CommonValue* value = nullptr;  // Null: a tensor, of which all below is.
  bool encoded = false;                // The value, as the Python package stores it.
  bool ordered = false;                // An OrderedDict, which is empty.
  DType dtype = DType::kU8;
  Dims shape;
  std::uint32_t ordinal = 0;  // In the index.
  std::uint64_t bytes = 0;
  std::uint32_t storage = 0;  // Of data/N in the archive.
};

// A state dict as dicts, lists and tuples within each other.
// A node is a leaf or has nodes below it, never both. Keys are sorted, integers before strings,
// which is what IsList relies on.
struct Tree {
  std::map<CommonKey, Tree> below;
  const StateValue* leaf = nullptr;
  const SavedPaths::Container* container = nullptr;  // What a structure says of it.
  bool number_keys = false;                          // A dict, of which some keys are numbers.
  bool tuple = false;

  // False where something else stands there.
  bool Put(const SavedPath& path, const StateValue& value) {
    Tree* at = this;
    for (const PathStep& step : path) {
      if (at->leaf != nullptr) return false;
      at->number_keys = at->number_keys || step.kind == PathStep::Kind::kNumberKey;
      at->tuple = at->tuple || step.kind == PathStep::Kind::kTupleItem;
      at = &at->below[step.key];
    }
    if (at->leaf != nullptr || !at->below.empty()) return false;
    at->leaf = &value;
    return true;
  }

  // Whether these are the items of a list, of which a few may be missing.
  // Indices that are not negative, and not far more of them than items: gaps become None.
  // Otherwise it is a dict with integers as keys.
  bool IsList() const {
    if (number_keys) return false;
    if (container != nullptr && container->kind != SavedPaths::Container::Kind::kList &&
        container->kind != SavedPaths::Container::Kind::kTuple) {
      return false;
    }
    if (below.empty() || !std::holds_alternative<std::int64_t>(below.rbegin()->first)) return false;
    const std::int64_t last =
        std::get<std::int64_t>(below.rbegin()->first);  // Integers come first.
    return std::get<std::int64_t>(below.begin()->first) >= 0 &&
           (container != nullptr || last < 64 + 4 * static_cast<std::int64_t>(below.size()));
  }
};

void BeginOrderedDict(PickleWriter& pickle) {
  pickle.Global("collections", "OrderedDict");
  pickle.EmptyTuple();
  pickle.Reduce();
}

void PickleTree(PickleWriter& pickle, const Tree& tree);

void PickleDict(PickleWriter& pickle, const Tree& tree) {
  using Kind = SavedPaths::Container::Kind;
  if (tree.container != nullptr && tree.container->kind == Kind::kOrderedDict) {
    BeginOrderedDict(pickle);
  } else {
    pickle.EmptyDict();
  }
  pickle.Mark();
  const auto put = [&](const CommonKey& key, const Tree& below) {
    if (const auto* number = std::get_if<std::int64_t>(&key)) {
      pickle.Int(*number);
    } else {
      pickle.String(std::get<std::string>(key));
    }
    PickleTree(pickle, below);
  };
  // In the order in which they were saved; others, that a map of keys made, behind them.
  std::set<CommonKey> done;
  if (tree.container != nullptr) {
    for (const CommonKey& key : tree.container->order) {
      const auto below = tree.below.find(key);
      if (below != tree.below.end() && done.insert(key).second) put(key, below->second);
    }
  }
  for (const auto& [key, below] : tree.below) {
    if (!done.contains(key)) put(key, below);
  }
  pickle.SetItems();
}

// Recursive; kMaxDepth bounds it.
void PickleTree(PickleWriter& pickle, const Tree& tree) {
  if (tree.leaf != nullptr) {
    const StateValue& leaf = *tree.leaf;
    if (leaf.ordered) {
      BeginOrderedDict(pickle);
    } else if (leaf.value != nullptr && leaf.encoded) {
      (void)PickleEncoded(pickle, *leaf.value);  // That it can PlanTorch has seen.
    } else if (leaf.value != nullptr) {
      pickle.Common(*leaf.value);
    } else {
      PickleTensor(pickle, leaf.dtype, leaf.shape, std::to_string(leaf.storage));
    }
    return;
  }
  if (tree.IsList()) {
    if (!tree.tuple) pickle.EmptyList();
    pickle.Mark();
    std::int64_t next = 0;
    for (const auto& [key, below] : tree.below) {
      for (const std::int64_t index = std::get<std::int64_t>(key); next < index; ++next) {
        pickle.None();
      }
      PickleTree(pickle, below);
      ++next;
    }
    // Items at the end that the format cannot hold.
    for (; tree.container != nullptr && next < tree.container->items; ++next) pickle.None();
    if (tree.tuple) {
      pickle.TupleFromMark();
    } else {
      pickle.Appends();
    }
    return;
  }
  PickleDict(pickle, tree);
}

// A plain value that a checkpoint has as torch.save wrote it, as our writer for DCP stores them.
struct ObjectValue {
  std::string key;     // As it is shown.
  std::string stored;  // As the checkpoint has it.
  CommonValue value;
};
// Bounds, since any object may claim to be one.
constexpr std::size_t kMostObjectValues = 4096;
constexpr std::uint64_t kMostObjectBytes = std::uint64_t{64} << 20;

// Those that are no common values besides; what is opaque has no place in a state dict.
Result<std::vector<ObjectValue>> ValuesOfObjects(
    const CheckpointView& view, const CommonValues& common,
    const std::set<std::string, std::less<>>& tensors) {
  std::vector<ObjectValue> out;
  ValueBudget budget;
  std::uint64_t read = 0;
  const std::vector<ObjectRecord>& parts = view.shown().objects.parts();
  for (std::uint32_t n = 0; n < parts.size() && out.size() < kMostObjectValues; ++n) {
    const ObjectRecord& part = parts[n];
    const std::string_view renamed = view.shown().objects.stored_key(n);
    const std::string stored(renamed.empty() ? std::string_view(part.key) : renamed);
    if (part.grid.rank() > 0 || part.length > kMaxObjectValue || common.contains(stored) ||
        tensors.contains(stored)) {
      continue;
    }
    read += part.length;
    if (read > kMostObjectBytes) break;
    std::string bytes(static_cast<std::size_t>(part.length), '\0');
    // One that cannot be read is left out as those that are opaque.
    if (!view.data().ReadObject(n, 0, bytes.data(), bytes.size()).ok()) continue;
    std::optional<CommonValue> value = ValueOfObject(bytes, part.key, budget);
    if (value.has_value()) out.push_back({part.key, stored, std::move(*value)});
  }
  return out;
}

// Nested as `paths` say; where they contradict each other, everything by its key.
Result<Tree> MakeTree(const std::vector<StateValue>& all, const std::vector<StateValue>& empty,
                      const SavedPaths& paths, ExportPlan& plan) {
  if (paths.nested()) {
    Tree nested;
    bool fits = true;
    for (const StateValue& value : all) {
      std::vector<SavedPath> places =
          value.value == nullptr ? paths.Of(value.key, value.stored)
                                 : std::vector<SavedPath>{paths.OfValue(value.key, value.stored)};
      for (SavedPath& path : places) {
        if (path.size() > kMaxDepth) path = {{value.key}};
        fits = fits && nested.Put(path, value);
      }
    }
    for (std::size_t i = 0; i < empty.size(); ++i) {
      // Another rank may have had something in it.
      if (paths.empty()[i].path.size() <= kMaxDepth)
        (void)nested.Put(paths.empty()[i].path, empty[i]);
    }
    for (const auto& [path, container] : paths.containers()) {
      Tree* at = &nested;
      for (const PathStep& step : path) {
        const auto below = at->below.find(step.key);
        at = below == at->below.end() ? nullptr : &below->second;
        if (at == nullptr) break;
      }
      if (at != nullptr) at->container = &container;
    }
    // The outermost must be a dict: it is the state dict.
    if (fits && !nested.IsList()) return nested;
    plan.notes.emplace_back("its values' paths contradict each other: a flat dict");
  }
  Tree flat;
  for (const StateValue& value : all) {
    if (!flat.Put({{value.key}}, value)) {
      return Status(Code::kUnsupported,
                    fmt::format("torch has one dict for tensors and common values: there are two "
                                "of {}",
                                value.key));
    }
  }
  return flat;
}

}  // namespace

Status PlanTorch(const CheckpointView& view, ExportPlan& plan) {
  const ShownCheckpoint& shown = view.shown();
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState common, shown.opened.index().Common());
  std::set<std::string, std::less<>> keys;
  std::vector<StateValue> all;  // Tensors first: number n has storage n.
  TENSORMOUNT_RETURN_IF_ERROR(shown.tensors.ForEachEntry(
      0, shown.tensors.count(), [&](std::uint32_t n, const TensorEntry& tensor) -> Status {
        const TensorMeta& meta = tensor.meta;
        TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored, StoredTensorKey(shown, n, meta.key()));
        keys.insert(stored);
        all.push_back({.key = meta.key(),
                       .stored = std::move(stored),
                       .value = nullptr,
                       .dtype = meta.dtype(),
                       .shape = TorchDims(meta.dtype(), meta.shape()),
                       .ordinal = tensor.ordinal,
                       .bytes = meta.bytes(),
                       .storage = static_cast<std::uint32_t>(all.size())});
        return {};
      }));
  const std::size_t tensors = all.size();
  const SavedPaths paths =
      SavedPaths::Make(common.values, [&](std::string_view key) { return keys.contains(key); });
  std::vector<std::string> lost;
  for (const auto& [name, value] : common.values) {
    if (SavedPaths::IsInternal(name)) continue;
    const bool encoded = paths.IsEncoded(name);
    if (encoded && !CanPickleEncoded(value)) {
      lost.push_back(name);
      continue;
    }
    all.push_back({.key = name, .stored = name, .value = &value, .encoded = encoded});
  }
  NoteLost("torch cannot hold the values", lost, plan);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectValue> objects,
                               ValuesOfObjects(view, common.values, keys));
  for (const ObjectValue& object : objects) {
    all.push_back({.key = object.key, .stored = object.stored, .value = &object.value});
    plan.objects_as_values.insert(object.key);
  }
  std::vector<StateValue> empty;
  for (const SavedPaths::Empty& one : paths.empty())
    empty.push_back({.value = &one.value, .ordered = one.ordered});
  // From here on neither must change: the tree points into them.
  TENSORMOUNT_ASSIGN_OR_RETURN(const Tree tree, MakeTree(all, empty, paths, plan));
  PickleWriter pickle(2);
  PickleTree(pickle, tree);

  FileBuilder builder;
  ZipWriter zip;
  std::string text;
  // What the archive has as text so far goes into the file, before bytes of a tensor follow.
  const auto flush = [&] {
    builder.Add(text);
    text.clear();
  };
  zip.Add("data.pkl", pickle.Finish(), text);
  AddEntriesBeforeData(zip, text);
  for (std::size_t n = 0; n < tensors; ++n) {
    zip.Begin(fmt::format("data/{}", n), all[n].bytes, text);
    flush();
    builder.AddTensor(all[n].ordinal, 0, all[n].bytes);
    zip.End(text);
  }
  AddEntriesAfterData(zip, text);
  zip.Finish(text);
  flush();
  AddMadeFile(plan, view, "", builder.Finish(), zip.holes());
  return {};
}

}  // namespace tensormount::fs
