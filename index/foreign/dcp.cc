// SPDX-License-Identifier: Apache-2.0
// torch.distributed.checkpoint, a ForeignFormat of format.h: a pickle named .metadata that says
// where in *.distcp files the items lie, and what Megatron-Core (torch_dist) and OLMo-core (>= 1.0)
// put around it.
//
//   .metadata       pickle of Metadata: tensors with their chunks, objects, and for each of them
//                   (relative_path, offset, length) of an item
//   __R_N.distcp    items one after the other, of rank R: a torch archive (zip) of one tensor
//                   each, or the bytes of an object
//
// An item is not opened here. The metadata say which region of which tensor it is, which is enough
// to plan reads; where in the archive the bytes begin is found by MakeDcpItemResolver when they are
// first wanted. So opening costs the metadata, one stat a file, and the few small objects that are
// shown as values, however many items there are.
//
// What is wrong with a single tensor or object (its file is missing, its chunk lies outside) leaves
// that one out and says so; what is wrong with the metadata as a whole ends the read.
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
constexpr std::string_view kProto = "\x80";  // Pickles of protocol 2 and later.
constexpr std::string_view kOlmoFolder = "model_and_optim/";
// Of a relative_path: PATH_MAX.
// Linux takes no longer one, and hostile metadata may share one huge text between a million items.
constexpr std::size_t kMaxPath = 4096;
constexpr std::uint64_t kMaxDcpMetadata = std::uint64_t{2} << 30;
// Seconds. More than it takes to copy what is small, or than clocks of machines differ.
// How much newer than .metadata a data file may be before a warning says that a save may be under
// way.
constexpr std::int64_t kMuchNewer = 60;
// planner_data in the common values, which are read whole when a checkpoint is opened.
constexpr std::string_view kPlannerName = "torch.planner_data";
constexpr std::size_t kMaxPlannerBytes = std::size_t{1} << 20;

// The digits that `text` begins with, taken off; nullopt: none, or too many for a rank.
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

// The rank that wrote "prefix__3_0.distcp".
// Only to count the writing ranks for info.world_size. Files of other names are read as well.
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

// The rank of "__3.metadata", of a save without a global plan.
std::optional<std::uint32_t> RankOfMetadata(std::string_view name) {
  if (!name.starts_with("__")) return std::nullopt;
  name.remove_prefix(2);
  const std::optional<std::uint32_t> rank = TakeNumber(name);
  return rank && name == kMetadataFile ? rank : std::nullopt;
}

// By key: a tensor of which several ranks have chunks, and its number once the first was added.
// Keys are views into the metadata of the ranks.
// Only for saves without a global plan. Null in the map: every rank agrees, but nobody has added it
// yet.
using UnitedTensors = std::unordered_map<std::string_view, std::optional<std::uint32_t>>;

// One .metadata and what it points into.
class DcpReader {
 public:
  // `below`: the folder of the metadata, "model_and_optim/" or empty; `key_prefix`: before every
  // key.
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

  // Read in two steps: what the metadata say,
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

