// SPDX-License-Identifier: Apache-2.0
// The folder of a checkpoint: its views in the order in which they are listed. A line of MakeViews
// makes a view.
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
#include "fs/views/hf_view.h"
#include "fs/views/keyed_view.h"
#include "fs/views/slices_view.h"
#include "fs/views/zarr_view.h"
#include "index/foreign/open_source.h"

namespace tensormount::fs {

Result<std::shared_ptr<const CheckpointView>> CheckpointView::Open(FileSystem& fs,
                                                                   const std::string& directory,
                                                                   const Uuid& expected,
                                                                   const Ownership& ownership,
                                                                   const Options& options) {
  // `roots`: where data that lie outside of the folder may be. `proven`: what an earlier view of
  // the same checkpoint, or of its files in another one, found good.
  OpenedCheckpoint::Options how;
  how.roots = options.roots;
  how.proven = options.proven;
  // A link in the place of a checkpoint is not followed.
  TENSORMOUNT_ASSIGN_OR_RETURN(how.pinned, fs.PinDirectory(directory));
  auto opened = OpenedCheckpoint::Open(fs, directory, how);
  TENSORMOUNT_RETURN_IF_ERROR(opened.status());
  for (const std::string& warning : opened.value()->warnings()) {
    Log(LogLevel::kWarning, directory + ": " + warning);
  }
  // Checked after the open and not before it: only what was opened counts.
  if (!expected.IsZero() && opened.value()->index().info().uuid != expected) {
    return Status(Code::kStale, directory + ": another checkpoint has taken its place");
  }
  std::shared_ptr<CheckpointView> view(new CheckpointView(fs, std::move(opened).value()));
  TENSORMOUNT_RETURN_IF_ERROR(view->Prepare(ownership, options));
  return std::shared_ptr<const CheckpointView>(std::move(view));
}

Result<std::shared_ptr<const CheckpointView>> CheckpointView::OpenForeign(
    FileSystem& fs, const std::string& path, const Ownership& ownership, const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(
      auto opened, OpenFound(fs, {.kind = SourceKind::kForeign, .path = path}, options.roots));
  for (const std::string& warning : opened->warnings()) {
    Log(LogLevel::kWarning, path + ": " + warning);
  }
  return Of(fs, std::move(opened), ownership, options);
}

Result<std::shared_ptr<const CheckpointView>> CheckpointView::Of(
    FileSystem& fs, std::shared_ptr<OpenedCheckpoint> opened, const Ownership& ownership,
    const Options& options) {
  std::shared_ptr<CheckpointView> view(new CheckpointView(fs, std::move(opened)));
  TENSORMOUNT_RETURN_IF_ERROR(view->Prepare(ownership, options));
  return std::shared_ptr<const CheckpointView>(std::move(view));
}

Status CheckpointView::Prepare(const Ownership& ownership, const Options& options) {
  ownership_ = ownership;
  options_ = options;
  if (!options_.slices) options_.slices = std::make_shared<SliceItems>();
  if (options.others) TENSORMOUNT_RETURN_IF_ERROR(RestrictToFiles());
  const CheckpointIndex& index = opened_->index();
  // The name is part of it, since a checkpoint may be shown under two names; the uuid, so that
  // another checkpoint of that name has other inodes and no cache takes one for the other.
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
  TENSORMOUNT_ASSIGN_OR_RETURN(tensors_, MakeShownTensors(index, names));
  tensor_tree_ = std::make_unique<KeyTree>(*tensors_);
  TENSORMOUNT_ASSIGN_OR_RETURN(layers_, LayerFiles::Make(index, names));
  TENSORMOUNT_ASSIGN_OR_RETURN(objects_, ShownObjects::Make(index, names));
  // Numbers of keys have 27 bits in node ids. 134 million tensors are far from what there is.
  if (tensors_->count() >= KeyedView::kMaxKeys || objects_->parts().size() >= KeyedView::kMaxKeys) {
    return Status(Code::kUnsupported, options.name + ": too many keys to be mounted");
  }
  shown_.emplace(ShownCheckpoint{.opened = *opened_,
                                 .tensors = *tensors_,
                                 .tensor_tree = *tensor_tree_,
                                 .layers = *layers_,
                                 .objects = *objects_,
                                 .map = options_.map.get()});
  data_.emplace(*opened_, *objects_, options.verify);
  return MakeViews();
}

// One look at each file, and at each folder above it, where a link leads too. Who may not read the
// index may not know names either. What is not there can be read by nobody, and says so when it is
// read.
Status CheckpointView::RestrictToFiles() {
  const auto need = [this](Reach& reach, const std::string& path) -> Status {
    const Result<std::string> real = fs_.Resolve(path);
    if (real.status().code() == Code::kNotFound) return {};
    TENSORMOUNT_RETURN_IF_ERROR(real.status());
    TENSORMOUNT_RETURN_IF_ERROR(reach.NeedFoldersAbove(fs_, real.value()));
    return reach.Need(fs_, real.value(), Reach::How::kRead);
  };
  // Its own folder is the one that the kernel asked for first.
  const auto begin = [this] {
    Reach reach(ownership_.uid, ownership_.gid);
    reach.AssumeSearched(opened_->directory());
    return reach;
  };
  Reach names = begin();
  TENSORMOUNT_RETURN_IF_ERROR(need(names, JoinPath(opened_->directory(), kIndexName)));
  ownership_.folder_mode &= names.mask();
  Reach bytes = begin();
  const std::size_t files = opened_->index().files().size();
  for (std::size_t n = 0; n < files; ++n) {
    TENSORMOUNT_RETURN_IF_ERROR(need(bytes, opened_->FilePath(static_cast<std::uint32_t>(n))));
  }
  ownership_.file_mode &= names.mask() & bytes.mask();
  return {};
}

// What a checkpoint shows, in the order in which it is listed. A line makes a view.
// New ones go to the end: the number is part of node ids, which a kernel may hold over an update of
// the program.
Status CheckpointView::MakeViews() {
  const ShownCheckpoint& shown = *shown_;
  TENSORMOUNT_ASSIGN_OR_RETURN(auto common_json, MakeCommonJsonView(shown));
  views_.push_back(MakeTensorsView(shown));
  views_.push_back(MakeObjectsView(shown));
  views_.push_back(std::move(common_json));
  // Gets the list itself, because it names also the views that come after it.
  views_.push_back(MakeCheckpointJsonView(shown, views_));
  views_.push_back(MakeNpyView(shown));
  views_.push_back(std::make_unique<SlicesView>(shown, options_.slices));
  if (views_.size() != kSlicesView) return Status(Code::kInternal, "slices/ has another number");
  views_.push_back(std::make_unique<ZarrView>(shown));
  views_.push_back(MakeSafetensorsView(shown));
  // After model.safetensors, which it shows again where hf/ would have just that.
  TENSORMOUNT_ASSIGN_OR_RETURN(auto hf, HfView::Make(shown, *views_.back(), options_.hf));
  views_.push_back(std::move(hf));
  views_.push_back(MakeExtentsView(shown));
  if (views_.size() < kMaxViews) return {};
  return Status(Code::kInternal, "more views than node ids have room for");
}

Result<const View*> CheckpointView::ViewOf(const Node& node) const {
  if (node.view == kOwnView || node.view > views_.size()) return StaleNode("the checkpoint");
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
  // 0 and 1 mean other things to some programs.
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

// Ten views: a linear search costs less than a table. Names that --views would list open without
// it, too.
Result<Child> CheckpointView::LookupTop(std::string_view name) const {
  for (std::uint8_t n = 1; n <= views_.size(); ++n) {
    const View& view = *views_[n - 1u];
    if (name != view.name()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const ViewNode root, view.Stat(View::kRoot));
    return ChildOf(n, std::string(name), root);
  }
  return Status(Code::kNotFound, "no " + std::string(name) + " here");
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
  // The constructor is private: only a view, which has to outlive it, makes such files. The file
  // keeps this alive.
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
  // Who reads this file. The bridge answers with what is true at that time where the kernel does
  // (fs/mount); without one it is the daemon.
  if (!own.empty()) add("tier", "daemon");
  return all;
}

std::string CheckpointView::PathOf(const Node& node) const {
  const Result<const View*> view = ViewOf(node);
  return view.ok() ? view.value()->PathOf(node.item) : std::string();
}

Result<std::uint32_t> CheckpointView::BackingFileOf(const Node& node,
                                                    const FileSegments& segments) const {
  // One segment is looked up in the index alone: not worth an entry in the map.
  if (segments.segments().size() == 1) return FindBackingFile(fs_, *shown_, segments);
  const Status none(Code::kNotFound, "no one file holds this and nothing else");
  // Not held while the index is walked: two opens at once may both do it, with the same result.
  {
    const std::lock_guard lock(mutex_);
    const auto known = backing_files_.find(IdOf(node));
    if (known != backing_files_.end()) {
      if (!known->second) return none;
      return *known->second;
    }
  }
  // Only files of fixed items share their segments; others (slices) come and go.
  // Otherwise the map would grow with every slice that somebody looks at.
  const Result<std::uint32_t> found = FindBackingFile(fs_, *shown_, segments);
  if (!found.ok() && found.status().code() != Code::kNotFound) return found.status();
  if (segments.is_shared()) {
    const std::lock_guard lock(mutex_);
    backing_files_[IdOf(node)] = found.ok() ? std::optional(found.value()) : std::nullopt;
  }
  return found;
}

}  // namespace tensormount::fs
