// SPDX-License-Identifier: Apache-2.0
// Walks over nested dicts and lists of tensors, objects and values: merge, extract, diff, rename.
// CheckDepth bounds the recursion, because a tree may come from a checkpoint.
#include "examples/models/tree.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "examples/models/tree_walk.h"

namespace tensormount::examples {
namespace {

template <typename Tree, typename Fn>
Status Walk(Tree& tree, TreePath& path, const Fn& fn) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckDepth(path));
  if (tree.kind() == StateTree::Kind::kNothing) return Status();
  if (!tree.is_container()) return AtPath(fn(path, tree), path);
  return ForEachChild(tree, [&](const TreeStep& step, auto& child) {
    path.push_back(step);
    const Status status = Walk(child, path, fn);
    path.pop_back();
    return status;
  });
}

Status Merge(StateTree& a, StateTree& b, TreePath& path) {
  using Kind = StateTree::Kind;
  TENSORMOUNT_RETURN_IF_ERROR(CheckDepth(path));
  if (b.kind() == Kind::kNothing) return Status();
  if (a.kind() == Kind::kNothing) {
    a = std::move(b);
    return Status();
  }
  const auto conflict = [&](const std::string& why) {
    return AtPath(Status(Code::kInvalidArgument, why), path);
  };
  if (a.kind() != b.kind() || !a.is_container()) {
    return conflict("cannot merge " + TypeText(a) + " and " + TypeText(b));
  }
  const auto child = [&path](const TreeStep& step, StateTree& into, StateTree& from) {
    path.push_back(step);
    const Status status = Merge(into, from, path);
    path.pop_back();
    return status;
  };
  if (auto* dict = a.get_if<TreeDict>()) {
    for (auto& [key, value] : b.get_if<TreeDict>()->items) {
      const auto [at, added] = dict->items.try_emplace(key, std::move(value));
      if (added) continue;
      TENSORMOUNT_RETURN_IF_ERROR(child({TreeStep::Kind::kKey, key}, at->second, value));
    }
    return Status();
  }
  const bool list = a.kind() == Kind::kList;
  auto& into = list ? a.get_if<TreeList>()->items : a.get_if<TreeTuple>()->items;
  auto& from = list ? b.get_if<TreeList>()->items : b.get_if<TreeTuple>()->items;
  if (into.size() != from.size()) {
    return conflict("cannot merge " + TypeText(a) + "s of " + std::to_string(into.size()) +
                    " and " + std::to_string(from.size()) + " items");
  }
  for (std::size_t i = 0; i < into.size(); ++i) {
    const TreeStep step{list ? TreeStep::Kind::kListItem : TreeStep::Kind::kTupleItem,
                        static_cast<std::int64_t>(i)};
    TENSORMOUNT_RETURN_IF_ERROR(child(step, into[i], from[i]));
  }
  return Status();
}

Status Extract(StateTree& tree, StateTree& matching, TreePath& path,
               const std::function<bool(const TreePath&, const StateTree&)>& wanted) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckDepth(path));
  if (tree.kind() == StateTree::Kind::kNothing) return Status();
  if (!tree.is_container()) {
    if (wanted(path, tree)) matching = std::exchange(tree, StateTree());
    return Status();
  }
  if (auto* dict = tree.get_if<TreeDict>()) {
    TreeDict found;
    for (auto it = dict->items.begin(); it != dict->items.end();) {
      StateTree picked;
      path.push_back({TreeStep::Kind::kKey, it->first});
      TENSORMOUNT_RETURN_IF_ERROR(Extract(it->second, picked, path, wanted));
      path.pop_back();
      const bool taken = it->second.kind() == StateTree::Kind::kNothing;
      if (picked.kind() != StateTree::Kind::kNothing) {
        found.items.emplace(it->first, std::move(picked));
        if (taken) {
          it = dict->items.erase(it);
          continue;
        }
      }
      ++it;
    }
    matching = std::move(found);
    return Status();
  }
  auto* list = tree.get_if<TreeList>();
  auto& items = list != nullptr ? list->items : tree.get_if<TreeTuple>()->items;
  std::vector<StateTree> found(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    path.push_back({list != nullptr ? TreeStep::Kind::kListItem : TreeStep::Kind::kTupleItem,
                    static_cast<std::int64_t>(i)});
    TENSORMOUNT_RETURN_IF_ERROR(Extract(items[i], found[i], path, wanted));
    path.pop_back();
  }
  if (list != nullptr) {
    matching = TreeList{std::move(found)};
  } else {
    matching = TreeTuple{std::move(found)};
  }
  return Status();
}

