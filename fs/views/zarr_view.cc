// SPDX-License-Identifier: Apache-2.0
// zarr/: Zarr version 3 with groups from the slashes of keys. Chunks at the upper edges are padded
// with zeros, as the format requires.
#include "fs/views/zarr_view.h"

#include <bit>
#include <cerrno>
#include <utility>

#include "fs/answers.h"
#include "fs/views/tensor_box.h"
#include "fs/views/zarr_metadata.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {
namespace {

constexpr std::uint64_t kRootJson = 2;
// Number of bits of an item, without the bit that marks directories of keys.
constexpr int kItemBits = 39;
constexpr std::uint64_t kGroupBit = std::uint64_t{1} << kItemBits;
static_assert(kGroupBit * 2 == View::kMaxItems);
// Largest number of cached grids, which have a few hundred bytes each.
constexpr std::size_t kCachedGrids = 256;

std::string Join(const std::string& folder, std::string_view name) {
  return folder.empty() ? std::string(name) : folder + '/' + std::string(name);
}

}  // namespace

ZarrView::ZarrView(const ShownCheckpoint& shown) : shown_(shown), grids_(kCachedGrids) {
  // With 1,000 tensors 10 bits go to the tensor and 29 are left for its chunks: half a billion.
  shift_ = kItemBits - static_cast<int>(std::bit_width(shown.tensors.count()));
}

std::uint64_t ZarrView::ItemOf(const ZarrItem& zarr) const {
  using Kind = ZarrItem::Kind;
  if (zarr.group()) {
    const bool json = zarr.kind == Kind::kGroupJson;
    // zarr/ and zarr/zarr.json have fixed items.
    if (zarr.depth == 0) return json ? kRootJson : kRoot;
    return kGroupBit | (std::uint64_t{zarr.number} << shift_) | (std::uint64_t{zarr.depth} << 1) |
           (json ? 1 : 0);
  }
  const std::uint64_t base = (std::uint64_t{zarr.number} + 1) << shift_;
  if (zarr.kind == Kind::kArray) return base;
  return base + (zarr.kind == Kind::kArrayJson ? 1 : zarr.chunk + 2);
}

Result<ZarrView::ZarrItem> ZarrView::ZarrItemOf(std::uint64_t item) const {
  using Kind = ZarrItem::Kind;
  // With 67 million tensors (2^26) too few bits are left for the depth of directories, and the view
  // does not exist.
  if (shift_ < kFolderDepthBits + 1) return NoSuchNameError(name());
  if (item == kRoot) return ZarrItem{.kind = Kind::kGroup};
  if (item == kRootJson) return ZarrItem{.kind = Kind::kGroupJson};
  if (item >= View::kMaxItems) return StaleNodeError("zarr/");
  // The upper field is the tensor's number + 1, or the first key of a directory; the lower field is
  // the file of that array or directory.
  const std::uint64_t high = (item & (kGroupBit - 1)) >> shift_;
  const std::uint64_t low = item & ((std::uint64_t{1} << shift_) - 1);
  const std::uint32_t count = shown_.tensors.count();
  if ((item & kGroupBit) != 0) {
    const ZarrItem zarr{.kind = (low & 1) != 0 ? Kind::kGroupJson : Kind::kGroup,
                        .number = static_cast<std::uint32_t>(high),
                        .depth = static_cast<std::uint32_t>(low >> 1)};
    if (high >= count || zarr.depth == 0 || (low >> 1) >= (1u << kFolderDepthBits))
      return StaleNodeError("zarr/");
    return zarr;
  }
  if (high == 0 || high > count) return StaleNodeError("zarr/");
  ZarrItem zarr{.kind = Kind::kArray, .number = static_cast<std::uint32_t>(high - 1)};
  if (low == 1) zarr.kind = Kind::kArrayJson;
  if (low > 1) {
    zarr.kind = Kind::kChunk;
    zarr.chunk = low - 2;
  }
  return zarr;
}

Result<ZarrView::ResolvedItem> ZarrView::Resolve(const ZarrItem& zarr) const {
  ResolvedItem known{.item = zarr, .tensor = std::nullopt, .grid = nullptr};
  if (zarr.group() && shown_.tensors.count() == 0) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(known.tensor, shown_.tensors.EntryAt(zarr.number));
  if (zarr.group()) return known;
  // There is no array for a tensor of this dtype. Lookup turns this error into "no such name".
  if (ZarrType(known.tensor->meta.dtype()).empty()) return StaleNodeError("zarr/");
  if (zarr.folder()) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(known.grid, GridOf(zarr.number, *known.tensor));
  if (zarr.kind == ZarrItem::Kind::kChunk && zarr.chunk >= known.grid->chunks())
    return StaleNodeError("zarr/");
  return known;
}

