// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h: OLMo-core 0.1, which writes a directory of rank_N.safetensors with
// metadata.json. Its trainer writes two such directories, model/ and optim/. Later releases write
// DCP.
//
// metadata.json has the shape and dtype of each tensor, and tells which file has which part of it:
// a box, or ranges of the flattened tensor. The header of each safetensors file gives the position
// of the bytes under the same key; several ranges in one file follow each other. The two are
// compared, and chunks are made from both.
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/archives/pickle.h"
#include "index/foreign/format.h"
#include "index/foreign/olmo_metadata.h"
#include "shard/safetensors.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kMetadataName = "metadata.json";
constexpr std::uint64_t kMaxOlmoMetadata = std::uint64_t{256} << 20;
// A larger pickle is shown only as an object, because values are read when the checkpoint is
// opened.
constexpr std::uint64_t kMaxOlmoPickle = std::uint64_t{1} << 20;
// The two directories of a trainer's checkpoint. Keys begin with these names, as in OLMo-core since
// 1.0.
constexpr std::array<std::string_view, 2> kHalves = {"model", "optim"};

// Whether the first bytes of metadata.json contain "tensors", as those of OLMo-core do.
// Megatron-Core's metadata.json has only a few fields, none of which has this name.
bool LooksLikeOlmo(const ForeignFolder& folder, const std::string& name) {
  const Result<std::unique_ptr<File>> file = folder.OpenRead(name);
  if (!file.ok()) return false;
  std::array<char, 256> head{};
  const Result<std::size_t> got = file.value()->ReadAt(0, head.data(), head.size());
  if (!got.ok()) return false;
  return std::string_view(head.data(), got.value()).find("\"tensors\"") != std::string_view::npos;
}

// Whether the bytes of the tensor are a pickle: hyperparameters ("param_group0"), or the names of
// an optimizer's state ("state_keys"). Only vectors of bytes are pickles.
bool IsPickled(const OlmoTensor& tensor) {
  if (tensor.dtype != DType::kU8 || tensor.shape.rank() != 1) return false;
  if (tensor.key == "state_keys") return true;
  constexpr std::string_view kGroup = "param_group";
  if (!tensor.key.starts_with(kGroup) || tensor.key.size() == kGroup.size()) return false;
  return tensor.key.find_first_not_of("0123456789", kGroup.size()) == std::string::npos;
}

// A file of OlmoMetadata::files. If it is missing, `present` is false.
struct RankFile {
  bool present = false;
  std::uint32_t number = 0;
  std::uint64_t data_offset = 0;
  std::unordered_map<std::string, SafetensorsEntry> entries;
};

class OlmoFolderReader {
 public:
  OlmoFolderReader(const ForeignFolder& folder, ForeignBuilder& builder, std::string_view half)
      : folder_(folder), builder_(builder) {
    if (half.empty()) return;
    below_ = std::string(half) + "/";
    prefix_ = std::string(half) + ".";
  }

