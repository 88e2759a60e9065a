// SPDX-License-Identifier: Apache-2.0
// zarr/: Zarr version 3 with groups from the slashes of keys. Chunks at the upper edges are padded
// with zeros, as the format asks.
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
constexpr int kItemBits = 39;  // Besides the bit that tells folders of keys.
constexpr std::uint64_t kGroupBit = std::uint64_t{1} << kItemBits;
static_assert(kGroupBit * 2 == View::kMaxItems);
// A key has at most kMaxKeyBytes slashes, so its path has not more folders.
constexpr int kZarrDepthBits = 12;
static_assert(kMaxKeyBytes < (1u << kZarrDepthBits));
constexpr std::size_t kCachedGrids = 256;

std::string Join(const std::string& folder, std::string_view name) {
  return folder.empty() ? std::string(name) : folder + '/' + std::string(name);
}

}  // namespace

ZarrView::ZarrView(const ShownCheckpoint& shown) : shown_(shown), grids_(kCachedGrids) {
  shift_ = kItemBits - static_cast<int>(std::bit_width(shown.tensors.count()));
}

std::uint64_t ZarrView::ItemOf(const ZarrItem& place) const {
  using Kind = ZarrItem::Kind;
  if (place.group()) {
    const bool json = place.kind == Kind::kGroupJson;
    if (place.depth == 0) return json ? kRootJson : kRoot;
    return kGroupBit | (std::uint64_t{place.number} << shift_) | (std::uint64_t{place.depth} << 1) |
           (json ? 1 : 0);
  }
  const std::uint64_t base = (std::uint64_t{place.number} + 1) << shift_;
  if (place.kind == Kind::kArray) return base;
  return base + (place.kind == Kind::kArrayJson ? 1 : place.chunk + 2);
}

Result<ZarrView::ZarrItem> ZarrView::ZarrItemOf(std::uint64_t item) const {
  using Kind = ZarrItem::Kind;
  // A hundred times what fits any mount; there is no such view then.
  if (shift_ < kZarrDepthBits + 1) return NoSuch(name());
  if (item == kRoot) return ZarrItem{.kind = Kind::kGroup};
  if (item == kRootJson) return ZarrItem{.kind = Kind::kGroupJson};
  if (item >= View::kMaxItems) return StaleNode("zarr/");
  const std::uint64_t high = (item & (kGroupBit - 1)) >> shift_;
  const std::uint64_t low = item & ((std::uint64_t{1} << shift_) - 1);
  const std::uint32_t count = shown_.tensors.count();
  if ((item & kGroupBit) != 0) {
    const ZarrItem place{.kind = (low & 1) != 0 ? Kind::kGroupJson : Kind::kGroup,
                         .number = static_cast<std::uint32_t>(high),
                         .depth = static_cast<std::uint32_t>(low >> 1)};
    if (high >= count || place.depth == 0 || (low >> 1) >= (1u << kZarrDepthBits))
      return StaleNode("zarr/");
    return place;
  }
  if (high == 0 || high > count) return StaleNode("zarr/");
  ZarrItem place{.kind = Kind::kArray, .number = static_cast<std::uint32_t>(high - 1)};
  if (low == 1) place.kind = Kind::kArrayJson;
  if (low > 1) {
    place.kind = Kind::kChunk;
    place.chunk = low - 2;
  }
  return place;
}

Result<ZarrView::Known> ZarrView::Know(const ZarrItem& place) const {
  Known known{.place = place, .tensor = std::nullopt, .grid = nullptr};
  if (place.group() && shown_.tensors.count() == 0) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(known.tensor, shown_.tensors.EntryAt(place.number));
  if (place.group()) return known;
  if (ZarrType(known.tensor->meta.dtype()).empty()) return StaleNode("zarr/");
  if (place.folder()) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(known.grid, GridOf(place.number, *known.tensor));
  if (place.kind == ZarrItem::Kind::kChunk && place.chunk >= known.grid->chunks())
    return StaleNode("zarr/");
  return known;
}

