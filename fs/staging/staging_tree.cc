// SPDX-License-Identifier: Apache-2.0
// Names and attributes below .staging/; staged_changes.cc has the changes.
#include "fs/staging/staging_tree.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fmt/core.h>

#include "base/hash.h"
#include "fs/answers.h"
#include "fs/views/checkpoint_text.h"
#include "fs/views/slice_name.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kLongFolder = "%+";

// The names in a staging directory, in the order in which they are listed and in which `rm -r`
// removes them. schema.json is last, because its removal allows that of the staging directory.
constexpr std::pair<std::string_view, NodeRole> kFixedNames[] = {
    {"slices", NodeRole::kSlices},          {"tensors", NodeRole::kTensors},
    {"objects", NodeRole::kObjects},        {"done", NodeRole::kDone},
    {"report.json", NodeRole::kReportJson}, {"report.txt", NodeRole::kReportText},
    {"common.json", NodeRole::kCommon},     {"schema.json", NodeRole::kSchema},
};

std::string IndexName(const Dims& index) {
  std::string name;
  for (int a = 0; a < index.rank(); ++a) {
    if (a > 0) name += '.';
    name += std::to_string(index[a]);
  }
  return name;
}

// Parses an index such as "0.1" within a grid. nullopt for other spellings ("00.1"), because only
// one name may stand for a part.
std::optional<Dims> ParseIndex(std::string_view name, const Dims& grid) {
  Dims index;
  std::string_view rest = name;
  for (int a = 0; a < grid.rank(); ++a) {
    const std::size_t dot = a + 1 < grid.rank() ? rest.find('.') : rest.size();
    if (dot == std::string_view::npos) return std::nullopt;
    std::uint32_t value = 0;
    if (!ParseRank(rest.substr(0, dot), &value) || value >= grid[a]) return std::nullopt;
    index.push_back(value);
    rest.remove_prefix(std::min(dot + 1, rest.size()));
  }
  if (!rest.empty()) return std::nullopt;
  return index;
}

// The key of the tensor whose slice has the name `stem`[...] in the directory `folder`. `stem` may
// lack the suffix "%=" that tells the file of a tensor from a directory of the same name, because a
// slice is never a directory.
Result<std::string> KeyIn(const SchemaView& view, std::string_view folder, std::string_view stem) {
  if (stem.empty()) {
    const std::size_t slash = folder.rfind('/');
    const std::size_t begin = slash == std::string_view::npos ? 0 : slash + 1;
    if (!folder.substr(begin).starts_with(kLongFolder))
      return NoSuchNameError("tensor of this slice");
    stem = folder.substr(begin + kLongFolder.size());
    folder = folder.substr(0, slash == std::string_view::npos ? 0 : slash);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeFolder at, view.FolderAt(folder));
  Result<TreeChild> child = view.tree.Lookup(at, stem);
  if (child.ok() && child.value().is_folder) {
    child = view.tree.Lookup(at, std::string(stem) + "%=");
  }
  TENSORMOUNT_RETURN_IF_ERROR(child.status());
  if (child.value().is_folder) return NoSuchNameError(stem);
  return view.keys.KeyAt(child.value().ordinal);
}

// Number of listings of slices/ and objects/ that are kept, so that programs can continue them.
constexpr std::size_t kKeptListings = 8;

// The position in a listing after `name`: a hash of the name alone, so that additions and removals
// during a listing do not move other names. (With positions that move, a program that unlinks the
// names it lists would miss some.) 62 bits, to leave room in off_t for "." and "..". Names with
// equal hashes are as unlikely as on ext4, which also lists by hashes.
std::uint64_t CookieOf(std::string_view name) {
  return std::max<std::uint64_t>(Xxh3Low64(name) >> 2, 1);
}

}  // namespace

Result<std::unique_ptr<StagingTree>> StagingTree::Make(FileSystem& fs, const std::string& store,
                                                       MountStats& stats) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Store opened, Store::Open(fs, store));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo folder, fs.Stat(store));
  std::string incarnation = Uuid::Random().ToString().substr(0, 16);
  return std::unique_ptr<StagingTree>(
      new StagingTree(fs, std::move(opened), folder, std::move(incarnation), stats));
}

StagingTree::StagingTree(FileSystem& fs, Store store, const FileInfo& folder,
                         std::string incarnation, MountStats& stats)
    : fs_(fs),
      store_(std::move(store)),
      incarnation_(std::move(incarnation)),
      stats_(stats),
      folder_(folder) {}

