// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. OLMo-core 0.1: a folder of rank_N.safetensors with metadata.json, or
// the folder of two of them, model/ and optim/, that its trainer writes. Later releases write DCP.
//
// metadata.json has for every tensor its shape, dtype and which file holds which part of it: boxes,
// or ranges of the flattened tensor. The positions of the bytes stand in the headers of the
// safetensors files, under the same key; several ranges of one file stand one after the other. Both
// are read, compared, and joined into chunks.
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
// A larger one stays an object only: it is read when the checkpoint is opened.
constexpr std::uint64_t kMaxOlmoPickle = std::uint64_t{1} << 20;
// The halves of a trainer's checkpoint; keys get these prefixes, as they have them since 1.0.
constexpr std::array<std::string_view, 2> kHalves = {"model", "optim"};

// Whether the first bytes of metadata.json look like OLMo's rather than Megatron's.
// Megatron's metadata.json is a few words without "tensors"; OLMo's begins with it.
bool LooksLikeOlmo(const ForeignFolder& folder, const std::string& name) {
  const Result<std::unique_ptr<File>> file = folder.OpenRead(name);
  if (!file.ok()) return false;
  std::array<char, 256> head{};
  const Result<std::size_t> got = file.value()->ReadAt(0, head.data(), head.size());
  if (!got.ok()) return false;
  return std::string_view(head.data(), got.value()).find("\"tensors\"") != std::string_view::npos;
}

// Pickles in tensors of bytes: the hyperparameters, and the names of an optimizer's slots.
// Tensors of these names that are no vectors of bytes are tensors like others.
bool IsPickled(const OlmoTensor& tensor) {
  if (tensor.dtype != DType::kU8 || tensor.shape.rank() != 1) return false;
  if (tensor.key == "state_keys") return true;
  constexpr std::string_view kGroup = "param_group";
  if (!tensor.key.starts_with(kGroup) || tensor.key.size() == kGroup.size()) return false;
  return tensor.key.find_first_not_of("0123456789", kGroup.size()) == std::string::npos;
}

// One file of the metadata, whether it is there or not: positions in files_ are those of
// OlmoMetadata::files.
struct RankFile {
  bool present = false;
  std::uint32_t number = 0;
  std::uint64_t data_offset = 0;
  std::unordered_map<std::string, SafetensorsEntry> entries;
};

class HalfReader {
 public:
  HalfReader(const ForeignFolder& folder, ForeignBuilder& builder, std::string_view half)
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
  // A file that is missing leaves holes in the tensors that it held part of; the read goes on.
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
      builder_.LoseFile(name, "the file is missing");
    } else {
      return number.status();
    }
    files_.push_back(std::move(rank));
    return Status();
  }

  // The dtype, where metadata.json does not say: that of the first file that has the tensor.
  // The first releases did not write it. Files that say otherwise are then found by AddShard.
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
      builder_.Lose({}, "its element type stands nowhere", ForeignBuilder::What::kTensor, key);
      return Status();
    }
    if (IsPickled(tensor)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool added, AddPickled(tensor, key));
      if (added) return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number,
                                 builder_.AddTensor(key, *dtype, tensor.shape));
    // Copies that other process groups wrote stand in the metadata or not; one is enough.
    std::vector<const OlmoShard*> added;
    for (const OlmoShard& shard : tensor.shards) {
      if (!files_[shard.file].present) continue;
      // Equal regions are copies, of which the first found counts; regions that overlap without
      // being equal are left to the builder, which drops the tensor.
      const bool copy = std::any_of(added.begin(), added.end(), [&](const OlmoShard* other) {
        return other->regions == shard.regions;
      });
      if (copy) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool found, AddShard(number, tensor.key, shard));
      if (found) added.push_back(&shard);
    }
    return Status();
  }

  // False: the file does not have it (a replica, of which only the first rank's is written), or the
  // tensor was dropped.
  Result<bool> AddShard(std::uint32_t tensor, const std::string& key, const OlmoShard& shard) {
    const RankFile& file = files_[shard.file];
    const auto at = file.entries.find(key);
    if (at == file.entries.end()) return false;
    const SafetensorsEntry& entry = at->second;
    const TensorMeta& meta = builder_.MetaOf(tensor);
    // The regions of a shard stand one after the other in its entry, in the order of the metadata,
    // and must fill it exactly.
    const std::string& name = metadata_.files[shard.file];
    if (entry.dtype != meta.dtype()) {
      builder_.Drop(tensor, name + " holds it as " + std::string(InfoOf(entry.dtype).name) +
                                ", metadata.json says " + std::string(InfoOf(meta.dtype()).name));
      return false;
    }
    std::uint64_t offset = file.data_offset + entry.begin;
    const std::uint64_t end = file.data_offset + entry.end;
    for (const Region& region : shard.regions) {
      const Result<std::uint64_t> bytes = RegionBytes(meta.dtype(), meta.shape(), region);
      if (!bytes.ok() || bytes.value() > end - offset) {
        builder_.Drop(tensor, name + " holds less of it than metadata.json says");
        return false;
      }
      TENSORMOUNT_RETURN_IF_ERROR(
          builder_.AddChunk(tensor, region, file.number, offset, bytes.value()));
      offset += bytes.value();
    }
    if (offset != end) {
      builder_.Drop(tensor, name + " holds more of it than metadata.json says");
      return false;
    }
    return true;
  }

  // A pickle that stands whole in one file: an object, and a common value where it is plain data.
  // False: it is not what it should be (cut into shares, or of another length), and is shown as the
  // tensor of bytes that it also is.
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
      if (!document.ok()) return true;  // Opaque, as an object may be.
      if (std::optional<CommonValue> plain = CommonFromPickle(document.value().root())) {
        builder_.AddCommon(key, std::move(*plain));
      }
      return true;
    }
    return false;
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::string below_;   // Of file names: "model/".
  std::string prefix_;  // Of keys: "model.".
  OlmoMetadata metadata_;
  std::vector<RankFile> files_;  // By number of metadata_.files.
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
      HalfReader reader(folder, builder, {});
      TENSORMOUNT_RETURN_IF_ERROR(reader.Read());
      ranks = reader.ranks();
    } else {
      for (const std::string_view half : kHalves) {
        if (!folder.Has(std::string(half) + "/" + std::string(kMetadataName))) continue;
        HalfReader reader(folder, builder, half);
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
