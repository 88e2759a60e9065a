// SPDX-License-Identifier: Apache-2.0
#include "fs/checkpoint_view.h"

#include <algorithm>
#include <cstring>

#include "base/coding.h"
#include "base/hash.h"
#include "base/log.h"
#include "fs/checkpoint_text.h"
#include "fs/in_memory.h"
#include "shard/leaf_hash.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kNpySuffix = ".npy";
constexpr std::string_view kJsonSuffix = ".json";

// What is listed in a checkpoint, in this order; the last ones only with list_views.
constexpr std::array<View, 4> kViewOrder = {View::kTensors, View::kObjects, View::kNpy,
                                            View::kExtents};

std::string_view ViewName(View view) {
  switch (view) {
    case View::kTensors:
      return "tensors";
    case View::kNpy:
      return "npy";
    case View::kExtents:
      return "extents";
    case View::kObjects:
      return "objects";
    case View::kFixed:
      break;
  }
  return "";
}

std::string_view FixedName(Fixed fixed) {
  switch (fixed) {
    case Fixed::kCheckpointJson:
      return "checkpoint.json";
    case Fixed::kCommonJson:
      return "common.json";
    case Fixed::kSafetensors:
      return "model.safetensors";
    default:
      return "";
  }
}

// What files of a view are called after their key.
std::string_view SuffixOf(View view) {
  if (view == View::kNpy) return kNpySuffix;
  if (view == View::kExtents) return kJsonSuffix;
  return "";
}

Status NoSuch(std::string_view name) {
  return Status(Code::kNotFound, "no " + std::string(name) + " here");
}

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
    : opened_(std::move(opened)), tensor_keys_(opened_->index()), tensors_(tensor_keys_) {}

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
  TENSORMOUNT_ASSIGN_OR_RETURN(objects_, MakeObjects(index));
  TENSORMOUNT_ASSIGN_OR_RETURN(common_json_, CommonJson(index));
  return {};
}

Result<std::unique_ptr<CheckpointView::Objects>> CheckpointView::MakeObjects(
    const CheckpointIndex& index) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectContent> parts, index.Objects());
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
  objects->parts = std::move(sorted);
  return objects;
}

std::uint64_t CheckpointView::InodeOf(const Node& node, std::string_view path) const {
  ByteWriter text;
  text.U64(inode_seed_);
  text.U8(static_cast<std::uint8_t>(node.view));
  text.U32(node.depth);
  if (node.view == View::kFixed) text.U32(node.ordinal);
  text.String(path);
  // 0 and 1 mean other things to some programs.
  return std::max<std::uint64_t>(Xxh3Low64(text.bytes()), 2);
}

Node CheckpointView::FixedNode(Fixed fixed) const {
  return {.slot = options_.slot,
          .view = View::kFixed,
          .ordinal = static_cast<std::uint32_t>(fixed),
          .depth = fixed == Fixed::kRoot ? 1u : 0u};
}

Node CheckpointView::ViewRoot(View view) const {
  return {.slot = options_.slot, .view = view, .ordinal = 0, .depth = 1};
}

const KeyTree& CheckpointView::TreeOf(View view) const {
  return view == View::kObjects ? objects_->tree : tensors_;
}

Attributes CheckpointView::FolderAttributes(const Node& node, std::string_view path,
                                            std::int64_t mtime) const {
  return {.kind = FileKind::kDirectory,
          .inode = InodeOf(node, path),
          .size = 0,
          .mode = ownership_.folder_mode,
          .uid = ownership_.uid,
          .gid = ownership_.gid,
          .mtime = mtime};
}

Attributes CheckpointView::FileAttributes(const Node& node, std::string_view path,
                                          std::uint64_t size, std::int64_t mtime) const {
  return {.kind = FileKind::kFile,
          .inode = InodeOf(node, path),
          .size = size,
          .mode = ownership_.file_mode,
          .uid = ownership_.uid,
          .gid = ownership_.gid,
          .mtime = mtime};
}

Result<std::uint64_t> CheckpointView::SizeIn(View view, const TensorEntry& tensor) const {
  if (view == View::kNpy) {
    const Result<std::string> header = MakeNpyHeader(tensor.meta.dtype(), tensor.meta.shape());
    if (!header.ok()) return Status(Code::kNotFound, "no .npy of this type");
    return header.value().size() + tensor.meta.bytes();
  }
  if (view == View::kExtents) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, Extents(tensor));
    return text->size();
  }
  return tensor.meta.bytes();
}