Status StagingTree::LogFailure(std::string_view operation, std::string_view object, Status status) {
  if (!status.ok()) stats_.Report(operation, object, status);
  return status;
}

Result<StagingTree::NodePtr> StagingTree::FindLive(std::uint64_t item) {
  TENSORMOUNT_ASSIGN_OR_RETURN(NodePtr node, nodes_.Find(item));
  if (node->staged) {
    const Status status = node->staged->CheckInPlace();
    if (!status.ok()) {
      Drop(node->staged);
      return status;
    }
  }
  return node;
}

void StagingTree::Drop(const StagedPtr& staged) {
  staged->Retire();
  const std::lock_guard lock(mutex_);
  const auto it = staged_.find(staged->name());
  if (it != staged_.end() && it->second == staged) staged_.erase(it);
}

void StagingTree::DropGone() {
  std::vector<StagedPtr> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, staged] : staged_) all.push_back(staged);
  }
  for (const StagedPtr& staged : all) {
    if (!staged->CheckInPlace().ok()) Drop(staged);
  }
}

// The UUID tells whether the staging that has the name now is the one that this mount knows.
Result<StagingTree::StagedPtr> StagingTree::Join(std::string_view name) {
  StagedPtr known;
  {
    const std::lock_guard lock(mutex_);
    const auto it = staged_.find(name);
    if (it != staged_.end()) known = it->second;
  }
  if (known) {
    if (known->CheckInPlace().ok()) return known;
    Drop(known);
  }
  if (!CheckCheckpointName(name).ok()) return NoSuchNameError(name);
  Result<Staging> found = OpenStaging(store_, fs_, std::string(name));
  // kUnsupported: a save by the library made this staging, so the mount does not show it.
  if (found.status().code() == Code::kUnsupported) return NoSuchNameError(name);
  TENSORMOUNT_RETURN_IF_ERROR(found.status());
  DropGone();
  const std::lock_guard lock(mutex_);
  StagedPtr& slot = staged_[std::string(name)];
  if (!slot || slot->staging().uuid != found.value().uuid) {
    if (slot) slot->Retire();
    slot = std::make_shared<StagedCheckpoint>(fs_, std::move(found).value(), incarnation_);
  }
  return slot;
}

// schema.json and common.json exist while a program edits them or they have content; the
// directories always exist.
Result<StagedNode> StagingTree::ChildOfStaging(const StagedNode& parent, std::string_view name) {
  StagedNode child;
  child.staged = parent.staged;
  StagedCheckpoint& of = *parent.staged;
  for (const auto& [fixed, role] : kFixedNames) {
    if (name != fixed) continue;
    child.role = role;
    switch (role) {
      case NodeRole::kSchema: {
        if (of.EditSize(true)) return child;
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema(true));
        if (view->schema.empty()) return NoSuchNameError(name);
        return child;
      }
      case NodeRole::kCommon: {
        if (of.EditSize(false)) return child;
        TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, ReadCommonJson(fs_, of.staging()));
        if (text.empty()) return NoSuchNameError(name);
        return child;
      }
      case NodeRole::kReportJson:
      case NodeRole::kReportText:
        TENSORMOUNT_RETURN_IF_ERROR(fs_.LinkStat(JoinPath(of.staging().directory, name)).status());
        return child;
      default:
        return child;
    }
  }
  return NoSuchNameError(name);
}

Result<StagedNode> StagingTree::TensorChild(const StagedNode& parent, std::string_view name,
                                            const SchemaView& view) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeFolder folder, view.FolderAt(parent.path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild found, view.tree.Lookup(folder, name));
  StagedNode child;
  child.staged = parent.staged;
  child.path = JoinedPath(parent.path, name);
  child.role = found.is_folder ? NodeRole::kTensors : NodeRole::kTensor;
  if (found.is_folder) return child;
  TENSORMOUNT_ASSIGN_OR_RETURN(child.key, view.keys.KeyAt(found.ordinal));
  child.box = Box::Whole(view.Find(child.key)->shape());
  return child;
}

