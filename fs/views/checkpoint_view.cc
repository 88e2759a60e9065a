// SPDX-License-Identifier: Apache-2.0
#include "fs/views/checkpoint_view.h"

#include <algorithm>

#include "base/coding.h"
#include "base/hash.h"
#include "base/log.h"
#include "fs/views/checkpoint_text.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kNpySuffix = ".npy";
constexpr std::string_view kJsonSuffix = ".json";

// What is listed in a checkpoint, in this order; the last ones only with list_views.
constexpr std::array<ViewKind, 4> kViewOrder = {ViewKind::kTensors, ViewKind::kObjects,
                                                ViewKind::kNpy, ViewKind::kExtents};

std::string_view ViewName(ViewKind view) {
  switch (view) {
    case ViewKind::kTensors:
    case ViewKind::kLayers:
      return "tensors";
    case ViewKind::kNpy:
    case ViewKind::kNpyLayers:
      return "npy";
    case ViewKind::kExtents:
      return "extents";
    case ViewKind::kObjects:
      return "objects";
    case ViewKind::kFixed:
      break;
  }
  return "";
}

std::string_view FixedName(FixedFile fixed) {
  switch (fixed) {
    case FixedFile::kCheckpointJson:
      return "checkpoint.json";
    case FixedFile::kCommonJson:
      return "common.json";
    case FixedFile::kSafetensors:
      return "model.safetensors";
    default:
      return "";
  }
}

// What files of a view are called after their key.
std::string_view SuffixOf(ViewKind view) {
  if (view == ViewKind::kNpy || view == ViewKind::kNpyLayers) return kNpySuffix;
  if (view == ViewKind::kExtents) return kJsonSuffix;
  return "";
}

Status NoSuch(std::string_view name) {
  return Status(Code::kNotFound, "no " + std::string(name) + " here");
}

bool IsLayers(ViewKind view) { return view == ViewKind::kLayers || view == ViewKind::kNpyLayers; }

Status Stale() { return Status(Code::kStale, "the checkpoint has no such node"); }

// "0.3" of an index.
std::string PartName(const Dims& index) {
  std::string name;
  for (const std::int64_t i : index) {
    if (!name.empty()) name += '.';
    name += std::to_string(i);
  }
  return name;
}

}  // namespace

CheckpointView::CheckpointView(std::shared_ptr<OpenedCheckpoint> opened)
    : opened_(std::move(opened)) {}

Result<std::shared_ptr<const CheckpointView>> CheckpointView::Open(FileSystem& fs,
                                                                   const std::string& directory,
                                                                   const Uuid& expected,
                                                                   const Ownership& ownership,
                                                                   const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const std::string> pinned,
                               fs.PinDirectory(directory));
  auto opened = OpenedCheckpoint::Open(fs, *pinned, {.rebuild_index = false});
  if (!opened.ok() && opened.status().code() != Code::kStale) {
    // Rebuilt copies are found by the folder's own path.
    opened = OpenedCheckpoint::Open(fs, directory, {});
  }
  TENSORMOUNT_RETURN_IF_ERROR(opened.status());
  for (const std::string& warning : opened.value()->warnings()) {
    Log(LogLevel::kWarning, directory + ": " + warning);
  }
  if (!expected.IsZero() && opened.value()->index().info().uuid != expected) {
    return Status(Code::kStale, directory + ": another checkpoint has taken its place");
  }
  std::shared_ptr<CheckpointView> view(new CheckpointView(std::move(opened).value()));
  view->pinned_ = std::move(pinned);
  TENSORMOUNT_RETURN_IF_ERROR(view->Prepare(ownership, options));
  return std::shared_ptr<const CheckpointView>(std::move(view));
}

Result<std::shared_ptr<const CheckpointView>> CheckpointView::OpenSafetensors(
    FileSystem& fs, const std::string& path, const Ownership& ownership, const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, OpenedCheckpoint::OpenSafetensors(fs, path));
  std::shared_ptr<CheckpointView> view(new CheckpointView(std::move(opened)));
  TENSORMOUNT_RETURN_IF_ERROR(view->Prepare(ownership, options));
  return std::shared_ptr<const CheckpointView>(std::move(view));
}

