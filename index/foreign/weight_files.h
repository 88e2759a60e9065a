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

// Which files of a folder of the Hugging Face kind are its weights. Several could be; what readers
// of such folders (transformers, diffusers, vLLM) take is what counts.

namespace tensormount {

// As they stand in the folder; names that begin with a dot never count, and neither do folders.
struct WeightFiles {
  // The files of one model: in one file, and by an index. Either may be empty.
  std::string single;
  std::string index;
  // Who reads the folder takes the index first, as diffusers does; else the single file.
  bool index_first = false;
  // Without the two: several indices, of which none has a usual name, or files without any.
  std::vector<std::string> indices;
  std::vector<std::string> loose;

  bool empty() const { return single.empty() && index.empty() && indices.empty() && loose.empty(); }
};

// *.safetensors and their indices. Adapters (adapter*) and consolidated copies (consolidated*)
// count only where nothing else is there.
WeightFiles SafetensorsFiles(std::span<const DirectoryEntry> entries);
// pytorch_model.bin and its index.
WeightFiles TorchWeightFiles(std::span<const DirectoryEntry> entries);

// Whether the name is that of an index: it ends with ".index.json".
bool IsWeightIndex(std::string_view name);

// A larger index is not read: one of six million keys.
inline constexpr std::uint64_t kMaxWeightIndexBytes = std::uint64_t{1} << 30;

// The weight_map of an index: keys by file. kDataLoss: it is none, names a key twice, or a file
// that is no name below the folder (kPermissionDenied by ".."). kUnsupported: over
// kMaxWeightIndexBytes.
using WeightMap = std::map<std::string, std::set<std::string>>;
Result<WeightMap> ReadWeightMap(const ForeignFolder& folder, const std::string& index);

// Which of the two, `files.single` and `files.index`, is read: the one that the usual reader takes.
// `list` reads one of them. Where both hold the same keys, shapes and types a warning names both;
// where they do not, kUnsupported does (AmbiguousWeights), since readers differ in which they take.
// An index of which no file is there is no candidate, and one that lists nothing but the single
// file is the one that is read.
using ListWeights = std::function<Result<ForeignInventory>(const std::string& name)>;
Result<std::string> ChooseWeights(const WeightFiles& files, ForeignBuilder& builder,
                                  const ListWeights& list);

// kUnsupported: "FOLDER: WHY: name one of them, by --file or as the source: A, B".
Status AmbiguousWeights(const ForeignFolder& folder, std::string_view why,
                        std::span<const std::string> names);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_WEIGHT_FILES_H_