Result<StagedNode> StagingTree::SliceChild(const StagedNode& parent, std::string_view name,
                                           const SchemaView& view) {
  StagedNode child;
  child.staged = parent.staged;
  child.path = JoinedPath(parent.path, name);
  const std::optional<SliceName> slice = ParseSliceName(name);
  if (!slice) {
    child.role = NodeRole::kSlices;
    const Result<TreeFolder> folder = view.FolderAt(child.path);
    if (folder.ok()) return child;
    // A directory "%+NAME" has the slices of one tensor whose slice names would otherwise be too
    // long.
    if (!name.starts_with(kLongFolder)) return NoSuchNameError(name);
    TENSORMOUNT_RETURN_IF_ERROR(KeyIn(view, parent.path, name.substr(kLongFolder.size())).status());
    return child;
  }
  if (slice->npy) {
    return Status(Code::kNotFound,
                  "a slice is written without .npy in its name: " + std::string(name));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(child.key, KeyIn(view, parent.path, slice->stem));
  const Result<Slice> parsed = ParseSlice(slice->slice, view.Find(child.key)->shape());
  if (!parsed.ok()) {
    return Status(Code::kNotFound, "tensor " + child.key + ": " + parsed.status().message());
  }
  child.box = parsed.value().box;
  child.role = NodeRole::kSlice;
  const TensorMeta& meta = *view.Find(child.key);
  const auto bytes = RegionBytes(meta.dtype(), meta.shape(), Region(child.box));
  if (!bytes.ok()) {
    return Status(Code::kNotFound, "tensor " + child.key + ": " + bytes.status().message());
  }
  return child;
}

Result<StagingWriter::ObjectName> StagingTree::ObjectAt(const SchemaView& view,
                                                        std::string_view path) {
  const auto& objects = view.schema.objects();
  const std::size_t slash = path.rfind('/');
  if (slash != std::string_view::npos) {
    if (const auto key = KeyOfPath(path.substr(0, slash)); key.ok()) {
      const auto spec = objects.find(key.value());
      if (spec != objects.end() && spec->second.grid.rank() > 0) {
        const auto index = ParseIndex(path.substr(slash + 1), spec->second.grid);
        if (index) return StagingWriter::ObjectName{.key = key.value(), .index = *index};
        return Status(Code::kNotFound, "object " + key.value() + " has no part " +
                                           std::string(path.substr(slash + 1)) +
                                           " in the grid of schema.json");
      }
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string key, KeyOfPath(path));
  if (const auto spec = objects.find(key); spec != objects.end() && spec->second.grid.rank() > 0) {
    return Status::FromErrno(EISDIR, "open as a file the directory of parts (see schema.json)",
                             path);
  }
  return StagingWriter::ObjectName{.key = std::move(key), .index = {}};
}

Result<StagingTree::ObjectPaths> StagingTree::PathsOfObjects(StagedCheckpoint& of) {
  ObjectPaths paths;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema());
  for (const auto& [key, spec] : view->schema.objects()) {
    const std::string path = PathOfKey(key, false);
    if (spec.grid.rank() > 0) paths.folders.push_back(path);
  }
  for (const StagingWriter::ObjectName& object : of.writer().Objects()) {
    std::string path = PathOfKey(object.key, false);
    if (object.index.rank() > 0) path += '/' + IndexName(object.index);
    paths.files.push_back(std::move(path));
  }
  for (std::string& folder : of.ObjectFolders()) paths.folders.push_back(std::move(folder));
  return paths;
}

Result<StagedNode> StagingTree::ObjectChild(const StagedNode& parent, std::string_view name) {
  StagedNode child;
  child.staged = parent.staged;
  child.path = JoinedPath(parent.path, name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, parent.staged->Schema());
  const Result<StagingWriter::ObjectName> object = ObjectAt(*view, child.path);
  if (object.ok() &&
      parent.staged->writer().OpenObject(object.value().key, object.value().index, false).ok()) {
    child.role = NodeRole::kObject;
    child.key = object.value().key;
    child.index = object.value().index;
    return child;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectPaths paths, PathsOfObjects(*parent.staged));
  child.role = NodeRole::kObjects;
  const std::string below = child.path + '/';
  const auto inside = [&](const std::string& path) {
    return path == child.path || path.starts_with(below);
  };
  if (std::any_of(paths.folders.begin(), paths.folders.end(), inside)) return child;
  if (std::any_of(paths.files.begin(), paths.files.end(),
                  [&](const std::string& path) { return path.starts_with(below); })) {
    return child;
  }
  return NoSuchNameError(name);
}

Result<StagedNode> StagingTree::Child(const StagedNode& parent, std::string_view name) {
  switch (parent.role) {
    case NodeRole::kRoot: {
      StagedNode child;
      TENSORMOUNT_ASSIGN_OR_RETURN(child.staged, Join(name));
      child.role = NodeRole::kStaging;
      return child;
    }
    case NodeRole::kStaging:
      return ChildOfStaging(parent, name);
    case NodeRole::kDone: {
      StagedNode child;
      child.staged = parent.staged;
      child.role = NodeRole::kMark;
      child.path = std::string(name);
      if (!ParseRank(name, &child.rank)) return NoSuchNameError(name);
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto marks, ReadDoneMarks(fs_, parent.staged->staging()));
      for (const DoneMark& mark : marks) {
        if (mark.rank == child.rank) return child;
      }
      return NoSuchNameError(name);
    }
    case NodeRole::kTensors:
    case NodeRole::kSlices: {
      const auto in = [&](const SchemaView& view) {
        return parent.role == NodeRole::kTensors ? TensorChild(parent, name, view)
                                                 : SliceChild(parent, name, view);
      };
      TENSORMOUNT_ASSIGN_OR_RETURN(auto view, parent.staged->Schema());
      Result<StagedNode> child = in(*view);
      if (child.status().code() != Code::kNotFound) return child;
      // Another mount may have just added the name.
      TENSORMOUNT_ASSIGN_OR_RETURN(auto fresh, parent.staged->Schema(true));
      return fresh == view ? child : in(*fresh);
    }
    case NodeRole::kObjects:
      return ObjectChild(parent, name);
    default:
      return Status::FromErrno(ENOTDIR, "look up", name);
  }
}