Result<std::shared_ptr<const ZarrGrid>> ZarrView::GridOf(std::uint32_t number,
                                                         const TensorEntry& tensor) const {
  // Two threads may both make the grid; the cache keeps the first.
  if (auto cached = grids_.Get(number)) return cached;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrGrid grid,
                               ZarrGrid::Make(shown_.opened.index(), tensor, max_chunks()));
  return grids_.Put(number, std::make_shared<const ZarrGrid>(grid), 1);
}

Result<std::shared_ptr<const GeneratedText>> ZarrView::RootJson() const {
  const std::lock_guard lock(mutex_);
  if (!root_json_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(root_json_,
                                 ZarrRootJson(shown_.tensors, shown_.tensor_tree,
                                              [this](std::uint32_t, const TensorEntry& tensor) {
                                                return ZarrGrid::Make(shown_.opened.index(), tensor,
                                                                      max_chunks());
                                              }));
  }
  return root_json_;
}

Result<std::string> ZarrView::FolderPath(const ZarrItem& zarr) const {
  if (zarr.group()) {
    if (zarr.depth == 0) return std::string();
    return shown_.tensor_tree.PathOf(zarr.number, zarr.depth);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string path, shown_.tensor_tree.PathOf(zarr.number, 0));
  return ZarrPath(std::move(path));
}

// A node's identity is its path below zarr/, so inode numbers stay when grids get other numbers of
// chunks.
Result<ViewNode> ZarrView::NodeOf(const ResolvedItem& known, const std::string& folder_path) const {
  using Kind = ZarrItem::Kind;
  const ZarrItem& zarr = known.item;
  // A chunk has the tensor's time. A zarr.json has the time of checkpoint.json, because its content
  // depends on how tensors are stored, which may change with every checkpoint.
  const std::int64_t json_mtime = shown_.opened.index().info().json_mtime;
  ViewNode node{.item = ItemOf(zarr),
                .folder = zarr.folder(),
                .size = 0,
                .mtime = known.tensor ? known.tensor->mtime : json_mtime,
                .identity = folder_path};
  switch (zarr.kind) {
    case Kind::kGroup:
    case Kind::kArray:
      return node;
    case Kind::kGroupJson:
    case Kind::kArrayJson:
      node.mtime = json_mtime;
      node.identity = Join(folder_path, kZarrJson);
      if (zarr.kind == Kind::kArrayJson) {
        node.size = ZarrArrayJson(known.tensor->meta, *known.grid).size();
      } else if (zarr.depth > 0) {
        node.size = ZarrGroupJson().size();
      } else {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, RootJson());
        node.size = text->size();
      }
      return node;
    case Kind::kChunk:
      node.size = known.tensor->meta.bits() / 8;
      // All chunks have the same size, since chunks at the upper edges are padded.
      for (const std::int64_t extent : known.grid->chunk()) {
        // Cannot overflow: a chunk is at most as large as the tensor.
        node.size *= static_cast<std::uint64_t>(extent);
      }
      node.identity = Join(folder_path, known.grid->NameOf(zarr.chunk));
      return node;
  }
  return StaleNodeError("zarr/");
}

Result<ViewNode> ZarrView::Stat(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem zarr, ZarrItemOf(item));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ResolvedItem known, Resolve(zarr));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(zarr));
  return NodeOf(known, path);
}

Result<ViewChild> ZarrView::Lookup(std::uint64_t folder, std::string_view name) const {
  using Kind = ZarrItem::Kind;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem in, ZarrItemOf(folder));
  if (!in.folder()) return Status::FromErrno(ENOTDIR, "look up", name);
  ZarrItem zarr{.kind = Kind::kChunk, .number = in.number};
  if (name == kZarrJson) {
    zarr = in;
    zarr.kind = in.group() ? Kind::kGroupJson : Kind::kArrayJson;
  } else if (in.kind == Kind::kArray) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, shown_.tensors.EntryAt(in.number));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto grid, GridOf(in.number, tensor));
    const std::optional<std::uint64_t> chunk = grid->NumberOf(name);
    if (!chunk) return NoSuchNameError(name);
    zarr.chunk = *chunk;
  } else {
    // A key whose last name is zarr.json is an array at zarr%2Ejson: the plain name is that of the
    // metadata file.
    const TreeFolder at{.first = in.number, .depth = in.depth};
    Result<TreeChild> child = shown_.tensor_tree.Lookup(at, name);
    if (child.status().code() == Code::kNotFound && name == ZarrPath(std::string(kZarrJson))) {
      child = shown_.tensor_tree.Lookup(at, kZarrJson);
    }
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    zarr = {.kind = child.value().is_folder ? Kind::kGroup : Kind::kArray,
            .number = child.value().ordinal,
            .depth = child.value().depth};
  }
  Result<ResolvedItem> known = Resolve(zarr);
  // The tree has the key, but zarr/ has no array of this dtype.
  if (known.status().code() == Code::kStale && zarr.kind == Kind::kArray)
    return NoSuchNameError(name);
  TENSORMOUNT_RETURN_IF_ERROR(known.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(zarr));
  TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, NodeOf(known.value(), path));
  return ViewChild{std::string(name), std::move(node)};
}

