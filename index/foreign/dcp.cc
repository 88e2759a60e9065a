// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h: checkpoints of torch.distributed.checkpoint (DCP), whose pickle
// .metadata locates the items in *.distcp files. Also reads what Megatron-Core (torch_dist) and
// OLMo-core (>= 1.0) add to such a checkpoint.
//
//   .metadata       pickle of Metadata: tensors with their chunks, objects, and the location of
//                   each item (relative_path, offset, length)
//   __R_N.distcp    the items of rank R: a torch archive (zip) of one tensor each, or the bytes of
//                   an object
//
// Items are not opened here: the metadata give the tensor and region of each item, which suffices
// to plan reads, and MakeDcpItemResolver locates the bytes when they are first read. So opening a
// checkpoint reads the metadata and the objects that are shown as values, and calls stat once for
// each data file.
//
// If something is wrong with one tensor or object (its file is missing, a chunk is not within its
// shape), a warning names it and the read continues. If the metadata as a whole are wrong, the read
// fails.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "index/foreign/dcp_items.h"
#include "index/foreign/dcp_metadata.h"
#include "index/foreign/dcp_objects.h"
#include "index/foreign/format.h"
#include "index/foreign/megatron.h"
#include "shard/coverage.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr std::string_view kMetadataFile = ".metadata";
// Pickles of protocol 2 and later begin with this byte.
constexpr std::string_view kProto = "\x80";
constexpr std::string_view kOlmoFolder = "model_and_optim/";
// Longest path of a data file: PATH_MAX of Linux. Hostile metadata could share one huge path
// between a million items.
constexpr std::size_t kMaxPath = 4096;
constexpr std::uint64_t kMaxDcpMetadata = std::uint64_t{2} << 30;
// A data file that is newer than .metadata by more than this many seconds causes a warning that a
// save may be in progress. Copying a small checkpoint takes less time, and clocks of hosts differ
// by less.
constexpr std::int64_t kMuchNewer = 60;
// The name of the common value with planner_data, and its largest size. The size is limited,
// because common values are read when a checkpoint is opened.
constexpr std::string_view kPlannerName = "torch.planner_data";
constexpr std::size_t kMaxPlannerBytes = std::size_t{1} << 20;

// Parses a number of at most 9 digits at the start of `text` and removes these digits; nullopt if
// there is no digit.
std::optional<std::uint32_t> TakeNumber(std::string_view& text) {
  std::uint32_t out = 0;
  std::size_t n = 0;
  for (; n < text.size() && n < 9 && text[n] >= '0' && text[n] <= '9'; ++n) {
    out = out * 10 + static_cast<std::uint32_t>(text[n] - '0');
  }
  if (n == 0) return std::nullopt;
  text.remove_prefix(n);
  return out;
}

// The rank that wrote "prefix__3_0.distcp"; used only for info.world_size. nullopt for other names;
// files with such names are read as well.
std::optional<std::uint32_t> RankOfFile(std::string_view name) {
  const std::size_t mark = name.rfind("__");
  if (mark == std::string_view::npos) return std::nullopt;
  name.remove_prefix(mark + 2);
  const std::optional<std::uint32_t> rank = TakeNumber(name);
  if (!rank || !name.starts_with('_')) return std::nullopt;
  name.remove_prefix(1);
  if (!TakeNumber(name) || name != ".distcp") return std::nullopt;
  return rank;
}

// The rank in "__3.metadata", written by a save without a global plan.
std::optional<std::uint32_t> RankOfMetadata(std::string_view name) {
  if (!name.starts_with("__")) return std::nullopt;
  name.remove_prefix(2);
  const std::optional<std::uint32_t> rank = TakeNumber(name);
  return rank && name == kMetadataFile ? rank : std::nullopt;
}

// For saves without a global plan: the tensors whose chunks on all ranks form one tensor, by key.
// The value is the tensor's number in the builder, once the first rank has added the tensor. The
// keys are views into the metadata of the ranks.
using UnitedTensors = std::unordered_map<std::string_view, std::optional<std::uint32_t>>;

