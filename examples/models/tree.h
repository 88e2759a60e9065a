// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_EXAMPLES_MODELS_TREE_H_
#define TENSORMOUNT_EXAMPLES_MODELS_TREE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <tensormount/common_value.h>
#include <tensormount/shard.h>
#include <tensormount/state_dict.h>
#include <tensormount/status.h>

// An example: nested state dicts (dicts of lists of tensors) over the public API. FlattenTree adds
// the leaves of a tree to a StateDict, UnflattenTree takes them back. Copy it into a program and
// change it. Python reads the tensors and values that FlattenTree adds, but not the structure that
// FlattenTree stores: Python has a structure of its own, `tensormount.tree` (docs/state-dicts.md).
//
// Errors name the path: "model.layers[3].w: ...". A tree deeper than kMaxTreeDepth is
// kInvalidArgument everywhere.

namespace tensormount::examples {

inline constexpr int kMaxTreeDepth = 64;

class StateTree;

// An empty position of a list or tuple, from which ExtractLeaves took the item.
struct TreeNothing {};
// Integers sort before strings: 1 and "1" are two keys.
struct TreeDict {
  std::map<CommonKey, StateTree> items;
};
struct TreeList {
  std::vector<StateTree> items;
};
struct TreeTuple {
  std::vector<StateTree> items;
};
// `key` is the tensor's name in the checkpoint; empty: the name of the path. Several leaves may
// give the same key (layers stacked under one), and one leaf may have several shards (Interleaved).
struct TreeTensor {
  std::string key;
  std::vector<Shard> shards;
};
struct TreeObject {
  std::string key;  // As in TreeTensor.
  std::string bytes;
  GridPosition place;
};
// Never stored; a load gives back the value of the request.
struct TreeLocal {
  CommonValue value;
};

// A container or a leaf. A value; tensors are views of the caller's memory.
//
// Example:
//
//   TreeDict model;
//   model.items["w"] = shard_of_w;
//   model.items["step"] = CommonValue(1000);
//   const Status status =  // Adds "model.w" and "model.step".
//       FlattenTree(StateTree(TreeDict{{{"model", model}}}), state);
//
// Copies are deep but for the memory of tensors, which no tree owns.
class StateTree {
 public:
  enum class Kind { kNothing, kDict, kList, kTuple, kTensor, kObject, kCommon, kLocal };

  // Conversions are implicit so that trees can be written down as literals.
  StateTree() = default;                                                       // Nothing.
  StateTree(TreeDict v) : value_(std::move(v)) {}                              // NOLINT
  StateTree(TreeList v) : value_(std::move(v)) {}                              // NOLINT
  StateTree(TreeTuple v) : value_(std::move(v)) {}                             // NOLINT
  StateTree(TreeTensor v) : value_(std::move(v)) {}                            // NOLINT
  StateTree(const Shard& v) : value_(TreeTensor{.key = {}, .shards = {v}}) {}  // NOLINT
  StateTree(TreeObject v) : value_(std::move(v)) {}                            // NOLINT
  StateTree(CommonValue v) : value_(std::move(v)) {}                           // NOLINT
  StateTree(TreeLocal v) : value_(std::move(v)) {}                             // NOLINT

  Kind kind() const { return static_cast<Kind>(value_.index()); }
  bool is_container() const {
    return kind() == Kind::kDict || kind() == Kind::kList || kind() == Kind::kTuple;
  }
  // Null where the value has another type than T (TreeDict, TreeTensor, CommonValue, ...).
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  template <typename T>
  T* get_if() {
    return std::get_if<T>(&value_);
  }

