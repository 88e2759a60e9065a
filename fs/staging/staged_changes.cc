// SPDX-License-Identifier: Apache-2.0
// StagingTree of staging_tree.h: what changes something below .staging/. Names, and what they are,
// stand in staging_tree.cc.
#include <algorithm>
#include <cerrno>
#include <fcntl.h>

#include "base/log.h"
#include "fs/save/publish.h"
#include "fs/staging/staging_tree.h"

namespace tensormount::fs {
namespace {

constexpr std::uint64_t kMaxReportBytes = std::uint64_t{64} << 20;

// EPERM: never allowed, and not EROFS, because the mount is writable.
Status Refused(std::string_view why) {
  return Status::FromParts(Code::kPermissionDenied, EPERM, std::string(why));
}

bool Writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY; }

// Counts as an open writer while it lives.
// A change without a file handle (unlink, rename, making an object) must not run beside a publish
// either.
class Writing {
 public:
  explicit Writing(StagedCheckpoint& of) : of_(of), status_(of.BeginWriting()) {}
  ~Writing() {
    if (status_.ok()) of_.EndWriting();
  }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  const Status& status() const { return status_; }

 private:
  StagedCheckpoint& of_;
  const Status status_;
};

Status RemoveFilesIn(FileSystem& fs, const std::string& folder) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, fs.List(folder));
  for (const DirectoryEntry& entry : entries) {
    const Status removed = fs.RemoveFile(JoinPath(folder, entry.name));
    if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
  }
  return fs.SyncDirectory(folder);
}

// What rename(2) answers. `mv` takes EXDEV for a reason to copy, and EINVAL for a folder that is
// moved into itself.
Status AsRename(const Status& status) {
  switch (status.ToErrno()) {
    case EINVAL:
      return Status::FromParts(status.code(), ENODATA, status.message());
    case EXDEV:
      return Status::FromParts(status.code(), EIO, status.message());
    default:
      return status;
  }
}

// Why no object can be called this, which ENOENT would not say: `cp` would look for the source.
Status NoNameForAnObject(std::string_view path, const Status& why) {
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name.size() > kMaxPartBytes) {
    return Status::FromParts(Code::kInvalidArgument, ENAMETOOLONG,
                             "names here have at most " + std::to_string(kMaxPartBytes) +
                                 " bytes; longer keys go through schema.json");
  }
  return Status::FromParts(Code::kInvalidArgument, EINVAL, why.message());
}

}  // namespace

HandleContext StagingTree::ContextOf(const NodePtr& node, bool writable) {
  return {.of = node->of,
          .label = node->Label(),
          .writable = writable,
          // As it is called now.
          .stat = [this, node]() -> Result<Attributes> {
            const Result<NodePtr> now = nodes_.Find(node->item);
            return Describe(now.ok() ? *now.value() : *node);
          },
          .stats = &stats_};
}

Result<StagingTree::Node> StagingTree::MakeDirectory(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, Live(folder));
  const Status exists = Status::FromErrno(EEXIST, "make", JoinedPath(parent->Label(), name));
  switch (parent->role) {
    case NodeRole::kRoot: {
      const std::string label = ".staging/" + std::string(name);
      if (const Status bad = CheckCheckpointName(name); !bad.ok()) {
        return Told("mkdir", label, Refused(bad.message()));
      }
      const Result<Staging> made = CreateStaging(store_, fs_, std::string(name));
      if (!made.ok() && made.status().code() != Code::kAlreadyExists) {
        return Told("mkdir", label, made.status());
      }
      if (!made.ok()) return made.status();
      return Lookup(folder, name);
    }
    case NodeRole::kObjects: {
      const Result<StagedNode> there = ObjectChild(*parent, name);
      if (there.ok()) return exists;
      if (there.status().code() != Code::kNotFound) return there.status();
      parent->of->AddObjectFolder(JoinedPath(parent->path, name));
      return Lookup(folder, name);
    }
    default: {
      if (Child(*parent, name).ok()) return exists;
      return Told("mkdir", JoinedPath(parent->Label(), name),
                  Refused("folders here are those of the keys in schema.json"));
    }
  }
}