bool InHostMemory(const Shard& shard) {
  return !shard.metadata_only && shard.data.data != nullptr &&
         shard.data.device.kind == DeviceKind::kHost && shard.data.stream.kind == StreamKind::kNone;
}

// The byte offset of element `n` of the row-major order of a buffer.
std::int64_t OffsetOf(const BufferView& buffer, std::int64_t n, std::int64_t element_bytes) {
  if (buffer.strides.rank() == 0) return n * element_bytes;
  std::int64_t offset = 0;
  for (int axis = buffer.shape.rank() - 1; axis >= 0; --axis) {
    offset += n % buffer.shape[axis] * buffer.strides[axis];
    n /= buffer.shape[axis];
  }
  return offset * element_bytes;
}

// Compares two shards of one region and dtype. A buffer that does not have the elements of the
// region is different from every other.
bool SameBytes(const Shard& a, const Shard& b) {
  const std::int64_t elements = a.region.volume();
  const auto fits = [elements](const BufferView& buffer) {
    return CheckedProduct(buffer.shape) == elements &&
           (buffer.strides.rank() == 0 || buffer.strides.rank() == buffer.shape.rank());
  };
  if (!fits(a.data) || !fits(b.data)) return false;
  const auto* left = static_cast<const std::byte*>(a.data.data);
  const auto* right = static_cast<const std::byte*>(b.data.data);
  const auto bits = static_cast<std::int64_t>(InfoOf(a.data.dtype).bits);
  if (a.data.IsPacked() && b.data.IsPacked()) {
    return std::memcmp(left, right, static_cast<std::size_t>(elements * bits / 8)) == 0;
  }
  if (bits % 8 != 0) return false;  // Elements under a byte are always packed.
  for (std::int64_t n = 0; n < elements; ++n) {
    if (std::memcmp(left + OffsetOf(a.data, n, bits / 8), right + OffsetOf(b.data, n, bits / 8),
                    static_cast<std::size_t>(bits / 8)) != 0) {
      return false;
    }
  }
  return true;
}

// Empty where equal.
std::string TensorDifference(const TreeTensor& a, const TreeTensor& b) {
  if (a.key != b.key) return "keys \"" + a.key + "\" and \"" + b.key + "\"";
  if (a.shards.size() != b.shards.size()) {
    return std::to_string(a.shards.size()) + " and " + std::to_string(b.shards.size()) + " shards";
  }
  for (std::size_t i = 0; i < a.shards.size(); ++i) {
    const Shard& x = a.shards[i];
    const Shard& y = b.shards[i];
    if (x.data.dtype != y.data.dtype || !(x.global_shape == y.global_shape)) {
      return "shards " + std::to_string(i) + " of " + std::string(InfoOf(x.data.dtype).name) + " " +
             x.global_shape.ToString() + " and " + std::string(InfoOf(y.data.dtype).name) + " " +
             y.global_shape.ToString();
    }
    if (!(x.region == y.region)) {
      return "regions " + x.region.ToString() + " and " + y.region.ToString();
    }
    if (InHostMemory(x) && InHostMemory(y) && !SameBytes(x, y)) {
      return "bytes of region " + x.region.ToString() + " differ";
    }
  }
  return {};
}

std::string LeafDifference(const StateTree& a, const StateTree& b) {
  if (const auto* tensor = a.get_if<TreeTensor>()) {
    return TensorDifference(*tensor, *b.get_if<TreeTensor>());
  }
  if (const auto* object = a.get_if<TreeObject>()) {
    const auto* other = b.get_if<TreeObject>();
    if (object->key != other->key) {
      return "keys \"" + object->key + "\" and \"" + other->key + "\"";
    }
    if (!(object->place.index == other->place.index && object->place.grid == other->place.grid)) {
      return "places " + object->place.index.ToString() + " and " + other->place.index.ToString();
    }
    return object->bytes == other->bytes ? "" : "bytes differ";
  }
  const auto* x = a.get_if<CommonValue>();
  const auto* y = b.get_if<CommonValue>();
  const auto difference =
      x != nullptr ? FirstDifference(*x, *y)
                   : FirstDifference(a.get_if<TreeLocal>()->value, b.get_if<TreeLocal>()->value);
  if (!difference) return {};
  return (difference->path.empty() ? "" : difference->path + ": ") + difference->what;
}

