// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h: Zarr hierarchies of version 2, written by Megatron-Core until 0.15
// (strategies/zarr.py, the name of a directory is the key of a tensor) or by other programs.
//
//   KEY/.zarray          shape, chunks, dtype, order: JSON (zarr_array.h)
//   KEY/0.0 KEY/0.1      one file a chunk, uncompressed: elements in C or F order
//   KEY/shard_0_2.pt     Megatron-Core: a part of an object, on a grid
//   .zgroup              optional mark of a group; its version applies to all arrays below
//
// Chunks at the upper edges are stored in full size, with padding, so their elements have strides.
// Compressed arrays are left out, because the reader cannot decompress.
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
// End of the names of the lock directories that writers of flattened state create (zarr's
// ProcessSynchronizer).
constexpr std::string_view kSync = ".sync";
constexpr std::string_view kMegatron = "zarr";
constexpr std::uint64_t kMaxArrayJson = std::uint64_t{1} << 20;
// Deepest directory of a hierarchy; real hierarchies are a few levels deep.
constexpr int kMaxZarrDepth = 64;
// Number of directories that a probe examines. A probe must be quick, even in a directory of a
// million steps.
constexpr int kProbed = 16;

std::string JoinedNames(const std::string& below, const std::string& name) {
  return below.empty() ? name : below + "/" + name;
}

// Strides in bytes of the elements of a chunk file, which has the full size of a chunk.
Dims StridesOf(const ZarrArray& array) {
  const int rank = array.chunks.rank();
  Dims strides = Dims::Filled(rank, 0);
  auto step = static_cast<std::int64_t>(InfoOf(array.dtype).bits / 8);
  for (int i = 0; i < rank; ++i) {
    const int axis = array.fortran_order ? i : rank - 1 - i;
    strides[axis] = step;
    step *= array.chunks[axis];  // Cannot overflow: ParseZarray checked the size of a chunk.
  }
  return strides;
}

// Adds the files of one array as chunks of one tensor.
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
                    " files in the tensor's directory are not chunks and are ignored (the first: " +
                    strange_.first + ")");
    }
    // If an array has a fill value, chunks of only that value are often not written. Their elements
    // are in no file and cannot be read in place, so the tensor is left out. If fill_value is null,
    // a missing chunk is a hole, which the builder reports.
    const std::optional<std::int64_t> all = CheckedProduct(grid_);
    if (array_.fill_value && (!all || stored_ < *all)) {
      builder_.LeaveOut(
          tensor_, (all ? std::to_string(*all - stored_) : std::string("most")) +
                       " of the tensor's chunks are not stored and consist of the fill value " +
                       array_.fill_value->substr(0, 64) + ", which cannot be read in place");
    }
    return Status();
  }

 private:
  // Adds the chunk files in a directory. `prefix`: the part of the chunks' names that the
  // directories above give: with the separator "/" chunk [1, 2] is file 2 in directory 1.
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
      // Cannot overflow, because the index is on the grid.
      begin.push_back(index[a] * array_.chunks[a]);
      extent.push_back(std::min(array_.chunks[a], array_.shape[a] - begin[a]));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
    // If the file is a FIFO or a loop of links, the chunk becomes a hole. stored_ counts it as
    // stored, because its elements are not the fill value.
    const Result<std::uint32_t> added = builder_.AddFile(name);
    if (added.status().code() == Code::kDataLoss) {
      builder_.Warn("tensor " + builder_.MetaOf(tensor_).key() + " " + box.ToString() + ": " +
                    added.status().message());
      ++stored_;
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, added);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t whole, RegionBytes(array_.dtype, array_.chunks,
                                                                        Box::Whole(array_.chunks)));
    ++stored_;
    // Each chunk file has the full size of a chunk, including padding.
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
  CountedNames strange_;  // Files in the array's directory that are not chunks.
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
  // Adds the arrays in a directory and below. Does not walk below an array, whose subdirectories
  // contain its chunks.
  Status Walk(const std::string& below, int depth) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder_.List(below));
    const auto has = [&](std::string_view name) {
      return std::any_of(entries.begin(), entries.end(),
                         [&](const DirectoryEntry& entry) { return entry.name == name; });
    };
    const std::string shown = below.empty() ? "." : below.substr(0, 256);
    if (has(kArray) && has(kZarr3)) {
      // If both files exist, zarr-python reads zarr.json, which may describe another array.
      builder_.Warn(
          "directory " + shown +
          ": left out: it has both .zarray and zarr.json, which may describe different arrays");
      return Status();
    }
    if (has(kArray)) return AddArray(below);
    if (has(kZgroup)) {
      const Status known = CheckGroup(below);
      if (!known.ok() && below.empty()) return known;
      if (known.code() == Code::kDataLoss) {
        builder_.ReportLostFile(JoinedNames(below, std::string(kZgroup)), known.message());
        return Status();
      }
      if (!known.ok()) {
        builder_.Warn("directory " + shown + ": left out: " + known.message());
        return Status();
      }
    } else if (has(kZarr3)) {
      builder_.Warn("directory " + (below.empty() ? "." : below) +
                    ": left out: zarr version 3 is not supported (supported: 2)");
      return Status();
    }
    for (const DirectoryEntry& entry : entries) {
      const std::string name = JoinedNames(below, entry.name);
      if (entry.kind == FileKind::kDirectory) {
        // Links to directories are not followed, because they could form a cycle.
        if (entry.name.starts_with('.') || entry.name.ends_with(kSync)) continue;
        if (depth == kMaxZarrDepth) {
          builder_.Warn("directory " + name.substr(0, 256) + ": left out: nested too deep");
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

  // Checks zarr_format in a .zgroup. The version of a group applies to all arrays below, and
  // another version may store arrays in another layout.
  Status CheckGroup(const std::string& below) {
    const std::string name = JoinedNames(below, std::string(kZgroup));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, folder_.ReadFile(name, kMaxArrayJson));
    return ParseZgroup(text).WithContext(folder_.Shown(name));
  }

  Status AddArray(const std::string& below) {
    // If the array is the whole checkpoint, its key is the name of the directory.
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
        builder_.ReportLost({}, array.status().message(), ForeignBuilder::LostKind::kTensor, key);
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
  std::vector<std::string> objects_;  // Names of object files without ".pt".
};

class MegatronZarr : public ForeignFormat {
 public:
  std::string_view name() const override { return "megatron-core zarr"; }

  // Looks for metadata.json with the name of the backend, and for arrays and groups. A .zgroup is
  // optional, so a few directories are examined for arrays.
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
        return Status(Code::kUnsupported,
                      folder.path() + ": zarr version 3 is not supported (supported: 2)");
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