// Opening for writing counts the handle as an open writer before it is returned; a truncation that
// was asked for is done under that right.
Result<std::shared_ptr<WriteHandle>> StagingTree::OpenNode(const NodePtr& node, int flags) {
  const bool writable = Writes(flags);
  const bool truncates = (flags & O_TRUNC) != 0;
  StagedCheckpoint& of = *node->of;
  HandleContext context = ContextOf(node, writable);
  std::shared_ptr<WriteHandle> handle;
  switch (node->role) {
    case NodeRole::kTensor:
    case NodeRole::kSlice: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema());
      const TensorMeta* meta = view->Find(node->key);
      if (meta == nullptr) return Status(Code::kStale, node->Label() + ": not in schema.json");
      TENSORMOUNT_ASSIGN_OR_RETURN(auto target, of.OpenTarget(*meta, node->box));
      TENSORMOUNT_ASSIGN_OR_RETURN(handle, OpenTargetHandle(std::move(context), target));
      if (writable && node->role == NodeRole::kSlice) of.AddSlicePath(node->path);
      break;
    }
    case NodeRole::kObject: {
      TENSORMOUNT_ASSIGN_OR_RETURN(auto blob,
                                   of.writer().OpenObject(node->key, node->index, false));
      TENSORMOUNT_ASSIGN_OR_RETURN(handle, OpenObjectHandle(std::move(context), std::move(blob)));
      break;
    }
    case NodeRole::kSchema:
    case NodeRole::kCommon: {
      const bool schema = node->role == NodeRole::kSchema;
      std::string text;
      if (schema) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema(true));
        if (!view->schema.empty()) text = view->text;
      } else {
        TENSORMOUNT_ASSIGN_OR_RETURN(text, ReadCommonJson(fs_, of.staging()));
      }
      if (!writable) return OpenTextHandle(std::move(context), std::move(text));
      // An edit says what is added. It begins empty where the old text is cut off.
      if (truncates) text.clear();
      return OpenEditHandle(std::move(context), schema, std::move(text));
    }
    case NodeRole::kReportJson:
    case NodeRole::kReportText: {
      if (writable || truncates) return Refused(node->Label() + ": reports are read only");
      const std::string path =
          JoinPath(of.staging().directory,
                   node->role == NodeRole::kReportJson ? "report.json" : "report.txt");
      TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, fs_.ReadFile(path, kMaxReportBytes));
      return OpenTextHandle(std::move(context), std::move(text));
    }
    case NodeRole::kMark:
      if (writable) TENSORMOUNT_RETURN_IF_ERROR(of.MarkDone(node->rank));
      return OpenMarkHandle(std::move(context));
    default:
      return Status::FromErrno(EISDIR, "open", node->Label());
  }
  if (truncates && writable) TENSORMOUNT_RETURN_IF_ERROR(handle->Truncate(0));
  return handle;
}

Result<std::shared_ptr<WriteHandle>> StagingTree::Open(std::uint64_t file, int flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, Live(file));
  Result<std::shared_ptr<WriteHandle>> opened = OpenNode(node, flags);
  if (!opened.ok() && Writes(flags) && opened.status().code() != Code::kStale &&
      opened.status().ToErrno() != EISDIR) {
    return Told("open", node->Label(), opened.status());
  }
  return opened;
}

Status StagingTree::MakeObject(const StagedNode& node) {
  const Writing writing(*node.of);
  TENSORMOUNT_RETURN_IF_ERROR(writing.status());
  return node.of->writer().OpenObject(node.key, node.index, true).status();
}

// O_CREAT of a name that is there is an open, as POSIX wants it. Of a name that is not: only what
// the schema allows can be made, and every refusal says what to do instead, in .tensormount/errors,
// since errno says so little.
Result<StagingTree::Opened> StagingTree::Create(std::uint64_t folder, std::string_view name,
                                                int flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, Live(folder));
  const std::string label = JoinedPath(parent->Label(), name);
  Result<StagedNode> child = Child(*parent, name);
  if (child.ok() && (flags & O_EXCL) != 0) return Status::FromErrno(EEXIST, "create", label);
  if (child.status().code() == Code::kNotFound) {
    StagedNode made;
    made.of = parent->of;
    made.path = JoinedPath(parent->path, name);
    switch (parent->role) {
      case NodeRole::kStaging:
        if (name != "schema.json" && name != "common.json") {
          return Told(
              "create", label,
              Refused("files here are schema.json and common.json; objects go to objects/"));
        }
        made.role = name == "schema.json" ? NodeRole::kSchema : NodeRole::kCommon;
        made.path.clear();
        break;
      case NodeRole::kDone:
        if (!ParseRank(name, &made.rank)) {
          return Told("create", label, Refused("marks are called by the number of their writer"));
        }
        made.role = NodeRole::kMark;
        break;
      case NodeRole::kObjects: {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, parent->of->Schema(true));
        const Result<StagingWriter::ObjectName> object = ObjectAt(*view, made.path);
        if (!object.ok()) {
          const bool never = !KeyOfPath(made.path).ok();
          return Told("create", label,
                      never ? NoNameForAnObject(made.path, object.status()) : object.status());
        }
        made.role = NodeRole::kObject;
        made.key = object.value().key;
        made.index = object.value().index;
        const Status status = MakeObject(made);
        if (!status.ok()) return Told("create", label, status);
        break;
      }
      case NodeRole::kTensors:
        return Told(
            "create", label,
            Status(Code::kNotFound, "no tensor with this key: schema.json must name it first"));
      case NodeRole::kSlices:
        return Told("create", label,
                    child.status().WithContext(
                        "no box of a tensor that schema.json names (write KEY[0:4,:])"));
      default:
        return Told("create", label,
                    Refused("make a folder here (mkdir): it becomes a checkpoint"));
    }
    // A mark is there only once it was made.
    if (made.role == NodeRole::kMark) {
      const Status status = made.of->MarkDone(made.rank);
      if (!status.ok()) return Told("create", label, status);
    }
    child = std::move(made);
  }
  TENSORMOUNT_RETURN_IF_ERROR(child.status());
  if (child.value().folder()) return Status::FromErrno(EISDIR, "open", label);
  const NodePtr node = nodes_.Take(std::move(child).value());
  Result<std::shared_ptr<WriteHandle>> handle = OpenNode(node, flags);
  if (!handle.ok()) {
    nodes_.Forget(node->item, 1);
    return Told("open", label, handle.status());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Node known, Known(node));
  return Opened{.node = known, .handle = std::move(handle).value()};
}

