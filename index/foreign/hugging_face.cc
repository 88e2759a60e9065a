// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. Files and folders of safetensors: a single file; a folder of them
// with or without an index (transformers, diffusers); and what torch.distributed.checkpoint's
// HuggingFaceStorageWriter leaves, whose files hold shards.
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
#include "index/records/common_state.h"
#include "shard/safetensors.h"
#include "shard/strict_json.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;  // As the format's header.
constexpr std::string_view kShardingKey = "DCP_SHARDING_INFO";

// Begins like a file of the format: a header length that fits, and the header's '{'.
bool BeginsLikeSafetensors(File& file) {
  std::array<char, 9> head{};
  const Result<FileInfo> info = file.Stat();
  if (!info.ok() || !file.ReadExactAt(0, head.data(), head.size()).ok()) return false;
  const auto length = LoadLittle<std::uint64_t>(head.data());
  return length >= 2 && length <= kMaxIndexBytes && length <= info.value().size - 8 &&
         head[8] == '{';
}

// A tensor as it stands in one file.
struct StoredShard {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  Dims begin;  // In the global tensor.
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// The place of a file's tensors in the global ones: {name: {"saved_offsets": [...]}}, as text.
using SavedOffsets = std::map<std::string, Dims>;

Result<SavedOffsets> ParseOffsets(std::string_view text) {
  JsonLimits limits;
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
    }
    return AddPieces();
  }

 private:
  // By name of a tensor; of one file.
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
    if (!indices.empty()) return ReadByIndex(ChooseIndex(indices));
    const auto whole = std::find(files.begin(), files.end(), "model.safetensors");
    if (whole != files.end()) return ReadHeader(*whole, nullptr, true);
    WarnOfMissing(files);
    for (const std::string& name : files) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadHeader(name, nullptr, true));
    }
    return {};
  }

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
  void WarnOfMissing(const std::vector<std::string>& files) {
    struct Set {
      std::uint64_t count = 0;
      std::vector<std::uint64_t> seen;
    };
    std::map<std::string, Set> sets;
    for (const std::string& name : files) {
      const std::string stem = name.substr(0, name.size() - kSuffix.size());
      const std::size_t of = stem.rfind("-of-");
      if (of == std::string::npos || of < 6 || stem.size() - of != 9 || stem[of - 6] != '-')
        continue;
      const std::string digits = stem.substr(of - 5, 5) + stem.substr(of + 4);
      if (digits.find_first_not_of("0123456789") != std::string::npos) continue;
      // A shard's number is its rank's: there are as many as ranks have something of that file.
      if (stem.starts_with("shard-")) continue;
      Set& set = sets[stem.substr(0, of - 5) + "*" + stem.substr(of)];
      set.count = std::stoull(digits.substr(5));
      set.seen.push_back(std::stoull(digits.substr(0, 5)));
    }
    for (const auto& [pattern, set] : sets) {
      if (set.seen.size() < set.count) {
        builder_.LoseFile(pattern + std::string(kSuffix), std::to_string(set.seen.size()) + " of " +
                                                              std::to_string(set.count) +
                                                              " files are there");
      }
    }
  }

  Status ReadByIndex(const std::string& name) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                                 folder_.ReadFile(name, kMaxIndexBytes, "{"));
    std::map<std::string, Wanted> by_file;
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
      StoredShard piece;
      piece.begin = Dims::Filled(entry.shape.rank(), 0);
      if (const auto at = offsets.find(entry.key); at != offsets.end()) {
        if (at->second.rank() != entry.shape.rank()) {
          return DataLoss(folder_.Shown(name) + ": " + std::string(kShardingKey) + ": tensor '" +
                          entry.key + "': offsets " + at->second.ToString() + " of shape " +
                          entry.shape.ToString());
        }
        const bool moved = !(at->second == piece.begin);
        shards += moved ? 1 : 0;
        if (in_folder) piece.begin = at->second;
      }
      piece.key = std::move(entry.key);
      piece.dtype = entry.dtype;
      piece.shape = entry.shape;
      piece.file = file;
      piece.offset = header.data_offset + entry.begin;
      piece.length = entry.end - entry.begin;
      pieces_.push_back(std::move(piece));
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

  Status AddPieces() {
    std::stable_sort(pieces_.begin(), pieces_.end(),
                     [](const StoredShard& a, const StoredShard& b) { return a.key < b.key; });
    for (std::size_t i = 0; i < pieces_.size();) {
      std::size_t end = i + 1;
      while (end < pieces_.size() && pieces_[end].key == pieces_[i].key) ++end;
      TENSORMOUNT_RETURN_IF_ERROR(AddTensor({pieces_.data() + i, end - i}));
      i = end;
    }
    return {};
  }

  // The global shape is not stored: it reaches as far as the shards do.
  Status AddTensor(std::span<const StoredShard> pieces) {
    const StoredShard& first = pieces.front();
    if (const Status usable = CheckKey(first.key); !usable.ok()) {
      // The format allows more. One name that we cannot show is no reason to show nothing.
      builder_.Warn(file_names_[first.file] + ": a tensor is left out: " + usable.message());
      return {};
    }
    Dims shape = first.shape;
    for (const StoredShard& piece : pieces) {
      if (piece.dtype != first.dtype || piece.shape.rank() != shape.rank()) {
        builder_.Lose({}, "its shards are of several types", ForeignBuilder::What::kTensor,
                      first.key);
        return {};
      }
      for (int a = 0; a < shape.rank(); ++a) {
        const auto reach = CheckedAdd(piece.begin[a], piece.shape[a]);
        if (!reach) return DataLoss("tensor '" + first.key + "': its saved_offsets overflow");
        shape[a] = std::max(shape[a], *reach);
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                                 builder_.AddTensor(first.key, first.dtype, shape));
    for (const StoredShard& piece : pieces) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(piece.begin, piece.shape));
      TENSORMOUNT_RETURN_IF_ERROR(
          builder_.AddChunk(tensor, Region(box), piece.file, piece.offset, piece.length));
    }
    return {};
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::vector<StoredShard> pieces_;
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
