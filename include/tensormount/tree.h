// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TREE_H_
#define TENSORMOUNT_TREE_H_

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

#include "tensormount/common_value.h"
#include "tensormount/shard.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

// The nested state of a program (dicts of lists of tensors), and its way into a StateDict and back.
// Errors say at which path: "model.layers[3].w: ...". Trees are at most kMaxTreeDepth deep; a
// deeper one is kInvalidArgument everywhere.

namespace tensormount {

inline constexpr int kMaxTreeDepth = 64;

class StateTree;

// A place in a list or tuple where nothing stands (what ExtractLeaves took out).
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
// `key` is the tensor's name in the checkpoint; empty: made of the path. Leaves may share a key
// that was given (layers stacked under one), and one leaf may have several shards (Interleaved).
struct TreeTensor {
  std::string key;
  std::vector<Shard> shards;
};
struct TreeObject {
  std::string key;  // As of tensors.
  std::string bytes;
  GridPosition place;
};
// Never stored; a load gives back what the request had.
struct TreeLocal {
  CommonValue value;
};

// A container or a leaf. A value; tensors are views, as everywhere.
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
class TENSORMOUNT_EXPORT StateTree {
 public:
  enum class Kind { kNothing, kDict, kList, kTuple, kTensor, kObject, kCommon, kLocal };