// Modes are those of the store's directory, so users who may write to the store may write below
// .staging/; the kernel checks the modes (default_permissions).
Result<Attributes> StagingTree::Describe(const StagedNode& node) {
  Attributes a;
  a.kind = node.folder() ? FileKind::kDirectory : FileKind::kFile;
  a.inode = node.Inode();
  a.mode = node.folder() ? folder_.mode & 0777 : folder_.mode & 0666;
  a.uid = folder_.uid;
  a.gid = folder_.gid;
  a.mtime = node.staged ? node.staged->mtime() : folder_.mtime_seconds;
  switch (node.role) {
    case NodeRole::kSchema: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, node.staged->Schema());
      a.size = node.staged->EditSize(true).value_or(view->schema.empty() ? 0 : view->text.size());
      break;
    }
    case NodeRole::kCommon: {
      const auto edited = node.staged->EditSize(false);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                                   ReadCommonJson(fs_, node.staged->staging()));
      a.size = edited.value_or(text.size());
      break;
    }
    case NodeRole::kReportJson:
    case NodeRole::kReportText: {
      const std::string name = node.role == NodeRole::kReportJson ? "report.json" : "report.txt";
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info,
                                   fs_.LinkStat(JoinPath(node.staged->staging().directory, name)));
      a.size = info.size;
      a.mtime = info.mtime_seconds;
      a.mode &= 0444;
      break;
    }
    case NodeRole::kTensor:
    case NodeRole::kSlice: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, node.staged->Schema());
      const TensorMeta* meta = view->Find(node.key);
      if (meta == nullptr)
        return Status(Code::kStale, node.Label() + ": the tensor is no longer in schema.json");
      TENSORMOUNT_ASSIGN_OR_RETURN(a.size,
                                   RegionBytes(meta->dtype(), meta->shape(), Region(node.box)));
      const auto target = node.staged->FindTarget(*meta, node.box);
      a.allocated = target ? target->written_bytes() : 0;
      // Unwritten files get time 0. Otherwise tools that compare size and time (rsync) could take
      // them for finished copies.
      if (a.allocated == 0 && a.size > 0) a.mtime = 0;
      break;
    }
    case NodeRole::kObject: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto blob,
                                   node.staged->writer().OpenObject(node.key, node.index, false));
      a.size = blob->size();
      break;
    }
    default:
      break;
  }
  return a;
}

// Number and attributes of a node whose reference was just counted. Releases that reference if the
// attributes cannot be determined.
Result<StagingTree::Node> StagingTree::NodeWithAttributes(NodePtr node) {
  Result<Attributes> attributes = Describe(*node);
  if (!attributes.ok()) {
    nodes_.Forget(node->item, 1);
    return attributes.status();
  }
  return Node{.item = node->item, .attributes = attributes.value()};
}