 private:
  std::variant<TreeNothing, TreeDict, TreeList, TreeTuple, TreeTensor, TreeObject, CommonValue,
               TreeLocal>
      value_;
};

// ---- Paths and names -----------------------------------------------------------------------

struct TreeStep {
  enum class Kind { kKey, kListItem, kTupleItem } kind = Kind::kKey;
  CommonKey key;  // Of a dict; in lists and tuples the index.
  friend bool operator==(const TreeStep&, const TreeStep&) = default;
};
using TreePath = std::vector<TreeStep>;
// In the spelling of CommonValue::At: "model.layers[3].w", "{7}" for the key 7, "(0)" in a tuple.
std::string PathText(const TreePath& path);
// Null where the tree has no such path.
const StateTree* FindPath(const StateTree& tree, const TreePath& path);

// How a path becomes the key of a tensor or object, or the name of a common value.
//   kDotted      the steps joined by ".", integers in decimal, as in PyTorch. Two paths may get
//                one name: {"a.b"} and {"a"}{"b"}; FlattenTree refuses such a tree.
//   kReversible  the steps joined by ".", escaped so that PathOfName finds the path again:
//                  a string key    itself, with "%" and two hexadecimal digits (upper case) for
//                                  '.', '%', NUL, and one of # : , at its beginning; the empty
//                                  key is "%"
//                  an integer key  "#7", "#-7"
//                  item of a list  ":3"        of a tuple  ",3"
//                {"opt"}{7}["exp.avg"][3] is "opt.#7.exp%2Eavg.:3".
enum class TreeNames { kDotted, kReversible };
std::string NameOfPath(const TreePath& path, TreeNames names);
// The path of a reversible name. kInvalidArgument for every other text.
Result<TreePath> PathOfName(std::string_view name);

// ---- Walks ---------------------------------------------------------------------------------
// Leaves in the order of keys and indices, without TreeNothing. A failure of `fn` ends the walk and
// is returned with the path.

Status ForEachLeaf(const StateTree& tree,
                   const std::function<Status(const TreePath&, const StateTree&)>& fn);
// In place: `fn` may replace the leaf.
Status MapLeaves(StateTree& tree, const std::function<Status(const TreePath&, StateTree&)>& fn);
// A new tree of the same structure.
Result<StateTree> MappedLeaves(
    const StateTree& tree,
    const std::function<Result<StateTree>(const TreePath&, const StateTree&)>& fn);

// One line for each leaf: "model.w: tensor f32 [4, 8]".
Result<std::string> DescribeTree(const StateTree& tree);

// The union of two trees. kInvalidArgument where both have a leaf at one path, where containers
// differ in kind, or lists in length.
Result<StateTree> MergeTrees(StateTree a, StateTree b);

// The leaves that `wanted` picks, and all other leaves, each in the structure of the whole: dicts
// lack the leaves of the other tree, lists and tuples have TreeNothing instead. MergeTrees puts
// both together again.
struct ExtractedTrees {
  StateTree matching;
  StateTree rest;
};
Result<ExtractedTrees> ExtractLeaves(
    StateTree tree, const std::function<bool(const TreePath&, const StateTree&)>& wanted);
Result<ExtractedTrees> ExtractKinds(StateTree tree, std::span<const StateTree::Kind> kinds);

struct TreeMismatch {
  std::string path;
  std::string left;   // "tensor f32 [4, 8]", "int".
  std::string right;  // Equal to `left` where only values differ.
  std::string what;   // "0.1 and 0.2", "bytes differ".
};
struct TreeDiff {
  std::vector<std::string> only_left;  // Paths.
  std::vector<std::string> only_right;
  std::vector<TreeMismatch> mismatches;
  bool empty() const { return only_left.empty() && only_right.empty() && mismatches.empty(); }
};
// Tensors are equal if keys, dtypes, shapes and regions are equal and, where both are in host
// memory, their bytes.
Result<TreeDiff> DiffTrees(const StateTree& left, const StateTree& right);

// ---- Keys of tensors and objects -----------------------------------------------------------
// Leaves that have no key get the name of their path first. A call that fails changes no key. The
// StateDict checks keys when FlattenTree adds them.

Status AssignKeys(StateTree& tree, TreeNames names = TreeNames::kDotted);
Status AddPrefix(StateTree& tree, std::string_view prefix);
// kInvalidArgument names path and key where a key does not begin with `from`.
Status ReplacePrefix(StateTree& tree, std::string_view from, std::string_view to);
// Pairs (from, to). The first `from` that a key begins with is replaced; other keys stay.
Status MapPrefixes(StateTree& tree, std::span<const std::pair<std::string, std::string>> prefixes);

// ---- To a StateDict and back -----------------------------------------------------------------

struct FlattenOptions {
  TreeNames names = TreeNames::kDotted;
  // For a load: objects are asked for, common values are not set.
  bool for_load = false;
  // A save can store the structure of the tree, too, so that lists, tuples, integer keys and empty
  // containers can be loaded without a tree of the same form. kCommon: as the common value
  // `structure_name`, if the structure is the same on every rank; kRank: as a value of this rank.
  enum class Structure { kNone, kCommon, kRank } structure = Structure::kNone;
  std::string structure_name = "tree";
};
// Adds every leaf: tensors and objects under their keys, common and local values under the name of
// their path. kInvalidArgument where two leaves would get one name (names both paths). `state`
// remembers every failure, so that a later Save or Load fails on all ranks.
Status FlattenTree(const StateTree& tree, StateDict& state, const FlattenOptions& options = {});

// The structure of a tree without its values, and a tree of that structure: its tensors have a key
// and no shards, its objects no bytes, its values are none. kDataLoss for a malformed `structure`.
Result<CommonValue> StructureOf(const StateTree& tree);
Result<StateTree> TreeFromStructure(const CommonValue& structure);

// Where UnflattenTree takes values from. Each returns kNotFound for a name that does not exist.
struct TreeSource {
  std::function<Result<std::vector<Shard>>(std::string_view key)> tensor;
  std::function<Result<TreeObject>(const TreeObject& wanted)> object;
  std::function<Result<CommonValue>(std::string_view name)> common;
  std::function<Result<CommonValue>(std::string_view name)> local;
};
// The tensors and values of a state dict, which must outlive the source.
TreeSource SourceOf(const StateDict& state);
// The objects and values of a load's report (LoadReport) and the tensors of its request, which the
// load filled. Both must outlive the source.
template <typename Report>
TreeSource SourceOf(const StateDict& request, const Report& report) {
  TreeSource source = SourceOf(request);
  source.object = [find = source.object, &report](const TreeObject& wanted) -> Result<TreeObject> {
    TENSORMOUNT_ASSIGN_OR_RETURN(TreeObject object, find(wanted));
    TENSORMOUNT_ASSIGN_OR_RETURN(object.bytes, report.object(object.key, object.place.index));
    return object;
  };
  source.common = [&report](std::string_view name) { return report.common(name); };
  source.local = [&report](std::string_view name) { return report.local(name); };
  return source;
}

struct UnflattenOptions {
  TreeNames names = TreeNames::kDotted;  // The same as in FlattenTree.
  // Leaves that the source lacks stay as they are in `like`. By default they are kNotFound.
  bool keep_missing = false;
};
// A copy of `like` with the values of the source. Tensors that have shards keep them, because a
// load fills their buffers in place. Shards without data get the data of the source's shard of the
// same region (StateDict::AllocateData). Tensors without shards get all shards of their key, which
// no other leaf may have then.
Result<StateTree> UnflattenTree(StateTree like, const TreeSource& source,
                                const UnflattenOptions& options = {});

}  // namespace tensormount::examples

#endif  // TENSORMOUNT_EXAMPLES_MODELS_TREE_H_
