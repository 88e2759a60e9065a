// SPDX-License-Identifier: Apache-2.0
// The directory of a checkpoint with its views, in listing order (MakeViews).
#include "fs/views/checkpoint_view.h"

#include <algorithm>
#include <cerrno>

#include "base/coding.h"
#include "base/hash.h"
#include "base/log.h"
#include "fs/answers.h"
#include "fs/reach.h"
#include "fs/views/backing_file.h"
#include "fs/views/checkpoint_views.h"
#include "fs/views/dcp_view.h"
#include "fs/views/hf_view.h"
#include "fs/views/keyed_view.h"
#include "fs/views/slices_view.h"
#include "fs/views/zarr_view.h"
#include "index/foreign/open_source.h"
#include "index/foreign/rule_packs.h"

namespace tensormount::fs {

Result<std::shared_ptr<const CheckpointView>> CheckpointView::Open(FileSystem& fs,
                                                                   const std::string& directory,
                                                                   const Uuid& expected,
                                                                   const Ownership& ownership,
                                                                   const Options& options) {
  OpenedCheckpoint::Options how;
  how.roots = options.roots;
  how.proven = options.proven;
  // The directory is pinned first, so that all files are of one checkpoint. A symlink is refused.
  TENSORMOUNT_ASSIGN_OR_RETURN(how.pinned, fs.PinDirectory(directory));
  auto opened = OpenedCheckpoint::Open(fs, directory, how);
  TENSORMOUNT_RETURN_IF_ERROR(opened.status());
  for (const std::string& warning : opened.value()->warnings()) {
    Log(LogLevel::kWarning, directory + ": " + warning);
  }
  // Another checkpoint may have got this name since the caller learned `expected`.
  if (!expected.IsZero() && opened.value()->index().info().uuid != expected) {
    return Status(Code::kStale, directory + ": the checkpoint was replaced by another one");
  }
  std::shared_ptr<CheckpointView> view(new CheckpointView(std::move(opened).value()));
  TENSORMOUNT_RETURN_IF_ERROR(view->Prepare(ownership, options));
  return std::shared_ptr<const CheckpointView>(std::move(view));
}

Result<std::shared_ptr<const CheckpointView>> CheckpointView::OpenForeign(
    FileSystem& fs, const std::string& path, const Ownership& ownership, const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(
      auto opened,
      OpenFound({.fs = &fs, .kind = SourceKind::kForeign, .path = path}, options.roots));
  for (const std::string& warning : opened->warnings()) {
    Log(LogLevel::kWarning, path + ": " + warning);
  }
  return FromOpened(std::move(opened), ownership, options);
}

Result<std::shared_ptr<const CheckpointView>> CheckpointView::FromOpened(
    std::shared_ptr<const OpenedCheckpoint> opened, const Ownership& ownership,
    const Options& options) {
  std::shared_ptr<CheckpointView> view(new CheckpointView(std::move(opened)));
  TENSORMOUNT_RETURN_IF_ERROR(view->Prepare(ownership, options));
  return std::shared_ptr<const CheckpointView>(std::move(view));
}

Status CheckpointView::Prepare(const Ownership& ownership, const Options& options) {
  ownership_ = ownership;
  options_ = options;
  if (!options_.slices) options_.slices = std::make_shared<SliceItems>();
  if (options.other_users) TENSORMOUNT_RETURN_IF_ERROR(RestrictToFiles());
  if (!options.map.empty()) {
    Result<std::shared_ptr<const OpenedCheckpoint>> mapped = ApplyNames(opened_, options.map);
    if (!mapped.ok()) {
      return options.name.empty() ? mapped.status() : mapped.status().WithContext(options.name);
    }
    opened_ = std::move(mapped).value();
  }
  const CheckpointIndex& index = opened_->index();
  // The seed contains the name, since a checkpoint may be shown under two names, and the UUID, so
  // that another checkpoint of that name has other inode numbers and no cache confuses the two.
  ByteWriter seed;
  seed.String(options.name);
  seed.U64(index.info().uuid.high);
  seed.U64(index.info().uuid.low);
  inode_seed_ = Xxh3Low64(seed.bytes());
  tensors_ = std::make_unique<const ShownTensors>(index);
  tensor_tree_ = std::make_unique<KeyTree>(*tensors_);
  TENSORMOUNT_ASSIGN_OR_RETURN(layers_, LayerFiles::Make(index));
  TENSORMOUNT_ASSIGN_OR_RETURN(objects_, ShownObjects::Make(index));
  // Key numbers have 27 bits in node ids: 134 million tensors, far beyond real checkpoints.
  if (tensors_->count() >= KeyedView::kMaxKeys || objects_->parts().size() >= KeyedView::kMaxKeys) {
    return Status(Code::kUnsupported, options.name + ": too many keys to be mounted");
  }
  shown_.emplace(ShownCheckpoint{.opened = *opened_,
                                 .tensors = *tensors_,
                                 .tensor_tree = *tensor_tree_,
                                 .layers = *layers_,
                                 .objects = *objects_});
  data_.emplace(*opened_, *objects_, options.verify);
  return MakeViews();
}

// Checks each file and each directory above it, following symlinks. Users without read access to
// the index may not list names either. Missing files are ignored here and reported when they are
// read.
Status CheckpointView::RestrictToFiles() {
  FileSystem& fs = opened_->fs();
  const auto need = [&fs](AccessMask& reach, const std::string& path) -> Status {
    const Result<std::string> real = fs.Resolve(path);
    if (real.status().code() == Code::kNotFound) return {};
    TENSORMOUNT_RETURN_IF_ERROR(real.status());
    TENSORMOUNT_RETURN_IF_ERROR(reach.RequireFoldersAbove(fs, real.value()));
    return reach.Require(fs, real.value(), AccessMask::Access::kRead);
  };
  // Access to the checkpoint's own directory is assumed: its modes are in ownership_, which the
  // kernel checks.
  const auto begin = [this] {
    AccessMask reach(ownership_.uid, ownership_.gid);
    reach.AssumeSearchable(opened_->directory());
    return reach;
  };
  AccessMask names = begin();
  TENSORMOUNT_RETURN_IF_ERROR(need(names, JoinPath(opened_->directory(), kIndexName)));
  ownership_.folder_mode &= names.mask();
  AccessMask bytes = begin();
  const std::size_t files = opened_->index().files().size();
  for (std::size_t n = 0; n < files; ++n) {
    TENSORMOUNT_RETURN_IF_ERROR(need(bytes, opened_->FilePath(static_cast<std::uint32_t>(n))));
  }
  ownership_.file_mode &= names.mask() & bytes.mask();
  return {};
}

// The views of a checkpoint, in listing order. New ones must be added at the end: a view's number
// is part of node ids, which a kernel may keep over an update of the program.
Status CheckpointView::MakeViews() {
  const ShownCheckpoint& shown = *shown_;
  TENSORMOUNT_ASSIGN_OR_RETURN(auto common_json, MakeCommonJsonView(shown));
  views_.push_back(MakeTensorsView(shown));
  views_.push_back(MakeObjectsView(shown));
  views_.push_back(std::move(common_json));
  // The view checkpoint.json gets a reference to the list, because its text also names views that
  // are added later.
  views_.push_back(MakeCheckpointJsonView(shown, views_));
  views_.push_back(MakeNpyView(shown));
  views_.push_back(std::make_unique<SlicesView>(shown, options_.slices));
  if (views_.size() != kSlicesView)
    return Status(Code::kInternal, "internal error: slices/ is not at its fixed position");
  views_.push_back(std::make_unique<ZarrView>(shown));
  views_.push_back(MakeSafetensorsView(shown));
  // hf/ gets the view model.safetensors, which is views_.back(), and shows that file if its own
  // file would be the same.
  TENSORMOUNT_ASSIGN_OR_RETURN(auto hf, HfView::Make(shown, *views_.back(), options_.hf));
  views_.push_back(std::move(hf));
  views_.push_back(MakeExtentsView(shown));
  views_.push_back(std::make_unique<DcpView>(shown));
  if (views_.size() < kMaxViews) return {};
  return Status(Code::kInternal, "internal error: too many views for node ids");
}

Result<const View*> CheckpointView::ViewOf(const Node& node) const {
  if (node.view == kOwnView || node.view > views_.size()) return StaleNodeError("the checkpoint");
  return views_[node.view - 1u].get();
}

bool CheckpointView::IsTop(const Node& node) {
  return node.view == kOwnView && node.item == kRootItem;
}

std::uint64_t CheckpointView::InodeOf(std::string_view view, bool folder,
                                      std::string_view identity) const {
  ByteWriter text;
  text.U64(inode_seed_);
  text.String(view);
  text.U8(folder);
  text.String(identity);
  // 0 and 1 have special meanings for some programs.
  return std::max<std::uint64_t>(Xxh3Low64(text.bytes()), 2);
}

Attributes CheckpointView::AttributesOf(std::string_view view, const ViewNode& node) const {
  return {.kind = node.folder ? FileKind::kDirectory : FileKind::kFile,
          .inode = InodeOf(view, node.folder, node.identity),
          .size = node.size,
          .mode = node.folder ? ownership_.folder_mode : ownership_.file_mode,
          .uid = ownership_.uid,
          .gid = ownership_.gid,
          .mtime = node.mtime};
}

Child CheckpointView::ChildOf(std::uint8_t number, std::string name, const ViewNode& node) const {
  return {.name = std::move(name),
          .node = {.slot = options_.slot, .view = number, .item = node.item},
          .attributes = AttributesOf(views_[number - 1u]->name(), node)};
}

// Eleven views: a linear search is faster than a table. Views that are listed only with --views can
// be opened without that option, too.
Result<Child> CheckpointView::LookupTop(std::string_view name) const {
  for (std::uint8_t n = 1; n <= views_.size(); ++n) {
    const View& view = *views_[n - 1u];
    if (name != view.name()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const ViewNode root, view.Stat(View::kRoot));
    return ChildOf(n, std::string(name), root);
  }
  return Status(Code::kNotFound, "no entry " + std::string(name) + " in the checkpoint");
}

Result<Child> CheckpointView::Lookup(const Node& folder, std::string_view name) const {
  if (IsTop(folder)) return LookupTop(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const View* const view, ViewOf(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(ViewChild child, view->Lookup(folder.item, name));
  return ChildOf(folder.view, std::move(child.name), child.node);
}

Result<Attributes> CheckpointView::Stat(const Node& node) const {
  if (IsTop(node)) {
    return AttributesOf("", {.item = kRootItem,
                             .folder = true,
                             .size = 0,
                             .mtime = opened_->index().info().json_mtime,
                             .identity = std::string()});
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const View* const view, ViewOf(node));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ViewNode found, view->Stat(node.item));
  return AttributesOf(view->name(), found);
}

Status CheckpointView::ListTop(std::uint64_t cookie, const Visit& fn) const {
  for (std::uint8_t n = 1; n <= views_.size(); ++n) {
    const View& view = *views_[n - 1u];
    // Cookies are numbers of views.
    if (n <= cookie || !(options_.list_views || view.listed_by_default())) continue;
    const Result<ViewNode> root = view.Stat(View::kRoot);
    if (root.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(root.status());
    if (!fn(ChildOf(n, std::string(view.name()), root.value()), n)) return {};
  }
  return {};
}

Status CheckpointView::List(const Node& folder, std::uint64_t cookie, const Visit& fn) const {
  if (IsTop(folder)) return ListTop(cookie, fn);
  TENSORMOUNT_ASSIGN_OR_RETURN(const View* const view, ViewOf(folder));
  return view->List(folder.item, cookie, [&](const ViewChild& child, std::uint64_t next) {
    return fn(ChildOf(folder.view, child.name, child.node), next);
  });
}

Result<std::shared_ptr<const VirtualFile>> CheckpointView::OpenFile(const Node& node) const {
  if (IsTop(node)) return Status::FromErrno(EISDIR, "open", options_.name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const View* const view, ViewOf(node));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSegments segments, view->Open(node.item));
  return Serve(std::move(segments), view->PathOf(node.item), node);
}

std::shared_ptr<const VirtualFile> CheckpointView::Serve(FileSegments segments,
                                                         const std::string& path,
                                                         const Node& node) const {
  // VirtualFile's constructor is private, so std::make_shared cannot be used.
  std::shared_ptr<VirtualFile> file(new VirtualFile);
  file->segments_ = std::move(segments);
  file->view_ = shared_from_this();
  file->node_ = node;
  file->label_ = options_.name.empty() ? path : options_.name + "/" + path;
  return file;
}

Result<std::map<std::string, std::string>> CheckpointView::Xattrs(const Node& node) const {
  std::map<std::string, std::string> all;
  const auto add = [&](std::string_view name, std::string value) {
    all.emplace("user.tensormount." + std::string(name), std::move(value));
  };
  if (IsTop(node)) {
    const CheckpointInfo& info = opened_->index().info();
    add("uuid", info.uuid.ToString());
    add("generation", std::to_string(info.generation));
    if (!info.parent.IsZero()) add("parent", info.parent.ToString());
    add("producer", info.producer);
    return all;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const View* const view, ViewOf(node));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto own, view->Attributes(node.item));
  for (const auto& [name, value] : own) add(name, value);
  // The attribute tier says who reads the file's bytes: here the daemon, the process of the mount.
  // For files that the kernel can read itself, the FUSE bridge (fs/mount) replaces this value with
  // the current one.
  if (!own.empty()) add("tier", "daemon");
  return all;
}

std::string CheckpointView::PathOf(const Node& node) const {
  const Result<const View*> view = ViewOf(node);
  return view.ok() ? view.value()->PathOf(node.item) : std::string();
}

Result<std::uint32_t> CheckpointView::BackingFileOf(const Node& node,
                                                    const FileSegments& segments) const {
  // The search for one segment walks over no other tensors, so its result is not cached.
  if (segments.segments().size() == 1) return FindBackingFile(*shown_, segments);
  const Status none(Code::kNotFound, "no single data file contains exactly the bytes of this file");
  // The lock is not held during the search: concurrent opens may both search, with the same result.
  {
    const std::lock_guard lock(mutex_);
    const auto known = backing_files_.find(IdOf(node));
    if (known != backing_files_.end()) {
      if (!known->second) return none;
      return *known->second;
    }
  }
  // Only results for shared segments are cached. If results for slices, which are made on demand,
  // were cached too, the map would grow without limit.
  const Result<std::uint32_t> found = FindBackingFile(*shown_, segments);
  if (!found.ok() && found.status().code() != Code::kNotFound) return found.status();
  if (segments.is_shared()) {
    const std::lock_guard lock(mutex_);
    backing_files_[IdOf(node)] = found.ok() ? std::optional(found.value()) : std::nullopt;
  }
  return found;
}

}  // namespace tensormount::fs
