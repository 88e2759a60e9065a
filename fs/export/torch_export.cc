// SPDX-License-Identifier: Apache-2.0
// One file as torch.save writes a state dict; declared in export_plan.h.
#include <map>

#include <fmt/core.h>

#include "fs/export/export_plan.h"
#include "fs/export/torch_text.h"

namespace tensormount::fs {
namespace {

// Longer paths are keys of the outermost dict, so that no input can exhaust a stack.
constexpr std::size_t kMaxDepth = 64;

struct Leaf {
  const CommonValue* value = nullptr;  // Null: a tensor.
  DType dtype = DType::kU8;
  Dims shape;
  std::uint32_t storage = 0;
};

// A state dict as dicts and lists within each other.
struct Tree {
  std::map<CommonKey, Tree> below;
  const Leaf* leaf = nullptr;

  // False where something else stands there.
  bool Put(const std::vector<CommonKey>& path, const Leaf& value) {
    Tree* at = this;
    for (const CommonKey& part : path) {
      if (at->leaf != nullptr) return false;
      at = &at->below[part];
    }
    if (at->leaf != nullptr || !at->below.empty()) return false;
    at->leaf = &value;
    return true;
  }

  // Whether these are the items of a list, of which a few may be missing.
  bool IsList() const {
    if (below.empty() || !std::holds_alternative<std::int64_t>(below.rbegin()->first)) return false;
    const std::int64_t last =
        std::get<std::int64_t>(below.rbegin()->first);  // Integers come first.
    return std::get<std::int64_t>(below.begin()->first) >= 0 &&
           last < 64 + 4 * static_cast<std::int64_t>(below.size());
  }
};

void PickleTree(PickleWriter& pickle, const Tree& tree) {
  if (tree.leaf != nullptr) {
    const Leaf& leaf = *tree.leaf;
    if (leaf.value != nullptr) {
      pickle.Common(*leaf.value);
    } else {
      PickleTensor(pickle, leaf.dtype, leaf.shape, std::to_string(leaf.storage));
    }
    return;
  }
  if (tree.IsList()) {
    pickle.EmptyList();
    pickle.Mark();
    std::int64_t next = 0;
    for (const auto& [key, below] : tree.below) {
      for (const std::int64_t index = std::get<std::int64_t>(key); next < index; ++next) {
        pickle.None();
      }
      PickleTree(pickle, below);
      ++next;
    }
    pickle.Appends();
    return;
  }
  pickle.EmptyDict();
  pickle.Mark();
  for (const auto& [key, below] : tree.below) {
    if (const auto* number = std::get_if<std::int64_t>(&key)) {
      pickle.Int(*number);
    } else {
      pickle.String(std::get<std::string>(key));
    }
    PickleTree(pickle, below);
  }
  pickle.SetItems();
}

struct Named {
  std::string key;
  std::string stored;
  Leaf leaf;
};

// Nested as `paths` say; where they contradict each other, everything by its key.
Result<Tree> MakeTree(const std::vector<Named>& all, const PlannerPaths& paths, ExportPlan& plan) {
  if (paths.nested()) {
    Tree nested;
    bool fits = true;
    for (const Named& named : all) {
      std::vector<CommonKey> path = paths.PathOf(named.key, named.stored);
      if (path.size() > kMaxDepth) path = {CommonKey(named.key)};
      fits = fits && nested.Put(path, named.leaf);
    }
    if (fits && !nested.IsList()) return nested;
    plan.notes.emplace_back("the paths of its planner_data contradict each other: a flat dict");
  }
  Tree flat;
  for (const Named& named : all) {
    if (!flat.Put({CommonKey(named.key)}, named.leaf)) {
      return Status(Code::kUnsupported,
                    fmt::format("torch has one dict for tensors and common values: there are two "
                                "of {}",
                                named.key));
    }
  }
  return flat;
}

}  // namespace

Status PlanTorch(const CheckpointView& view, ExportPlan& plan) {
  const ShownCheckpoint& shown = view.shown();
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState common, shown.opened.index().Common());
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannerPaths paths, PlannerPaths::Make(common.values));
  std::vector<Named> all;
  struct Storage {
    std::uint32_t ordinal = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Storage> storages;
  TENSORMOUNT_RETURN_IF_ERROR(shown.tensors.ForEachEntry(
      0, shown.tensors.count(), [&](std::uint32_t n, const TensorEntry& tensor) -> Status {
        const TensorMeta& meta = tensor.meta;
        TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored, StoredTensorKey(shown, n, meta.key()));
        all.push_back({.key = meta.key(),
                       .stored = std::move(stored),
                       .leaf = {.value = nullptr,
                                .dtype = meta.dtype(),
                                .shape = meta.shape(),
                                .storage = static_cast<std::uint32_t>(storages.size())}});
        storages.push_back({.ordinal = tensor.ordinal, .bytes = meta.bytes()});
        return {};
      }));
  for (const auto& [name, value] : common.values) {
    if (name == kPlannerData) continue;
    all.push_back({.key = name, .stored = name, .leaf = {}});
    all.back().leaf.value = &value;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Tree tree, MakeTree(all, paths, plan));
  PickleWriter pickle(2);
  PickleTree(pickle, tree);

  FileBuilder builder;
  ZipWriter zip;
  std::string text;
  const auto flush = [&] {
    builder.Add(text);
    text.clear();
  };
  zip.Add("data.pkl", pickle.Finish(), text);
  AddEntriesBeforeData(zip, text);
  for (std::size_t n = 0; n < storages.size(); ++n) {
    zip.Begin(fmt::format("data/{}", n), storages[n].bytes, text);
    flush();
    builder.AddTensor(storages[n].ordinal, 0, storages[n].bytes);
    zip.End(text);
  }
  AddEntriesAfterData(zip, text);
  zip.Finish(text);
  flush();
  AddMadeFile(plan, view, "", builder.Finish(), zip.holes());
  return {};
}

}  // namespace tensormount::fs