Status CheckpointView::Prepare(const Ownership& ownership, const Options& options) {
  ownership_ = ownership;
  options_ = options;
  const CheckpointIndex& index = opened_->index();
  if (index.tensor_count() >= kMaxOrdinals) {
    return Status(Code::kUnsupported, options.name + ": too many tensors to be mounted");
  }
  ByteWriter seed;
  seed.String(options.name);
  seed.U64(index.info().uuid.high);
  seed.U64(index.info().uuid.low);
  inode_seed_ = Xxh3Low64(seed.bytes());
  std::optional<KeyRenames> renames;
  if (options.map) {
    Result<KeyRenames> made = KeyRenames::Make(index, *options.map);
    if (!made.ok()) return made.status().WithContext(options.name);
    renames = std::move(made).value();
  }
  const KeyRenames* names = renames ? &*renames : nullptr;
  TENSORMOUNT_ASSIGN_OR_RETURN(tensor_keys_, MakeShownTensors(index, names));
  tensors_ = std::make_unique<KeyTree>(*tensor_keys_);
  TENSORMOUNT_ASSIGN_OR_RETURN(layers_, LayerFiles::Make(index, names));
  TENSORMOUNT_ASSIGN_OR_RETURN(objects_, MakeObjects(index, names));
  TENSORMOUNT_ASSIGN_OR_RETURN(common_json_, CommonJson(index));
  return {};
}

Result<std::unique_ptr<CheckpointView::Objects>> CheckpointView::MakeObjects(
    const CheckpointIndex& index, const KeyRenames* renames) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectContent> parts, index.Objects());
  std::vector<std::string> stored;
  if (renames != nullptr) {
    std::erase_if(parts, [&](const ObjectContent& o) { return renames->Object(o.key).empty(); });
    // By new key; parts of one key stay in their order.
    std::stable_sort(parts.begin(), parts.end(), [&](const auto& a, const auto& b) {
      return renames->Object(a.key) < renames->Object(b.key);
    });
    for (ObjectContent& part : parts) {
      stored.push_back(part.key);
      part.key = renames->Object(part.key);
    }
  }
  if (parts.size() >= kMaxOrdinals) return Status(Code::kUnsupported, "too many objects");
  // A part of a grid is a file in a folder with the key's name. Where keys of others begin with
  // that name too, the folder is called "KEY%00": no key of ours has a NUL.
  std::vector<std::pair<std::string, std::size_t>> paths;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::string path = parts[i].key;
    if (parts[i].grid.rank() > 0) {
      const std::string prefix = path + '/';
      const auto below =
          std::lower_bound(parts.begin(), parts.end(), prefix,
                           [](const ObjectContent& o, const std::string& p) { return o.key < p; });
      if (below != parts.end() && below->key.starts_with(prefix)) path += '\0';
      path += '/' + PartName(parts[i].index);
    }
    paths.emplace_back(std::move(path), i);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> keys;
  std::vector<ObjectContent> sorted;
  for (auto& [path, i] : paths) {
    keys.push_back(std::move(path));
    sorted.push_back(std::move(parts[i]));
  }
  auto objects = std::make_unique<Objects>(std::move(keys));
  if (renames != nullptr) {
    for (const auto& [path, i] : paths) objects->stored_keys.push_back(std::move(stored[i]));
  }
  objects->parts = std::move(sorted);
  return objects;
}

std::optional<KeyNode> CheckpointView::KeyNodeOf(const Node& node) {
  if (node.view == kOwnView) {
    if (node.item != kRootItem) return std::nullopt;
    return KeyNode{.slot = node.slot, .depth = 1};
  }
  if (node.view == kViewKinds) {
    if (node.item > static_cast<std::uint32_t>(FixedFile::kSafetensors)) return std::nullopt;
    return KeyNode{.slot = node.slot, .ordinal = static_cast<std::uint32_t>(node.item)};
  }
  if (node.view > kViewKinds) return std::nullopt;
  return KeyNode{.slot = node.slot,
                 .view = static_cast<ViewKind>(node.view),
                 .ordinal = static_cast<std::uint32_t>(node.item >> 12),
                 .depth = static_cast<std::uint32_t>(node.item & kMaxDepth)};
}

Node CheckpointView::NodeOfKey(const KeyNode& node) const {
  if (node.view == ViewKind::kFixed) {
    if (node.is_folder()) return {.slot = options_.slot, .view = kOwnView, .item = kRootItem};
    return {.slot = options_.slot, .view = kViewKinds, .item = node.ordinal};
  }
  return {.slot = options_.slot,
          .view = static_cast<std::uint8_t>(node.view),
          .item = (std::uint64_t{node.ordinal} << 12) | node.depth};
}

Result<Child> CheckpointView::Lookup(const Node& folder, std::string_view name) const {
  const std::optional<KeyNode> node = KeyNodeOf(folder);
  if (!node) return Stale();
  return LookupKey(*node, name);
}