Result<StagingTree::Node> StagingTree::Lookup(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, FindLive(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(StagedNode child, Child(*parent, name));
  return NodeWithAttributes(nodes_.Reference(std::move(child)));
}

void StagingTree::Forget(std::uint64_t item, std::uint64_t references) {
  nodes_.Forget(item, references);
}

Result<StagingTree::Node> StagingTree::Stat(std::uint64_t item) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindLive(item));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Attributes attributes, Describe(*node));
  return Node{.item = item, .attributes = attributes};
}

std::optional<StagingTree::Node> StagingTree::LookupKnown(std::string_view name) {
  StagedNode child;
  child.role = NodeRole::kStaging;
  {
    const std::lock_guard lock(mutex_);
    const auto it = staged_.find(name);
    if (it == staged_.end() || it->second->gone()) return std::nullopt;
    child.staged = it->second;
  }
  const Result<Node> node = NodeWithAttributes(nodes_.Reference(std::move(child)));
  return node.ok() ? std::optional(node.value()) : std::nullopt;
}

std::optional<StagingTree::Node> StagingTree::StatKnown(std::uint64_t item) {
  const Result<NodePtr> node = nodes_.Find(item);
  if (!node.ok()) return std::nullopt;
  const NodeRole role = node.value()->role;
  if (role != NodeRole::kRoot && role != NodeRole::kStaging) return std::nullopt;
  if (node.value()->staged && node.value()->staged->gone()) return std::nullopt;
  const Result<Attributes> attributes = Describe(*node.value());
  if (!attributes.ok()) return std::nullopt;
  return Node{.item = item, .attributes = attributes.value()};
}

Status StagingTree::ListStaging(const StagedNode& folder, std::uint64_t cookie, const Visit& fn) {
  std::uint64_t next = 0;
  for (const auto& [name, role] : kFixedNames) {
    if (++next <= cookie) continue;
    const Result<StagedNode> child = ChildOfStaging(folder, name);
    if (child.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(child.status());
    Attributes a;
    a.kind = child.value().folder() ? FileKind::kDirectory : FileKind::kFile;
    a.inode = child.value().Inode();
    if (!fn(name, a, next)) return {};
  }
  return {};
}

Status StagingTree::ListTree(const StagedNode& folder, std::uint64_t cookie, const Visit& fn) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, folder.staged->Schema());
  TENSORMOUNT_ASSIGN_OR_RETURN(const TreeFolder at, view->FolderAt(folder.path));
  StagedNode child;
  child.staged = folder.staged;
  return view->tree.List(at, cookie, [&](TreeChild& found, std::uint64_t next) {
    child.role = found.is_folder ? NodeRole::kTensors : NodeRole::kTensor;
    child.path = JoinedPath(folder.path, found.name);
    Attributes a;
    a.kind = found.is_folder ? FileKind::kDirectory : FileKind::kFile;
    a.inode = child.Inode();
    return fn(found.name, a, next);
  });
}

// The names in `folder`, without duplicates (several paths may form the same directory), sorted by
// cookie.
StagingTree::ListedNames StagingTree::NamesIn(const StagedNode& folder, const ObjectPaths& paths) {
  std::map<std::string, bool> names;  // Value: whether it is a directory.
  const std::string below = folder.path.empty() ? std::string() : folder.path + '/';
  const auto add = [&](const std::string& path, bool is_folder) {
    if (!path.starts_with(below) || path.size() == below.size()) return;
    const std::size_t slash = path.find('/', below.size());
    if (slash == std::string::npos) {
      names.try_emplace(path.substr(below.size()), is_folder);
    } else {
      names[path.substr(below.size(), slash - below.size())] = true;
    }
  };
  for (const std::string& path : paths.folders) add(path, true);
  for (const std::string& path : paths.files) add(path, false);
  ListedNames listed;
  listed.reserve(names.size());
  for (const auto& [name, is_folder] : names) listed.push_back({CookieOf(name), name, is_folder});
  std::ranges::stable_sort(listed, {}, &ListedName::cookie);
  return listed;
}