Result<Attributes> CheckpointView::FileStat(const Node& node, std::string_view path,
                                            const TensorEntry* entry) const {
  if (node.view == View::kObjects) {
    const ObjectContent& part = objects_->parts[node.ordinal];
    return FileAttributes(node, path, part.length, part.mtime);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t size, SizeIn(node.view, *entry));
  // Where the bytes are changes with every checkpoint.
  const std::int64_t mtime =
      node.view == View::kExtents ? opened_->index().info().json_mtime : entry->mtime;
  return FileAttributes(node, path, size, mtime);
}

Result<Attributes> CheckpointView::FixedStat(Fixed fixed) const {
  const Node node = FixedNode(fixed);
  const CheckpointInfo& info = opened_->index().info();
  switch (fixed) {
    case Fixed::kRoot:
      return FolderAttributes(node, "", info.json_mtime);
    case Fixed::kCheckpointJson: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto text, Json());
      return FileAttributes(node, "", text->size(), info.json_mtime);
    }
    case Fixed::kCommonJson:
      return FileAttributes(node, "", common_json_.size(), info.common_mtime);
    case Fixed::kSafetensors: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto segments, SafetensorsSegments());
      const Segment& last = segments->back();
      return FileAttributes(node, "", last.begin + last.length, info.json_mtime);
    }
    default:
      return Stale();
  }
}

Result<Child> CheckpointView::FixedChild(Fixed fixed, std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, FixedStat(fixed));
  return Child{std::string(name), FixedNode(fixed), attributes};
}

Result<Child> CheckpointView::ViewChild(View view) const {
  const Node node = ViewRoot(view);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, Stat(node));
  return Child{std::string(ViewName(view)), node, attributes};
}

Result<Child> CheckpointView::LookupTop(std::string_view name) const {
  for (const View view : kViewOrder) {
    if (name == ViewName(view)) return ViewChild(view);
  }
  for (const Fixed fixed : {Fixed::kCommonJson, Fixed::kCheckpointJson, Fixed::kSafetensors}) {
    if (name == FixedName(fixed)) return FixedChild(fixed, name);
  }
  return NoSuch(name);
}

Result<Child> CheckpointView::Lookup(const Node& folder, std::string_view name) const {
  if (!folder.is_folder()) return Status::FromErrno(ENOTDIR, "look up", name);
  if (folder.view == View::kFixed) return LookupTop(name);
  const KeyTree& tree = TreeOf(folder.view);
  const TreeFolder in{.first = folder.ordinal, .depth = folder.depth - 1};
  const std::string_view suffix = SuffixOf(folder.view);
  Node node{.slot = options_.slot, .view = folder.view};
  std::string_view stem = name;
  if (!suffix.empty() && name.size() > suffix.size() && name.ends_with(suffix)) {
    stem.remove_suffix(suffix.size());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild child, tree.Lookup(in, stem));
  // Folders have no suffix, files always: never both, since such folder names are escaped.
  if (child.is_folder != (stem.size() == name.size()) && !suffix.empty()) return NoSuch(name);
  if (child.depth + 1 >= kMaxDepth) return NoSuch(name);
  node.ordinal = child.ordinal;
  node.depth = child.is_folder ? child.depth + 1 : 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, Stat(node));
  return Child{std::string(name), node, attributes};
}

Result<Attributes> CheckpointView::Stat(const Node& node) const {
  if (node.view == View::kFixed) return FixedStat(static_cast<Fixed>(node.ordinal));
  const bool objects = node.view == View::kObjects;
  const std::uint32_t count = objects ? objects_->keys.count() : tensor_keys_.count();
  if (node.depth == 1 && count == 0) {
    return FolderAttributes(node, "", opened_->index().info().json_mtime);
  }
  if (node.ordinal >= count) return Stale();
  std::optional<TensorEntry> entry;
  if (!objects) {
    TENSORMOUNT_ASSIGN_OR_RETURN(entry, opened_->index().At(node.ordinal));
  }
  if (!node.is_folder()) {
    if (!objects) return FileStat(node, entry->meta.key(), &*entry);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, objects_->keys.KeyAt(node.ordinal));
    return FileStat(node, key, nullptr);
  }
  // A folder is as old as its first key: it does not change where that does not, which is what
  // rsync wants to see.
  const std::int64_t mtime = objects ? objects_->parts[node.ordinal].mtime : entry->mtime;
  std::string path;
  if (node.depth > 1) {
    TENSORMOUNT_ASSIGN_OR_RETURN(path, TreeOf(node.view).PathOf(node.ordinal, node.depth - 1));
  }
  return FolderAttributes(node, path, mtime);
}