Result<Attributes> CheckpointView::Stat(const Node& of) const {
  const std::optional<KeyNode> node = KeyNodeOf(of);
  if (!node) return Stale();
  return StatKey(*node);
}

std::string CheckpointView::PathOf(const Node& of) const {
  const std::optional<KeyNode> node = KeyNodeOf(of);
  return node ? PathOfKey(*node) : "?";
}

void CheckpointView::Forget(const Node& node, std::uint64_t references) const {
  (void)node;
  (void)references;
}

std::uint64_t CheckpointView::InodeOf(const KeyNode& node, std::string_view path) const {
  ByteWriter text;
  text.U64(inode_seed_);
  text.U8(static_cast<std::uint8_t>(node.view));
  text.U32(node.depth);
  if (node.view == ViewKind::kFixed) text.U32(node.ordinal);
  text.String(path);
  // 0 and 1 mean other things to some programs.
  return std::max<std::uint64_t>(Xxh3Low64(text.bytes()), 2);
}

KeyNode CheckpointView::FixedNode(FixedFile fixed) const {
  return {.slot = options_.slot,
          .view = ViewKind::kFixed,
          .ordinal = static_cast<std::uint32_t>(fixed),
          .depth = fixed == FixedFile::kRoot ? 1u : 0u};
}

KeyNode CheckpointView::ViewRoot(ViewKind view) const {
  return {.slot = options_.slot, .view = view, .ordinal = 0, .depth = 1};
}

const KeyTree& CheckpointView::TreeOf(ViewKind view) const {
  if (IsLayers(view)) return layers_->tree();
  return view == ViewKind::kObjects ? objects_->tree : *tensors_;
}

const KeySource& CheckpointView::KeysOf(ViewKind view) const {
  if (IsLayers(view)) return layers_->keys();
  if (view == ViewKind::kObjects) return objects_->keys;
  return *tensor_keys_;
}

Result<CheckpointView::Served> CheckpointView::ServedBy(const KeyNode& node) const {
  if (node.ordinal >= KeysOf(node.view).count()) return Stale();
  Served served;
  if (IsLayers(node.view)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(LayerFiles::Layer layer,
                                 layers_->At(opened_->index(), node.ordinal));
    return Served{.shown = std::move(layer.entry),
                  .source = std::move(layer.stack),
                  .skip = layer.skip,
                  .layer = layer.number,
                  .stacked_key = std::move(layer.stacked_key)};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(served.shown, tensor_keys_->EntryAt(node.ordinal));
  served.source = served.shown;
  return served;
}

Attributes CheckpointView::FolderAttributes(const KeyNode& node, std::string_view path,
                                            std::int64_t mtime) const {
  return {.kind = FileKind::kDirectory,
          .inode = InodeOf(node, path),
          .size = 0,
          .mode = ownership_.folder_mode,
          .uid = ownership_.uid,
          .gid = ownership_.gid,
          .mtime = mtime};
}

Attributes CheckpointView::FileAttributes(const KeyNode& node, std::string_view path,
                                          std::uint64_t size, std::int64_t mtime) const {
  return {.kind = FileKind::kFile,
          .inode = InodeOf(node, path),
          .size = size,
          .mode = ownership_.file_mode,
          .uid = ownership_.uid,
          .gid = ownership_.gid,
          .mtime = mtime};
}

Result<std::uint64_t> CheckpointView::SizeIn(ViewKind view, const TensorEntry& tensor) const {
  if (view == ViewKind::kNpy || view == ViewKind::kNpyLayers) {
    const Result<std::string> header = MakeNpyHeader(tensor.meta.dtype(), tensor.meta.shape());
    if (!header.ok()) return Status(Code::kNotFound, "no .npy of this type");
    return header.value().size() + tensor.meta.bytes();
  }
  if (view == ViewKind::kExtents) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, Extents(tensor));
    return text->size();
  }
  return tensor.meta.bytes();
}

Result<Attributes> CheckpointView::FileStat(const KeyNode& node, std::string_view path,
                                            const TensorEntry* entry) const {
  if (node.view == ViewKind::kObjects) {
    const ObjectContent& part = objects_->parts[node.ordinal];
    return FileAttributes(node, path, part.length, part.mtime);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t size, SizeIn(node.view, *entry));
  // Where the bytes are changes with every checkpoint.
  const std::int64_t mtime =
      node.view == ViewKind::kExtents ? opened_->index().info().json_mtime : entry->mtime;
  return FileAttributes(node, path, size, mtime);
}