// Reads one .metadata file and adds the items that it lists.
class DcpReader {
 public:
  // `below`: the directory of the metadata, "model_and_optim/" or empty. `key_prefix`: text that is
  // put before every key.
  DcpReader(const ForeignFolder& folder, ForeignBuilder& builder, std::string below,
            std::string key_prefix)
      : folder_(folder),
        builder_(builder),
        below_(std::move(below)),
        key_prefix_(std::move(key_prefix)),
        objects_(builder) {}

  Status Read(std::string_view metadata_name, bool megatron) {
    TENSORMOUNT_RETURN_IF_ERROR(Parse(metadata_name));
    return Add(megatron, nullptr);
  }

  Status Parse(std::string_view metadata_name) {
    const std::string name = below_ + std::string(metadata_name);
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, folder_.Stat(name));
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes,
                                 folder_.ReadFile(name, kMaxDcpMetadata, kProto));
    Result<DcpMetadata> parsed = ParseDcpMetadata(std::move(bytes), left_out_);
    if (!parsed.ok()) return parsed.status().WithContext(folder_.Shown(name));
    metadata_.emplace(std::move(parsed).value());
    metadata_name_ = name;
    written_ = info.mtime_seconds;
    return Status();
  }

  // Adds the tensors and objects to the builder; call it after Parse. `united`: the tensors that
  // are assembled from several ranks and whose keys get no prefix; null: none.
  Status Add(bool megatron, UnitedTensors* united) {
    for (const std::string& warning : metadata_->warnings) {
      builder_.Warn(metadata_name_ + ": " + warning);
    }
    ReadFlatShapes(metadata_->mcore_data);
    builder_.ReserveTensors(metadata_->tensors.size());
    for (const DcpTensor& tensor : metadata_->tensors) {
      TENSORMOUNT_RETURN_IF_ERROR(AddTensor(*metadata_, tensor, united));
    }
    TENSORMOUNT_RETURN_IF_ERROR(AddObjects(*metadata_, megatron));
    AddPlannerData(metadata_->planner_data);
    left_out_.WarnAll(builder_);
    WarnOfNewerFiles(metadata_name_, written_);
    return Status();
  }

  const DcpMetadata& metadata() const { return *metadata_; }

  const std::unordered_set<std::string>& flattened() const { return flattened_; }
  const std::set<std::uint32_t>& ranks() const { return ranks_; }

 private:
  struct FileState {
    std::uint32_t number = 0;
    std::uint64_t length = 0;
    std::string_view missing;  // Why the file cannot be used; empty if it can.
  };

  // Returns the state of a data file; a missing file is reported in the result. An error ends the
  // read: the path leads out of the checkpoint directory, or the file cannot be examined. A file
  // may have a million items, so states are kept by path, and the path of the last call is compared
  // first. The pointer stays valid, because unordered_map does not move its elements.
  Result<const FileState*> FileOf(std::string_view path) {
    if (path.size() > kMaxPath) {
      return Status(Code::kDataLoss, folder_.Shown(kMetadataFile) + ": a file name has " +
                                         std::to_string(path.size()) + " bytes, at most " +
                                         std::to_string(kMaxPath) + " are allowed");
    }
    if (last_file_ != nullptr && last_path_ == path) return last_file_;
    auto it = files_.find(path);
    if (it == files_.end()) {
      FileState state;
      // Absolute paths are refused here; ForeignFolder refuses ".." and links that lead out of its
      // bounds.
      if (path.starts_with('/')) {
        return Status(Code::kPermissionDenied,
                      folder_.Shown(kMetadataFile) + ": refers to the file " + std::string(path) +
                          ", which is outside of the checkpoint directory");
      }
      Result<std::uint32_t> added = builder_.AddFile(below_ + std::string(path));
      if (added.ok()) {
        state.number = added.value();
        state.length = builder_.FileLength(state.number);
        if (const std::optional<std::uint32_t> rank = RankOfFile(path)) ranks_.insert(*rank);
      } else if (added.status().code() == Code::kNotFound) {
        state.missing = "the file is missing";
      } else if (added.status().code() == Code::kDataLoss &&
                 folder_.PathFromRoot(below_ + std::string(path)).ok()) {
        state.missing = "is not a regular file";
      } else {
        return added.status();
      }
      it = files_.emplace(path, std::move(state)).first;
    }
    last_path_ = path;
    last_file_ = &it->second;
    return last_file_;
  }

  struct LostItem {
    std::string file;
    std::string reason;
    bool operator==(const LostItem&) const = default;
  };

  // Returns the file of an item of `key`. Null if the bytes are missing (then `lost` is set), or if
  // an extension of DCP transformed the bytes, such as zstd (then the key is added to left_out_).
  Result<const FileState*> FileOfItem(const DcpItem& item, ForeignBuilder::LostKind what,
                                      std::string_view key, std::optional<LostItem>& lost) {
    if (!item.transform.empty()) {
      left_out_.Add(what == ForeignBuilder::LostKind::kTensor ? "tensor" : "object", key,
                    "the item is stored with the unsupported transform '" +
                        std::string(item.transform.substr(0, 64)) + "'");
      return nullptr;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileState* file, FileOf(item.path));
    const std::string name = below_ + std::string(item.path);
    if (!file->missing.empty()) {
      lost = {.file = name, .reason = std::string(file->missing)};
      return nullptr;
    }
    if (item.offset > file->length || item.length > file->length - item.offset) {
      lost = {.file = name,
              .reason = "the file ends after " + std::to_string(file->length) +
                        " bytes, before the end of an item"};
      return nullptr;
    }
    return file;
  }

  // Warns of data files that are newer than the metadata. DCP writes the metadata last, so during a
  // save into the same directory the old metadata describe files of both saves. A copy that wrote
  // .metadata first looks the same, so this is only a warning.
  void WarnOfNewerFiles(const std::string& name, std::int64_t written) {
    std::size_t newer = 0;
    std::string_view first;
    for (const auto& [path, state] : files_) {
      if (!state.missing.empty() || builder_.FileTime(state.number) - written <= kMuchNewer)
        continue;
      if (newer++ == 0 || path < first) first = path;
    }
    if (newer == 0) return;
    builder_.Warn(below_ + std::string(first) + (newer > 1 ? " and others are" : " is") +
                  " newer than " + name +
                  ": the files were copied in this order, or a save into this directory did not "
                  "finish and tensors may be from two saves");
  }

  Status AddTensor(const DcpMetadata& metadata, const DcpTensor& tensor, UnitedTensors* united) {
    // The number of each chunk's file; kNoFile if the chunk is empty or its bytes are missing. All
    // chunks are checked before anything is added.
    std::vector<std::uint32_t> files(tensor.count, kNoFile);
    // The entry in `united`, if the readers share this tensor: the first reader adds the tensor,
    // and each reader adds its chunks.
    std::optional<std::uint32_t>* shared = nullptr;
    if (united != nullptr) {
      const auto at = united->find(tensor.fqn);
      if (at != united->end()) shared = &at->second;
    }
    const std::string key = (shared != nullptr ? "" : key_prefix_) + std::string(tensor.fqn);
    if (const Status usable = CheckKey(key); !usable.ok()) {
      left_out_.Add("tensor", key, usable.message());
      return Status();
    }
    // Reports the tensor as lost, because the metadata contradict themselves.
    const auto contradicted = [&](const std::string& why) {
      builder_.ReportLost({}, why, ForeignBuilder::LostKind::kTensor, key);
      return Status();
    };
    const Dims shape = metadata.Shape(tensor);
    const MegatronFlatShape* flat = FlatShape(tensor, shape);
    // Each pair of file and reason is in it once.
    std::vector<LostItem> lost;
    std::size_t found = 0;
    for (std::size_t i = 0; i < tensor.count; ++i) {
      const DcpItem& item = metadata.items[tensor.first + i];
      const std::span<const std::int64_t> sizes = metadata.Sizes(tensor, i);
      // Ranks without a shard write empty chunks, which may have the offsets of other chunks.
      if (std::ranges::find(sizes, 0) != sizes.end()) continue;
      const Result<Region> region = RegionOf(metadata, tensor, shape, i, flat);
      if (!region.ok()) return contradicted(region.status().message());
      if (!item.stored) continue;  // The builder reports the hole.
      std::optional<LostItem> gone;
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileState* file,
                                   FileOfItem(item, ForeignBuilder::LostKind::kTensor, key, gone));
      if (file == nullptr && !gone) return Status();
      if (gone) {
        if (std::ranges::find(lost, *gone) == lost.end()) lost.push_back(std::move(*gone));
        continue;
      }
      files[i] = file->number;
      ++found;
    }
    // If only some chunks exist, the tensor is added, and the builder reports the hole.
    const bool part = found > 0;
    for (const LostItem& gone : lost) {
      builder_.ReportLost(gone.file, gone.reason, ForeignBuilder::LostKind::kTensor, key, part);
    }
    if (!lost.empty() && !part) return Status();
    const bool known = shared != nullptr && shared->has_value();
    Result<std::uint32_t> added =
        known ? Result<std::uint32_t>(**shared)
              : builder_.AddTensor(key, tensor.dtype, flat != nullptr ? flat->original() : shape);
    if (!added.ok()) return contradicted(added.status().message());
    if (shared != nullptr) *shared = added.value();
    for (std::size_t i = 0; i < tensor.count; ++i) {
      if (files[i] == kNoFile) continue;
      const DcpItem& item = metadata.items[tensor.first + i];
      // value() is safe, because RegionOf succeeded for this chunk above.
      const Status status = builder_.AddPendingChunk(
          added.value(), RegionOf(metadata, tensor, shape, i, flat).value(), files[i], item.offset,
          item.length);
      if (!status.ok()) {
        builder_.Drop(added.value(), status.message());
        return Status();
      }
    }
    if (flat != nullptr) flattened_.insert(key);
    return Status();
  }

  // The region of a chunk: a box of the stored tensor, or, for flattened optimizer state, a flat
  // range within a box of the original tensor.
  static Result<Region> RegionOf(const DcpMetadata& metadata, const DcpTensor& tensor,
                                 const Dims& shape, std::size_t chunk,
                                 const MegatronFlatShape* flat) {
    const std::span<const std::int64_t> offsets = metadata.Offsets(tensor, chunk);
    const std::span<const std::int64_t> sizes = metadata.Sizes(tensor, chunk);
    if (flat != nullptr) return flat->RegionOf(offsets, sizes);
    const Result<Box> box = Box::Make(Dims(offsets), Dims(sizes));
    if (!box.ok() || !box.value().Within(shape)) {
      return Status(Code::kDataLoss, "the chunk at " + Dims(offsets).ToString() + " of size " +
                                         Dims(sizes).ToString() + " is not within shape " +
                                         shape.ToString());
    }
    return Region(box.value());
  }

  // Reads original_shapes_. Megatron-Core up to 0.14 kept the original shapes of flattened
  // optimizer state in mcore_data, a dict by tensor key of dicts with
  // "nd_reformulated_orig_global_shape". Entries of another form are ignored, and their tensors are
  // shown in the stored shape.
  void ReadFlatShapes(const Value& mcore_data) {
    if (mcore_data.kind() != Kind::kDict) return;
    std::vector<std::int64_t> numbers;
    for (std::size_t i = 0; i < mcore_data.size(); ++i) {
      const Value data = mcore_data.item(i);
      if (mcore_data.key(i).kind() != Kind::kString || data.kind() != Kind::kDict ||
          data.size() > 64) {
        continue;
      }
      const std::optional<Value> shape = data.Find("nd_reformulated_orig_global_shape");
      numbers.clear();
      if (!shape || !ReadPickledSize(*shape, numbers) ||
          mcore_data.key(i).text().size() > kMaxKeyBytes ||
          numbers.size() > static_cast<std::size_t>(kMaxRank)) {
        continue;
      }
      original_shapes_.insert_or_assign(mcore_data.key(i).text(), Dims(numbers));
    }
  }

  // Returns how the tensor was flattened; null if the tensor is shown in its stored shape. The
  // result is valid until the next call.
  const MegatronFlatShape* FlatShape(const DcpTensor& tensor, const Dims& shape) {
    const auto it = original_shapes_.find(tensor.fqn);
    if (it == original_shapes_.end()) return nullptr;
    flat_ = MegatronFlatShape::Make(shape, it->second);
    if (!flat_) {
      builder_.Warn("tensor " + std::string(tensor.fqn) + ": its original shape " +
                    it->second.ToString() + " is incompatible with the stored shape " +
                    shape.ToString() + "; shown as stored");
      return nullptr;
    }
    return &*flat_;
  }

  // Adds the objects. With `megatron` all names are parsed together, because whether
  // "KEY/shard_0_2" is a part of KEY depends on the other names.
  Status AddObjects(const DcpMetadata& metadata, bool megatron) {
    std::vector<std::string> names;
    for (const auto& [fqn, item] : metadata.objects)
      names.push_back(key_prefix_ + std::string(fqn));
    std::vector<ObjectRecord> parsed;
    if (megatron) parsed = MegatronObjects(names);
    for (std::size_t i = 0; i < names.size(); ++i) {
      const DcpItem& item = metadata.objects[i].second;
      if (!item.stored) {
        builder_.ReportLost({}, "the metadata has no storage location for this object",
                            ForeignBuilder::LostKind::kObject, names[i]);
        continue;
      }
      std::optional<LostItem> gone;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const FileState* file,
          FileOfItem(item, ForeignBuilder::LostKind::kObject, names[i], gone));
      if (gone)
        builder_.ReportLost(gone->file, gone->reason, ForeignBuilder::LostKind::kObject, names[i]);
      if (file == nullptr) continue;
      ObjectRecord part = megatron ? std::move(parsed[i]) : ObjectRecord{.key = names[i]};
      part.file = file->number;
      part.offset = item.offset;
      part.length = item.length;
      objects_.Add(std::move(part));
    }
    return objects_.Finish(megatron, left_out_);
  }

  // Adds the paths of nested keys, such as {"model.w": ("model", "w")}, as a common value. `export
  // --to dcp` needs the paths, because a dot in a key may also be part of a name. planner_data of
  // another form are ignored. For kMaxPlannerBytes, each key and each part of a path counts 16
  // bytes more than its text.
  void AddPlannerData(const Value& data) {
    if (data.kind() != Kind::kDict) return;
    CommonDict out;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < data.size() && bytes <= kMaxPlannerBytes; ++i) {
      const Value path = data.item(i);
      if (data.key(i).kind() != Kind::kString || path.kind() != Kind::kTuple) return;
      const std::string_view fqn = data.key(i).text();
      if (fqn.size() > kMaxKeyBytes) return;
      if (path.size() == 1 && path.item(0).kind() == Kind::kString && path.item(0).text() == fqn) {
        continue;  // The key is not nested.
      }
      CommonTuple parts;
      bytes += fqn.size() + 16;
      for (std::size_t n = 0; n < path.size() && bytes <= kMaxPlannerBytes; ++n) {
        const Value part = path.item(n);
        if (part.kind() == Kind::kString) {
          parts.items.emplace_back(part.text());
          bytes += part.text().size() + 16;
        } else if (part.kind() == Kind::kInt) {
          parts.items.emplace_back(part.integer());
          bytes += 16;
        } else {
          return;
        }
      }
      out.items.emplace(key_prefix_ + std::string(fqn), std::move(parts));
    }
    if (bytes > kMaxPlannerBytes) {
      builder_.Warn(
          "planner_data, which records how keys are nested, is larger than 1 MiB and left out");
    } else if (!out.items.empty()) {
      builder_.AddCommon(key_prefix_ + std::string(kPlannerName), std::move(out));
    }
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::string below_;
  std::string key_prefix_;
  std::optional<DcpMetadata> metadata_;  // Set by Parse.
  std::string metadata_name_;
  std::int64_t written_ = 0;  // mtime of the metadata, in seconds.
  DcpObjects objects_;
  OmissionCounter left_out_;
  // Data files by relative_path; the keys are views into metadata_.
  std::unordered_map<std::string_view, FileState> files_;
  std::string_view last_path_;
  const FileState* last_file_ = nullptr;
  std::unordered_map<std::string_view, Dims> original_shapes_;
  // The result of FlatShape for the tensor that is being added.
  std::optional<MegatronFlatShape> flat_;
  // Keys of flattened tensors, for the resolver: their items have one axis for any region.
  std::unordered_set<std::string> flattened_;
  std::set<std::uint32_t> ranks_;
};