// truncate(2) without a descriptor: as if opened, truncated and closed.
Status StagingTree::Truncate(std::uint64_t file, std::uint64_t size) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, Live(file));
  if (node->folder()) return Status::FromErrno(EISDIR, "truncate", node->Label());
  if (node->role == NodeRole::kMark) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto handle, OpenNode(node, O_WRONLY));
  TENSORMOUNT_RETURN_IF_ERROR(handle->Truncate(size));
  return handle->Flush();
}

Result<StagingTree::Node> StagingTree::SetAttributes(std::uint64_t item) { return Stat(item); }

// Of a tensor or slice: what was written is forgotten, and synced, so that a crash does not bring
// it back; the name stays as long as schema.json has it.
Status StagingTree::Unlink(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, Live(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedNode node, Child(*parent, name));
  if (node.folder()) return Status::FromErrno(EISDIR, "remove", node.Label());
  StagedCheckpoint& of = *node.of;
  const Status status = [&]() -> Status {
    if (node.role == NodeRole::kMark) return RemoveDoneMark(fs_, of.staging(), node.rank);
    if (node.role == NodeRole::kReportJson || node.role == NodeRole::kReportText) {
      return fs_.RemoveFile(JoinPath(of.staging().directory, name));
    }
    const Writing writing(of);
    TENSORMOUNT_RETURN_IF_ERROR(writing.status());
    switch (node.role) {
      case NodeRole::kSchema:
        return of.WithdrawSchema();
      case NodeRole::kCommon:
        return RemoveFilesIn(fs_, JoinPath(of.staging().directory, "common"));
      case NodeRole::kObject:
        return of.writer().RemoveObject(node.key, node.index);
      case NodeRole::kTensor:
      case NodeRole::kSlice:
        of.RemoveSlicePath(node.role == NodeRole::kSlice ? node.path : "");
        {
          TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema());
          const TensorMeta* const meta = view->Find(node.key);
          const auto target = meta == nullptr ? nullptr : of.FindTarget(*meta, node.box);
          if (target == nullptr) return {};
          TENSORMOUNT_RETURN_IF_ERROR(target->Forget({0, target->size()}));
          return target->Sync();
        }
      default:
        return {};
    }
  }();
  of.Touch();
  return status.code() == Code::kStale ? status : Told("unlink", node.Label(), status);
}

Status StagingTree::CheckEmpty(const StagedNode& folder) {
  const Status full = Status::FromErrno(ENOTEMPTY, "remove", folder.Label());
  switch (folder.role) {
    case NodeRole::kTensors:
      // Names stay as long as schema.json does: empty is what this mount has not written to.
      return folder.of->HasWrittenBelow(folder.path) ? full : Status();
    case NodeRole::kDone:
    case NodeRole::kSlices:
    case NodeRole::kObjects: {
      bool any = false;
      const auto visit = [&any](std::string_view, const Attributes& a, std::uint64_t) {
        any = any || a.kind == FileKind::kFile;
        return true;
      };
      if (folder.role == NodeRole::kDone) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto marks, ReadDoneMarks(fs_, folder.of->staging()));
        any = !marks.empty();
      } else if (folder.role == NodeRole::kSlices) {
        TENSORMOUNT_RETURN_IF_ERROR(ListPaths(folder, 0, visit));
      } else {
        TENSORMOUNT_ASSIGN_OR_RETURN(ObjectPaths paths, PathsOfObjects(*folder.of));
        const std::string below = folder.path.empty() ? std::string() : folder.path + '/';
        any = std::any_of(paths.files.begin(), paths.files.end(),
                          [&](const std::string& path) { return path.starts_with(below); });
      }
      return any ? full : Status();
    }
    default:
      return {};
  }
}

