// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. Files and folders of safetensors: a single file; a folder of them
// with or without an index (transformers, diffusers); and what torch.distributed.checkpoint's
// HuggingFaceStorageWriter leaves, whose files hold shards.
//
// A safetensors file is 8 bytes of header length, a JSON header (name: dtype, shape, data_offsets),
// and the bytes of all tensors without gaps. So every tensor is one packed chunk, or one of several
// where files hold shards, and nothing but headers is read to open a checkpoint.
#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/coding.h"
#include "base/errors.h"
#include "index/foreign/format.h"
#include "index/foreign/model_files.h"
#include "index/records/common_state.h"
#include "shard/safetensors.h"
#include "shard/strict_json.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;  // As the format's header.
// In `__metadata__` of the files of HuggingFaceStorageWriter: where the tensors of this file begin
// in the global ones.
constexpr std::string_view kShardingKey = "DCP_SHARDING_INFO";

// Begins like a file of the format: a header length that fits, and the header's '{'.
// Enough to tell it from a pickle, a zip or text; the header itself is checked when it is read.
bool BeginsLikeSafetensors(File& file) {
  std::array<char, 9> head{};
  const Result<FileInfo> info = file.Stat();
  if (!info.ok() || !file.ReadExactAt(0, head.data(), head.size()).ok()) return false;
  const auto length = LoadLittle<std::uint64_t>(head.data());
  return length >= 2 && length <= kMaxIndexBytes && length <= info.value().size - 8 &&
         head[8] == '{';
}

// A tensor as it stands in one file.
// A whole tensor is a shard that begins at 0.
struct StoredShard {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  Dims begin;  // In the global tensor.
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// Where a file's tensors begin in the global ones: {name: {"saved_offsets": [...]}}, as text.
using SavedOffsets = std::map<std::string, Dims>;

Result<SavedOffsets> ParseOffsets(std::string_view text) {
  JsonLimits limits;
  // An object, a list and a number an axis for each tensor: more than models have, less than would
  // fill memory.
  limits.max_values = std::size_t{1} << 22;
  TENSORMOUNT_ASSIGN_OR_RETURN(const nlohmann::json all, ParseStrictJson(text, limits));
  SavedOffsets out;
  for (const auto& [key, item] : all.items()) {
    const auto bad = [&key = key] { return DataLoss("tensor '" + key + "' has no saved_offsets"); };
    if (!item.is_object() || !item.contains("saved_offsets")) return bad();
    const nlohmann::json& offsets = item.at("saved_offsets");
    if (!offsets.is_array() || offsets.size() > static_cast<std::size_t>(kMaxRank)) return bad();
    Dims begin;
    for (const nlohmann::json& offset : offsets) {
      if (!offset.is_number_unsigned()) return bad();
      const auto number = CheckedCast<std::int64_t>(offset.get<std::uint64_t>());
      if (!number) return bad();
      begin.push_back(*number);
    }
    out.emplace(key, begin);
  }
  return out;
}

class HuggingFaceReader {
 public:
  HuggingFaceReader(const ForeignFolder& folder, ForeignBuilder& builder)
      : folder_(folder), builder_(builder) {}