// Adds the files "train/rankN.pt" as objects: the trainer's state of each rank.
Status AddOlmoTrainerFiles(const ForeignFolder& folder, ForeignBuilder& builder) {
  if (!folder.Has("train")) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List("train"));
  for (const DirectoryEntry& entry : entries) {
    if (!entry.name.starts_with("rank") || !entry.name.ends_with(".pt")) continue;
    const std::string name = "train/" + entry.name;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, builder.AddFile(name));
    TENSORMOUNT_RETURN_IF_ERROR(builder.AddObject(name, file, 0, builder.FileLength(file)));
  }
  return Status();
}

class Dcp : public ForeignFormat {
 public:
  std::string_view name() const override { return "torch.distributed.checkpoint"; }

  bool Probe(const ForeignFolder& folder) const override {
    return folder.file().empty() && (folder.Has(kMetadataFile) || IsOlmo(folder));
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    const bool olmo = !folder.Has(kMetadataFile);
    if (!olmo) TENSORMOUNT_RETURN_IF_ERROR(CheckMegatronBackend(folder));
    const bool torch_dist = !olmo && MegatronBackend(folder) == "torch_dist";
    // Megatron-Core writes metadata.json last, so common.pt without it is a Megatron-Core
    // checkpoint whose save may not have ended.
    const bool megatron = torch_dist || (!olmo && folder.Has("common.pt"));
    if (olmo) builder.SetProducer("olmo-core");
    if (megatron) builder.SetProducer("megatron.core.dist_checkpointing");
    if (megatron && !torch_dist) {
      builder.Warn(std::string(folder.Has("metadata.json") ? "metadata.json does not name a backend"
                                                           : "metadata.json is missing") +
                   "; Megatron-Core writes it last, so this save may be incomplete");
    }
    DcpReader reader(folder, builder, olmo ? std::string(kOlmoFolder) : std::string(), "");
    TENSORMOUNT_RETURN_IF_ERROR(reader.Read(kMetadataFile, megatron));
    if (olmo) TENSORMOUNT_RETURN_IF_ERROR(AddOlmoTrainerFiles(folder, builder));
    if (megatron) TENSORMOUNT_RETURN_IF_ERROR(AddMegatronCommonFile(folder, builder));
    // The number of ranks follows from the names of the data files; the metadata do not have it.
    builder.SetWorldSize(static_cast<std::uint32_t>(reader.ranks().size()));
    builder.SetResolver(MakeDcpItemResolver(reader.flattened()));
    return Status();
  }