class TreeMismatches {
 public:
  explicit TreeMismatches(TreeDiff& out) : out_(out) {}

  Status Compare(const StateTree& a, const StateTree& b) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckDepth(path_));
    const bool none_left = a.kind() == StateTree::Kind::kNothing;
    const bool none_right = b.kind() == StateTree::Kind::kNothing;
    if (none_left || none_right) {
      if (!none_left) out_.only_left.push_back(PathText(path_));
      if (!none_right) out_.only_right.push_back(PathText(path_));
      return Status();
    }
    if (a.kind() != b.kind()) {
      out_.mismatches.push_back({PathText(path_), TypeText(a), TypeText(b), "types differ"});
      return Status();
    }
    if (a.is_container()) return Children(a, b);
    std::string what = LeafDifference(a, b);
    if (what.empty()) return Status();
    out_.mismatches.push_back({PathText(path_), TypeText(a), TypeText(b), std::move(what)});
    return Status();
  }

 private:
  Status Children(const StateTree& a, const StateTree& b) {
    TENSORMOUNT_RETURN_IF_ERROR(ForEachChild(a, [&](const TreeStep& step, const StateTree& child) {
      path_.push_back(step);
      const StateTree* other = Child(b, step);
      Status status;
      if (other != nullptr) {
        status = Compare(child, *other);
      } else {
        out_.only_left.push_back(PathText(path_));
      }
      path_.pop_back();
      return status;
    }));
    return ForEachChild(b, [&](const TreeStep& step, const StateTree&) {
      path_.push_back(step);
      if (Child(a, step) == nullptr) out_.only_right.push_back(PathText(path_));
      path_.pop_back();
      return Status();
    });
  }

  static const StateTree* Child(const StateTree& tree, const TreeStep& step) {
    return FindPath(tree, {step});
  }

  TreeDiff& out_;
  TreePath path_;
};

// Gives every tensor and object the key that `name` returns, after `name` accepted all of them.
Status Rename(StateTree& tree, TreeNames names_of_paths,
              const std::function<Result<std::string>(const std::string& key)>& name) {
  const auto each = [&](auto& into, const auto& fn) {
    return MapLeaves(into, [&](const TreePath& path, StateTree& leaf) -> Status {
      std::string* key = nullptr;
      if (auto* tensor = leaf.get_if<TreeTensor>()) key = &tensor->key;
      if (auto* object = leaf.get_if<TreeObject>()) key = &object->key;
      return key == nullptr ? Status() : fn(path, *key);
    });
  };
  std::vector<std::string> names;
  const Status possible = each(tree, [&](const TreePath& path, std::string& key) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string renamed,
                                 name(key.empty() ? NameOfPath(path, names_of_paths) : key));
    names.push_back(std::move(renamed));
    return Status();
  });
  if (!possible.ok()) return possible;
  std::size_t next = 0;
  return each(tree, [&](const TreePath&, std::string& key) {
    key = std::move(names[next++]);
    return Status();
  });
}

}  // namespace

std::string TypeText(const StateTree& tree) {
  switch (tree.kind()) {
    case StateTree::Kind::kNothing:
      return "nothing";
    case StateTree::Kind::kDict:
      return "dict";
    case StateTree::Kind::kList:
      return "list";
    case StateTree::Kind::kTuple:
      return "tuple";
    case StateTree::Kind::kTensor: {
      const auto& shards = tree.get_if<TreeTensor>()->shards;
      if (shards.empty()) return "tensor";
      return "tensor " + std::string(InfoOf(shards[0].data.dtype).name) + " " +
             shards[0].global_shape.ToString();
    }
    case StateTree::Kind::kObject:
      return "object";
    case StateTree::Kind::kCommon:
      return std::string(tree.get_if<CommonValue>()->kind_name());
    case StateTree::Kind::kLocal:
      return "local " + std::string(tree.get_if<TreeLocal>()->value.kind_name());
  }
  return {};
}

Status AtPath(const Status& status, const TreePath& path) {
  return status.ok() || path.empty() ? status : status.WithContext(PathText(path));
}

Status CheckDepth(const TreePath& path) {
  if (path.size() <= static_cast<std::size_t>(kMaxTreeDepth)) return Status();
  return Status(Code::kInvalidArgument, PathText({path.begin(), path.begin() + 8}) +
                                            "...: trees are at most " +
                                            std::to_string(kMaxTreeDepth) + " deep");
}