  // and what comes of it. `united`: tensors that readers share, which have no prefix; null: none.
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
    WarnOfNewer(metadata_name_, written_);
    return Status();
  }

  const DcpMetadata& metadata() const { return *metadata_; }

  const std::unordered_set<std::string>& flattened() const { return flattened_; }
  const std::set<std::uint32_t>& ranks() const { return ranks_; }

 private:
  struct FileState {
    std::uint32_t number = 0;
    std::uint64_t length = 0;
    std::string_view missing;  // What is wrong with it; empty: nothing.
  };

  // What the metadata say about a file is only a wish: one that leads elsewhere ends the read, one
  // that is not there concerns the tensors in it.
  // Asked once for every item, of which a million may lie in one file: the answer is kept by path,
  // and the last path is compared first, since items of one file mostly follow each other. Pointers
  // into files_ stay valid, as unordered_map moves no elements.
  Result<const FileState*> FileOf(std::string_view path) {
    if (path.size() > kMaxPath) {
      return Status(Code::kDataLoss, folder_.Shown(kMetadataFile) + ": the name of a file has " +
                                         std::to_string(path.size()) + " bytes");
    }
    if (last_file_ != nullptr && last_path_ == path) return last_file_;
    auto it = files_.find(path);
    if (it == files_.end()) {
      FileState state;
      // An absolute path is refused by name here; ".." and links that lead out are refused by
      // ForeignFolder.
      if (path.starts_with('/')) {
        return Status(Code::kPermissionDenied, folder_.Shown(kMetadataFile) + ": names the file " +
                                                   std::string(path) + ", which is not below it");
      }
      Result<std::uint32_t> added = builder_.AddFile(below_ + std::string(path));
      if (added.ok()) {
        state.number = added.value();
        state.length = builder_.FileLength(state.number);
        if (const std::optional<std::uint32_t> rank = RankOfFile(path)) ranks_.insert(*rank);
      } else if (added.status().code() == Code::kNotFound) {
        state.missing = "the file is missing";
      } else if (added.status().code() == Code::kDataLoss &&
                 folder_.BelowRoot(below_ + std::string(path)).ok()) {
        state.missing = "is no regular file";
      } else {
        return added.status();
      }
      it = files_.emplace(path, std::move(state)).first;
    }
    last_path_ = path;
    last_file_ = &it->second;
    return last_file_;
  }

  // Where an item should be and is not: its file, and what is wrong with that.
  struct LostItem {
    std::string file;
    std::string reason;
    bool operator==(const LostItem&) const = default;
  };

  // The file of an item of `key` that can be read in place. Null: it cannot, which was told, or is
  // what `lost` says then.
  // An extension (zstd and others) may have transformed the bytes of an item; it is named, and the
  // tensor is left out, since its bytes stand nowhere as they are.
  Result<const FileState*> FileOfItem(const DcpItem& item, ForeignBuilder::What what,
                                      std::string_view key, std::optional<LostItem>& lost) {
    if (!item.transform.empty()) {
      left_out_.Add(
          what == ForeignBuilder::What::kTensor ? "tensor" : "object", key,
          "its items are transformed by '" + std::string(item.transform.substr(0, 64)) + "'");
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
                        " bytes, before an item does"};
      return nullptr;
    }
    return file;
  }

  // Metadata are written last. Where a save replaces a checkpoint in place, those of the one before
  // stay until then, and files of both are there: no number in them can tell.
  // A copy tool that writes .metadata first gives the same picture, which is why this is a warning.
  void WarnOfNewer(const std::string& name, std::int64_t written) {
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
                  ": copied in this order, or a save into this folder has not ended, and tensors "
                  "may be of two saves");
  }

  Status AddTensor(const DcpMetadata& metadata, const DcpTensor& tensor, UnitedTensors* united) {
    // All of it is looked at before anything is added: the file of each chunk, kNoFile of those
    // that hold nothing or are stored nowhere.
    std::vector<std::uint32_t> files(tensor.count, kNoFile);
    // Points into the map of all readers: the first rank that comes adds the tensor, the others
    // only add their chunks to it.
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
    // The metadata contradict themselves: the tensor is lost, as its files cannot be what they say.
    const auto contradicted = [&](const std::string& why) {
      builder_.Lose({}, why, ForeignBuilder::What::kTensor, key);
      return Status();
    };
    const Dims shape = metadata.Shape(tensor);
    const MegatronFlatShape* flat = FlatShape(tensor, shape);
    std::vector<LostItem> lost;  // Each once.
    std::size_t found = 0;
    for (std::size_t i = 0; i < tensor.count; ++i) {
      const DcpItem& item = metadata.items[tensor.first + i];
      const std::span<const std::int64_t> sizes = metadata.Sizes(tensor, i);
      // Ranks without a share write chunks without elements, all of them with one identity.
      if (std::ranges::find(sizes, 0) != sizes.end()) continue;
      const Result<Region> region = RegionOf(metadata, tensor, shape, i, flat);
      if (!region.ok()) return contradicted(region.status().message());
      // Zero-size chunks were passed over above, so this is a real hole.
      if (!item.stored) continue;  // A hole, which the builder tells of.
      std::optional<LostItem> gone;
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileState* file,
                                   FileOfItem(item, ForeignBuilder::What::kTensor, key, gone));
      if (file == nullptr && !gone) return Status();
      if (gone) {
        if (std::ranges::find(lost, *gone) == lost.end()) lost.push_back(std::move(*gone));
        continue;
      }
      files[i] = file->number;
      ++found;
    }
    // What other files hold of it is there, and the builder tells of the hole.
    const bool part = found > 0;
    for (const LostItem& gone : lost) {
      builder_.Lose(gone.file, gone.reason, ForeignBuilder::What::kTensor, key, part);
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
      // RegionOf succeeded for this chunk in the loop above, so that value() is safe.
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

  // A box of the tensor as stored, or, of flattened optimizer state, a flat range within a box of
  // the tensor as it was.
  static Result<Region> RegionOf(const DcpMetadata& metadata, const DcpTensor& tensor,
                                 const Dims& shape, std::size_t chunk,
                                 const MegatronFlatShape* flat) {
    const std::span<const std::int64_t> offsets = metadata.Offsets(tensor, chunk);
    const std::span<const std::int64_t> sizes = metadata.Sizes(tensor, chunk);
    if (flat != nullptr) return flat->RegionOf(offsets, sizes);
    const Result<Box> box = Box::Make(Dims(offsets), Dims(sizes));
    if (!box.ok() || !box.value().Within(shape)) {
      return Status(Code::kDataLoss, "its chunk at " + Dims(offsets).ToString() + " of size " +
                                         Dims(sizes).ToString() + " does not lie within shape " +
                                         shape.ToString());
    }
    return Region(box.value());
  }

  // Megatron-Core up to 0.14 kept the shape of flattened optimizer state aside.
  // Keys of mcore_data are those of tensors; the value is a dict in which
  // "nd_reformulated_orig_global_shape" is the shape before flattening. Whatever looks otherwise is
  // ignored: the tensor is then shown as it is stored, which is never wrong, only less handy.
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

  // Null: the tensor is stored in its own shape.
  const MegatronFlatShape* FlatShape(const DcpTensor& tensor, const Dims& shape) {
    const auto it = original_shapes_.find(tensor.fqn);
    if (it == original_shapes_.end()) return nullptr;
    flat_ = MegatronFlatShape::Make(shape, it->second);
    if (!flat_) {
      builder_.Warn("tensor " + std::string(tensor.fqn) + ": shown as stored, " + shape.ToString() +
                    ": its original shape is given as " + it->second.ToString() +
                    ", which does not go with that");
      return nullptr;
    }
    return &*flat_;
  }

  // Names are taken apart all at once, because whether "KEY/shard_0_2" is a part of KEY depends on
  // the other names. `parsed[i]` belongs to object i.
  Status AddObjects(const DcpMetadata& metadata, bool megatron) {
    std::vector<std::string> names;
    for (const auto& [fqn, item] : metadata.objects)
      names.push_back(key_prefix_ + std::string(fqn));
    std::vector<ObjectRecord> parsed;
    if (megatron) parsed = MegatronObjects(names);
    for (std::size_t i = 0; i < names.size(); ++i) {
      const DcpItem& item = metadata.objects[i].second;
      if (!item.stored) {
        builder_.Lose({}, "the metadata do not say where it is stored",
                      ForeignBuilder::What::kObject, names[i]);
        continue;
      }
      std::optional<LostItem> gone;
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileState* file,
                                   FileOfItem(item, ForeignBuilder::What::kObject, names[i], gone));
      if (gone) builder_.Lose(gone->file, gone->reason, ForeignBuilder::What::kObject, names[i]);
      if (file == nullptr) continue;
      ObjectRecord part = megatron ? std::move(parsed[i]) : ObjectRecord{.key = names[i]};
      part.file = file->number;
      part.offset = item.offset;
      part.length = item.length;
      objects_.Add(std::move(part));
    }
    return objects_.Finish(megatron, left_out_);
  }

  // What torch needs to nest keys again: which parts of a key are names of dicts.
  // {"model.w": ("model", "w")}: needed by `export --to dcp`, since a dot in a key may be part of a
  // name or a level of a dict. What is not of this form is left out without a word: nothing but
  // nesting is lost by that. 16 bytes an entry stand for what its records cost beside texts.
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
        continue;  // Not nested: nothing to tell.
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
      builder_.Warn("planner_data, which say how keys nest, are larger than 1 MiB and left out");
    } else if (!out.items.empty()) {
      builder_.AddCommon(key_prefix_ + std::string(kPlannerName), std::move(out));
    }
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::string below_;
  std::string key_prefix_;
  std::optional<DcpMetadata> metadata_;  // After Parse.
  std::string metadata_name_;
  std::int64_t written_ = 0;  // When the metadata were.
  DcpObjects objects_;
  LeftOut left_out_;
  // By relative_path. The views point into metadata_, whose document keeps the stream.
  std::unordered_map<std::string_view, FileState> files_;
  std::string_view last_path_;
  const FileState* last_file_ = nullptr;
  std::unordered_map<std::string_view, Dims> original_shapes_;
  // Of the tensor that is being added, where FlatShape gave one.
  std::optional<MegatronFlatShape> flat_;
  // Keys for the resolver: items of these have one axis whatever their region is.
  std::unordered_set<std::string> flattened_;
  std::set<std::uint32_t> ranks_;
};