  Status Read() {
    const std::string name = below_ + std::string(kMetadataName);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string json,
                                 folder_.ReadFile(name, kMaxOlmoMetadata, "{"));
    Result<OlmoMetadata> parsed = ParseOlmoMetadata(json);
    if (!parsed.ok()) return parsed.status().WithContext(folder_.Shown(name));
    metadata_ = std::move(parsed).value();
    for (const std::string& file : metadata_.files) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadHeader(below_ + file));
    }
    for (const OlmoTensor& tensor : metadata_.tensors) {
      TENSORMOUNT_RETURN_IF_ERROR(AddTensor(tensor));
    }
    return Status();
  }

  std::size_t ranks() const { return files_.size(); }

 private:
  // Reads the header of a file. If the file is missing, it is reported as lost, and the read
  // continues.
  Status ReadHeader(const std::string& name) {
    RankFile rank;
    const Result<std::uint32_t> number = builder_.AddFile(name);
    if (number.ok()) {
      rank.present = true;
      rank.number = number.value();
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file,
                                   builder_.OpenFile(rank.number));
      TENSORMOUNT_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(*file));
      rank.data_offset = header.data_offset;
      rank.entries.reserve(header.entries.size());
      for (SafetensorsEntry& entry : header.entries) {
        std::string key = entry.key;
        rank.entries.emplace(std::move(key), std::move(entry));
      }
    } else if (number.status().code() == Code::kNotFound) {
      builder_.ReportLostFile(name, "the file is missing");
    } else {
      return number.status();
    }
    files_.push_back(std::move(rank));
    return Status();
  }

  // The dtype of the tensor. The first releases of OLMo-core did not write dtypes into
  // metadata.json; then the first file that has the tensor gives the dtype, and AddShard compares
  // it with that in other files.
  std::optional<DType> DTypeOf(const OlmoTensor& tensor) const {
    if (tensor.dtype) return tensor.dtype;
    for (const OlmoShard& shard : tensor.shards) {
      const auto& entries = files_[shard.file].entries;
      if (const auto at = entries.find(tensor.key); at != entries.end()) return at->second.dtype;
    }
    return std::nullopt;
  }

  Status AddTensor(const OlmoTensor& tensor) {
    const std::string key = prefix_ + tensor.key;
    const auto left_out = [&](const std::string& why) {
      builder_.Warn("tensor " + key.substr(0, 256) + ": left out: " + why);
      return Status();
    };
    if (!tensor.problem.ok()) return left_out(tensor.problem.message());
    const std::optional<DType> dtype = DTypeOf(tensor);
    if (!dtype) {
      builder_.ReportLost({}, "the dtype is not recorded", ForeignBuilder::LostKind::kTensor, key);
      return Status();
    }
    if (IsPickled(tensor)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool added, AddPickled(tensor, key));
      if (added) return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number,
                                 builder_.AddTensor(key, *dtype, tensor.shape));
    std::vector<const OlmoShard*> added;
    for (const OlmoShard& shard : tensor.shards) {
      if (!files_[shard.file].present) continue;
      // Several process groups may have written the same regions as replicas; the first replica is
      // used. If regions overlap without being equal, the builder drops the tensor.
      const bool copy = std::any_of(added.begin(), added.end(), [&](const OlmoShard* other) {
        return other->regions == shard.regions;
      });
      if (copy) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool found, AddShard(number, tensor.key, shard));
      if (found) added.push_back(&shard);
    }
    return Status();
  }

  // Adds the chunks of a shard. False if the file does not have the shard (OLMo-core writes only
  // the replica of the first rank), or if the tensor was dropped.
  Result<bool> AddShard(std::uint32_t tensor, const std::string& key, const OlmoShard& shard) {
    const RankFile& file = files_[shard.file];
    const auto at = file.entries.find(key);
    if (at == file.entries.end()) return false;
    const SafetensorsEntry& entry = at->second;
    const TensorMeta& meta = builder_.MetaOf(tensor);
    // The regions of a shard follow each other in the entry of the file, and must fill the entry.
    const std::string& name = metadata_.files[shard.file];
    if (entry.dtype != meta.dtype()) {
      builder_.Drop(tensor,
                    name + " stores the tensor as " + std::string(InfoOf(entry.dtype).name) +
                        ", but metadata.json declares " + std::string(InfoOf(meta.dtype()).name));
      return false;
    }
    std::uint64_t offset = file.data_offset + entry.begin;
    const std::uint64_t end = file.data_offset + entry.end;
    for (const Region& region : shard.regions) {
      const Result<std::uint64_t> bytes = RegionBytes(meta.dtype(), meta.shape(), region);
      if (!bytes.ok() || bytes.value() > end - offset) {
        builder_.Drop(tensor, name + " stores less of the tensor than metadata.json declares");
        return false;
      }
      TENSORMOUNT_RETURN_IF_ERROR(
          builder_.AddChunk(tensor, region, file.number, offset, bytes.value()));
      offset += bytes.value();
    }
    if (offset != end) {
      builder_.Drop(tensor, name + " stores more of the tensor than metadata.json declares");
      return false;
    }
    return true;
  }

  // Adds a pickle as an object, and, if the pickle is plain data, also as a common value. False if
  // the first file with the key does not have the whole pickle, or no file has the key; the caller
  // then adds a tensor of bytes.
  Result<bool> AddPickled(const OlmoTensor& tensor, const std::string& key) {
    for (const OlmoShard& shard : tensor.shards) {
      const RankFile& file = files_[shard.file];
      const auto at = file.entries.find(tensor.key);
      if (!file.present || at == file.entries.end()) continue;
      const SafetensorsEntry& entry = at->second;
      const std::uint64_t length = entry.end - entry.begin;
      const bool whole = shard.regions.size() == 1 &&
                         shard.regions[0] == Region(Box::Whole(tensor.shape)) &&
                         length == static_cast<std::uint64_t>(tensor.shape[0]);
      if (!whole) return false;
      const std::uint64_t offset = file.data_offset + entry.begin;
      TENSORMOUNT_RETURN_IF_ERROR(builder_.AddObject(key, file.number, offset, length));
      if (length > kMaxOlmoPickle) return true;
      std::string bytes(length, '\0');
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened,
                                   builder_.OpenFile(file.number));
      TENSORMOUNT_RETURN_IF_ERROR(opened->ReadExactAt(offset, bytes.data(), bytes.size()));
      const Result<pickle::Document> document = pickle::Parse(std::move(bytes));
      // A pickle that cannot be parsed is added only as an object.
      if (!document.ok()) return true;
      if (std::optional<CommonValue> plain = CommonFromPickle(document.value().root())) {
        builder_.AddCommon(key, std::move(*plain));
      }
      return true;
    }
    return false;
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::string below_;   // Start of file names: "model/".
  std::string prefix_;  // Start of keys: "model.".
  OlmoMetadata metadata_;
  std::vector<RankFile> files_;  // Element i belongs to metadata_.files[i].
};

class Olmo : public ForeignFormat {
 public:
  std::string_view name() const override { return "olmo-core 0.1"; }

  bool Probe(const ForeignFolder& folder) const override {
    if (!folder.file().empty()) return false;
    if (LooksLikeOlmo(folder, std::string(kMetadataName))) return true;
    return LooksLikeOlmo(folder, std::string(kHalves[0]) + "/" + std::string(kMetadataName));
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    std::size_t ranks = 0;
    if (folder.Has(kMetadataName)) {
      OlmoFolderReader reader(folder, builder, {});
      TENSORMOUNT_RETURN_IF_ERROR(reader.Read());
      ranks = reader.ranks();
    } else {
      for (const std::string_view half : kHalves) {
        if (!folder.Has(std::string(half) + "/" + std::string(kMetadataName))) continue;
        OlmoFolderReader reader(folder, builder, half);
        TENSORMOUNT_RETURN_IF_ERROR(reader.Read());
        ranks = std::max(ranks, reader.ranks());
      }
    }
    builder.SetWorldSize(static_cast<std::uint32_t>(std::max<std::size_t>(ranks, 1)));
    return Status();
  }
};

}  // namespace

const ForeignFormat& OlmoFormat() {
  static const Olmo kFormat;
  return kFormat;
}

}  // namespace tensormount