Status CheckpointView::ListTop(std::uint64_t cookie, const Visit& fn) const {
  std::uint64_t next = 0;
  for (const View view : kViewOrder) {
    if (!options_.list_views && view != View::kTensors && view != View::kObjects) continue;
    if (++next <= cookie) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Child child, ViewChild(view));
    if (!fn(child, next)) return {};
  }
  for (const Fixed fixed : {Fixed::kCommonJson, Fixed::kCheckpointJson, Fixed::kSafetensors}) {
    if (!options_.list_views && fixed == Fixed::kSafetensors) continue;
    if (++next <= cookie) continue;
    const Result<Child> child = FixedChild(fixed, FixedName(fixed));
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    if (!fn(child.value(), next)) return {};
  }
  return {};
}

Status CheckpointView::List(const Node& folder, std::uint64_t cookie, const Visit& fn) const {
  if (!folder.is_folder()) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  if (folder.view == View::kFixed) return ListTop(cookie, fn);
  const KeyTree& tree = TreeOf(folder.view);
  const TreeFolder in{.first = folder.ordinal, .depth = folder.depth - 1};
  const std::string_view suffix = SuffixOf(folder.view);
  Status failed;
  const Status listed = tree.List(in, cookie, [&](TreeChild& child, std::uint64_t next) {
    if (child.is_folder && child.depth + 1 >= kMaxDepth) return true;
    Child out;
    out.node = {.slot = options_.slot,
                .view = folder.view,
                .ordinal = child.ordinal,
                .depth = child.is_folder ? child.depth + 1 : 0};
    Result<Attributes> attributes = child.entry && !child.is_folder
                                        ? FileStat(out.node, child.entry->meta.key(), &*child.entry)
                                        : Stat(out.node);
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

std::string CheckpointView::PathOf(const Node& node) const {
  if (node.view == View::kFixed) return std::string(FixedName(static_cast<Fixed>(node.ordinal)));
  std::string path(ViewName(node.view));
  if (node.depth == 1) return path;
  const Result<std::string> rest =
      TreeOf(node.view).PathOf(node.ordinal, node.is_folder() ? node.depth - 1 : 0);
  path += '/' + (rest.ok() ? rest.value() : std::string("?"));
  if (!node.is_folder()) path += SuffixOf(node.view);
  return path;
}

Result<std::shared_ptr<const VirtualFile>> CheckpointView::OpenFile(const Node& node) const {
  std::shared_ptr<VirtualFile> file(new VirtualFile);
  file->view_ = shared_from_this();
  file->label_ = options_.name.empty() ? PathOf(node) : options_.name + "/" + PathOf(node);
  if (node.is_folder()) return Status::FromErrno(EISDIR, "open", file->label_);
  const auto of_literal = [&](std::string text) {
    file->literal_ = std::make_shared<const std::string>(std::move(text));
    file->Add(Segment::Kind::kLiteral, 0, file->literal_->size());
  };
  const auto of_text = [&](std::shared_ptr<const GeneratedText> text) {
    file->text_ = std::move(text);
    file->Add(Segment::Kind::kText, 0, file->text_->size());
  };
  if (node.view == View::kFixed) {
    switch (static_cast<Fixed>(node.ordinal)) {
      case Fixed::kCheckpointJson: {
        TENSORMOUNT_ASSIGN_OR_RETURN(auto text, Json());
        of_text(std::move(text));
        return std::shared_ptr<const VirtualFile>(std::move(file));
      }
      case Fixed::kCommonJson:
        of_literal(common_json_);
        return std::shared_ptr<const VirtualFile>(std::move(file));
      case Fixed::kSafetensors: {
        TENSORMOUNT_ASSIGN_OR_RETURN(file->shared_, SafetensorsSegments());
        TENSORMOUNT_ASSIGN_OR_RETURN(std::string header, opened_->index().SafetensorsHeader());
        if (header.size() != file->shared_->front().length) {
          return Status(Code::kDataLoss, file->label_ + ": the header has another length");
        }
        file->literal_ = std::make_shared<const std::string>(std::move(header));
        file->size_ = file->shared_->back().begin + file->shared_->back().length;
        file->reads_data_ = true;
        return std::shared_ptr<const VirtualFile>(std::move(file));
      }
      default:
        return Stale();
    }
  }
  if (node.view == View::kObjects) {
    if (node.ordinal >= objects_->parts.size()) return Stale();
    file->Add(Segment::Kind::kObject, node.ordinal, objects_->parts[node.ordinal].length);
    return std::shared_ptr<const VirtualFile>(std::move(file));
  }
  if (node.ordinal >= tensor_keys_.count()) return Stale();
  TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry entry, opened_->index().At(node.ordinal));
  if (node.view == View::kExtents) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto text, Extents(entry));
    of_text(std::move(text));
    return std::shared_ptr<const VirtualFile>(std::move(file));
  }
  if (node.view == View::kNpy) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string header,
                                 MakeNpyHeader(entry.meta.dtype(), entry.meta.shape()));
    of_literal(std::move(header));
  }
  file->Add(Segment::Kind::kTensor, node.ordinal, entry.meta.bytes());
  file->tensor_ = std::move(entry);
  return std::shared_ptr<const VirtualFile>(std::move(file));
}