Result<Attributes> CheckpointView::FixedStat(FixedFile fixed) const {
  const KeyNode node = FixedNode(fixed);
  const CheckpointInfo& info = opened_->index().info();
  switch (fixed) {
    case FixedFile::kRoot:
      return FolderAttributes(node, "", info.json_mtime);
    case FixedFile::kCheckpointJson: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, Json());
      return FileAttributes(node, "", text->size(), info.json_mtime);
    }
    case FixedFile::kCommonJson:
      return FileAttributes(node, "", common_json_.size(), info.common_mtime);
    case FixedFile::kSafetensors: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto file, SafetensorsFile());
      const Segment& last = file->segments.back();
      return FileAttributes(node, "", last.begin + last.length, info.json_mtime);
    }
    default:
      return Stale();
  }
}

Result<Child> CheckpointView::FixedChild(FixedFile fixed, std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, FixedStat(fixed));
  return Child{std::string(name), NodeOfKey(FixedNode(fixed)), attributes};
}

Result<Child> CheckpointView::ViewChild(ViewKind view) const {
  const KeyNode node = ViewRoot(view);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, StatKey(node));
  return Child{std::string(ViewName(view)), NodeOfKey(node), attributes};
}

Result<Child> CheckpointView::LookupTop(std::string_view name) const {
  for (const ViewKind view : kViewOrder) {
    if (name == ViewName(view)) return ViewChild(view);
  }
  for (const FixedFile fixed :
       {FixedFile::kCommonJson, FixedFile::kCheckpointJson, FixedFile::kSafetensors}) {
    if (name == FixedName(fixed)) return FixedChild(fixed, name);
  }
  return NoSuch(name);
}

Result<Child> CheckpointView::LookupKey(const KeyNode& folder, std::string_view name) const {
  if (!folder.is_folder()) return Status::FromErrno(ENOTDIR, "look up", name);
  if (folder.view == ViewKind::kFixed) return LookupTop(name);
  const KeyTree& tree = TreeOf(folder.view);
  const TreeFolder in{.first = folder.ordinal, .depth = folder.depth - 1};
  const std::string_view suffix = SuffixOf(folder.view);
  KeyNode node{.slot = options_.slot, .view = folder.view};
  std::string_view stem = name;
  if (!suffix.empty() && name.size() > suffix.size() && name.ends_with(suffix)) {
    stem.remove_suffix(suffix.size());
  }
  const Result<TreeChild> found = tree.Lookup(in, stem);
  if (found.status().code() == Code::kNotFound && !layers_->patterns().empty()) {
    return LookupLayer(folder, name, stem);
  }
  TENSORMOUNT_RETURN_IF_ERROR(found.status());
  const TreeChild& child = found.value();
  // Folders have no suffix, files always: never both, since such folder names are escaped.
  if (child.is_folder != (stem.size() == name.size()) && !suffix.empty()) return NoSuch(name);
  if (child.depth + 1 >= kMaxDepth) return NoSuch(name);
  node.ordinal = child.ordinal;
  node.depth = child.is_folder ? child.depth + 1 : 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, StatKey(node));
  return Child{std::string(name), NodeOfKey(node), attributes};
}

Result<Child> CheckpointView::LookupLayer(const KeyNode& folder, std::string_view name,
                                          std::string_view stem) const {
  KeyNode node{.slot = options_.slot};
  if (folder.view == ViewKind::kTensors) {
    node.view = ViewKind::kLayers;
  } else if (folder.view == ViewKind::kNpy) {
    node.view = ViewKind::kNpyLayers;
  } else {
    return NoSuch(name);
  }
  // The same folder in the tree of the layers' names.
  TreeFolder in;
  if (folder.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path,
                                 TreeOf(folder.view).PathOf(folder.ordinal, folder.depth - 1));
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const TreeChild step,
          layers_->tree().Lookup(in, std::string_view(path).substr(begin, end - begin)));
      if (!step.is_folder) return NoSuch(name);
      in = {.first = step.ordinal, .depth = step.depth};
      begin = end + 1;
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild child, layers_->tree().Lookup(in, stem));
  if (child.is_folder != (stem.size() == name.size()) && !SuffixOf(node.view).empty()) {
    return NoSuch(name);
  }
  if (child.depth + 1 >= kMaxDepth) return NoSuch(name);
  node.ordinal = child.ordinal;
  node.depth = child.is_folder ? child.depth + 1 : 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, StatKey(node));
  return Child{std::string(name), NodeOfKey(node), attributes};
}