Status ZarrView::List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem zarr, ZarrItemOf(folder));
  if (!zarr.folder()) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  return zarr.group() ? ListGroup(zarr, cookie, fn) : ListArray(zarr, cookie, fn);
}

// Cookies: 1 follows zarr.json, n + 1 is the tree's cookie n.
Status ZarrView::ListGroup(const ZarrItem& group, std::uint64_t cookie, const Visit& fn) const {
  using Kind = ZarrItem::Kind;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(group));
  if (cookie == 0) {
    ZarrItem json = group;
    json.kind = Kind::kGroupJson;
    TENSORMOUNT_ASSIGN_OR_RETURN(const ResolvedItem known, Resolve(json));
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, NodeOf(known, path));
    if (!fn({std::string(kZarrJson), std::move(node)}, 1)) return {};
  }
  if (shown_.tensors.count() == 0) return {};
  Status failed;
  const auto visit = [&](TreeChild& child, std::uint64_t next) {
    ResolvedItem known{.item = {.kind = child.is_folder ? Kind::kGroup : Kind::kArray,
                                .number = child.ordinal,
                                .depth = child.depth},
                       .tensor = std::move(child.entry),
                       .grid = nullptr};
    if (!known.tensor) {
      Result<TensorEntry> tensor = shown_.tensors.EntryAt(child.ordinal);
      failed = tensor.status();
      if (!failed.ok()) return false;
      // A directory needs the record of its first key too, because it has the time of that tensor.
      known.tensor = std::move(tensor).value();
    }
    if (!child.is_folder) {
      if (ZarrType(known.tensor->meta.dtype()).empty()) return true;
      child.name = ZarrPath(std::move(child.name));
    }
    Result<ViewNode> node = NodeOf(known, Join(path, child.name));
    failed = node.status();
    return failed.ok() && fn({std::move(child.name), std::move(node).value()}, next + 1);
  };
  TENSORMOUNT_RETURN_IF_ERROR(shown_.tensor_tree.List({.first = group.number, .depth = group.depth},
                                                      cookie == 0 ? 0 : cookie - 1, visit));
  return failed;
}

// Cookies: 1 follows zarr.json, n + 2 follows chunk n.
Status ZarrView::ListArray(const ZarrItem& array, std::uint64_t cookie, const Visit& fn) const {
  using Kind = ZarrItem::Kind;
  ZarrItem zarr = array;
  zarr.kind = Kind::kArrayJson;
  TENSORMOUNT_ASSIGN_OR_RETURN(ResolvedItem known, Resolve(zarr));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(array));
  // O(1) for each chunk: its name and box follow from its number.
  for (std::uint64_t at = cookie; at <= known.grid->chunks(); ++at) {
    if (at > 0) {
      known.item.kind = Kind::kChunk;
      known.item.chunk = at - 1;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, NodeOf(known, path));
    std::string name = at == 0 ? std::string(kZarrJson) : known.grid->NameOf(at - 1);
    if (!fn({std::move(name), std::move(node)}, at + 1)) break;
  }
  return {};
}

Result<FileSegments> ZarrView::Open(std::uint64_t file) const {
  using Kind = ZarrItem::Kind;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem zarr, ZarrItemOf(file));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ResolvedItem known, Resolve(zarr));
  if (zarr.folder()) return Status::FromErrno(EISDIR, "open", PathOf(file));
  FileSegments segments;
  if (zarr.kind == Kind::kChunk) {
    TENSORMOUNT_RETURN_IF_ERROR(
        AddTensorBox(segments, *known.tensor, known.grid->BoxOf(zarr.chunk), known.grid->chunk()));
  } else if (zarr.kind == Kind::kArrayJson) {
    segments.AddLiteral(ZarrArrayJson(known.tensor->meta, *known.grid));
  } else if (zarr.depth > 0) {
    segments.AddLiteral(ZarrGroupJson());
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, RootJson());
    segments.AddText(std::move(text));
  }
  return segments;
}

std::string ZarrView::PathOf(std::uint64_t item) const {
  std::string path(name());
  if (item == kRoot) return path;
  const Result<ViewNode> node = Stat(item);
  return path + '/' + (node.ok() ? node.value().identity : std::string("?"));
}

Result<std::map<std::string, std::string>> ZarrView::Attributes(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem zarr, ZarrItemOf(item));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ResolvedItem known, Resolve(zarr));
  std::map<std::string, std::string> all;
  if (zarr.group()) return all;
  const TensorMeta& meta = known.tensor->meta;
  all.emplace("key", meta.key());
  all.emplace("dtype", std::string(InfoOf(meta.dtype()).name));
  if (zarr.kind == ZarrItem::Kind::kChunk) {
    const Box box = known.grid->BoxOf(zarr.chunk);
    all.emplace("shape", known.grid->chunk().ToString());
    all.emplace("box", box.ToString());
  } else {
    all.emplace("shape", meta.shape().ToString());
  }
  return all;
}

}  // namespace tensormount::fs