// Needs the publisher's lease: a removal must not run beside a publish or a writer on another
// machine.
Status StagingTree::RemoveStagingAt(std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedPtr staged, Join(name));
  const std::string label = ".staging/" + std::string(name);
  const auto remove = [&]() -> Status {
    const Status busy(Code::kBusy, "files are open for writing");
    if (staged->AwaitReleases() > 0) return busy;
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto lease,
                                 StagingLease::ForPublishing(fs_, staged->staging()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool removable, staged->Removable());
    if (!removable) {
      return Status::FromErrno(
          ENOTEMPTY, "remove (something was written; remove schema.json first, or rm -r)", label);
    }
    return RemoveStaging(store_, fs_, staged->staging());
  };
  const Status status = remove();
  if (!status.ok() && status.code() != Code::kStale) return Told("rmdir", label, status);
  Drop(staged);
  return status;
}

Status StagingTree::RemoveDirectory(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, Live(folder));
  if (parent->role == NodeRole::kRoot) return RemoveStagingAt(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedNode node, Child(*parent, name));
  if (!node.folder()) return Status::FromErrno(ENOTDIR, "remove", node.Label());
  TENSORMOUNT_RETURN_IF_ERROR(CheckEmpty(node));
  if (node.role == NodeRole::kObjects) node.of->RemoveObjectFolder(node.path);
  return {};
}

// Two things that PublishStaging cannot know are done here first: files of this mount that were
// closed a moment ago get time to be released, and what this mount wrote is synced, whose failure
// is a failure of the publish.
Status StagingTree::Publish(std::string_view name, std::string_view as) {
  const std::string label = ".staging/" + std::string(name) + " as " + std::string(as);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedPtr staged, Join(name));
  const auto publish = [&]() -> Status {
    if (const Status bad = CheckCheckpointName(as); !bad.ok()) return Refused(bad.message());
    if (const int open = staged->AwaitReleases(); open > 0) {
      return Status(Code::kBusy,
                    std::to_string(open) + " files are open for writing on this mount");
    }
    // What could not be recorded here must not be passed over because it is in no journal.
    const Status synced = staged->writer().SyncAll();
    if (!synced.ok() && synced.code() != Code::kStale) {
      return Status::FromParts(Code::kDataLoss, EIO, synced.message());
    }
    // Its report is in the staging's report.txt and report.json.
    return PublishStaging(store_, fs_, std::string(name), std::string(as), nullptr).status();
  };
  const Status status = publish();
  if (status.ok() || status.code() == Code::kStale) {
    Drop(staged);
    return status;
  }
  (void)staged->CheckInPlace(true);  // kUnknown: it may be gone all the same.
  return Told("publish", label, AsRename(status));
}

// Objects only: `mv state.tmp state`, by which programs replace a file in one step, has to work.
Status StagingTree::RenameWithin(std::uint64_t folder, std::string_view name,
                                 std::uint64_t to_folder, std::string_view to_name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, Live(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr to_parent, Live(to_folder));
  const std::string label = JoinedPath(parent->Label(), name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedNode from, Child(*parent, name));
  if (from.role != NodeRole::kObject || to_parent->role != NodeRole::kObjects ||
      from.of != to_parent->of) {
    return Told("rename", label,
                Refused("only objects can be renamed here (rsync: use --inplace), and a whole "
                        "staging into the root, which publishes it"));
  }
  StagedCheckpoint& of = *from.of;
  const Status status = [&]() -> Status {
    const Writing writing(of);
    TENSORMOUNT_RETURN_IF_ERROR(writing.status());
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema(true));
    const std::string to_path = JoinedPath(to_parent->path, to_name);
    if (const auto key = KeyOfPath(to_path); !key.ok()) {
      return Refused(NoNameForAnObject(to_path, key.status()).message());
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const StagingWriter::ObjectName to, ObjectAt(*view, to_path));
    if (to.key == from.key && to.index == from.index) return {};
    TENSORMOUNT_RETURN_IF_ERROR(of.writer().RenameObject(from.key, from.index, to.key, to.index));
    StagedNode moved = from;
    moved.path = JoinedPath(to_parent->path, to_name);
    moved.key = to.key;
    moved.index = to.index;
    nodes_.Move(from, std::move(moved));
    of.Touch();
    return {};
  }();
  return status.ok() || status.code() == Code::kStale ? status
                                                      : Told("rename", label, AsRename(status));
}

}  // namespace tensormount::fs
