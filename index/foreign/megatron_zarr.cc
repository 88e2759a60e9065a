// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. Zarr hierarchies of version 2: those of Megatron-Core
// (strategies/zarr.py, until 0.15), where the name of a folder is the key of a tensor, and
// anybody's.
//
//   KEY/.zarray          shape, chunks, dtype, order: JSON (zarr_array.h)
//   KEY/0.0 KEY/0.1      one file a chunk, uncompressed: elements in C or F order
//   KEY/shard_0_2.pt     Megatron-Core: a part of an object, on a grid
//   .zgroup              may mark a folder of arrays, and says the version of all below it
//
// Chunks at the edges are stored whole, padding included, so those are strided windows of their
// files. Compressed arrays are left out: nothing is decompressed here, and a chunk has no range of
// bytes then.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/foreign/format.h"
#include "index/foreign/megatron.h"
#include "index/foreign/zarr_array.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

constexpr std::string_view kArray = ".zarray";
constexpr std::string_view kZgroup = ".zgroup";
constexpr std::string_view kZarr3 = "zarr.json";
constexpr std::string_view kSync = ".sync";  // Locks that writers of flattened state left.
constexpr std::string_view kMegatron = "zarr";
constexpr std::uint64_t kMaxArrayJson = std::uint64_t{1} << 20;
// Folders are walked by recursion; real hierarchies are a few levels deep.
constexpr int kMaxZarrDepth = 64;
// A folder of a million steps must not be walked to see that it is no hierarchy.
constexpr int kProbed = 16;  // Folders that a probe looks into.

std::string JoinedNames(const std::string& below, const std::string& name) {
  return below.empty() ? name : below + "/" + name;
}

// Bytes from an element to the next along each axis of a whole chunk.
// Of the chunk as it stands in its file, which is larger than the region at an edge.
Dims StridesOf(const ZarrArray& array) {
  const int rank = array.chunks.rank();
  Dims strides = Dims::Filled(rank, 0);
  auto step = static_cast<std::int64_t>(InfoOf(array.dtype).bits / 8);
  for (int i = 0; i < rank; ++i) {
    const int axis = array.fortran_order ? i : rank - 1 - i;
    strides[axis] = step;
    step *= array.chunks[axis];  // Fits: ParseZarray checked the whole.
  }
  return strides;
}

// The files of one array, as chunks of one tensor.
class ArrayReader {
 public:
  ArrayReader(const ForeignFolder& folder, ForeignBuilder& builder, std::string below,
              const ZarrArray& array, std::uint32_t tensor)
      : folder_(folder),
        builder_(builder),
        below_(std::move(below)),
        array_(array),
        tensor_(tensor),
        grid_(array.Grid()),
        strides_(StridesOf(array)) {}

  Status Read() {
    TENSORMOUNT_RETURN_IF_ERROR(List(below_, ""));
    const std::string& key = builder_.MetaOf(tensor_).key();
    if (strange_.count > 0) {
      builder_.Warn("tensor " + key + ": " + std::to_string(strange_.count) +
                    " files are no chunks of it and not shown (the first: " + strange_.first + ")");
    }
    // Of an array with a fill value chunks that equal it are often not written. Their cells have
    // values that stand in no file, so reads in place cannot give them: the whole tensor is left
    // out. Where fill_value is null, what is not stored is a hole, which the builder finds.
    const std::optional<std::int64_t> all = CheckedProduct(grid_);
    if (array_.fill_value && (!all || stored_ < *all)) {
      builder_.LeaveOut(tensor_, (all ? std::to_string(*all - stored_) : std::string("most")) +
                                     " of its chunks are not stored and stand for its fill value " +
                                     array_.fill_value->substr(0, 64) + ", which no file holds");
    }
    return Status();
  }