// Lists slices/ or objects/. Programs read a listing in pages, so the names are collected once,
// when the listing begins, and kept. If they were evicted meanwhile they are collected again; the
// cookies stay valid.
Status StagingTree::ListPaths(const StagedNode& folder, std::uint64_t cookie, const Visit& fn) {
  const bool objects = folder.role == NodeRole::kObjects;
  std::shared_ptr<const ListedNames> names;
  if (cookie > 0) {
    const std::lock_guard lock(listings_mutex_);
    if (const auto it = listings_.find(folder.item); it != listings_.end()) names = it->second;
  }
  if (!names) {
    ObjectPaths paths{.files = {}, .folders = {}};
    if (objects) {
      TENSORMOUNT_ASSIGN_OR_RETURN(paths, PathsOfObjects(*folder.staged));
    } else {
      paths.files = folder.staged->SlicePaths();
    }
    names = std::make_shared<const ListedNames>(NamesIn(folder, paths));
    const std::lock_guard lock(listings_mutex_);
    if (listings_.size() >= kKeptListings && !listings_.contains(folder.item)) listings_.clear();
    if (folder.item != 0) listings_[folder.item] = names;
  }
  StagedNode child;
  child.staged = folder.staged;
  for (auto it = std::ranges::upper_bound(*names, cookie, {}, &ListedName::cookie);
       it != names->end(); ++it) {
    child.role = it->folder ? folder.role : objects ? NodeRole::kObject : NodeRole::kSlice;
    child.path = JoinedPath(folder.path, it->name);
    Attributes a;
    a.kind = it->folder ? FileKind::kDirectory : FileKind::kFile;
    a.inode = child.Inode();
    if (!fn(it->name, a, it->cookie)) return {};
  }
  return {};
}

Status StagingTree::List(std::uint64_t item, std::uint64_t cookie, const Visit& fn) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr folder, FindLive(item));
  Attributes a;
  std::uint64_t next = 0;
  switch (folder->role) {
    case NodeRole::kRoot: {
      TENSORMOUNT_ASSIGN_OR_RETURN(auto names, ListStagings(store_, fs_));
      std::ranges::stable_sort(names, {}, CookieOf);
      for (const std::string& name : names) {
        next = CookieOf(name);
        if (next <= cookie) continue;
        const Result<StagedPtr> staged = Join(name);
        if (!staged.ok()) continue;  // The staging was published or removed meanwhile.
        StagedNode child;
        child.staged = staged.value();
        child.role = NodeRole::kStaging;
        a.kind = FileKind::kDirectory;
        a.inode = child.Inode();
        if (!fn(name, a, next)) return {};
      }
      return {};
    }
    case NodeRole::kStaging:
      return ListStaging(*folder, cookie, fn);
    case NodeRole::kDone: {
      TENSORMOUNT_ASSIGN_OR_RETURN(auto marks, ReadDoneMarks(fs_, folder->staged->staging()));
      std::set<std::uint32_t> ranks;
      for (const DoneMark& mark : marks) ranks.insert(mark.rank);
      for (const std::uint32_t rank : ranks) {
        next = std::uint64_t{rank} + 1;
        if (next <= cookie) continue;
        StagedNode child;
        child.staged = folder->staged;
        child.role = NodeRole::kMark;
        child.path = std::to_string(rank);
        a.inode = child.Inode();
        if (!fn(child.path, a, next)) return {};
      }
      return {};
    }
    case NodeRole::kTensors:
      return ListTree(*folder, cookie, fn);
    case NodeRole::kSlices:
    case NodeRole::kObjects:
      return ListPaths(*folder, cookie, fn);
    default:
      return Status::FromErrno(ENOTDIR, "list", folder->Label());
  }
}

Status StagingTree::SyncAll() {
  std::vector<StagedPtr> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, staged] : staged_) all.push_back(staged);
  }
  Status first;
  for (const StagedPtr& staged : all) {
    const Status status = staged->writer().SyncAll().WithContext(".staging/" + staged->name());
    if (!status.ok() && status.code() != Code::kStale && first.ok()) first = status;
  }
  return first;
}

StagingTree::Counts StagingTree::counts() {
  const std::lock_guard lock(mutex_);
  Counts counts{.stagings = staged_.size()};
  for (const auto& [name, staged] : staged_) {
    counts.open_writers += staged->open_writers();
    counts.bytes += staged->writer().bytes_written();
    counts.files += staged->writer().files();
    counts.syncs += staged->writer().syncs();
  }
  return counts;
}

std::string StagingTree::StatusFields() {
  const Counts now = counts();
  const std::lock_guard lock(mutex_);
  return fmt::format(
      R"("incarnation": "{}", "stagings": {}, "open_writers": {}, "staged_bytes": {}, )"
      R"("staged_files": {}, "staged_syncs": {}, "staged_nodes": {})",
      incarnation_, now.stagings, now.open_writers, now.bytes, now.files, now.syncs, nodes_.size());
}

}  // namespace tensormount::fs
