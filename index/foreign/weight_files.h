// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_WEIGHT_FILES_H_
#define TENSORMOUNT_INDEX_FOREIGN_WEIGHT_FILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/foreign/foreign.h"

// Finds the files with the weights in a Hugging Face directory. If a directory has a single file
// and an index with the same tensors, the one that the usual reader (transformers, diffusers)
// prefers is used; if they differ, the directory is refused.

namespace tensormount {

// Names of files with weights in a directory, without hidden files.
struct WeightFiles {
  // The file with all weights, and the index of several files; a name is empty if the file does not
  // exist.
  std::string single;
  std::string index;
  // Whether the usual reader of these names prefers the index to the single file, as diffusers
  // does.
  bool index_first = false;
  // Set only without `single` and `index`: several indices with unusual names, or files without an
  // index.
  std::vector<std::string> indices;
  std::vector<std::string> loose;

  bool empty() const { return single.empty() && index.empty() && indices.empty() && loose.empty(); }
};

// Finds *.safetensors and their indices. Adapters (adapter*) and consolidated copies
// (consolidated*) are used only if there are no other weights.
WeightFiles SafetensorsFiles(std::span<const DirectoryEntry> entries);
// Finds pytorch_model.bin and its index.
WeightFiles TorchWeightFiles(std::span<const DirectoryEntry> entries);

// Whether the name ends with ".index.json".
bool IsWeightIndex(std::string_view name);

// Largest size of an index in bytes, enough for about six million keys.
inline constexpr std::uint64_t kMaxWeightIndexBytes = std::uint64_t{1} << 30;

// By file: the keys that an index lists for it.
using WeightMap = std::map<std::string, std::set<std::string>>;
// Reads the weight_map of an index. kDataLoss: the index is malformed, has a key twice, or a file
// name is invalid (kPermissionDenied for ".."). kUnsupported: the index is larger than
// kMaxWeightIndexBytes.
Result<WeightMap> ReadWeightMap(const ForeignFolder& folder, const std::string& index);

// Reads the tensors of one set of weights: a single file, or the files of an index.
using ListWeights = std::function<Result<ForeignInventory>(const std::string& name)>;
// Chooses between files.single and files.index. An index is ignored if none of its files exists,
// and chosen if it lists only the single file. Otherwise `list` reads both. If they have the same
// keys, shapes and dtypes, the choice is that of the usual reader, and a warning names both; if
// not, or if one has losses or cannot be read, the result is kUnsupported (AmbiguousWeights),
// because readers choose differently.
Result<std::string> ChooseWeights(const WeightFiles& files, ForeignBuilder& builder,
                                  const ListWeights& list);

// The error (kUnsupported) "DIRECTORY: WHY: choose one of them with --file, or as the source: A,
// B".
Status AmbiguousWeights(const ForeignFolder& folder, std::string_view why,
                        std::span<const std::string> names);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_WEIGHT_FILES_H_