Result<Attributes> CheckpointView::StatKey(const KeyNode& node) const {
  if (node.view == ViewKind::kFixed) return FixedStat(static_cast<FixedFile>(node.ordinal));
  const std::uint32_t count = KeysOf(node.view).count();
  if (node.depth == 1 && count == 0) {
    return FolderAttributes(node, "", opened_->index().info().json_mtime);
  }
  if (node.ordinal >= count) return Stale();
  const bool objects = node.view == ViewKind::kObjects;
  std::optional<Served> served;
  if (!objects) {
    TENSORMOUNT_ASSIGN_OR_RETURN(served, ServedBy(node));
  }
  if (!node.is_folder()) {
    if (!objects) return FileStat(node, served->shown.meta.key(), &served->shown);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, objects_->keys.KeyAt(node.ordinal));
    return FileStat(node, key, nullptr);
  }
  // A folder is as old as its first key: it does not change where that does not, which is what
  // rsync wants to see.
  const std::int64_t mtime = objects ? objects_->parts[node.ordinal].mtime : served->shown.mtime;
  std::string path;
  if (node.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(path, TreeOf(node.view).PathOf(node.ordinal, node.depth - 1));
  }
  return FolderAttributes(node, path, mtime);
}

Status CheckpointView::ListTop(std::uint64_t cookie, const Visit& fn) const {
  std::uint64_t next = 0;
  for (const ViewKind view : kViewOrder) {
    if (!options_.list_views && view != ViewKind::kTensors && view != ViewKind::kObjects) continue;
    if (++next <= cookie) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Child child, ViewChild(view));
    if (!fn(child, next)) return {};
  }
  for (const FixedFile fixed :
       {FixedFile::kCommonJson, FixedFile::kCheckpointJson, FixedFile::kSafetensors}) {
    if (!options_.list_views && fixed == FixedFile::kSafetensors) continue;
    if (++next <= cookie) continue;
    const Result<Child> child = FixedChild(fixed, FixedName(fixed));
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!fn(child.value(), next)) return {};
  }
  return {};
}

Status CheckpointView::List(const Node& of, std::uint64_t cookie, const Visit& fn) const {
  const std::optional<KeyNode> known = KeyNodeOf(of);
  if (!known) return Stale();
  const KeyNode& folder = *known;
  if (!folder.is_folder()) return Status::FromErrno(ENOTDIR, "list", PathOfKey(folder));
  if (folder.view == ViewKind::kFixed) return ListTop(cookie, fn);
  if (IsLayers(folder.view)) return {};
  const KeyTree& tree = TreeOf(folder.view);
  const TreeFolder in{.first = folder.ordinal, .depth = folder.depth - 1};
  const std::string_view suffix = SuffixOf(folder.view);
  Status failed;
  const Status listed = tree.List(in, cookie, [&](TreeChild& child, std::uint64_t next) {
    if (child.is_folder && child.depth + 1 >= kMaxDepth) return true;
    Child out;
    const KeyNode key_node = {.slot = options_.slot,
                              .view = folder.view,
                              .ordinal = child.ordinal,
                              .depth = child.is_folder ? child.depth + 1 : 0};
    out.node = NodeOfKey(key_node);
    Result<Attributes> attributes = child.entry && !child.is_folder
                                        ? FileStat(key_node, child.entry->meta.key(), &*child.entry)
                                        : StatKey(key_node);
    if (attributes.status().code() == Code::kNotFound) return true;  // No .npy of this type.
    if (!attributes.ok()) {
      failed = attributes.status();
      return false;
    }
    out.attributes = attributes.value();
    out.name = std::move(child.name);
    if (!child.is_folder) out.name += suffix;
    return fn(out, next);
  });
  TENSORMOUNT_RETURN_IF_ERROR(listed);
  return failed;
}

std::string CheckpointView::PathOfKey(const KeyNode& node) const {
  if (node.view == ViewKind::kFixed)
    return std::string(FixedName(static_cast<FixedFile>(node.ordinal)));
  std::string path(ViewName(node.view));
  if (node.depth == 1) return path;
  const Result<std::string> rest =
      TreeOf(node.view).PathOf(node.ordinal, node.is_folder() ? node.depth - 1 : 0);
  path += '/' + (rest.ok() ? rest.value() : std::string("?"));
  if (!node.is_folder()) path += SuffixOf(node.view);
  return path;
}

}  // namespace tensormount::fs