Result<std::shared_ptr<const ZarrGrid>> ZarrView::GridOf(std::uint32_t number,
                                                         const TensorEntry& tensor) const {
  if (auto cached = grids_.Get(number)) return cached;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrGrid grid,
                               ZarrGrid::Make(shown_.opened.index(), tensor, max_chunks()));
  return grids_.Put(number, std::make_shared<const ZarrGrid>(grid), 1);
}

Result<std::shared_ptr<const GeneratedText>> ZarrView::RootJson() const {
  const std::lock_guard lock(mutex_);
  if (!root_json_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(GeneratedText::Parts parts,
                                 ZarrRootJson(shown_.tensors, shown_.tensor_tree,
                                              [this](std::uint32_t, const TensorEntry& tensor) {
                                                return ZarrGrid::Make(shown_.opened.index(), tensor,
                                                                      max_chunks());
                                              }));
    TENSORMOUNT_ASSIGN_OR_RETURN(root_json_, GeneratedText::Make(std::move(parts)));
  }
  return root_json_;
}

Result<std::string> ZarrView::FolderPath(const ZarrItem& place) const {
  if (place.group()) {
    if (place.depth == 0) return std::string();
    return shown_.tensor_tree.PathOf(place.number, place.depth);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string path, shown_.tensor_tree.PathOf(place.number, 0));
  return ZarrPath(std::move(path));
}

Result<ViewNode> ZarrView::NodeOf(const Known& known, const std::string& folder_path) const {
  using Kind = ZarrItem::Kind;
  const ZarrItem& place = known.place;
  // Where chunks begin and end may change with every checkpoint.
  const std::int64_t json_mtime = shown_.opened.index().info().json_mtime;
  ViewNode node{.item = ItemOf(place),
                .folder = place.folder(),
                .size = 0,
                .mtime = known.tensor ? known.tensor->mtime : json_mtime,
                .identity = folder_path};
  switch (place.kind) {
    case Kind::kGroup:
    case Kind::kArray:
      return node;
    case Kind::kGroupJson:
    case Kind::kArrayJson:
      node.mtime = json_mtime;
      node.identity = Join(folder_path, kZarrJson);
      if (place.kind == Kind::kArrayJson) {
        node.size = ZarrArrayJson(known.tensor->meta, *known.grid).size();
      } else if (place.depth > 0) {
        node.size = ZarrGroupJson().size();
      } else {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, RootJson());
        node.size = text->size();
      }
      return node;
    case Kind::kChunk:
      node.size = known.tensor->meta.bits() / 8;
      for (const std::int64_t extent : known.grid->chunk()) {
        node.size *= static_cast<std::uint64_t>(extent);  // Not above the tensor's size.
      }
      node.identity = Join(folder_path, known.grid->NameOf(place.chunk));
      return node;
  }
  return StaleNode("zarr/");
}

Result<ViewNode> ZarrView::Stat(std::uint64_t item) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem place, ZarrItemOf(item));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Known known, Know(place));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(place));
  return NodeOf(known, path);
}

Result<ViewChild> ZarrView::Lookup(std::uint64_t folder, std::string_view name) const {
  using Kind = ZarrItem::Kind;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem in, ZarrItemOf(folder));
  if (!in.folder()) return Status::FromErrno(ENOTDIR, "look up", name);
  ZarrItem place{.kind = Kind::kChunk, .number = in.number};
  if (name == kZarrJson) {
    place = in;
    place.kind = in.group() ? Kind::kGroupJson : Kind::kArrayJson;
  } else if (in.kind == Kind::kArray) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, shown_.tensors.EntryAt(in.number));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto grid, GridOf(in.number, tensor));
    const std::optional<std::uint64_t> chunk = grid->NumberOf(name);
    if (!chunk) return NoSuch(name);
    place.chunk = *chunk;
  } else {
    const TreeFolder at{.first = in.number, .depth = in.depth};
    Result<TreeChild> child = shown_.tensor_tree.Lookup(at, name);
    if (child.status().code() == Code::kNotFound && name == ZarrPath(std::string(kZarrJson))) {
      child = shown_.tensor_tree.Lookup(at, kZarrJson);
    }
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    place = {.kind = child.value().is_folder ? Kind::kGroup : Kind::kArray,
             .number = child.value().ordinal,
             .depth = child.value().depth};
  }
  Result<Known> known = Know(place);
  // Of a type that is no array.
  if (known.status().code() == Code::kStale && place.kind == Kind::kArray) return NoSuch(name);
  TENSORMOUNT_RETURN_IF_ERROR(known.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(place));
  TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, NodeOf(known.value(), path));
  return ViewChild{std::string(name), std::move(node)};
}

