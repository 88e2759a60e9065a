// SPDX-License-Identifier: Apache-2.0
// From a tree to a StateDict and back (tree.h). The structure is stored as a common value that is a
// flat list of nodes, so that a deep tree stays within the limit on nested values.
#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "examples/models/tree.h"
#include "examples/models/tree_walk.h"

namespace tensormount::examples {
namespace {

using Kind = StateTree::Kind;

Status NotFound(const std::string& what) { return Status(Code::kNotFound, what + ": not there"); }

// Who has which name, to refuse two leaves that would become one.
class Names {
 public:
  // `given`: the caller chose the name, rather than the path. Given names may be shared by tensors,
  // and by parts of an object, which the state dict tells apart.
  Status Take(const std::string& name, const TreePath& path, Kind kind, bool given) {
    const auto [at, added] = taken_.try_emplace(name, Owner{path, kind, given});
    if (added) return Status();
    const Owner& owner = at->second;
    if (given && owner.given && owner.kind == kind) return Status();
    return Status(Code::kInvalidArgument, "\"" + PathText(owner.path) + "\" and \"" +
                                              PathText(path) + "\" would both be called \"" + name +
                                              "\"");
  }

 private:
  struct Owner {
    TreePath path;
    Kind kind;
    bool given;
  };
  std::map<std::string, Owner> taken_;
};

Status Flatten(const StateTree& tree, StateDict& state, const FlattenOptions& options) {
  if (!tree.is_container() && tree.kind() != Kind::kNothing) {
    return Status(Code::kInvalidArgument, "a tree of one " + TypeText(tree) + " has no names");
  }
  if (options.structure != FlattenOptions::Structure::kNone && !options.for_load) {
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue structure, StructureOf(tree));
    if (options.structure == FlattenOptions::Structure::kCommon) {
      TENSORMOUNT_RETURN_IF_ERROR(state.SetCommon(options.structure_name, std::move(structure)));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(
          state.SetRankCommon(options.structure_name, std::move(structure)));
    }
  }
  Names names;
  return ForEachLeaf(tree, [&](const TreePath& path, const StateTree& leaf) -> Status {
    const std::string name = NameOfPath(path, options.names);
    if (const auto* tensor = leaf.get_if<TreeTensor>()) {
      const std::string& key = tensor->key.empty() ? name : tensor->key;
      TENSORMOUNT_RETURN_IF_ERROR(names.Take(key, path, leaf.kind(), !tensor->key.empty()));
      for (const Shard& shard : tensor->shards) {
        TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(key, shard));
      }
      return Status();
    }
    if (const auto* object = leaf.get_if<TreeObject>()) {
      const std::string& key = object->key.empty() ? name : object->key;
      TENSORMOUNT_RETURN_IF_ERROR(names.Take(key, path, leaf.kind(), !object->key.empty()));
      return options.for_load ? state.WantObject(key, object->place)
                              : state.AddObject(key, object->bytes, object->place);
    }
    if (options.structure != FlattenOptions::Structure::kNone && name == options.structure_name) {
      return Status(Code::kInvalidArgument,
                    "\"" + name + "\" is the name of the structure of the tree");
    }
    TENSORMOUNT_RETURN_IF_ERROR(names.Take(name, path, leaf.kind(), false));
    if (const auto* local = leaf.get_if<TreeLocal>()) return state.SetLocal(name, local->value);
    if (options.for_load) return Status();
    return state.SetCommon(name, *leaf.get_if<CommonValue>());
  });
}

// ---- The structure of a tree as a common value: a list of its nodes, each before its children, as
// tuples (kind, payload) or, in dicts, (kind, payload, key). The payload of a container is the
// number of its children, of a tensor or object its key if it was given one.

struct KindName {
  Kind kind;
  std::string_view name;
};
constexpr KindName kKindNames[] = {
    {Kind::kNothing, "nothing"}, {Kind::kDict, "dict"},     {Kind::kList, "list"},
    {Kind::kTuple, "tuple"},     {Kind::kTensor, "tensor"}, {Kind::kObject, "object"},
    {Kind::kCommon, "common"},   {Kind::kLocal, "local"},
};

CommonValue GivenKey(const std::string& key) {
  return key.empty() ? CommonValue() : CommonValue(key);
}

CommonValue Payload(const StateTree& tree) {
  if (const auto* dict = tree.get_if<TreeDict>()) return dict->items.size();
  if (const auto* list = tree.get_if<TreeList>()) return list->items.size();
  if (const auto* tuple = tree.get_if<TreeTuple>()) return tuple->items.size();
  if (const auto* tensor = tree.get_if<TreeTensor>()) return GivenKey(tensor->key);
  if (const auto* object = tree.get_if<TreeObject>()) return GivenKey(object->key);
  return {};
}

