// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. Files and folders of safetensors: a single file; a folder of them
// with or without an index (transformers, diffusers); and what torch.distributed.checkpoint's
// HuggingFaceStorageWriter leaves, whose files hold shards.
//
// A safetensors file is 8 bytes of header length, a JSON header (name: dtype, shape, data_offsets),
// and the bytes of all tensors without gaps. So every tensor is one packed chunk, or one of several
// where files hold shards, and nothing but headers is read to open a checkpoint.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/errors.h"
#include "index/foreign/file_begin.h"
#include "index/foreign/format.h"
#include "index/foreign/model_files.h"
#include "index/foreign/weight_files.h"
#include "index/records/common_state.h"
#include "shard/safetensors.h"
#include "shard/strict_json.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kSuffix = ".safetensors";
// In `__metadata__` of the files of HuggingFaceStorageWriter: where the tensors of this file begin
// in the global ones.
constexpr std::string_view kShardingKey = "DCP_SHARDING_INFO";

// A tensor as it stands in one file.
// A whole tensor is a shard that begins at 0.
struct StoredShard {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  Dims begin;         // In the global tensor.
  bool whole = true;  // No offsets were stored for it.
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
      TENSORMOUNT_RETURN_IF_ERROR(ReadNamed(folder_.file(), false));
      // Of a file that has nothing else nobody could tell that it has something.
      if (shards_.empty() && !unknown_.empty()) return Status(Code::kUnsupported, unknown_);
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(ReadFolder());
    }
    if (folder_.file().empty() || IsWeightIndex(folder_.file())) {
      TENSORMOUNT_RETURN_IF_ERROR(AddModelFiles(folder_, builder_));
    }
    return AddShards();
  }

 private:
  // By name of a tensor; of one file.
  // Whether each was found, to say afterwards which the file lacks.
  using Wanted = std::map<std::string, bool, std::less<>>;

  // A file of tensors, or an index and what it lists.
  Status ReadNamed(const std::string& name, bool in_folder) {
    return IsWeightIndex(name) ? ReadByIndex(name) : ReadHeader(name, nullptr, in_folder);
  }

  Status ReadFolder() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder_.List(""));
    const WeightFiles files = SafetensorsFiles(entries);
    if (!files.single.empty() && !files.index.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const std::string chosen,
          ChooseWeights(files, builder_, [&](const std::string& name) -> Result<ForeignInventory> {
            ForeignBuilder alone(folder_, {});
            HuggingFaceReader reader(folder_, alone);
            TENSORMOUNT_RETURN_IF_ERROR(reader.ReadNamed(name, true));
            TENSORMOUNT_RETURN_IF_ERROR(reader.AddShards());
            return alone.Finish();
          }));
      return ReadNamed(chosen, true);
    }
    if (!files.single.empty()) return ReadHeader(files.single, nullptr, true);
    if (!files.index.empty()) return ReadByIndex(files.index);
    if (!files.indices.empty()) {
      return AmbiguousWeights(folder_, "holds several indices", files.indices);
    }
    // transformers takes the torch file, vLLM the others.
    const WeightFiles torch = TorchWeightFiles(entries);
    if (!torch.empty()) {
      std::vector<std::string> all = files.loose;
      all.insert(all.begin(), torch.single.empty() ? torch.index : torch.single);
      return AmbiguousWeights(folder_, "holds several sets of weights", all);
    }
    WarnOfMissing(files.loose);
    for (const std::string& name : files.loose) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadOrLose(name, nullptr));
    }
    return AnyRead();
  }

  // A file that is damaged or leads nowhere takes away what it held and nothing else.
  Status ReadOrLose(const std::string& name, Wanted* wanted) {
    const std::size_t before = shards_.size();
    const Status status = ReadHeader(name, wanted, true);
    if (status.ok()) {
      ++files_read_;
      return status;
    }
    if (status.code() != Code::kDataLoss && status.code() != Code::kNotFound &&
        status.code() != Code::kUnsupported) {
      return status;
    }
    shards_.resize(before);
    unread_.push_back(status);
    std::string reason = status.message();
    // A loss begins with the name of its file.
    if (const std::size_t at = reason.find(name + ": "); at != std::string::npos) {
      reason.erase(0, at + name.size() + 2);
    }
    if (status.code() == Code::kNotFound) reason = "the file is missing, or its link leads nowhere";
    if (wanted == nullptr) builder_.LoseFile(name, reason);
    if (wanted == nullptr) return {};
    for (auto& [key, found] : *wanted) {
      found = true;  // Told here.
      builder_.Lose(name, reason, ForeignBuilder::What::kTensor, key);
    }
    return {};
  }

  // What ReadOrLose told is all that there is to say where no file could be read.
  Status AnyRead() const {
    if (files_read_ > 0 || unread_.empty()) return {};
    constexpr std::size_t kShown = 8;
    std::string text = unread_.front().message();
    for (std::size_t i = 1; i < std::min(unread_.size(), kShown); ++i) {
      text += "; " + unread_[i].message();
    }
    if (unread_.size() > kShown) {
      text += "; and " + std::to_string(unread_.size() - kShown) + " more";
    }
    return unread_.front().WithMessage(text);
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

  // An index decides: files beside it that it does not list belong to something else.
  Status ReadByIndex(const std::string& name) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const WeightMap map, ReadWeightMap(folder_, name));
    for (const auto& [file, keys] : map) {
      if (!folder_.Has(file)) {
        // A link that leads out is not a file that is missing.
        const Status why = folder_.Stat(file).status();
        if (why.code() == Code::kPermissionDenied) return why;
        for (const std::string& key : keys) {
          builder_.Lose(file, "is in " + name + ", but not in the folder",
                        ForeignBuilder::What::kTensor, key);
        }
        continue;
      }
      Wanted wanted;
      for (const std::string& key : keys) wanted.emplace_hint(wanted.end(), key, false);
      TENSORMOUNT_RETURN_IF_ERROR(ReadOrLose(file, &wanted));
      for (const auto& [key, found] : wanted) {
        if (found) continue;
        builder_.Lose(file, "does not hold what " + name + " says", ForeignBuilder::What::kTensor,
                      key);
      }
    }
    return AnyRead();
  }

  // The header, or what the file is instead.
  Result<SafetensorsHeader> HeaderOf(const std::string& name, File& file) {
    Result<SafetensorsHeader> header = ReadSafetensorsHeader(file, UnknownDType::kLeaveOut);
    if (header.ok()) return header;
    switch (BeginOf(file)) {
      case FileBegin::kLfsPointer:
        return IsLfsPointer(folder_.Shown(name));
      case FileBegin::kTorchZip:
      case FileBegin::kLegacyTorch:
        return DataLoss(folder_.Shown(name) + ": written by torch.save, and no safetensors file");
      case FileBegin::kZip:
      case FileBegin::kNumpyZip:
        return DataLoss(folder_.Shown(name) + ": a zip archive, and no safetensors file");
      default:
        return header;
    }
  }

  // `wanted`: the tensors that the index says are in it; null: all are wanted.
  // `in_folder`: whether offsets of shards count. A single file that the user names shows what
  // stands in it, in its own shape, because the other shards are not read.
  Status ReadHeader(const std::string& name, Wanted* wanted, bool in_folder) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, builder_.AddFile(name));
    file_names_[file] = name;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened, builder_.OpenFile(file));
    TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsHeader header, HeaderOf(name, *opened));
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
    for (const auto& [key, dtype] : header.unknown) {
      if (wanted != nullptr) {
        const auto listed = wanted->find(key);
        if (listed == wanted->end()) continue;
        listed->second = true;
      }
      unknown_ = name + ": tensor " + key.substr(0, 256) + ": left out: dtype '" + dtype +
                 "' is not known";
      builder_.Warn(unknown_);
    }
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
        shard.whole = false;
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
    if (shards.size() > 1 && std::ranges::any_of(shards, &StoredShard::whole)) {
      std::vector<std::string> names;
      for (const StoredShard& shard : shards) names.push_back(file_names_[shard.file]);
      return AmbiguousWeights(
          folder_,
          "tensor " + first.key.substr(0, 256) + " is in " + names[0] + " and in " + names[1],
          names);
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
  std::string unknown_;  // The warning of a tensor whose dtype is not known; empty: none.
  std::size_t files_read_ = 0;
  std::vector<Status> unread_;  // Why files of the folder were not read.
  std::map<std::uint32_t, std::string> file_names_;
  std::map<std::string, std::string> common_;  // What the files said so far.
};

class HuggingFace final : public ForeignFormat {
 public:
  std::string_view name() const override { return "safetensors"; }

  bool Probe(const ForeignFolder& folder) const override {
    if (!folder.file().empty()) {
      // What hubs keep has no name that says what it is, and a name may be wrong.
      const FileBegin begin = BeginOf(folder, folder.file());
      if (begin == FileBegin::kSafetensors) return true;
      return begin == FileBegin::kElse && (folder.file().ends_with(kSuffix) ||
                                           folder.file().ends_with(".safetensors.index.json"));
    }
    const Result<std::vector<DirectoryEntry>> entries = folder.List("");
    return entries.ok() && !SafetensorsFiles(entries.value()).empty();
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
