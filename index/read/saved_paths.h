// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_SAVED_PATHS_H_
#define TENSORMOUNT_INDEX_READ_SAVED_PATHS_H_

#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/common_value.h"

#include "index/records/common_state.h"

// Paths of a checkpoint's values in the nested state dict that was saved.

namespace tensormount {

// Name of the common value with the paths of nested values: a dict that maps a key to a tuple of
// names and positions, as in planners of torch.distributed.checkpoint (DCP). Adoption and import
// store it, so that an export can restore the nesting.
inline constexpr std::string_view kPlannerData = "torch.planner_data";

// The items of a list or tuple; null for other values.
const std::vector<CommonValue>* ListItems(const CommonValue& value);

struct PathStep {
  // Kinds of steps. A number is a dict key (kNumberKey) or a position in a list or tuple. A dict
  // key that is neither text nor an integer is kOtherKey; `key` then has a NUL, which no other
  // key has, and the text of the key in dotted names.
  enum class Kind { kName, kNumberKey, kListItem, kTupleItem, kOtherKey };
  CommonKey key;
  Kind kind = Kind::kName;
  friend bool operator==(const PathStep&, const PathStep&) = default;
  friend auto operator<=>(const PathStep&, const PathStep&) = default;
};
using SavedPath = std::vector<PathStep>;
// Prefixes of the names of common values: kStructurePrefix for a structure that the Python package
// saved, kMappingsPrefix for the mappings of its DCP writer (tensormount.torch.Writer).
inline constexpr std::string_view kStructurePrefix = "tensormount.tree.";
inline constexpr std::string_view kMappingsPrefix = "tensormount.dcp.";

// A tensor or value of a structure: its path, and the key or name under which it is stored.
struct StructureLeaf {
  SavedPath path;
  std::string name;
  bool tensor = false;
};
// The leaves of a structure that the Python package saved, without per-rank values; empty if it is
// malformed.
std::vector<StructureLeaf> StructureLeaves(const CommonValue& structure);
// The keys in the mappings of the Python package's DCP writer.
std::vector<std::string> MappedKeys(const CommonValue& mappings);

// The steps of a path joined by ".", as DCP and the Python package name values.
std::string Dotted(const SavedPath& path);

// Paths of values in the nested state dict that was saved, by tensor key or value name. A key
// without a stored path is its own path. Example: "optim.state.0.exp_avg" has the path ("optim",
// "state", [0], "exp_avg"); the key does not show that 0 is a number, and keys may contain dots.
// There are three sources: kPlannerData, in which a numeric dict key is a list with one item ([0]);
// mappings of the Python package's DCP writer (kMappingsPrefix); and structures of the Python
// package (kStructurePrefix, docs/state-dicts.md). Malformed data are skipped. Planner paths are
// skipped if they contradict each other or have positions that are negative or far behind the end
// of their list. Immutable.
class SavedPaths {
 public:
  // Where a structure's values lie that are below a key that is neither text nor an integer (None,
  // a tuple). kAtRoot: at the root, under their names, as in paths of torch's planners. kInPlace:
  // in their dict, below a step of the kind kOtherKey.
  enum class OtherKeys { kAtRoot, kInPlace };
  // Collects the paths in `values`. `has_tensor` returns whether a tensor is stored under a key.
  static SavedPaths Make(const CommonValues& values,
                         const std::function<bool(std::string_view)>& has_tensor,
                         OtherKeys other_keys = OtherKeys::kAtRoot);
  // Whether a common value (shared or per-rank) only holds paths, and is not a value of the user's
  // program.
  static bool IsInternal(std::string_view name);

  bool nested() const { return !paths_.empty() || !value_paths_.empty(); }
  // Paths of a tensor: one, or several if it was tied. `stored` is its key in the checkpoint,
  // `shown` the key after a key map. If the two differ, the path is `shown` itself.
  std::vector<SavedPath> Of(std::string_view shown, std::string_view stored) const;
  // Path of a plain value. Names of values and keys of tensors are separate namespaces.
  SavedPath OfValue(std::string_view shown, std::string_view stored) const;
  // The path as DCP's planners write it: numeric dict keys as text.
  static std::vector<CommonKey> ToPlannerPath(const SavedPath& path);
  // For each tied tensor, its stored key and the dotted names of its other paths.
  std::map<std::string, std::vector<std::string>> TiedPaths() const;
  // Whether the value of a common value is in the Python package's encoding (docs/state-dicts.md,
  // "Encoded values").
  bool IsEncoded(std::string_view name) const { return encoded_.contains(name); }
  // The key (encoded as by the Python package) of a step of the kind kOtherKey; null: unknown.
  const CommonValue* OtherKey(const std::string& step) const {
    const auto at = other_keys_.find(step);
    return at == other_keys_.end() ? nullptr : &at->second;
  }
  // Containers that were empty when they were saved, so that no key or name shows them.
  struct Empty {
    SavedPath path;
    CommonValue value;
    bool ordered = false;  // Whether it was an OrderedDict.
  };
  const std::vector<Empty>& empty() const { return empty_; }
  // Properties of a saved container that paths do not show.
  struct Container {
    enum class Kind { kDict, kOrderedDict, kList, kTuple };
    Kind kind = Kind::kDict;
    // Keys of a dict in order. Keys that are neither text nor integers are as in PathStep, or
    // missing with OtherKeys::kAtRoot.
    std::vector<CommonKey> order;
    std::int64_t items = 0;  // Length of a list or tuple.
  };
  // Containers by path; the outermost container has the empty path. If the ranks' containers at a
  // path differ, the kind is that of the first, their keys are united, and the largest length
  // counts.
  const std::map<SavedPath, Container>& containers() const { return containers_; }

 private:
  void AddPath(const std::string* name, const CommonValue& path);
  // Removes planner paths that no nested state dict can have.
  void DropImpossible();
  void AddPlannerData(const CommonValue& value);
  void AddMappings(const CommonValue& value);

  std::map<std::string, std::vector<SavedPath>, std::less<>> paths_;
  std::map<std::string, SavedPath, std::less<>> value_paths_;
  std::set<std::string, std::less<>> encoded_;
  std::map<std::string, CommonValue> other_keys_;
  std::vector<Empty> empty_;
  std::map<SavedPath, Container> containers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_SAVED_PATHS_H_