  StateTree() = default;                                                       // Nothing.
  StateTree(TreeDict v) : value_(std::move(v)) {}                              // NOLINT: as below.
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
  // The value where it is of that type (TreeDict, TreeTensor, CommonValue, ...), null otherwise.
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
  CommonKey key;  // The index, of items of lists and tuples.
  friend bool operator==(const TreeStep&, const TreeStep&) = default;
};
using TreePath = std::vector<TreeStep>;
// As CommonValue::At spells it: "model.layers[3].w", "{7}" for the key 7, "(0)" of a tuple.
TENSORMOUNT_EXPORT std::string PathText(const TreePath& path);
// Null where there is nothing.
TENSORMOUNT_EXPORT const StateTree* FindPath(const StateTree& tree, const TreePath& path);

// How a path becomes the key of a tensor or object, or the name of a common value.
//   kDotted      the steps joined by ".", integers in decimal, as PyTorch does. Two paths may get
//                one name: {"a.b"} and {"a"}{"b"}; FlattenTree refuses that.
//   kReversible  likewise, but so that the path can be told from the name alone:
//                  a string key    itself, with "%" and two hexadecimal digits (upper case) for
//                                  '.', '%', NUL, one of # : , at its beginning, and each byte
//                                  over 7F where the key is no UTF-8; the empty key is "%"
//                  an integer key  "#7", "#-7"
//                  item of a list  ":3"        of a tuple  ",3"
//                {"opt"}{7}["exp.avg"][3] is "opt.#7.exp%2Eavg.:3".
enum class TreeNames { kDotted, kReversible };
TENSORMOUNT_EXPORT std::string NameOfPath(const TreePath& path, TreeNames names);
// Of a reversible name. kInvalidArgument where it is not one.
TENSORMOUNT_EXPORT Result<TreePath> PathOfName(std::string_view name);

// ---- Walks ---------------------------------------------------------------------------------
// Leaves in the order of keys and indices; TreeNothing is not one. What `fn` returns as a failure
// ends the walk and is returned with the path.

TENSORMOUNT_EXPORT Status ForEachLeaf(
    const StateTree& tree, const std::function<Status(const TreePath&, const StateTree&)>& fn);
// In place: `fn` may replace the leaf.
TENSORMOUNT_EXPORT Status MapLeaves(StateTree& tree,
                                    const std::function<Status(const TreePath&, StateTree&)>& fn);
// A new tree of the same structure.
TENSORMOUNT_EXPORT Result<StateTree> MappedLeaves(
    const StateTree& tree,
    const std::function<Result<StateTree>(const TreePath&, const StateTree&)>& fn);

// "model.w: tensor f32 [4, 8]", a line a leaf.
TENSORMOUNT_EXPORT Result<std::string> DescribeTree(const StateTree& tree);

// Everything that is in one of two trees. kInvalidArgument where both have a leaf at one path,
// where containers differ in kind, or lists in length.
TENSORMOUNT_EXPORT Result<StateTree> MergeTrees(StateTree a, StateTree b);

// The leaves that `wanted` picks, and the others, each in the structure of the whole: dicts lack
// what the other has, lists and tuples have nothing in its place. MergeTrees puts them together.
struct ExtractedTrees {
  StateTree matching;
  StateTree rest;
};
TENSORMOUNT_EXPORT Result<ExtractedTrees> ExtractLeaves(
    StateTree tree, const std::function<bool(const TreePath&, const StateTree&)>& wanted);
TENSORMOUNT_EXPORT Result<ExtractedTrees> ExtractKinds(StateTree tree,
                                                       std::span<const StateTree::Kind> kinds);

struct TreeMismatch {
  std::string path;
  std::string left;   // "tensor f32 [4, 8]", "int".
  std::string right;  // Equal to `left` where values differ.
  std::string what;   // "0.1 and 0.2", "bytes differ".
};
struct TreeDiff {
  std::vector<std::string> only_left;  // Paths.
  std::vector<std::string> only_right;
  std::vector<TreeMismatch> mismatches;
  bool empty() const { return only_left.empty() && only_right.empty() && mismatches.empty(); }
};
// Tensors are equal where keys, dtypes, shapes and regions are and, where both are in host memory,
// their bytes.
TENSORMOUNT_EXPORT Result<TreeDiff> DiffTrees(const StateTree& left, const StateTree& right);

// ---- Keys of tensors and objects -----------------------------------------------------------
// Leaves that have no key get the name of their path first. Where one fails, none has changed.

TENSORMOUNT_EXPORT Status AssignKeys(StateTree& tree, TreeNames names = TreeNames::kDotted);
TENSORMOUNT_EXPORT Status AddPrefix(StateTree& tree, std::string_view prefix);
// kInvalidArgument names path and key where a key does not begin with `from`.
TENSORMOUNT_EXPORT Status ReplacePrefix(StateTree& tree, std::string_view from,
                                        std::string_view to);
// (from, to): the first that a key begins with holds; other keys stay.
TENSORMOUNT_EXPORT Status
MapPrefixes(StateTree& tree, std::span<const std::pair<std::string, std::string>> prefixes);

// ---- To a StateDict and back -----------------------------------------------------------------

struct FlattenOptions {
  TreeNames names = TreeNames::kDotted;
  // For a load: objects are asked for, common values are not set.
  bool for_load = false;
  // On saves the structure of the tree can be stored beside it, so that lists, tuples, integer keys
  // and empty containers come back without a tree of the same form at hand: as the common value
  // `structure_name` where it is the same on every rank, as one of this rank otherwise.
  enum class Structure { kNone, kCommon, kRank } structure = Structure::kNone;
  std::string structure_name = "tree";
};
// Adds every leaf: tensors and objects under their keys, common and local values under the name of
// their path. kInvalidArgument where two leaves would get one name (says both paths); then, and
// where a leaf is refused, `state` remembers the failure as its own.
TENSORMOUNT_EXPORT Status FlattenTree(const StateTree& tree, StateDict& state,
                                      const FlattenOptions& options = {});

// A tree without its values: StructureOf and back. Tensors have their key and no shards then,
// objects no bytes, values are none. kDataLoss where `structure` is not one.
TENSORMOUNT_EXPORT Result<CommonValue> StructureOf(const StateTree& tree);
TENSORMOUNT_EXPORT Result<StateTree> TreeFromStructure(const CommonValue& structure);

// Where UnflattenTree takes values from. kNotFound: not there.
struct TreeSource {
  std::function<Result<std::vector<Shard>>(std::string_view key)> tensor;
  std::function<Result<TreeObject>(const TreeObject& wanted)> object;
  std::function<Result<CommonValue>(std::string_view name)> common;
  std::function<Result<CommonValue>(std::string_view name)> local;
};
// What a state dict has. It must stay while the source is used.
TENSORMOUNT_EXPORT TreeSource SourceOf(const StateDict& state);
// What a load returned (a LoadReport), and the tensors that it filled, which are those of its
// request. Both must stay while the source is used.
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
  TreeNames names = TreeNames::kDotted;  // As FlattenTree had it.
  // Leaves that the source does not have stay as they are in `like`; otherwise that is kNotFound.
  bool keep_missing = false;
};
// A tree like `like`, with the values of the source. Tensors that have shards keep them (a load
// fills their buffers in place); shards without data become those of the same region that have some
// (StateDict::AllocateData). Tensors without shards get all of their key, which no other leaf may
// have then.
TENSORMOUNT_EXPORT Result<StateTree> UnflattenTree(StateTree like, const TreeSource& source,
                                                   const UnflattenOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_TREE_H_