Status AppendNodes(const StateTree& tree, const CommonKey* key, TreePath& path, CommonList& nodes) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckDepth(path));
  CommonTuple node;
  node.items.emplace_back(kKindNames[static_cast<std::size_t>(tree.kind())].name);
  node.items.push_back(Payload(tree));
  if (key != nullptr) {
    std::visit([&node](const auto& k) { node.items.emplace_back(k); }, *key);
  }
  nodes.items.emplace_back(std::move(node));
  return ForEachChild(tree, [&](const TreeStep& step, const StateTree& child) {
    path.push_back(step);
    const bool keyed = step.kind == TreeStep::Kind::kKey;
    const Status status = AppendNodes(child, keyed ? &step.key : nullptr, path, nodes);
    path.pop_back();
    return status;
  });
}

class StructureReader {
 public:
  explicit StructureReader(const std::vector<CommonValue>& nodes) : nodes_(nodes) {}

  Result<StateTree> Read() {
    TENSORMOUNT_ASSIGN_OR_RETURN(StateTree tree, Node(0, nullptr));
    if (at_ != nodes_.size()) return Bad("has nodes behind its end");
    return tree;
  }

 private:
  Status Bad(const std::string& why) const {
    return Status(Code::kDataLoss, "structure of a tree: node " + std::to_string(at_) + ": " + why);
  }

  // `key`: where the node stands in a dict, set to its key there.
  Result<StateTree> Node(int depth, CommonKey* key) {
    if (depth > kMaxTreeDepth) return Bad("is too deep");
    if (at_ == nodes_.size()) return Bad("is missing");
    const auto* node = nodes_[at_].get_if<CommonTuple>();
    if (node == nullptr || node->items.size() != (key != nullptr ? 3u : 2u)) {
      return Bad("is not one");
    }
    const auto* name = node->items[0].get_if<std::string>();
    const KindName* kind = std::find_if(
        std::begin(kKindNames), std::end(kKindNames),
        [name](const KindName& known) { return name != nullptr && known.name == *name; });
    if (kind == std::end(kKindNames)) return Bad("is of no known kind");
    if (key != nullptr) {
      const auto* number = node->items[2].get_if<std::int64_t>();
      const auto* text = node->items[2].get_if<std::string>();
      if (number == nullptr && text == nullptr) return Bad("has no key");
      if (number != nullptr) *key = *number;
      if (text != nullptr) *key = *text;
    }
    const CommonValue& payload = node->items[1];
    switch (kind->kind) {
      case Kind::kDict:
      case Kind::kList:
      case Kind::kTuple:
        return Children(kind->kind, payload, depth);
      case Kind::kTensor:
      case Kind::kObject: {
        const auto* text = payload.get_if<std::string>();
        if (text == nullptr && payload.get_if<CommonNone>() == nullptr) return Bad("has a bad key");
        ++at_;
        const std::string given = text != nullptr ? *text : std::string();
        if (kind->kind == Kind::kTensor) return StateTree(TreeTensor{.key = given, .shards = {}});
        return StateTree(TreeObject{.key = given, .bytes = {}, .place = {}});
      }
      case Kind::kNothing:
        ++at_;
        return StateTree();
      case Kind::kCommon:
        ++at_;
        return StateTree(CommonValue());
      case Kind::kLocal:
        ++at_;
        return StateTree(TreeLocal{});
    }
    return Bad("is of no known kind");
  }

  Result<StateTree> Children(Kind kind, const CommonValue& payload, int depth) {
    const auto* count = payload.get_if<std::int64_t>();
    if (count == nullptr || *count < 0 ||
        static_cast<std::uint64_t>(*count) > nodes_.size() - at_ - 1) {
      return Bad("has an impossible number of children");
    }
    ++at_;
    TreeDict dict;
    std::vector<StateTree> items;
    for (std::int64_t i = 0; i < *count; ++i) {
      CommonKey key;
      TENSORMOUNT_ASSIGN_OR_RETURN(StateTree child,
                                   Node(depth + 1, kind == Kind::kDict ? &key : nullptr));
      if (kind != Kind::kDict) {
        items.push_back(std::move(child));
      } else if (!dict.items.emplace(std::move(key), std::move(child)).second) {
        return Bad("follows one of the same key");
      }
    }
    if (kind == Kind::kDict) return StateTree(std::move(dict));
    if (kind == Kind::kList) return StateTree(TreeList{std::move(items)});
    return StateTree(TreeTuple{std::move(items)});
  }

  const std::vector<CommonValue>& nodes_;
  std::size_t at_ = 0;
};

// A shard without data becomes the one of the same cells that has some.
void TakeData(const std::vector<Shard>& from, Shard& shard) {
  for (const Shard& other : from) {
    if (!shard.metadata_only) return;
    if (!other.metadata_only && other.global_shape == shard.global_shape &&
        other.data.dtype == shard.data.dtype && other.region == shard.region) {
      shard = other;
    }
  }
}

}  // namespace