 private:
  static bool IsOlmo(const ForeignFolder& folder) {
    return folder.Has("model_and_optim/.metadata");
  }
};

// Decides whether the chunks of a tensor on all ranks form one tensor: all ranks have the same
// dtype and shape, and every element is in one chunk.
class RankUnion {
 public:
  void Add(const DcpMetadata& metadata, const DcpTensor& tensor) {
    const Dims shape = metadata.Shape(tensor);
    if (!regions_) {
      dtype_ = tensor.dtype;
      regions_.emplace(shape);
    }
    fits_ = fits_ && tensor.dtype == dtype_ && shape == regions_->shape();
    for (std::size_t i = 0; fits_ && i < tensor.count; ++i) {
      if (!metadata.items[tensor.first + i].stored) continue;
      // AddBox fails for a box that exceeds the shape or overflows.
      fits_ = regions_->AddBox(metadata.Offsets(tensor, i).data(), metadata.Sizes(tensor, i).data(),
                               static_cast<std::uint32_t>(regions_->size()));
    }
  }
  bool exact() const { return fits_ && regions_ && IsPartition(*regions_); }

 private:
  DType dtype_ = DType::kU8;
  std::optional<RegionSet> regions_;
  bool fits_ = true;
};

// Saves without a global plan, in which each rank wrote its own metadata. If the chunks of a key on
// all ranks form one tensor exactly, that tensor is shown; if not, each rank's tensor is shown as
// rankN/KEY.
class DcpRanks : public ForeignFormat {
 public:
  std::string_view name() const override {
    return "torch.distributed.checkpoint without a global plan";
  }

