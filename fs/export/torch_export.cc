// SPDX-License-Identifier: Apache-2.0
// One file as torch.save writes a state dict; declared in export_plan.h.
// The file is a zip archive with: data.pkl, the dict with tensors over storages "0", "1" and so on;
// data/0, data/1 and so on, the bytes of the tensors, in the order of the shown keys; and the small
// entries of torch_text.h. The dict is nested by the recorded paths (saved_paths.h); without these
// it is flat.
#include <algorithm>
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

// Longest path in the dict. A value with a longer path becomes a key of the outermost dict, so that
// no input can exhaust the stack.
constexpr std::size_t kMaxDepth = 64;

// One value of the state dict: a tensor or a plain value (a common value or an object).
struct StateValue {
  std::string key;     // Shown key.
  std::string stored;  // Key in the checkpoint.
  // The plain value; null for a tensor, which the fields below describe.
  const CommonValue* value = nullptr;
  bool encoded = false;  // The value is in the encoding of the Python package.
  bool ordered = false;  // An empty OrderedDict.
  DType dtype = DType::kU8;
  Dims shape;
  std::uint32_t ordinal = 0;  // The tensor's number in the index.
  std::uint64_t bytes = 0;
  std::uint32_t storage = 0;  // Number N of data/N in the archive.
};

// A state dict as nested dicts, lists and tuples: a Tree is a leaf or has children, never both.
// Keys are sorted, integers before strings; IsList relies on this order.
struct Tree {
  std::map<CommonKey, Tree> below;
  const StateValue* leaf = nullptr;
  const SavedPaths::Container* container = nullptr;  // The recorded container, if any.
  bool number_keys = false;                          // A dict with some integer keys.
  bool tuple = false;

  // Adds a leaf. False if a leaf is on the path already, or other leaves are below it.
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

  // Whether the children are the items of a list, maybe with a few gaps, which become None: all
  // keys are integers, none is negative, and without a recorded container the last is not much
  // larger than the number of children.
  bool IsList() const {
    if (number_keys) return false;
    if (container != nullptr && container->kind != SavedPaths::Container::Kind::kList &&
        container->kind != SavedPaths::Container::Kind::kTuple) {
      return false;
    }
    if (below.empty() || !std::holds_alternative<std::int64_t>(below.rbegin()->first)) return false;
    const std::int64_t last =
        std::get<std::int64_t>(below.rbegin()->first);  // Integers sort before strings.
    return std::get<std::int64_t>(below.begin()->first) >= 0 &&
           (container != nullptr || last < 64 + 4 * static_cast<std::int64_t>(below.size()));
  }
};

void BeginOrderedDict(PickleWriter& pickle) {
  pickle.Global("collections", "OrderedDict");
  pickle.EmptyTuple();
  pickle.Reduce();
}

void PickleTree(PickleWriter& pickle, const Tree& tree, const SavedPaths& paths);

void PickleDict(PickleWriter& pickle, const Tree& tree, const SavedPaths& paths) {
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
    } else if (const CommonValue* other = paths.OtherKey(std::get<std::string>(key))) {
      (void)PickleEncoded(pickle, *other);  // Cannot fail: MakeTree checked the key.
    } else {
      pickle.String(std::get<std::string>(key));
    }
    PickleTree(pickle, below, paths);
  };
  // Keys are written in the order in which they were saved; keys that a key map made come last.
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

// Recursive, to a depth of about kMaxDepth.
void PickleTree(PickleWriter& pickle, const Tree& tree, const SavedPaths& paths) {
  if (tree.leaf != nullptr) {
    const StateValue& leaf = *tree.leaf;
    if (leaf.ordered) {
      BeginOrderedDict(pickle);
    } else if (leaf.value != nullptr && leaf.encoded) {
      (void)PickleEncoded(pickle, *leaf.value);  // Cannot fail: PlanTorch checked the value.
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
      PickleTree(pickle, below, paths);
      ++next;
    }
    // None stands for items at the end that are not in the export.
    for (; tree.container != nullptr && next < tree.container->items; ++next) pickle.None();
    if (tree.tuple) {
      pickle.TupleFromMark();
    } else {
      pickle.Appends();
    }
    return;
  }
  PickleDict(pickle, tree, paths);
}

// A plain value that is stored as an object written by torch.save, as our DCP writer stores plain
// values.
struct ObjectValue {
  std::string key;     // Shown key.
  std::string stored;  // Key in the checkpoint.
  CommonValue value;
};
// Largest number of plain values from objects, and largest total size of the objects that are
// tried.
constexpr std::size_t kMostObjectValues = 4096;
constexpr std::uint64_t kMostObjectBytes = std::uint64_t{64} << 20;