 private:
  // `prefix`: of the chunk's name, where folders are parts of it.
  // With "/" as separator chunk "1.2" is the file 2 in folder 1, one level of folders for each axis
  // but the last.
  Status List(const std::string& below, const std::string& prefix) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder_.List(below));
    for (const DirectoryEntry& entry : entries) {
      if (entry.name.starts_with('.')) continue;  // .zarray, .zattrs
      const std::string name = prefix + entry.name;
      if (entry.kind == FileKind::kDirectory) {
        const auto parts = std::count(name.begin(), name.end(), '/') + 1;
        if (array_.separator == '/' && parts < grid_.rank()) {
          TENSORMOUNT_RETURN_IF_ERROR(List(JoinedNames(below, entry.name), name + "/"));
        }
        continue;
      }
      const std::optional<Dims> index = ParseChunkName(name, grid_.rank(), array_.separator);
      if (!index || !OnGrid(*index)) {
        strange_.Add(name.substr(0, 256));
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(Add(*index, JoinedNames(below, entry.name)));
    }
    return Status();
  }

  bool OnGrid(const Dims& index) const {
    for (int a = 0; a < grid_.rank(); ++a) {
      if (index[a] >= grid_[a]) return false;
    }
    return true;
  }

  Status Add(const Dims& index, const std::string& name) {
    Dims begin;
    Dims extent;
    for (int a = 0; a < index.rank(); ++a) {
      // No overflow: the index is on the grid, and the shape fits.
      begin.push_back(index[a] * array_.chunks[a]);
      extent.push_back(std::min(array_.chunks[a], array_.shape[a] - begin[a]));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
    // A FIFO or a link that leads round: the chunk becomes a hole, and stored_ counts it, so that
    // it is not taken for a cell of the fill value.
    const Result<std::uint32_t> added = builder_.AddFile(name);
    if (added.status().code() == Code::kDataLoss) {
      // A chunk that is no file: as much as one that is not stored.
      builder_.Warn("tensor " + builder_.MetaOf(tensor_).key() + " " + box.ToString() + ": " +
                    added.status().message());
      ++stored_;
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, added);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t whole, RegionBytes(array_.dtype, array_.chunks,
                                                                        Box::Whole(array_.chunks)));
    ++stored_;
    // Chunks at the edges are whole in their files, whatever stands in the padding.
    if (builder_.FileLength(file) != whole) {
      builder_.Warn("tensor " + builder_.MetaOf(tensor_).key() + " " + box.ToString() + ": chunk " +
                    name.substr(0, 256) + " has " + std::to_string(builder_.FileLength(file)) +
                    " bytes instead of " + std::to_string(whole) + ": reading it fails");
      return Status();
    }
    if (ArePackedStrides(array_.dtype, extent, strides_)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                                   RegionBytes(array_.dtype, array_.shape, box));
      return builder_.AddChunk(tensor_, box, file, 0, bytes);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t span,
                                 StridedSpan(array_.dtype, extent, strides_));
    return builder_.AddChunk(tensor_, box, file, 0, span, strides_);
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  std::string below_;
  const ZarrArray& array_;
  std::uint32_t tensor_;
  Dims grid_;
  Dims strides_;
  std::int64_t stored_ = 0;
  CountedNames strange_;  // Files that are no chunks.
};

class HierarchyReader {
 public:
  HierarchyReader(const ForeignFolder& folder, ForeignBuilder& builder, bool megatron)
      : folder_(folder), builder_(builder), megatron_(megatron) {}

  Status Read() {
    TENSORMOUNT_RETURN_IF_ERROR(Walk("", 0));
    return AddObjects();
  }

