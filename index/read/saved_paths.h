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

// Where the values of a checkpoint stood in the nested state dict that was saved.

namespace tensormount {

// The common value that says where values stand in nested dicts and lists: a dict from key to the
// tuple of names and positions, as torch.distributed.checkpoint's planners have it. Kept when such
// a checkpoint is adopted or imported, so that an export can give the nesting back.
inline constexpr std::string_view kPlannerData = "torch.planner_data";

// Of a list or tuple; null for anything else.
const std::vector<CommonValue>* ListItems(const CommonValue& value);

struct PathStep {
  // A number that is no key of a dict is the position in a list or tuple.
  enum class Kind { kName, kNumberKey, kListItem, kTupleItem };
  CommonKey key;
  Kind kind = Kind::kName;
  friend bool operator==(const PathStep&, const PathStep&) = default;
  friend auto operator<=>(const PathStep&, const PathStep&) = default;
};
using SavedPath = std::vector<PathStep>;
// The names of the common values that a structure, or what our writer for DCP keeps, begin with.
inline constexpr std::string_view kStructurePrefix = "tensormount.tree.";
inline constexpr std::string_view kMappingsPrefix = "tensormount.dcp.";

// A tensor or value of a structure: where it stood, and the key or name that it is stored under.
struct StructureLeaf {
  SavedPath path;
  std::string name;
  bool tensor = false;
};
// Of a structure that the Python package saved; none of what is malformed.
std::vector<StructureLeaf> StructureLeaves(const CommonValue& structure);
// The keys that the mappings of our writer for DCP speak of.
std::vector<std::string> MappedKeys(const CommonValue& mappings);

// The steps joined by ".", as DCP and the Python package name values.
std::string Dotted(const SavedPath& path);

// Paths of the keys of tensors and the names of values. They come from kPlannerData, in which a key
// of a dict that is a number is a list of one ([0]); from what our writer for DCP keeps
// ("tensormount.dcp.H"); and from the structures of state dicts that the Python package saved
// ("tensormount.tree.H", docs/python.md). A key that none of them tells has itself as its path.
// Example: the key "optim.state.0.exp_avg" has the path ("optim", "state", [0], "exp_avg"), which
// no rule could tell from the key: the 0 is a number, and a key may have dots. What is malformed is
// passed over, and so are paths of planners that contradict each other or have positions that are
// negative or far past the end of their list: keys then stand for themselves. Immutable.
class SavedPaths {
 public:
  // `has_tensor`: whether a tensor is stored under a key.
  static SavedPaths Make(const CommonValues& values,
                         const std::function<bool(std::string_view)>& has_tensor);
  // Whether a common value, of all ranks or of one, tells paths and is no value of the program.
  static bool IsInternal(std::string_view name);

  bool nested() const { return !paths_.empty() || !value_paths_.empty(); }
  // Of a tensor: at least one; one that was tied has several. `stored`: the key that the checkpoint
  // has; paths hold only where it is the shown one, too.
  std::vector<SavedPath> Of(std::string_view shown, std::string_view stored) const;
  // Of a plain value. Values and tensors are named apart.
  SavedPath OfValue(std::string_view shown, std::string_view stored) const;
  // As DCP's planners have a path: keys that are numbers as text.
  static std::vector<CommonKey> ForPlanner(const SavedPath& path);
  // Of each tensor that stood in several places: its stored key, and the dotted names of the
  // others.
  std::map<std::string, std::vector<std::string>> Tied() const;
  // Whether a common value is in the form of the Python package (docs/python.md, "Encoded values").
  bool IsEncoded(std::string_view name) const { return encoded_.contains(name); }
  // Containers that were saved empty, so that no key or name leads through them.
  struct Empty {
    SavedPath path;
    CommonValue value;
    bool ordered = false;  // An OrderedDict.
  };
  const std::vector<Empty>& empty() const { return empty_; }
  // Of the containers of structures what paths do not tell.
  struct Container {
    enum class Kind { kDict, kOrderedDict, kList, kTuple };
    Kind kind = Kind::kDict;
    std::vector<CommonKey> order;  // Of the keys of a dict, but those that are no text or number.
    std::int64_t items = 0;        // Of a list or tuple.
  };
  // By path; that of the outermost is empty. Of a container that ranks had differently the first.
  const std::map<SavedPath, Container>& containers() const { return containers_; }

 private:
  void AddPath(const std::string* name, const CommonValue& path);
  // Takes away the paths of planners of which no state dict can be made.
  void DropImpossible();
  void AddPlannerData(const CommonValue& value);
  void AddMappings(const CommonValue& value);

  std::map<std::string, std::vector<SavedPath>, std::less<>> paths_;
  std::map<std::string, SavedPath, std::less<>> value_paths_;
  std::set<std::string, std::less<>> encoded_;
  std::vector<Empty> empty_;
  std::map<SavedPath, Container> containers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_SAVED_PATHS_H_
