// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_TORCH_TREE_H_
#define TENSORMOUNT_INDEX_FOREIGN_TORCH_TREE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tensormount/status.h"

#include "index/archives/pickle.h"
#include "index/archives/torch_archive.h"
#include "index/foreign/foreign.h"
#include "index/foreign/value_budget.h"

// Keys and names for the nested dicts and lists in a file of torch.save.

// For example, {"model": {"w": T}, "step": 7} gives the tensor model.w and the common value step.
// The largest subtrees without a tensor become common values, so a dict of a thousand settings is
// one value.
namespace tensormount {

// Makes the keys of one checkpoint. The parts of a path are joined with dots. If the result is
// empty or was returned before, the path is spelled as in Python: ["a.b"][0]. A checkpoint needs
// one instance for the tensors of all its files (with an index, one for each file) and one for the
// common values.
class TorchNames {
 public:
  // A part of a path. `number`: `text` is a number, which is spelled [0] and not ["0"]. `position`:
  // the number is the position of a list item, not a dict key.
  struct Part {
    std::string text;
    bool number = false;
    bool position = false;
  };

  // Returns a key that was not returned before. `prefix` ("mp_rank_00/") is put before it. nullopt:
  // too many paths have this key, or the keys are together longer than those of a real checkpoint
  // (a pickle may repeat one text everywhere). Takes time linear in the length of the path.
  std::optional<std::string> Of(const std::string& prefix, const std::vector<Part>& path);

 private:
  std::unordered_set<std::string> taken_;
  std::size_t bytes_ = 0;  // Total length of the names.
};

// Options of a TorchTree. Add calls the callbacks.
struct TorchTreeOptions {
  std::string prefix;    // Text before every key.
  std::string root_key;  // The key if the root is a single tensor or value.
  // The value whose content is added; nullopt: the root of the archive.
  std::optional<pickle::Value> root = std::nullopt;
  bool tensors_only = false;  // Whether to add no common values.
  std::uint64_t at = 0;       // Offset of the archive in the file.
  // Called for every added tensor, unless empty.
  std::function<void(const std::string& key)> added;
  // Called for every tensor or common value whose path is not just the one dict key that is its
  // name.
  std::function<void(const std::string& name, const std::vector<TorchNames::Part>& path)> nested;
};

// Adds the tensors of an archive (in file number `file` of the builder) with their strides, and the
// largest subtrees without tensors as common values: {"optimizer": {"state": {0: tensor},
// "param_groups": [...]}} gives optimizer.state.0 and optimizer.param_groups. Tensors that cannot
// be shown are left out with a warning. kDataLoss: values contain others, or themselves, so often
// that there are too many. kUnsupported: see CheckForeign. `budget` limits the common values of all
// archives together. Call Add once; all arguments must outlive the object.
class TorchTree {
 public:
  TorchTree(ForeignBuilder& builder, const TorchArchive& archive, std::uint32_t file,
            TorchNames& tensors, TorchNames& common, ValueBudget& budget,
            const TorchTreeOptions& options);
  Status Add();

 private:
  // Fills nodes_ for `value` and all values below it. Returns true if a tensor, or an object of an
  // unknown class, is among them.
  Result<bool> Scan(const pickle::Value& value, int depth);
  // Names and adds the values, in the same order as Scan visited them.
  Status Emit(const pickle::Value& value);
  Status AddTensor(const pickle::Value& value);
  // Adds one chunk for the whole tensor, because torch.save does not split tensors.
  Status AddStored(const std::string& key, const StoredTensor& stored);
  void AddCommon(const pickle::Value& value);
  // Identifiers of the records of pickle values, and of storages of tensors.
  using Records = std::set<std::string>;
  // Collects the identifiers of all values that a value contains, within a limit.
  Status CollectRecords(const pickle::Value& value, int depth, Records& into);
  // Collects into `shown` the identifiers of values that are shown, and into `given` those of
  // values that were passed to objects of unknown classes.
  Status CollectShownAndGiven(const pickle::Value& value, int depth, Records& shown,
                              Records& given);
  Status CheckBelow(const pickle::Value& top);
  // Decides whether a file with objects of unknown classes can be shown. kUnsupported, with the
  // name of the first unknown class: the file has no tensor, or a value that is shown was also
  // passed to such an object, whose code may have changed the value.
  Status CheckForeign(const pickle::Value& root);
  // Calls options_.nested, unless the path is just the one key that is the name.
  void ReportPath(const std::string& name) const;
  std::string Shown() const;

  ForeignBuilder& builder_;
  const TorchArchive& archive_;
  std::uint32_t file_;
  TorchNames& tensor_names_;
  TorchNames& common_names_;
  ValueBudget& budget_;
  const TorchTreeOptions& options_;
  // For each value, in the order of Scan: the number of values below it plus one, and the top bit
  // (kHoldsTensor) if Scan returned true for it.
  std::vector<std::uint32_t> nodes_;
  std::size_t next_ = 0;  // The position in nodes_ during Emit.
  std::string foreign_;   // The first unknown class; empty if there is none.
  std::size_t tensors_ = 0;
  std::size_t noted_ = 0;
  std::set<std::uint64_t> below_;  // Records (Value::record) that CheckBelow has visited.
  std::vector<TorchNames::Part> path_;
  // Total length of the texts in path_, plus one for each.
  std::size_t path_bytes_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_TORCH_TREE_H_