Status FlattenTree(const StateTree& tree, StateDict& state, const FlattenOptions& options) {
  const Status status = Flatten(tree, state, options).WithContext("state tree");
  return status.ok() ? status : state.Fail(status);
}

Result<CommonValue> StructureOf(const StateTree& tree) {
  CommonList nodes;
  TreePath path;
  TENSORMOUNT_RETURN_IF_ERROR(AppendNodes(tree, nullptr, path, nodes));
  return CommonValue(std::move(nodes));
}

Result<StateTree> TreeFromStructure(const CommonValue& structure) {
  const auto* nodes = structure.get_if<CommonList>();
  if (nodes == nullptr) return Status(Code::kDataLoss, "structure of a tree: is not a list");
  return StructureReader(nodes->items).Read();
}

TreeSource SourceOf(const StateDict& state) {
  TreeSource source;
  // By key, once: a tree asks for every one of them.
  std::multimap<std::string_view, const Shard*> by_key;
  for (const StateDict::TensorItem& item : state.tensors()) {
    by_key.emplace(item.key, &item.shard);
  }
  source.tensor = [by_key = std::move(by_key)](std::string_view key) -> Result<std::vector<Shard>> {
    std::vector<Shard> shards;
    const auto [begin, end] = by_key.equal_range(key);
    for (auto at = begin; at != end; ++at) shards.push_back(*at->second);
    if (shards.empty()) return NotFound("tensor " + std::string(key));
    return shards;
  };
  source.object = [&state](const TreeObject& wanted) -> Result<TreeObject> {
    const StateDict::ObjectItem* found = nullptr;
    for (const StateDict::ObjectItem& item : state.objects()) {
      if (item.key != wanted.key) continue;
      if (item.place.index == wanted.place.index) {
        found = &item;
        break;
      }
      // Whoever does not know where on its grid an object stands means the one part there is.
      if (wanted.place.index.rank() != 0) continue;
      if (found != nullptr) {
        return Status(Code::kInvalidArgument,
                      "object " + wanted.key + " has several parts: which is wanted was not said");
      }
      found = &item;
    }
    if (found == nullptr) return NotFound("object " + wanted.key);
    return TreeObject{.key = found->key, .bytes = found->bytes, .place = found->place};
  };
  const auto value_of = [](const std::map<std::string, CommonValue>& values,
                           std::string_view name) -> Result<CommonValue> {
    const auto found = values.find(std::string(name));
    if (found == values.end()) return NotFound("value " + std::string(name));
    return found->second;
  };
  source.common = [&state, value_of](std::string_view name) {
    return value_of(state.common(), name);
  };
  source.local = [&state, value_of](std::string_view name) {
    return value_of(state.locals(), name);
  };
  return source;
}

Result<StateTree> UnflattenTree(StateTree like, const TreeSource& source,
                                const UnflattenOptions& options) {
  Names names;
  const auto missing = [&options](const Status& status) {
    return options.keep_missing && status.code() == Code::kNotFound ? Status() : status;
  };
  const auto fill = [&](const TreePath& path, StateTree& leaf) -> Status {
    const std::string name = NameOfPath(path, options.names);
    if (auto* tensor = leaf.get_if<TreeTensor>()) {
      const bool unknown = tensor->shards.empty();
      const auto no_data = [](const Shard& shard) { return shard.metadata_only; };
      if (!unknown && std::none_of(tensor->shards.begin(), tensor->shards.end(), no_data)) {
        return Status();
      }
      const std::string& key = tensor->key.empty() ? name : tensor->key;
      // Where no shards are known, it would not be known which of the key's are whose.
      if (unknown) TENSORMOUNT_RETURN_IF_ERROR(names.Take(key, path, leaf.kind(), false));
      Result<std::vector<Shard>> shards = source.tensor(key);
      if (!shards.ok()) return missing(shards.status());
      if (unknown) tensor->shards = shards.value();
      for (Shard& shard : tensor->shards) TakeData(shards.value(), shard);
      return Status();
    }
    if (auto* object = leaf.get_if<TreeObject>()) {
      TreeObject wanted{
          .key = object->key.empty() ? name : object->key, .bytes = {}, .place = object->place};
      Result<TreeObject> found = source.object(wanted);
      if (!found.ok()) return missing(found.status());
      object->bytes = std::move(found.value().bytes);
      object->place = found.value().place;
      return Status();
    }
    auto* common = leaf.get_if<CommonValue>();
    Result<CommonValue> value = common != nullptr ? source.common(name) : source.local(name);
    if (!value.ok()) return missing(value.status());
    (common != nullptr ? *common : leaf.get_if<TreeLocal>()->value) = std::move(value).value();
    return Status();
  };
  TENSORMOUNT_RETURN_IF_ERROR(MapLeaves(like, fill));
  return like;
}

}  // namespace tensormount::examples
