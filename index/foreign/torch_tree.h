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

// The dicts and lists that torch.save was given, as keys of tensors and names of common values.

// {"model": {"w": T}, "step": 7} gives the tensor model.w and the common value step. What holds no
// tensor anywhere below becomes one common value, as large as can be, so that a dict of a thousand
// settings is one entry and not a thousand.
namespace tensormount {

// Keys of one checkpoint. The parts of a path are joined with dots, as everybody names parameters;
// where two paths come to the same text, or one to none, the later one is spelled out as Python
// would: ["a.b"][0]. Nothing is lost.
// Two are needed, one for tensors and one for common values, as these are two namespaces; they live
// as long as the read of the checkpoint, over all of its files.
class TorchNames {
 public:
  // A part of a path; of a number `text` is its digits, and `position` whether it counts the items
  // of a list.
  // "number" decides how a part is spelled ([0] or ["0"]), "position" how a path is told to others:
  // torch's planners make text of keys that are numbers.
  struct Part {
    std::string text;
    bool number = false;
    bool position = false;
  };

  // `prefix` stands before either spelling ("mp_rank_00/"). Each result is given once. nullopt: a
  // dict that says one key many times, or so many long names that nobody saved them: a pickle may
  // say a text once and mean it everywhere.
  // Linear in the length of the path; the names that it gave are kept, to tell later ones from
  // them.
  std::optional<std::string> Of(const std::string& prefix, const std::vector<Part>& path);

 private:
  std::unordered_set<std::string> taken_;
  std::size_t bytes_ = 0;  // Of all of them.
};

// The callbacks run during Add, on its thread.
struct TorchTreeOptions {
  std::string prefix;  // Before every key.
  std::string alone;   // The key where the root is no dict or list but one tensor or value.
  std::optional<pickle::Value> root = std::nullopt;  // Only what it holds; none: all.
  bool tensors_only = false;                         // Somebody else shows the rest.
  std::uint64_t at = 0;                              // Where the archive begins in the file.
  // Told of every tensor that was added, where not empty.
  std::function<void(const std::string& key)> added;
  // Told of every name of a tensor or common value that is not simply a key of the root.
  std::function<void(const std::string& name, const std::vector<TorchNames::Part>& path)> nested;
};

// Adds all tensors of an archive that is file number `file` of the builder as strided windows, and
// what holds none as common values, each as large as can be: {"optimizer": {"state": {0: tensor},
// "param_groups": [...]}} gives optimizer.state.0 and optimizer.param_groups. What cannot be shown
// is left out with a warning. kDataLoss: structures that hold themselves so often that listing them
// would take unbounded time. `budget` bounds what the common values of all archives come to.
// For one call of Add; everything that it is given must outlive it.
class TorchTree {
 public:
  TorchTree(ForeignBuilder& builder, const TorchArchive& archive, std::uint32_t file,
            TorchNames& tensors, TorchNames& common, ValueBudget& budget,
            const TorchTreeOptions& options);
  Status Add();

 private:
  // Counts values, and says whether a tensor is among them.
  Result<bool> Scan(const pickle::Value& value, int depth);
  // Names and adds what Scan has counted, in the same order.
  Status Emit(const pickle::Value& value);
  Status AddTensor(const pickle::Value& value);
  // The chunk is the whole tensor: torch.save cuts nothing.
  Status AddStored(const std::string& key, const StoredTensor& stored);
  void AddCommon(const pickle::Value& value);
  // Records and storages, by what tells them apart.
  using Records = std::set<std::string>;
  // Notes all that a value holds, a bounded number of values.
  Status NoteAll(const pickle::Value& value, int depth, Records& into);
  // Notes what is shown, and what values of classes that we do not know were given.
  Status NoteApart(const pickle::Value& value, int depth, Records& shown, Records& given);
  // kUnsupported, as of the first class that we do not know: nothing else is there, or what such a
  // class was given is shown elsewhere, too, and it may have changed that.
  Status CheckForeign(const pickle::Value& root);
  // To options_.nested, where the name alone does not say how it was nested.
  void TellPath(const std::string& name) const;
  std::string Shown() const;

  ForeignBuilder& builder_;
  const TorchArchive& archive_;
  std::uint32_t file_;
  TorchNames& tensor_names_;
  TorchNames& common_names_;
  ValueBudget& budget_;
  const TorchTreeOptions& options_;
  // Of every value in the order in which they are met: how many there are from it to the end of
  // what it holds, and, in the top bit, whether there is a tensor among them.
  std::vector<std::uint32_t> nodes_;
  std::size_t next_ = 0;  // While they are met again.
  std::string foreign_;   // The first class that we do not know; empty: none.
  std::size_t tensors_ = 0;
  std::size_t noted_ = 0;
  std::vector<TorchNames::Part> path_;
  std::size_t path_bytes_ = 0;  // Of its texts, and a dot each.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_TORCH_TREE_H_