Result<std::map<std::string, std::string>> CheckpointView::Xattrs(const Node& node) const {
  std::map<std::string, std::string> all;
  const auto add = [&](std::string_view name, std::string value) {
    all.emplace("user.tensormount." + std::string(name), std::move(value));
  };
  const CheckpointInfo& info = opened_->index().info();
  if (node.view == View::kFixed) {
    if (node.is_folder()) {
      add("uuid", info.uuid.ToString());
      add("generation", std::to_string(info.generation));
      if (!info.parent.IsZero()) add("parent", info.parent.ToString());
      add("producer", info.producer);
    }
    return all;
  }
  if (node.is_folder()) return all;
  add("tier", "daemon");
  if (node.view == View::kObjects) {
    if (node.ordinal >= objects_->parts.size()) return Stale();
    const ObjectContent& part = objects_->parts[node.ordinal];
    add("key", part.key);
    add("hash", "xxh3-128:" + part.hash.ToHex());
    if (part.grid.rank() > 0) {
      add("index", DimsText(part.index));
      add("grid", DimsText(part.grid));
    }
    return all;
  }
  if (node.ordinal >= tensor_keys_.count()) return Stale();
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, opened_->index().At(node.ordinal));
  add("key", entry.meta.key());
  add("dtype", std::string(InfoOf(entry.meta.dtype()).name));
  add("shape", DimsText(entry.meta.shape()));
  if (entry.has_digest) add("digest", DigestText(entry.digest));
  return all;
}

Result<std::shared_ptr<const GeneratedText>> CheckpointView::Json() const {
  const std::lock_guard lock(mutex_);
  if (!json_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(GeneratedText::Parts parts,
                                 CheckpointJson(*opened_, objects_->parts));
    TENSORMOUNT_ASSIGN_OR_RETURN(json_, GeneratedText::Make(std::move(parts)));
  }
  return json_;
}

Result<std::shared_ptr<const GeneratedText>> CheckpointView::Extents(
    const TensorEntry& tensor) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(GeneratedText::Parts parts, ExtentsJson(opened_->index(), tensor));
  return GeneratedText::Make(std::move(parts));
}

Result<std::shared_ptr<const std::vector<Segment>>> CheckpointView::SafetensorsSegments() const {
  const std::lock_guard lock(mutex_);
  if (safetensors_segments_) return safetensors_segments_;
  const CheckpointIndex& index = opened_->index();
  const Result<std::string> header = index.SafetensorsHeader();
  if (!header.ok()) {
    // The format has a limit: such a model has no file of this kind.
    if (header.status().code() != Code::kUnsupported) return header.status();
    return NoSuch("model.safetensors");
  }
  auto segments = std::make_shared<std::vector<Segment>>();
  segments->push_back({.kind = Segment::Kind::kLiteral, .length = header.value().size()});
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
    if (tensor.in_safetensors && tensor.meta.bytes() > 0) {
      segments->push_back({.kind = Segment::Kind::kTensor,
                           .ordinal = tensor.ordinal,
                           .begin = tensor.safetensors_offset,
                           .length = tensor.meta.bytes()});
    }
    return true;
  }));
  std::sort(segments->begin(), segments->end(),
            [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < segments->size(); ++i) {
    const Segment& before = (*segments)[i - 1];
    if ((*segments)[i].begin != before.begin + before.length) {
      return Status(Code::kDataLoss, "index: tensors of model.safetensors overlap or leave a gap");
    }
  }
  safetensors_segments_ = std::move(segments);
  return safetensors_segments_;
}