// Objects that are plain values, except those that are also common values. Other objects cannot be
// in a state dict.
Result<std::vector<ObjectValue>> ValuesOfObjects(
    const CheckpointView& view, const CommonValues& common,
    const std::set<std::string, std::less<>>& tensors) {
  std::vector<ObjectValue> out;
  ValueBudget budget;
  std::uint64_t read = 0;
  const std::vector<ObjectRecord>& parts = view.shown().objects.parts();
  for (std::uint32_t n = 0; n < parts.size() && out.size() < kMostObjectValues; ++n) {
    const ObjectRecord& part = parts[n];
    const std::string stored = view.opened().StoredObjectKey(part.key);
    if (part.grid.rank() > 0 || part.length > kMaxObjectValue || common.contains(stored) ||
        tensors.contains(stored)) {
      continue;
    }
    read += part.length;
    if (read > kMostObjectBytes) break;
    std::string bytes(static_cast<std::size_t>(part.length), '\0');
    // An object that cannot be read is left out, like opaque objects.
    if (!view.data().ReadObject(n, 0, bytes.data(), bytes.size()).ok()) continue;
    std::optional<CommonValue> value = ValueOfObject(bytes, part.key, budget);
    if (value.has_value()) out.push_back({part.key, stored, std::move(*value)});
  }
  return out;
}

// Whether a pickle can have an encoded value as the key of a dict. Lists and dicts have no hash.
bool CanPickleKey(const CommonValue& key) {
  if (const auto* tuple = key.get_if<CommonTuple>()) {
    return std::ranges::all_of(tuple->items, CanPickleKey);
  }
  if (const auto* tagged = key.get_if<CommonDict>()) {
    return CanPickleEncoded(key) && tagged->Find(std::string("dict")) == nullptr &&
           tagged->Find(std::string("odict")) == nullptr &&
           tagged->Find(std::string("counter")) == nullptr;
  }
  return key.get_if<CommonList>() == nullptr;
}

// Whether a pickle can hold all keys on the path.
bool CanPickleKeys(const SavedPath& path, const SavedPaths& paths) {
  return std::ranges::all_of(path, [&](const PathStep& step) {
    if (step.kind != PathStep::Kind::kOtherKey) return true;
    const CommonValue* key = paths.OtherKey(std::get<std::string>(step.key));
    return key != nullptr && CanPickleKey(*key);
  });
}

// Makes the state dict, nested by `paths`. If paths contradict each other, it is flat, by key.
Result<Tree> MakeTree(const std::vector<StateValue>& all, const std::vector<StateValue>& empty,
                      const SavedPaths& paths, ExportPlan& plan) {
  if (paths.nested()) {
    Tree nested;
    bool fits = true;
    std::vector<std::string> moved;
    for (const StateValue& value : all) {
      std::vector<SavedPath> places =
          value.value == nullptr ? paths.Of(value.key, value.stored)
                                 : std::vector<SavedPath>{paths.OfValue(value.key, value.stored)};
      for (SavedPath& path : places) {
        if (!CanPickleKeys(path, paths)) {
          path = {{value.key}};
          moved.push_back(value.key);
        }
        if (path.size() > kMaxDepth) path = {{value.key}};
        fits = fits && nested.Put(path, value);
      }
    }
    for (std::size_t i = 0; i < empty.size(); ++i) {
      // If another rank had values in this container, Put fails, and the values are what counts.
      const SavedPath& path = paths.empty()[i].path;
      if (path.size() <= kMaxDepth && CanPickleKeys(path, paths))
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
    // The outermost container must be a dict: the state dict.
    if (fits && !nested.IsList()) {
      NoteUnsupportedValues(
          "torch cannot store a key of the dicts around the values, which are at the root", moved,
          plan);
      return nested;
    }
    plan.notes.emplace_back(
        "exported as a flat dict: a value has the path of a dict or list that holds other values");
  }
  Tree flat;
  for (const StateValue& value : all) {
    if (!flat.Put({{value.key}}, value)) {
      return Status(
          Code::kUnsupported,
          fmt::format("torch stores tensors and common values in one dict: {} is used twice",
                      value.key));
    }
  }
  return flat;
}

}  // namespace

Status PlanTorch(const CheckpointView& view, ExportPlan& plan) {
  const ShownCheckpoint& shown = view.shown();
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState common, shown.opened.stored_index().Common());
  std::set<std::string, std::less<>> keys;
  std::vector<StateValue> all;  // Tensors come first: tensor n has storage n.
  TENSORMOUNT_RETURN_IF_ERROR(shown.tensors.ForEachEntry(
      0, shown.tensors.count(), [&](std::uint32_t n, const TensorEntry& tensor) -> Status {
        const TensorMeta& meta = tensor.meta;
        TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored, shown.StoredTensorKey(n, meta.key()));
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
  const SavedPaths paths = SavedPaths::Make(
      common.values, [&](std::string_view key) { return keys.contains(key); },
      SavedPaths::OtherKeys::kInPlace);
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
  NoteUnsupportedValues("torch cannot store the values", lost, plan);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectValue> objects,
                               ValuesOfObjects(view, common.values, keys));
  for (const ObjectValue& object : objects) {
    all.push_back({.key = object.key, .stored = object.stored, .value = &object.value});
    plan.objects_as_values.insert(object.key);
  }
  std::vector<StateValue> empty;
  for (const SavedPaths::Empty& one : paths.empty())
    empty.push_back({.value = &one.value, .ordered = one.ordered});
  // From here on `all` and `empty` must not change, because the tree points into them.
  TENSORMOUNT_ASSIGN_OR_RETURN(const Tree tree, MakeTree(all, empty, paths, plan));
  PickleWriter pickle(2);
  PickleTree(pickle, tree, paths);

  FileBuilder builder;
  ZipWriter zip;
  std::string text;
  // Moves the text of the archive so far to the file. Called before the bytes of a tensor.
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