const StateTree* FindPath(const StateTree& tree, const TreePath& path) {
  const StateTree* at = &tree;
  for (const TreeStep& step : path) {
    const auto* dict = at->get_if<TreeDict>();
    const auto* list = at->get_if<TreeList>();
    const auto* tuple = at->get_if<TreeTuple>();
    if (step.kind == TreeStep::Kind::kKey) {
      if (dict == nullptr) return nullptr;
      const auto found = dict->items.find(step.key);
      if (found == dict->items.end()) return nullptr;
      at = &found->second;
      continue;
    }
    const bool wants_list = step.kind == TreeStep::Kind::kListItem;
    if (wants_list ? list == nullptr : tuple == nullptr) return nullptr;
    const auto& items = wants_list ? list->items : tuple->items;
    const auto* index = std::get_if<std::int64_t>(&step.key);
    if (index == nullptr || *index < 0 || static_cast<std::size_t>(*index) >= items.size()) {
      return nullptr;
    }
    at = &items[static_cast<std::size_t>(*index)];
  }
  return at;
}

Status ForEachLeaf(const StateTree& tree,
                   const std::function<Status(const TreePath&, const StateTree&)>& fn) {
  TreePath path;
  return Walk(tree, path, fn);
}

Status MapLeaves(StateTree& tree, const std::function<Status(const TreePath&, StateTree&)>& fn) {
  TreePath path;
  return Walk(tree, path, fn);
}

Result<StateTree> MappedLeaves(
    const StateTree& tree,
    const std::function<Result<StateTree>(const TreePath&, const StateTree&)>& fn) {
  StateTree copy = tree;
  TENSORMOUNT_RETURN_IF_ERROR(MapLeaves(copy, [&](const TreePath& path, StateTree& leaf) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(leaf, fn(path, leaf));
    return Status();
  }));
  return copy;
}

Result<std::string> DescribeTree(const StateTree& tree) {
  std::string text;
  TENSORMOUNT_RETURN_IF_ERROR(ForEachLeaf(tree, [&](const TreePath& path, const StateTree& leaf) {
    text += PathText(path) + ": " + TypeText(leaf) + "\n";
    return Status();
  }));
  return text;
}

Result<StateTree> MergeTrees(StateTree a, StateTree b) {
  TreePath path;
  TENSORMOUNT_RETURN_IF_ERROR(Merge(a, b, path));
  return a;
}

Result<ExtractedTrees> ExtractLeaves(
    StateTree tree, const std::function<bool(const TreePath&, const StateTree&)>& wanted) {
  TreePath path;
  ExtractedTrees out;
  TENSORMOUNT_RETURN_IF_ERROR(Extract(tree, out.matching, path, wanted));
  out.rest = std::move(tree);
  return out;
}

Result<ExtractedTrees> ExtractKinds(StateTree tree, std::span<const StateTree::Kind> kinds) {
  return ExtractLeaves(std::move(tree), [kinds](const TreePath&, const StateTree& leaf) {
    return std::find(kinds.begin(), kinds.end(), leaf.kind()) != kinds.end();
  });
}

Result<TreeDiff> DiffTrees(const StateTree& left, const StateTree& right) {
  TreeDiff diff;
  TENSORMOUNT_RETURN_IF_ERROR(TreeMismatches(diff).Compare(left, right));
  return diff;
}

Status AssignKeys(StateTree& tree, TreeNames names) {
  return Rename(tree, names, [](const std::string& key) -> Result<std::string> { return key; });
}

Status AddPrefix(StateTree& tree, std::string_view prefix) {
  return Rename(tree, TreeNames::kDotted, [prefix](const std::string& key) -> Result<std::string> {
    return std::string(prefix) + key;
  });
}

Status ReplacePrefix(StateTree& tree, std::string_view from, std::string_view to) {
  return Rename(tree, TreeNames::kDotted, [&](const std::string& key) -> Result<std::string> {
    if (!key.starts_with(from)) {
      return Status(Code::kInvalidArgument,
                    "key \"" + key + "\" does not begin with \"" + std::string(from) + "\"");
    }
    return std::string(to) + key.substr(from.size());
  });
}

Status MapPrefixes(StateTree& tree, std::span<const std::pair<std::string, std::string>> prefixes) {
  return Rename(tree, TreeNames::kDotted,
                [prefixes](const std::string& key) -> Result<std::string> {
                  for (const auto& [from, to] : prefixes) {
                    if (key.starts_with(from)) return to + key.substr(from.size());
                  }
                  return key;
                });
}

}  // namespace tensormount::examples