std::shared_ptr<CheckpointView::GoodBlocks> CheckpointView::GoodBlocksOf(
    const TensorEntry& tensor) const {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<GoodBlocks>& blocks = good_blocks_[tensor.ordinal];
  if (!blocks) {
    blocks = std::make_shared<GoodBlocks>((tensor.meta.bytes() + kLeafBytes - 1) / kLeafBytes);
  }
  return blocks;
}

std::vector<OpenedCheckpoint::MappedPiece> CheckpointView::MapTensor(const TensorEntry& tensor,
                                                                     std::uint64_t offset,
                                                                     std::size_t size) const {
  if (options_.verify != ServeVerify::kOff) return {};
  auto mapped = opened_->MapBytes(tensor, offset, size);
  // Why it failed is found out, and told, by the read that follows.
  if (!mapped.ok()) return {};
  for (const auto& piece : mapped.value()) {
    if (!InMemory(piece.data, piece.size)) return {};
  }
  return std::move(mapped).value();
}

Status CheckpointView::ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out,
                                  std::size_t size, ReadStats* stats) const {
  if (options_.verify == ServeVerify::kOff) {
    return opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kOff, stats);
  }
  if (options_.verify == ServeVerify::kAlways) {
    return opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kExtendLeaves, stats);
  }
  const std::shared_ptr<GoodBlocks> good = GoodBlocksOf(tensor);
  const std::uint64_t first = offset / kLeafBytes;
  const std::uint64_t last = (offset + size - 1) / kLeafBytes;
  const auto bit = [&](std::uint64_t block) { return std::uint64_t{1} << (block % 64); };
  bool all_good = true;
  for (std::uint64_t b = first; b <= last && all_good; ++b) {
    all_good = (good->words[b / 64].load(std::memory_order_acquire) & bit(b)) != 0;
  }
  if (all_good) return opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kOff, stats);
  // Whole blocks, so that these need not be checked again.
  const std::uint64_t begin = first * kLeafBytes;
  const std::uint64_t end = std::min((last + 1) * kLeafBytes, tensor.meta.bytes());
  if (begin == offset && end == offset + size) {
    TENSORMOUNT_RETURN_IF_ERROR(
        opened_->ReadBytes(tensor, offset, out, size, ReadVerify::kExtendLeaves, stats));
  } else {
    std::vector<char> scratch(static_cast<std::size_t>(end - begin));
    TENSORMOUNT_RETURN_IF_ERROR(opened_->ReadBytes(tensor, begin, scratch.data(), scratch.size(),
                                                   ReadVerify::kExtendLeaves, stats));
    std::memcpy(out, scratch.data() + (offset - begin), size);
  }
  for (std::uint64_t b = first; b <= last; ++b) {
    good->words[b / 64].fetch_or(bit(b), std::memory_order_release);
  }
  return {};
}

Status CheckpointView::ReadObject(std::uint32_t number, std::uint64_t offset, char* out,
                                  std::size_t size) const {
  if (number >= objects_->parts.size()) return Stale();
  const ObjectContent& part = objects_->parts[number];
  // Whole leaves are what ReadObject checks.
  const std::uint64_t begin = offset / kLeafBytes * kLeafBytes;
  const std::uint64_t end =
      std::min((offset + size + kLeafBytes - 1) / kLeafBytes * kLeafBytes, part.length);
  if (options_.verify == ServeVerify::kOff || (begin == offset && end == offset + size)) {
    return opened_->ReadObject(part, offset, out, size);
  }
  std::vector<char> scratch(static_cast<std::size_t>(end - begin));
  TENSORMOUNT_RETURN_IF_ERROR(opened_->ReadObject(part, begin, scratch.data(), scratch.size()));
  std::memcpy(out, scratch.data() + (offset - begin), size);
  return {};
}

}  // namespace tensormount::fs
