// SPDX-License-Identifier: Apache-2.0
// The text of zarr.json for groups and arrays, and for the root, whose zarr.json repeats all
// others.
#include "fs/views/zarr_metadata.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "fs/views/checkpoint_text.h"
#include "fs/views/key_path.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kGroup = R"({"zarr_format": 3, "node_type": "group", "attributes": {}})";

// zarr.json of an array, with the fields required by the core specification of version 3. Chunk
// keys "c.0.1" (separator ".") keep all chunks in one directory. "bytes" with "endian" is the only
// codec: chunks are the stored bytes.
std::string ArrayText(const TensorMeta& meta, const ZarrGrid& grid) {
  const std::string_view type = ZarrType(meta.dtype());
  // The fill value, in the specification's notation for values of the array's type.
  std::string_view fill = "0";
  if (type == "bool") fill = "false";
  if (type.starts_with("float")) fill = "0.0";
  if (type.starts_with("complex")) fill = "[0.0, 0.0]";
  return fmt::format(
      R"({{"zarr_format": 3, "node_type": "array", "shape": {}, "data_type": "{}", )"
      R"("chunk_grid": {{"name": "regular", "configuration": {{"chunk_shape": {}}}}}, )"
      R"("chunk_key_encoding": {{"name": "default", "configuration": {{"separator": "."}}}}, )"
      R"("fill_value": {}, "codecs": [{{"name": "bytes", "configuration": {{"endian": "little"}}}}], )"
      R"("attributes": {{"tensormount_key": {}, "tensormount_dtype": "{}"}}}})",
      DimsText(meta.shape()), type, DimsText(grid.chunk()), fill, JsonString(meta.key()),
      InfoOf(meta.dtype()).name);
}

// One tensor of a scan, with facts from its neighbours: the key before it tells which directories
// begin with this tensor, and the key after it whether a directory has the tensor's name.
struct Scanned {
  std::uint32_t number = 0;
  std::string key;
  std::string key_before;  // Empty for the first tensor.
  bool also_folder = false;
  TensorEntry entry;
};

// Calls fn for tensors [first, first + count) until fn fails.
Status ScanTensors(const ShownTensors& tensors, const KeyTree& tree, std::uint32_t first,
                   std::uint32_t count, const std::function<Status(const Scanned&)>& fn) {
  // The tensor that is reported when the key after it is known. The scan begins one tensor before
  // `first`, only for that tensor's key.
  std::optional<Scanned> held;
  Status failed;
  const auto emit = [&](const std::string* next) -> Status {
    if (!held || held->number < first) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(held->also_folder, tree.IsFolder(held->key, next));
    return fn(*held);
  };
  TENSORMOUNT_RETURN_IF_ERROR(
      tensors.Scan(first > 0 ? first - 1 : 0,
                   [&](std::uint32_t number, const std::string& key, const TensorEntry* entry) {
                     failed = emit(&key);
                     if (!failed.ok() || number >= first + count) {
                       held.reset();
                       return false;
                     }
                     Scanned next;
                     next.number = number;
                     next.key = key;
                     if (held) next.key_before = std::move(held->key);
                     if (entry != nullptr) {
                       next.entry = *entry;
                     } else {
                       Result<TensorEntry> read = tensors.EntryAt(number);
                       failed = read.status();
                       if (!failed.ok()) return false;
                       next.entry = std::move(read).value();
                     }
                     held = std::move(next);
                     return true;
                   }));
  TENSORMOUNT_RETURN_IF_ERROR(failed);
  return emit(nullptr);
}

// Paths of the directories whose first tensor this is: each directory is reported once, before its
// members. Directories are new if the key before has other names; for "%+" directories a lookup
// decides.
Result<std::vector<std::string>> NewFolders(const KeyTree& tree, const Scanned& tensor) {
  std::vector<std::string> paths;
  const std::vector<PathPart> parts = PathParts(tensor.key, false);
  if (parts.size() == 1) return paths;
  std::vector<PathPart> before;
  if (tensor.number > 0) before = PathParts(tensor.key_before, false);
  std::string path;
  bool same = true;
  bool continued = false;
  for (std::size_t d = 0; d + 1 < parts.size(); ++d) {
    same = same && d + 1 < before.size() && before[d].name == parts[d].name;
    continued = continued || parts[d].continues;
    path += (d > 0 ? "/" : "") + parts[d].name;
    bool first = !same;
    if (continued && first) {
      // Keys of a "%+" directory are not adjacent, so its first key is looked up.
      TreeFolder at;
      for (std::size_t i = 0; i <= d; ++i) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild child, tree.Lookup(at, parts[i].name));
        at = {.first = child.ordinal, .depth = child.depth};
      }
      first = at.first == tensor.number;
    }
    if (first) paths.push_back(path);
  }
  return paths;
}

}  // namespace

