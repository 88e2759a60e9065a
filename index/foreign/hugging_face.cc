// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h: safetensors. The source is a single file; a directory of files with
// or without an index (transformers, diffusers); or the output of torch.distributed.checkpoint's
// HuggingFaceStorageWriter, whose files contain shards.
//
// A safetensors file is 8 bytes of header length, a JSON header (name: dtype, shape, data_offsets),
// and the bytes of all tensors without gaps. Each tensor, or each shard of it, is one packed chunk,
// and opening a checkpoint reads only headers.
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
// Entry of `__metadata__` in the files of HuggingFaceStorageWriter: the offsets of the file's
// shards in the global tensors.
constexpr std::string_view kShardingKey = "DCP_SHARDING_INFO";

// A tensor, or a shard of one, in one file. A whole tensor is a shard that begins at 0.
struct StoredShard {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  Dims begin;  // Offsets in the global tensor.
  // True: the file has no saved offsets for the tensor.
  bool whole = true;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// Offsets of a file's shards in the global tensors, by key. Parsed from the text {name:
// {"saved_offsets": [...]}}.
using SavedOffsets = std::map<std::string, Dims>;

Result<SavedOffsets> ParseOffsets(std::string_view text) {
  JsonLimits limits;
  // Each tensor takes an object, a list, and a number for each axis. The limit is far above the
  // tensors of real models.
  limits.max_values = std::size_t{1} << 22;
  TENSORMOUNT_ASSIGN_OR_RETURN(const nlohmann::json all, ParseStrictJson(text, limits));
  SavedOffsets out;
  for (const auto& [key, item] : all.items()) {
    const auto bad = [&key = key] {
      return DataLoss("tensor '" + key + "' has no valid saved_offsets");
    };
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
      // If all tensors of the file have unsupported dtypes, the read fails, because an empty result
      // would look like an empty file.
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
  // The wanted tensors of one file by name, and whether each was found.
  using Wanted = std::map<std::string, bool, std::less<>>;

  // Reads a file of tensors, or an index and the files that it lists.
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
      return AmbiguousWeights(folder_, "contains several index files", files.indices);
    }
    // Without an index, transformers reads the torch file of such a directory, but vLLM reads the
    // safetensors files. So neither is chosen here.
    const WeightFiles torch = TorchWeightFiles(entries);
    if (!torch.empty()) {
      std::vector<std::string> all = files.loose;
      all.insert(all.begin(), torch.single.empty() ? torch.index : torch.single);
      return AmbiguousWeights(folder_, "contains several sets of weights", all);
    }
    WarnOfMissing(files.loose);
    for (const std::string& name : files.loose) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadOrLose(name, nullptr));
    }
    return CheckAnyRead();
  }

  // Reads one file of several. If the file is missing, damaged or not supported, its tensors are
  // reported as lost, and the read of the other files continues.
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
    // ForeignLoss has the file's name in a field of its own.
    if (const std::size_t at = reason.find(name + ": "); at != std::string::npos) {
      reason.erase(0, at + name.size() + 2);
    }
    if (status.code() == Code::kNotFound)
      reason = "the file is missing, or a dangling symbolic link";
    if (wanted == nullptr) builder_.ReportLostFile(name, reason);
    if (wanted == nullptr) return {};
    for (auto& [key, found] : *wanted) {
      // Prevents a second report: ReadByIndex reports the keys that are not found.
      found = true;
      builder_.ReportLost(name, reason, ForeignBuilder::LostKind::kTensor, key);
    }
    return {};
  }

  // If no file could be read, fails with the errors that ReadOrLose collected.
  Status CheckAnyRead() const {
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

  // Reports missing files of a series such as "model-00002-of-00005.safetensors", by the numbers in
  // the names. It is unknown which tensors a missing file had, so the loss has no keys.
  void WarnOfMissing(const std::vector<std::string>& files) {
    // Number of existing files by pattern, "model-*-of-00005".
    std::map<std::string, std::uint64_t> there;
    for (const std::string& name : files) {
      const std::string stem = name.substr(0, name.size() - kSuffix.size());
      const std::size_t of = stem.rfind("-of-");
      if (of == std::string::npos || of < 6 || stem.size() - of != 9 || stem[of - 6] != '-')
        continue;
      const std::string digits = stem.substr(of - 5, 5) + stem.substr(of + 4);
      if (digits.find_first_not_of("0123456789") != std::string::npos) continue;
      // The number in the name of a "shard-" file is a rank, and ranks without data write no file.
      if (stem.starts_with("shard-")) continue;
      ++there[stem.substr(0, of - 5) + "*" + stem.substr(of)];
    }
    for (const auto& [pattern, count] : there) {
      const std::uint64_t all = std::stoull(pattern.substr(pattern.size() - 5));
      if (count >= all) continue;
      builder_.ReportLostFile(
          pattern + std::string(kSuffix),
          "only " + std::to_string(count) + " of " + std::to_string(all) + " files exist");
    }
  }

  // Reads the files that an index lists. Other files in the directory are not part of the model.
  Status ReadByIndex(const std::string& name) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const WeightMap map, ReadWeightMap(folder_, name));
    for (const auto& [file, keys] : map) {
      if (!folder_.Has(file)) {
        // A file behind a link that leads out of the bounds is not missing: the read fails.
        const Status why = folder_.Stat(file).status();
        if (why.code() == Code::kPermissionDenied) return why;
        for (const std::string& key : keys) {
          builder_.ReportLost(file, "the file is listed in " + name + ", but does not exist",
                              ForeignBuilder::LostKind::kTensor, key);
        }
        continue;
      }
      Wanted wanted;
      for (const std::string& key : keys) wanted.emplace_hint(wanted.end(), key, false);
      TENSORMOUNT_RETURN_IF_ERROR(ReadOrLose(file, &wanted));
      for (const auto& [key, found] : wanted) {
        if (found) continue;
        builder_.ReportLost(file,
                            "the file does not contain all tensors that " + name + " lists for it",
                            ForeignBuilder::LostKind::kTensor, key);
      }
    }
    return CheckAnyRead();
  }

  // Reads the header. If the file is a git-lfs pointer, a zip or a file of torch.save, the error
  // says so.
  Result<SafetensorsHeader> HeaderOf(const std::string& name, File& file) {
    Result<SafetensorsHeader> header = ReadSafetensorsHeader(file, UnknownDType::kLeaveOut);
    if (header.ok()) return header;
    switch (FileTypeOf(file)) {
      case FileType::kLfsPointer:
        return IsLfsPointer(folder_.Shown(name));
      case FileType::kTorchZip:
      case FileType::kLegacyTorch:
        return DataLoss(folder_.Shown(name) + ": written by torch.save, not a safetensors file");
      case FileType::kZip:
      case FileType::kNumpyZip:
        return DataLoss(folder_.Shown(name) + ": a zip archive, not a safetensors file");
      default:
        return header;
    }
  }

  // Reads the header of a file and adds its shards. `wanted`: the tensors that the index lists for
  // the file; null: all. `in_folder`: whether to use the offsets of shards. It is false for a file
  // that the user names: its shards are then shown as separate tensors, because the other files are
  // not read.
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
                 "' is not supported";
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
                          entry.key + "': offsets " + at->second.ToString() +
                          " do not match shape " + entry.shape.ToString());
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
                    " tensors in it are shards, shown as stored; open the directory to see the "
                    "whole tensors");
    }
    return {};
  }

  // Adds the metadata of a file; equal entries of several files ("format": "pt") are kept once.
  void AddMetadata(const std::string& name, std::map<std::string, std::string> metadata) {
    for (auto& [key, value] : metadata) {
      // The offsets of shards differ between files, and the regions of the shards already contain
      // them.
      if (key == kShardingKey) continue;
      const auto [known, fresh] = common_.emplace(key, value);
      if (fresh) {
        builder_.AddCommon(key, std::move(value));
      } else if (known->second != value) {
        builder_.Warn(name + ": metadata " + key + " differs from that of another file: left out");
      }
    }
  }

  // Adds each tensor with all its shards. The sort is stable, so the shards of a tensor keep the
  // order of the files.
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

  // Adds a tensor. The files do not have its global shape, which is computed from the ends of the
  // shards.
  Status AddTensor(std::span<const StoredShard> shards) {
    const StoredShard& first = shards.front();
    if (const Status usable = CheckKey(first.key); !usable.ok()) {
      // Such a key is valid in safetensors, but not in this library. The other tensors are still
      // read.
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
        builder_.ReportLost({}, "the shards have different dtypes or numbers of axes",
                            ForeignBuilder::LostKind::kTensor, first.key);
        return {};
      }
      for (int a = 0; a < shape.rank(); ++a) {
        // A missing last shard is not noticed here: the tensor only looks smaller
        // (docs/formats-adopted.md).
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
  // The last warning about a tensor of an unsupported dtype; empty if there is no such tensor.
  std::string unknown_;
  std::size_t files_read_ = 0;
  std::vector<Status> unread_;  // Errors of files that were not read.
  std::map<std::uint32_t, std::string> file_names_;
  std::map<std::string, std::string> common_;  // The metadata of all files so far.
};

class HuggingFace final : public ForeignFormat {
 public:
  std::string_view name() const override { return "safetensors"; }

  bool Probe(const ForeignFolder& folder) const override {
    if (!folder.file().empty()) {
      // The first bytes decide: the cache of a Hugging Face hub names files by hashes, and a name
      // may be wrong.
      const FileType begin = FileTypeOf(folder, folder.file());
      if (begin == FileType::kSafetensors) return true;
      return begin == FileType::kOther && (folder.file().ends_with(kSuffix) ||
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