 private:
  // An array ends the walk: folders below it are its chunks.
  Status Walk(const std::string& below, int depth) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder_.List(below));
    const auto has = [&](std::string_view name) {
      return std::any_of(entries.begin(), entries.end(),
                         [&](const DirectoryEntry& entry) { return entry.name == name; });
    };
    const std::string shown = below.empty() ? "." : below.substr(0, 256);
    if (has(kArray) && has(kZarr3)) {
      // zarr-python takes version 3, whose chunks may be others.
      builder_.Warn("folder " + shown +
                    ": left out: .zarray and zarr.json are both there, and say each for itself "
                    "which array it is");
      return Status();
    }
    if (has(kArray)) return AddArray(below);
    if (has(kZgroup)) {
      const Status known = CheckGroup(below);
      if (!known.ok() && below.empty()) return known;
      if (known.code() == Code::kDataLoss) {
        builder_.LoseFile(JoinedNames(below, std::string(kZgroup)), known.message());
        return Status();
      }
      if (!known.ok()) {
        builder_.Warn("folder " + shown + ": left out: " + known.message());
        return Status();
      }
    } else if (has(kZarr3)) {
      builder_.Warn("folder " + (below.empty() ? "." : below) +
                    ": left out: zarr of version 3, we read version 2");
      return Status();
    }
    for (const DirectoryEntry& entry : entries) {
      const std::string name = JoinedNames(below, entry.name);
      if (entry.kind == FileKind::kDirectory) {
        // Links to folders are not followed: they could lead in circles.
        if (entry.name.starts_with('.') || entry.name.ends_with(kSync)) continue;
        if (depth == kMaxZarrDepth) {
          builder_.Warn("folder " + name.substr(0, 256) + ": left out: nested too deep");
          continue;
        }
        TENSORMOUNT_RETURN_IF_ERROR(Walk(name, depth + 1));
      } else if (megatron_ && !below.empty() && entry.name.starts_with("shard_") &&
                 entry.name.ends_with(".pt")) {
        objects_.push_back(name.substr(0, name.size() - 3));
      }
    }
    return Status();
  }

  // Arrays below one of another version may be laid out in another way. So zarr_format of a .zgroup
  // speaks for everything below it.
  Status CheckGroup(const std::string& below) {
    const std::string name = JoinedNames(below, std::string(kZgroup));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, folder_.ReadFile(name, kMaxArrayJson));
    return ParseZgroup(text).WithContext(folder_.Shown(name));
  }

  Status AddArray(const std::string& below) {
    // An array that is the whole checkpoint is called like its folder.
    const std::string& path = folder_.path();
    const std::string key = below.empty() ? path.substr(path.rfind('/') + 1) : below;
    const auto left_out = [&](const std::string& why) {
      builder_.Warn("tensor " + key.substr(0, 256) + ": left out: " + why);
      return Status();
    };
    const Result<std::string> json =
        folder_.ReadFile(JoinedNames(below, std::string(kArray)), kMaxArrayJson);
    const Result<ZarrArray> array =
        json.ok() ? ParseZarray(json.value(), megatron_) : Result<ZarrArray>(json.status());
    if (!array.ok()) {
      const Code code = array.status().code();
      if (code == Code::kDataLoss) {
        builder_.Lose({}, array.status().message(), ForeignBuilder::What::kTensor, key);
        return Status();
      }
      if (code != Code::kUnsupported) return array.status();
      return left_out(array.status().message());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                                 builder_.AddTensor(key, array.value().dtype, array.value().shape));
    return ArrayReader(folder_, builder_, below, array.value(), tensor).Read();
  }

  Status AddObjects() {
    const std::vector<ObjectRecord> parsed = MegatronObjects(objects_);
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, builder_.AddFile(objects_[i] + ".pt"));
      TENSORMOUNT_RETURN_IF_ERROR(builder_.AddObject(
          parsed[i].key, file, 0, builder_.FileLength(file), parsed[i].index, parsed[i].grid));
    }
    return Status();
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  bool megatron_;
  std::vector<std::string> objects_;  // Names of their files, without ".pt".
};

class MegatronZarr : public ForeignFormat {
 public:
  std::string_view name() const override { return "megatron-core zarr"; }

  // Asked before all others: metadata.json that names the backend is the clearest sign there is. A
  // .zgroup may be missing, so a few folders are looked into.
  bool Probe(const ForeignFolder& folder) const override {
    if (!folder.file().empty()) return false;
    if (MegatronBackend(folder) == kMegatron) return true;
    const Result<std::vector<DirectoryEntry>> entries = folder.List("");
    if (!entries.ok()) return false;
    for (const DirectoryEntry& entry : entries.value()) {
      if (entry.name == kArray || entry.name == kZgroup || entry.name == kZarr3) return true;
    }
    int probed = 0;
    for (const DirectoryEntry& entry : entries.value()) {
      if (entry.kind != FileKind::kDirectory || entry.name.ends_with(kSync)) continue;
      if (folder.Has(entry.name + "/" + std::string(kArray))) return true;
      if (++probed == kProbed) break;
    }
    return false;
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    TENSORMOUNT_RETURN_IF_ERROR(CheckMegatronBackend(folder));
    const bool megatron = MegatronBackend(folder) == kMegatron;
    builder.SetProducer(megatron ? "megatron.core.dist_checkpointing" : "zarr");
    if (!megatron) {
      if (folder.Has(kZarr3) && !folder.Has(kArray) && !folder.Has(kZgroup)) {
        return Status(Code::kUnsupported, folder.path() + ": zarr of version 3, we read version 2");
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(HierarchyReader(folder, builder, megatron).Read());
    return megatron ? AddMegatronCommonFile(folder, builder) : Status();
  }
};

}  // namespace

const ForeignFormat& MegatronZarrFormat() {
  static const MegatronZarr kFormat;
  return kFormat;
}

}  // namespace tensormount