// The names are those of the core specification.
std::string_view ZarrType(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kI8:
      return "int8";
    case DType::kI16:
      return "int16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU16:
      return "uint16";
    case DType::kU32:
      return "uint32";
    case DType::kU64:
      return "uint64";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kC64:
      return "complex64";
    case DType::kC128:
      return "complex128";
    default:
      break;
  }
  const std::uint32_t bits = InfoOf(dtype).bits;
  if (bits == 8) return "uint8";
  return bits == 16 ? "uint16" : "";
}

std::string ZarrPath(std::string path_of_key) {
  const std::size_t slash = path_of_key.rfind('/');
  const std::size_t last = slash == std::string::npos ? 0 : slash + 1;
  if (path_of_key.compare(last, std::string::npos, kZarrJson) == 0) {
    path_of_key.replace(last + 4, 1, "%2E");
  }
  return path_of_key;
}

std::string ZarrGroupJson() { return std::string(kGroup) + '\n'; }

std::string ZarrArrayJson(const TensorMeta& meta, const ZarrGrid& grid) {
  return ArrayText(meta, grid) + '\n';
}

Result<std::shared_ptr<const GeneratedText>> ZarrRootJson(const ShownTensors& tensors,
                                                          const KeyTree& tree, ZarrGrids grids) {
  // The first tensor with an entry, before which there is no comma. A scan of its own finds it,
  // because blocks are rendered in any order.
  std::optional<std::uint32_t> first_said;
  std::string left_out;
  TENSORMOUNT_RETURN_IF_ERROR(
      ScanTensors(tensors, tree, 0, tensors.count(), [&](const Scanned& tensor) -> Status {
        const bool shown = !ZarrType(tensor.entry.meta.dtype()).empty();
        if (!shown) left_out += (left_out.empty() ? "" : ", ") + JsonString(tensor.key);
        if (!first_said) {
          bool says = shown;
          if (!says) {
            TENSORMOUNT_ASSIGN_OR_RETURN(const auto folders, NewFolders(tree, tensor));
            says = !folders.empty();
          }
          if (says) first_said = tensor.number;
        }
        return {};
      }));
  std::string head = fmt::format(
      R"({{"zarr_format": 3, "node_type": "group", "attributes": {{"tensormount_left_out": [{}]}}, )"
      R"("consolidated_metadata": {{"kind": "inline", "must_understand": false, "metadata": {{)",
      left_out);
  // Entries and grids are made again at each rendering, so that only keys of left-out tensors are
  // kept.
  auto render = [&tensors, &tree, first_said, grids = std::move(grids)](
                    std::uint32_t first, std::uint32_t count, std::string& out) {
    return ScanTensors(tensors, tree, first, count, [&](const Scanned& tensor) -> Status {
      bool comma = tensor.number != first_said;
      const auto say = [&](std::string_view path, std::string_view text) {
        out += fmt::format("{}\n{}: {}", comma ? "," : "", JsonString(path), text);
        comma = true;
      };
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto folders, NewFolders(tree, tensor));
      for (const std::string& folder : folders) say(folder, kGroup);
      if (ZarrType(tensor.entry.meta.dtype()).empty()) return {};
      TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrGrid grid, grids(tensor.number, tensor.entry));
      say(ZarrPath(PathOfKey(tensor.key, tensor.also_folder)), ArrayText(tensor.entry.meta, grid));
      return {};
    });
  };
  return GeneratedText::Make(std::move(head), tensors.count(), std::move(render), "\n}}}\n");
}

}  // namespace tensormount::fs
