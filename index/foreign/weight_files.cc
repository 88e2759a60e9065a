// SPDX-License-Identifier: Apache-2.0
// Finds the files with the weights of a directory (weight_files.h), by the names that the usual
// readers look for.
//
// The readers prefer different sets: transformers prefers model.safetensors and pytorch_model.bin
// to their indices, diffusers prefers an index, and vLLM reads *.safetensors except files that an
// index omits. So a directory with several sets of weights may be ambiguous.
#include "index/foreign/weight_files.h"

#include <algorithm>
#include <array>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "shard/strict_json.h"

namespace tensormount {
namespace {

constexpr std::string_view kSafetensors = ".safetensors";
constexpr std::string_view kIndexEnd = ".index.json";
constexpr std::string_view kSafetensorsIndex = ".safetensors.index.json";
constexpr std::string_view kTorchSingle = "pytorch_model.bin";
// Names that the usual readers look for. If a directory has several of them, the first is used.
struct UsualName {
  std::string_view stem;
  bool index_first;
};
constexpr std::array<UsualName, 2> kUsual = {{{"model", false}, {"diffusion_pytorch_model", true}}};

bool Counts(const DirectoryEntry& entry) {
  return entry.kind != FileKind::kDirectory && !entry.name.starts_with('.');
}

// Whether the file is an adapter or a consolidated copy, which readers use only on request.
bool IsAdapterOrConsolidated(std::string_view name) {
  return name.starts_with("adapter") || name.starts_with("consolidated");
}

void DropAdapters(std::vector<std::string>& names, bool other_weights) {
  const auto beside = [](const std::string& name) { return IsAdapterOrConsolidated(name); };
  if (other_weights || !std::ranges::all_of(names, beside)) std::erase_if(names, beside);
}

bool SameTensors(const ForeignInventory& a, const ForeignInventory& b) {
  return a.lost.empty() && b.lost.empty() &&
         std::ranges::equal(a.inventory.tensors, b.inventory.tensors,
                            [](const TensorRecord& x, const TensorRecord& y) {
                              return x.meta.key() == y.meta.key() &&
                                     x.meta.dtype() == y.meta.dtype() &&
                                     x.meta.shape() == y.meta.shape();
                            });
}

}  // namespace

bool IsWeightIndex(std::string_view name) { return name.ends_with(kIndexEnd); }

WeightFiles SafetensorsFiles(std::span<const DirectoryEntry> entries) {
  std::vector<std::string> files;
  std::vector<std::string> indices;
  for (const DirectoryEntry& entry : entries) {
    if (!Counts(entry)) continue;
    if (entry.name.ends_with(kSafetensors)) files.push_back(entry.name);
    if (entry.name.ends_with(kSafetensorsIndex)) indices.push_back(entry.name);
  }
  WeightFiles out;
  for (const UsualName& usual : kUsual) {
    const std::string single = std::string(usual.stem) + std::string(kSafetensors);
    const std::string index = std::string(usual.stem) + std::string(kSafetensorsIndex);
    if (std::ranges::find(files, single) != files.end()) out.single = single;
    if (std::ranges::find(indices, index) != indices.end()) out.index = index;
    out.index_first = usual.index_first;
    if (!out.empty()) return out;
  }
  const bool torch = !TorchWeightFiles(entries).empty();
  DropAdapters(indices, torch || std::ranges::any_of(files, [](const std::string& name) {
                          return !IsAdapterOrConsolidated(name);
                        }));
  if (indices.size() == 1) {
    out.index = indices.front();
  } else if (!indices.empty()) {
    out.indices = std::move(indices);
  } else {
    DropAdapters(files, torch);
    out.loose = std::move(files);
  }
  return out;
}

WeightFiles TorchWeightFiles(std::span<const DirectoryEntry> entries) {
  WeightFiles out;
  const std::string index = std::string(kTorchSingle) + std::string(kIndexEnd);
  for (const DirectoryEntry& entry : entries) {
    if (!Counts(entry)) continue;
    if (entry.name == kTorchSingle) out.single = entry.name;
    if (entry.name == index) out.index = entry.name;
  }
  return out;
}

Result<WeightMap> ReadWeightMap(const ForeignFolder& folder, const std::string& index) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, folder.Stat(index));
  if (info.size > kMaxWeightIndexBytes) {
    return Status(Code::kUnsupported, folder.Shown(index) + ": the index has " +
                                          std::to_string(info.size) + " bytes, at most " +
                                          std::to_string(kMaxWeightIndexBytes) + " are allowed");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                               folder.ReadFile(index, kMaxWeightIndexBytes, "{"));
  WeightMap out;
  // The parser calls this for each member of weight_map, so that an index of 100 MB is never all in
  // memory as JSON values.
  const auto member = [&](const std::string& key, nlohmann::json& value) -> Status {
    if (!value.is_string())
      return DataLoss("weight_map: the file name of '" + key.substr(0, 256) + "' is not a string");
    std::string_view file = value.get_ref<const std::string&>();
    while (file.starts_with("./")) file.remove_prefix(2);
    TENSORMOUNT_RETURN_IF_ERROR(folder.PathFromRoot(file).status());
    out[std::string(file)].insert(key);
    return {};
  };
  const Result<nlohmann::json> rest = ParseStrictJson(text, "weight_map", member);
  if (!rest.ok()) return rest.status().WithContext(folder.Shown(index));
  const auto map = rest.value().find("weight_map");
  if (map != rest.value().end() && !map->is_object()) {
    return DataLoss(folder.Shown(index) + ": weight_map is not an object");
  }
  // The parser has passed all members to the callback, so `rest` does not show whether weight_map
  // is empty or missing.
  if (out.empty() && text.find("\"weight_map\"") == std::string::npos) {
    return DataLoss(folder.Shown(index) + ": the index has no weight_map");
  }
  return out;
}

Status AmbiguousWeights(const ForeignFolder& folder, std::string_view why,
                        std::span<const std::string> names) {
  constexpr std::size_t kShown = 8;
  std::string text = folder.Shown("") + ": " + std::string(why) +
                     ": choose one of them with --file, or as the source: ";
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kShown) text += ", ...";
  return {Code::kUnsupported, std::move(text)};
}

Result<std::string> ChooseWeights(const WeightFiles& files, ForeignBuilder& builder,
                                  const ListWeights& list) {
  const ForeignFolder& folder = builder.folder();
  TENSORMOUNT_ASSIGN_OR_RETURN(const WeightMap map, ReadWeightMap(folder, files.index));
  if (map.size() == 1 && map.contains(files.single)) return files.index;
  // If none of its files exists, the index is left over from an earlier save.
  if (std::ranges::none_of(map, [&](const auto& item) { return folder.Has(item.first); })) {
    return files.single;
  }
  const std::string& first = files.index_first ? files.index : files.single;
  const std::string& second = files.index_first ? files.single : files.index;
  const Result<ForeignInventory> a = list(first);
  const Result<ForeignInventory> b = list(second);
  if (!a.ok() || !b.ok() || !SameTensors(a.value(), b.value())) {
    const std::array<std::string, 2> both = {files.single, files.index};
    return AmbiguousWeights(
        folder, "contains two sets of weights with different keys, shapes or types", both);
  }
  builder.Warn("the weights are stored twice, with the same keys, shapes and types: " + first +
               " is read and " + second + " is ignored (choose with --file)");
  return first;
}

}  // namespace tensormount