  bool Probe(const ForeignFolder& folder) const override {
    if (!folder.file().empty() || folder.Has(kMetadataFile)) return false;
    const Result<std::vector<DirectoryEntry>> entries = folder.List("");
    return entries.ok() && std::ranges::any_of(entries.value(), [](const DirectoryEntry& entry) {
             return RankOfMetadata(entry.name).has_value();
           });
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder.List(""));
    // All metadata are parsed before anything is added, because the metadata of all ranks together
    // tell which tensors can be assembled.
    std::vector<std::unique_ptr<DcpReader>> readers;
    for (const DirectoryEntry& entry : entries) {
      const std::optional<std::uint32_t> rank = RankOfMetadata(entry.name);
      if (!rank) continue;
      readers.push_back(
          std::make_unique<DcpReader>(folder, builder, "", "rank" + std::to_string(*rank) + "/"));
      TENSORMOUNT_RETURN_IF_ERROR(readers.back()->Parse(entry.name));
    }
    std::unordered_map<std::string_view, RankUnion> unions;
    for (const auto& reader : readers) {
      for (const DcpTensor& tensor : reader->metadata().tensors) {
        // RegionSet requires a shape whose volume does not overflow. Tensors with other shapes are
        // refused when they are added.
        if (CheckShape(tensor.dtype, reader->metadata().Shape(tensor)).ok()) {
          unions[tensor.fqn].Add(reader->metadata(), tensor);
        }
      }
    }
    UnitedTensors united;
    std::size_t apart = 0;
    for (const auto& [key, all] : unions) {
      if (all.exact()) {
        united.emplace(key, std::nullopt);
      } else {
        ++apart;
      }
    }
    for (const auto& reader : readers) {
      TENSORMOUNT_RETURN_IF_ERROR(reader->Add(false, &united));
    }
    builder.Warn("saved without a global plan: " + std::to_string(united.size()) +
                 (united.size() == 1 ? " tensor is" : " tensors are") +
                 " assembled from the shards of all ranks; " + std::to_string(apart) +
                 " others and all objects are shown per rank, as rankN/KEY");
    builder.SetWorldSize(static_cast<std::uint32_t>(readers.size()));
    builder.SetResolver(MakeDcpItemResolver({}));
    return Status();
  }
};

}  // namespace

const ForeignFormat& TorchDcpFormat() {
  static const Dcp format;
  return format;
}

const ForeignFormat& TorchDcpRankFormat() {
  static const DcpRanks format;
  return format;
}

}  // namespace tensormount