// "train/rank0.pt": what the trainer keeps for every rank beside the tensors.
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
    // Probe found one of the two files.
    const bool olmo = !folder.Has(kMetadataFile);
    if (!olmo) TENSORMOUNT_RETURN_IF_ERROR(CheckMegatronBackend(folder));
    const bool torch_dist = !olmo && MegatronBackend(folder) == "torch_dist";
    // Megatron-Core writes metadata.json after everything else, so a crash may leave common.pt
    // without it: still its checkpoint, but perhaps one that did not end.
    const bool megatron = torch_dist || (!olmo && folder.Has("common.pt"));
    if (olmo) builder.SetProducer("olmo-core");
    if (megatron) builder.SetProducer("megatron.core.dist_checkpointing");
    if (megatron && !torch_dist) {
      builder.Warn(std::string(folder.Has("metadata.json") ? "metadata.json names no backend"
                                                           : "metadata.json is missing") +
                   ", which Megatron-Core writes last: was this save ended?");
    }
    DcpReader reader(folder, builder, olmo ? std::string(kOlmoFolder) : std::string(), "");
    TENSORMOUNT_RETURN_IF_ERROR(reader.Read(kMetadataFile, megatron));
    if (olmo) TENSORMOUNT_RETURN_IF_ERROR(AddOlmoTrainerFiles(folder, builder));
    if (megatron) TENSORMOUNT_RETURN_IF_ERROR(AddMegatronCommonFile(folder, builder));
    // Known from file names alone: nothing in the metadata says how many ranks there were.
    builder.SetWorldSize(static_cast<std::uint32_t>(reader.ranks().size()));
    builder.SetResolver(MakeDcpItemResolver(reader.flattened()));
    return Status();
  }

 private:
  static bool IsOlmo(const ForeignFolder& folder) {
    return folder.Has("model_and_optim/.metadata");
  }
};

// Whether what the ranks stored of a tensor makes a whole: of one dtype and shape, every cell once.
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
      // AddBox says no to a box that does not lie within the shape, or overflows.
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

// Saves without a global plan: every rank has metadata of its own, and nothing says how their
// tensors go together, except where their chunks fit into one whole and nothing else.
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
    // All metadata are parsed before any tensor is added, since whether the ranks agree about a
    // tensor is known only when all of them have spoken. They stay in memory together.
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
        // A RegionSet wants a shape whose volume does not overflow. Others are refused when the
        // tensor is added.
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
                 " put together from what the ranks stored, " + std::to_string(apart) +
                 " and all objects are shown as rankN/KEY");
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