Status ZarrView::List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem place, ZarrItemOf(folder));
  if (!place.folder()) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  return place.group() ? ListGroup(place, cookie, fn) : ListArray(place, cookie, fn);
}

// Cookies: 1 is behind zarr.json, n + 1 what the tree calls n.
Status ZarrView::ListGroup(const ZarrItem& group, std::uint64_t cookie, const Visit& fn) const {
  using Kind = ZarrItem::Kind;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(group));
  if (cookie == 0) {
    ZarrItem json = group;
    json.kind = Kind::kGroupJson;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Known known, Know(json));
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, NodeOf(known, path));
    if (!fn({std::string(kZarrJson), std::move(node)}, 1)) return {};
  }
  if (shown_.tensors.count() == 0) return {};
  Status failed;
  const auto visit = [&](TreeChild& child, std::uint64_t next) {
    Known known{.place = {.kind = child.is_folder ? Kind::kGroup : Kind::kArray,
                          .number = child.ordinal,
                          .depth = child.depth},
                .tensor = std::move(child.entry),
                .grid = nullptr};
    if (!known.tensor) {
      Result<TensorEntry> tensor = shown_.tensors.EntryAt(child.ordinal);
      failed = tensor.status();
      if (!failed.ok()) return false;
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

// Cookies: 1 is behind zarr.json, n + 2 behind chunk n.
Status ZarrView::ListArray(const ZarrItem& array, std::uint64_t cookie, const Visit& fn) const {
  using Kind = ZarrItem::Kind;
  ZarrItem place = array;
  place.kind = Kind::kArrayJson;
  TENSORMOUNT_ASSIGN_OR_RETURN(Known known, Know(place));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, FolderPath(array));
  for (std::uint64_t at = cookie; at <= known.grid->chunks(); ++at) {
    if (at > 0) {
      known.place.kind = Kind::kChunk;
      known.place.chunk = at - 1;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(ViewNode node, NodeOf(known, path));
    std::string name = at == 0 ? std::string(kZarrJson) : known.grid->NameOf(at - 1);
    if (!fn({std::move(name), std::move(node)}, at + 1)) break;
  }
  return {};
}

Result<FileSegments> ZarrView::Open(std::uint64_t file) const {
  using Kind = ZarrItem::Kind;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem place, ZarrItemOf(file));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Known known, Know(place));
  if (place.folder()) return Status::FromErrno(EISDIR, "open", PathOf(file));
  FileSegments segments;
  if (place.kind == Kind::kChunk) {
    TENSORMOUNT_RETURN_IF_ERROR(
        AddTensorBox(segments, *known.tensor, known.grid->BoxOf(place.chunk), known.grid->chunk()));
  } else if (place.kind == Kind::kArrayJson) {
    segments.AddLiteral(ZarrArrayJson(known.tensor->meta, *known.grid));
  } else if (place.depth > 0) {
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
  TENSORMOUNT_ASSIGN_OR_RETURN(const ZarrItem place, ZarrItemOf(item));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Known known, Know(place));
  std::map<std::string, std::string> all;
  if (place.group()) return all;
  const TensorMeta& meta = known.tensor->meta;
  all.emplace("key", meta.key());
  all.emplace("dtype", std::string(InfoOf(meta.dtype()).name));
  if (place.kind == ZarrItem::Kind::kChunk) {
    const Box box = known.grid->BoxOf(place.chunk);
    all.emplace("shape", known.grid->chunk().ToString());
    all.emplace("box", box.ToString());
  } else {
    all.emplace("shape", meta.shape().ToString());
  }
  return all;
}

}  // namespace tensormount::fs