  Status Read() {
    if (!folder_.file().empty()) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadHeader(folder_.file(), nullptr, false));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(ReadFolder());
      TENSORMOUNT_RETURN_IF_ERROR(AddModelFiles(folder_, builder_));
    }
    return AddShards();
  }

 private:
  // By name of a tensor; of one file.
  // Whether each was found, to say afterwards which the file lacks.
  using Wanted = std::map<std::string, bool, std::less<>>;

  Status ReadFolder() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder_.List(""));
    std::vector<std::string> files;
    std::vector<std::string> indices;
    for (const DirectoryEntry& entry : entries) {
      if (entry.kind == FileKind::kDirectory) continue;
      if (entry.name.ends_with(kSuffix)) files.push_back(entry.name);
      if (entry.name.ends_with(kIndexSuffix)) indices.push_back(entry.name);
    }
    // An index decides: files beside it that it does not list belong to something else
    // (consolidated copies, adapters).
    if (!indices.empty()) return ReadByIndex(ChooseIndex(indices));
    // model.safetensors is a whole model: files beside it belong to something else.
    const auto whole = std::find(files.begin(), files.end(), "model.safetensors");
    if (whole != files.end()) return ReadHeader(*whole, nullptr, true);
    WarnOfMissing(files);
    for (const std::string& name : files) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadHeader(name, nullptr, true));
    }
    return {};
  }

  // The last name of the list that is there wins, so transformers' comes before diffusers'.
  std::string ChooseIndex(const std::vector<std::string>& indices) {
    std::string chosen = indices.front();
    for (const char* usual :
         {"diffusion_pytorch_model.safetensors.index.json", "model.safetensors.index.json"}) {
      if (std::find(indices.begin(), indices.end(), usual) != indices.end()) chosen = usual;
    }
    if (indices.size() > 1)
      builder_.Warn("several indices: " + chosen + " is the one that is read");
    return chosen;
  }

  // "model-00002-of-00005.safetensors" is not there, though others of the five are.
  // Only the numbers in names tell: "-NNNNN-of-NNNNN", five digits each. What the files held is not
  // known, so it is a loss without keys.
  void WarnOfMissing(const std::vector<std::string>& files) {
    std::map<std::string, std::uint64_t> there;  // By pattern, "model-*-of-00005": how many.
    for (const std::string& name : files) {
      const std::string stem = name.substr(0, name.size() - kSuffix.size());
      const std::size_t of = stem.rfind("-of-");
      if (of == std::string::npos || of < 6 || stem.size() - of != 9 || stem[of - 6] != '-')
        continue;
      const std::string digits = stem.substr(of - 5, 5) + stem.substr(of + 4);
      if (digits.find_first_not_of("0123456789") != std::string::npos) continue;
      // A shard's number is its rank's: there are as many as ranks have something of that file.
      if (stem.starts_with("shard-")) continue;
      ++there[stem.substr(0, of - 5) + "*" + stem.substr(of)];
    }
    for (const auto& [pattern, count] : there) {
      const std::uint64_t all = std::stoull(pattern.substr(pattern.size() - 5));
      if (count >= all) continue;
      builder_.LoseFile(pattern + std::string(kSuffix),
                        std::to_string(count) + " of " + std::to_string(all) + " files are there");
    }
  }

  Status ReadByIndex(const std::string& name) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                                 folder_.ReadFile(name, kMaxIndexBytes, "{"));
    std::map<std::string, Wanted> by_file;
    // Called for each member of weight_map as the parser meets it, so that an index of 100 MB never
    // becomes a tree in memory.
    const auto member = [&](const std::string& key, nlohmann::json& value) -> Status {
      if (!value.is_string()) return DataLoss("weight_map: '" + key + "' is in no file");
      const auto& file = value.get_ref<const std::string&>();
      TENSORMOUNT_RETURN_IF_ERROR(folder_.BelowRoot(file).status());
      by_file[file].emplace(key, false);
      return {};
    };
    const Result<nlohmann::json> rest = ParseStrictJson(text, "weight_map", member);
    if (!rest.ok()) return rest.status().WithContext(folder_.Shown(name));
    const auto map = rest.value().find("weight_map");
    if (map != rest.value().end() && !map->is_object()) {
      return DataLoss(folder_.Shown(name) + ": weight_map is no object");
    }
    // Members went to the callback and are not in `rest`: an empty map looks like none there.
    if (by_file.empty() && text.find("\"weight_map\"") == std::string::npos) {
      return DataLoss(folder_.Shown(name) + ": no weight_map");
    }
    for (auto& [file, wanted] : by_file) {
      if (!folder_.Has(file)) {
        // A link that leads out is not a file that is missing.
        const Status why = folder_.Stat(file).status();
        if (why.code() == Code::kPermissionDenied) return why;
        for (const auto& [key, found] : wanted) {
          builder_.Lose(file, "is in " + name + ", but not in the folder",
                        ForeignBuilder::What::kTensor, key);
        }
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(ReadHeader(file, &wanted, true));
      for (const auto& [key, found] : wanted) {
        if (found) continue;
        builder_.Lose(file, "does not hold what " + name + " says", ForeignBuilder::What::kTensor,
                      key);
      }
    }
    return {};
  }

  // `wanted`: the tensors that the index says are in it; null: all are wanted.
  // `in_folder`: whether offsets of shards count. A single file that the user names shows what
  // stands in it, in its own shape, because the other shards are not read.
  Status ReadHeader(const std::string& name, Wanted* wanted, bool in_folder) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, builder_.AddFile(name));
    file_names_[file] = name;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened, builder_.OpenFile(file));
    TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(*opened));
    SavedOffsets offsets;
    if (const auto info = header.metadata.find(std::string(kShardingKey));
        info != header.metadata.end()) {
      Result<SavedOffsets> parsed = ParseOffsets(info->second);
      if (!parsed.ok()) {
        return parsed.status().WithContext(folder_.Shown(name) + ": " + std::string(kShardingKey));
      }
      offsets = std::move(parsed).value();
    }
    AddMetadata(name, std::move(header.metadata));
    std::size_t unlisted = 0;
    std::size_t shards = 0;
    for (SafetensorsEntry& entry : header.entries) {
      if (wanted != nullptr) {
        const auto listed = wanted->find(entry.key);
        if (listed == wanted->end()) {
          ++unlisted;
          continue;
        }
        listed->second = true;
      }
      StoredShard shard;
      shard.begin = Dims::Filled(entry.shape.rank(), 0);
      if (const auto at = offsets.find(entry.key); at != offsets.end()) {
        if (at->second.rank() != entry.shape.rank()) {
          return DataLoss(folder_.Shown(name) + ": " + std::string(kShardingKey) + ": tensor '" +
                          entry.key + "': offsets " + at->second.ToString() + " of shape " +
                          entry.shape.ToString());
        }
        const bool moved = !(at->second == shard.begin);
        shards += moved ? 1 : 0;
        if (in_folder) shard.begin = at->second;
      }
      shard.key = std::move(entry.key);
      shard.dtype = entry.dtype;
      shard.shape = entry.shape;
      shard.file = file;
      shard.offset = header.data_offset + entry.begin;
      shard.length = entry.end - entry.begin;
      shards_.push_back(std::move(shard));
    }
    if (unlisted > 0) {
      builder_.Warn(name + ": " + std::to_string(unlisted) +
                    " tensors in it are not in the index: left out");
    }
    if (shards > 0 && !in_folder) {
      builder_.Warn(name + ": " + std::to_string(shards) +
                    " tensors in it are shards, shown as they are stored: name the folder for the "
                    "whole tensors");
    }
    return {};
  }

  // "format": "pt" stands in every file of a checkpoint; what all of them say is said once.
  void AddMetadata(const std::string& name, std::map<std::string, std::string> metadata) {
    for (auto& [key, value] : metadata) {
      // Of each file its own; what it says is in the regions.
      if (key == kShardingKey) continue;
      const auto [known, fresh] = common_.emplace(key, value);
      if (fresh) {
        builder_.AddCommon(key, std::move(value));
      } else if (known->second != value) {
        builder_.Warn(name + ": metadata " + key + " differs from that of another file: left out");
      }
    }
  }

  // Stable, so that the shards of a tensor keep the order of the files.
  Status AddShards() {
    std::stable_sort(shards_.begin(), shards_.end(),
                     [](const StoredShard& a, const StoredShard& b) { return a.key < b.key; });
    for (std::size_t i = 0; i < shards_.size();) {
      std::size_t end = i + 1;
      while (end < shards_.size() && shards_[end].key == shards_[i].key) ++end;
      TENSORMOUNT_RETURN_IF_ERROR(AddTensor({shards_.data() + i, end - i}));
      i = end;
    }
    return {};
  }

  // The global shape is not stored: it reaches as far as the shards do.
  Status AddTensor(std::span<const StoredShard> shards) {
    const StoredShard& first = shards.front();
    if (const Status usable = CheckKey(first.key); !usable.ok()) {
      // The format allows more. One name that we cannot show is no reason to show nothing.
      builder_.Warn(file_names_[first.file] + ": a tensor is left out: " + usable.message());
      return {};
    }
    Dims shape = first.shape;
    for (const StoredShard& shard : shards) {
      if (shard.dtype != first.dtype || shard.shape.rank() != shape.rank()) {
        builder_.Lose({}, "its shards are of several types", ForeignBuilder::What::kTensor,
                      first.key);
        return {};
      }
      for (int a = 0; a < shape.rank(); ++a) {
        // A lost last shard cannot be noticed by this; docs/formats-adopted.md says so.
        const auto reach = CheckedAdd(shard.begin[a], shard.shape[a]);
        if (!reach) return DataLoss("tensor '" + first.key + "': its saved_offsets overflow");
        shape[a] = std::max(shape[a], *reach);
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                                 builder_.AddTensor(first.key, first.dtype, shape));
    for (const StoredShard& shard : shards) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(shard.begin, shard.shape));
      TENSORMOUNT_RETURN_IF_ERROR(
          builder_.AddChunk(tensor, Region(box), shard.file, shard.offset, shard.length));
    }
    return {};
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::vector<StoredShard> shards_;
  std::map<std::uint32_t, std::string> file_names_;
  std::map<std::string, std::string> common_;  // What the files said so far.
};

class HuggingFace final : public ForeignFormat {
 public:
  std::string_view name() const override { return "safetensors"; }

  bool Probe(const ForeignFolder& folder) const override {
    if (!folder.file().empty()) {
      if (folder.file().ends_with(kSuffix)) return true;
      // What hubs keep has no name that says what it is.
      const Result<std::unique_ptr<File>> file = folder.OpenRead(folder.file());
      return file.ok() && BeginsLikeSafetensors(*file.value());
    }
    const Result<std::vector<DirectoryEntry>> entries = folder.List("");
    return entries.ok() &&
           std::any_of(entries.value().begin(), entries.value().end(), [](const auto& entry) {
             return entry.kind != FileKind::kDirectory &&
                    (entry.name.ends_with(kSuffix) || entry.name.ends_with(kIndexSuffix));
           });
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    return HuggingFaceReader(folder, builder).Read();
  }
};

}  // namespace

const ForeignFormat& HuggingFaceFormat() {
  static const HuggingFace kFormat;
  return kFormat;
}

}  // namespace tensormount
