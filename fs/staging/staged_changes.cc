// SPDX-License-Identifier: Apache-2.0
// StagingTree of staging_tree.h: operations that change something below .staging/. staging_tree.cc
// has the lookups.
#include <algorithm>
#include <cerrno>
#include <fcntl.h>

#include "base/log.h"
#include "fs/save/publish.h"
#include "fs/staging/staging_tree.h"

namespace tensormount::fs {
namespace {

constexpr std::uint64_t kMaxReportBytes = std::uint64_t{64} << 20;

// The error of a change that is never allowed: EPERM, not EROFS, because the mount is writable.
Status Refused(std::string_view why) {
  return Status::FromParts(Code::kPermissionDenied, EPERM, std::string(why));
}

bool OpensForWriting(int flags) { return (flags & O_ACCMODE) != O_RDONLY; }

// Counts as an open writer of the staging while this object lives, which blocks publishes: changes
// without a file handle (unlink, rename, creating an object) must not run during a publish either.
class WriterScope {
 public:
  explicit WriterScope(StagedCheckpoint& of) : of_(of), status_(of.BeginWriting()) {}
  ~WriterScope() {
    if (status_.ok()) of_.EndWriting();
  }
  WriterScope(const WriterScope&) = delete;
  WriterScope& operator=(const WriterScope&) = delete;
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

// Replaces errnos of rename(2) that mislead `mv`: after EXDEV it would copy the files, and it
// reports EINVAL as an attempt to move a directory into itself.
Status RenameError(const Status& status) {
  switch (status.ToErrno()) {
    case EINVAL:
      return Status::FromParts(status.code(), ENODATA, status.message());
    case EXDEV:
      return Status::FromParts(status.code(), EIO, status.message());
    default:
      return status;
  }
}

// The error for a name that cannot be that of an object. The errno is not ENOENT, because `cp`
// would then report that its source is missing.
Status ObjectNameError(std::string_view path, const Status& why) {
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name.size() > kMaxPartBytes) {
    return Status::FromParts(Code::kInvalidArgument, ENAMETOOLONG,
                             "names in a mount have at most " + std::to_string(kMaxPartBytes) +
                                 " bytes; declare longer keys in schema.json");
  }
  return Status::FromParts(Code::kInvalidArgument, EINVAL, why.message());
}

}  // namespace

HandleContext StagingTree::ContextOf(const NodePtr& node, bool writable) {
  return {.staged = node->staged,
          .label = node->Label(),
          .writable = writable,
          // Finds the node again by its number, because a rename may have changed name and inode.
          .stat = [this, node]() -> Result<Attributes> {
            const Result<NodePtr> now = nodes_.Find(node->item);
            return Describe(now.ok() ? *now.value() : *node);
          },
          .stats = &stats_};
}

Result<StagingTree::Node> StagingTree::MakeDirectory(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, FindLive(folder));
  const Status exists = Status::FromErrno(EEXIST, "make", JoinedPath(parent->Label(), name));
  switch (parent->role) {
    case NodeRole::kRoot: {
      const std::string label = ".staging/" + std::string(name);
      if (const Status bad = CheckCheckpointName(name); !bad.ok()) {
        return LogFailure("mkdir", label, Refused(bad.message()));
      }
      const Result<Staging> made = CreateStaging(store_, fs_, std::string(name));
      if (!made.ok() && made.status().code() != Code::kAlreadyExists) {
        return LogFailure("mkdir", label, made.status());
      }
      if (!made.ok()) return made.status();
      return Lookup(folder, name);
    }
    case NodeRole::kObjects: {
      const Result<StagedNode> there = ObjectChild(*parent, name);
      if (there.ok()) return exists;
      if (there.status().code() != Code::kNotFound) return there.status();
      parent->staged->AddObjectFolder(JoinedPath(parent->path, name));
      return Lookup(folder, name);
    }
    default: {
      if (Child(*parent, name).ok()) return exists;
      return LogFailure("mkdir", JoinedPath(parent->Label(), name),
                        Refused("no directory can be made here: the directories of the keys in "
                                "schema.json exist already"));
    }
  }
}

// Opens a file. A writable handle counts as an open writer before O_TRUNC is applied and before the
// handle is returned.
Result<std::shared_ptr<WriteHandle>> StagingTree::OpenNode(const NodePtr& node, int flags) {
  const bool writable = OpensForWriting(flags);
  const bool truncates = (flags & O_TRUNC) != 0;
  StagedCheckpoint& of = *node->staged;
  HandleContext context = ContextOf(node, writable);
  std::shared_ptr<WriteHandle> handle;
  switch (node->role) {
    case NodeRole::kTensor:
    case NodeRole::kSlice: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema());
      const TensorMeta* meta = view->Find(node->key);
      if (meta == nullptr)
        return Status(Code::kStale, node->Label() + ": the tensor is no longer in schema.json");
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
      // A text is applied as an addition to earlier edits, so a truncating open begins empty.
      if (truncates) text.clear();
      return OpenEditHandle(std::move(context), schema, std::move(text));
    }
    case NodeRole::kReportJson:
    case NodeRole::kReportText: {
      if (writable || truncates)
        return Refused(node->Label() + ": the publish report is read-only");
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
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindLive(file));
  Result<std::shared_ptr<WriteHandle>> opened = OpenNode(node, flags);
  if (!opened.ok() && OpensForWriting(flags) && opened.status().code() != Code::kStale &&
      opened.status().ToErrno() != EISDIR) {
    return LogFailure("open", node->Label(), opened.status());
  }
  return opened;
}

Status StagingTree::MakeObject(const StagedNode& node) {
  const WriterScope writing(*node.staged);
  TENSORMOUNT_RETURN_IF_ERROR(writing.status());
  return node.staged->writer().OpenObject(node.key, node.index, true).status();
}

// O_CREAT of an existing name opens the file, as in POSIX. The refusal of a new name is explained
// in .tensormount/errors, because the errno says too little.
Result<StagingTree::Opened> StagingTree::Create(std::uint64_t folder, std::string_view name,
                                                int flags) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, FindLive(folder));
  const std::string label = JoinedPath(parent->Label(), name);
  Result<StagedNode> child = Child(*parent, name);
  if (child.ok() && (flags & O_EXCL) != 0) return Status::FromErrno(EEXIST, "create", label);
  if (child.status().code() == Code::kNotFound) {
    StagedNode made;
    made.staged = parent->staged;
    made.path = JoinedPath(parent->path, name);
    switch (parent->role) {
      case NodeRole::kStaging:
        if (name != "schema.json" && name != "common.json") {
          return LogFailure(
              "create", label,
              Refused("only schema.json and common.json can be created here; write objects "
                      "in objects/"));
        }
        made.role = name == "schema.json" ? NodeRole::kSchema : NodeRole::kCommon;
        made.path.clear();
        break;
      case NodeRole::kDone:
        if (!ParseRank(name, &made.rank)) {
          return LogFailure("create", label,
                            Refused("the name of a done mark must be the number of its writer"));
        }
        made.role = NodeRole::kMark;
        break;
      case NodeRole::kObjects: {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, parent->staged->Schema(true));
        const Result<StagingWriter::ObjectName> object = ObjectAt(*view, made.path);
        if (!object.ok()) {
          const bool never = !KeyOfPath(made.path).ok();
          return LogFailure("create", label,
                            never ? ObjectNameError(made.path, object.status()) : object.status());
        }
        made.role = NodeRole::kObject;
        made.key = object.value().key;
        made.index = object.value().index;
        const Status status = MakeObject(made);
        if (!status.ok()) return LogFailure("create", label, status);
        break;
      }
      case NodeRole::kTensors:
        return LogFailure(
            "create", label,
            Status(Code::kNotFound, "no tensor has this key: declare it in schema.json first"));
      case NodeRole::kSlices:
        return LogFailure("create", label,
                          child.status().WithContext(
                              "not a slice of a tensor in schema.json (write KEY[0:4,:])"));
      default:
        return LogFailure(
            "create", label,
            Refused("no file can be created here; mkdir makes a staging directory, which becomes a "
                    "checkpoint"));
    }
    // O_CREAT makes the mark, also for an open that only reads (OpenNode marks only for writing).
    if (made.role == NodeRole::kMark) {
      const Status status = made.staged->MarkDone(made.rank);
      if (!status.ok()) return LogFailure("create", label, status);
    }
    child = std::move(made);
  }
  TENSORMOUNT_RETURN_IF_ERROR(child.status());
  if (child.value().folder()) return Status::FromErrno(EISDIR, "open", label);
  const NodePtr node = nodes_.Reference(std::move(child).value());
  Result<std::shared_ptr<WriteHandle>> handle = OpenNode(node, flags);
  if (!handle.ok()) {
    nodes_.Forget(node->item, 1);
    return LogFailure("open", label, handle.status());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Node known, NodeWithAttributes(node));
  return Opened{.node = known, .handle = std::move(handle).value()};
}

// truncate(2) without a descriptor: like open, ftruncate, close.
Status StagingTree::Truncate(std::uint64_t file, std::uint64_t size) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindLive(file));
  if (node->folder()) return Status::FromErrno(EISDIR, "truncate", node->Label());
  if (node->role == NodeRole::kMark) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto handle, OpenNode(node, O_WRONLY));
  TENSORMOUNT_RETURN_IF_ERROR(handle->Truncate(size));
  return handle->Flush();
}

Result<StagingTree::Node> StagingTree::SetAttributes(std::uint64_t item) { return Stat(item); }

// Removes a file. For a tensor or slice: discards the written bytes, and makes that durable, so
// that a crash does not restore them. The name of a tensor stays while schema.json has the tensor.
Status StagingTree::Unlink(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, FindLive(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedNode node, Child(*parent, name));
  if (node.folder()) return Status::FromErrno(EISDIR, "remove", node.Label());
  StagedCheckpoint& of = *node.staged;
  const Status status = [&]() -> Status {
    if (node.role == NodeRole::kMark) return RemoveDoneMark(fs_, of.staging(), node.rank);
    if (node.role == NodeRole::kReportJson || node.role == NodeRole::kReportText) {
      return fs_.RemoveFile(JoinPath(of.staging().directory, name));
    }
    const WriterScope writing(of);
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
  return status.code() == Code::kStale ? status : LogFailure("unlink", node.Label(), status);
}

Status StagingTree::CheckEmpty(const StagedNode& folder) {
  const Status full = Status::FromErrno(ENOTEMPTY, "remove", folder.Label());
  switch (folder.role) {
    case NodeRole::kTensors:
      // Directories of keys exist as long as schema.json has the keys, so here "empty" means that
      // this mount has written nothing below.
      return folder.staged->HasWrittenBelow(folder.path) ? full : Status();
    case NodeRole::kDone:
    case NodeRole::kSlices:
    case NodeRole::kObjects: {
      bool any = false;
      const auto visit = [&any](std::string_view, const Attributes& a, std::uint64_t) {
        any = any || a.kind == FileKind::kFile;
        return true;
      };
      if (folder.role == NodeRole::kDone) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto marks,
                                     ReadDoneMarks(fs_, folder.staged->staging()));
        any = !marks.empty();
      } else if (folder.role == NodeRole::kSlices) {
        TENSORMOUNT_RETURN_IF_ERROR(ListPaths(folder, 0, visit));
      } else {
        TENSORMOUNT_ASSIGN_OR_RETURN(ObjectPaths paths, PathsOfObjects(*folder.staged));
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

// Requires the publisher's lease: a removal must not run during a publish or beside a writer of
// another machine.
Status StagingTree::RemoveStagingAt(std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedPtr staged, Join(name));
  const std::string label = ".staging/" + std::string(name);
  const auto remove = [&]() -> Status {
    const Status busy(Code::kBusy, "files of this staging directory are open for writing");
    if (staged->AwaitReleases() > 0) return busy;
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto lease,
                                 StagingLease::ForPublishing(fs_, staged->staging()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool removable, staged->CanRemove());
    if (!removable) {
      return Status::FromErrno(
          ENOTEMPTY,
          "remove the staging directory with written data (remove schema.json first, or use rm -r)",
          label);
    }
    return RemoveStaging(store_, fs_, staged->staging());
  };
  const Status status = remove();
  if (!status.ok() && status.code() != Code::kStale) return LogFailure("rmdir", label, status);
  Drop(staged);
  return status;
}

Status StagingTree::RemoveDirectory(std::uint64_t folder, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, FindLive(folder));
  if (parent->role == NodeRole::kRoot) return RemoveStagingAt(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedNode node, Child(*parent, name));
  if (!node.folder()) return Status::FromErrno(ENOTDIR, "remove", node.Label());
  TENSORMOUNT_RETURN_IF_ERROR(CheckEmpty(node));
  if (node.role == NodeRole::kObjects) node.staged->RemoveObjectFolder(node.path);
  return {};
}

// Publishes a staging. Before PublishStaging, this function waits for files of this mount that were
// closed a moment ago, and syncs what this mount wrote; a failed sync fails the publish.
Status StagingTree::Publish(std::string_view name, std::string_view as) {
  const std::string label = ".staging/" + std::string(name) + " as " + std::string(as);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedPtr staged, Join(name));
  const auto publish = [&]() -> Status {
    if (const Status bad = CheckCheckpointName(as); !bad.ok()) return Refused(bad.message());
    if (const int open = staged->AwaitReleases(); open > 0) {
      return Status(Code::kBusy,
                    std::to_string(open) + " files are open for writing on this mount");
    }
    // PublishStaging reads journals, so it would not notice bytes whose journal record could not be
    // written.
    const Status synced = staged->writer().SyncAll();
    if (!synced.ok() && synced.code() != Code::kStale) {
      return Status::FromParts(Code::kDataLoss, EIO, synced.message());
    }
    // No report is returned here, because a failed publish writes report.txt and report.json.
    return PublishStaging(store_, fs_, std::string(name), std::string(as), nullptr).status();
  };
  const Status status = publish();
  if (status.ok() || status.code() == Code::kStale) {
    Drop(staged);
    return status;
  }
  // After an error of kind kUnknown the staging may be gone; this call then retires it.
  (void)staged->CheckInPlace(true);
  return LogFailure("publish", label, RenameError(status));
}

// Renames objects only: programs replace a file in one step with `mv state.tmp state`.
Status StagingTree::RenameWithin(std::uint64_t folder, std::string_view name,
                                 std::uint64_t to_folder, std::string_view to_name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr parent, FindLive(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr to_parent, FindLive(to_folder));
  const std::string label = JoinedPath(parent->Label(), name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagedNode from, Child(*parent, name));
  if (from.role != NodeRole::kObject || to_parent->role != NodeRole::kObjects ||
      from.staged != to_parent->staged) {
    return LogFailure(
        "rename", label,
        Refused("only objects can be renamed here (rsync: use --inplace); to publish, mv "
                "the whole staging directory to the root of the mount"));
  }
  StagedCheckpoint& of = *from.staged;
  const Status status = [&]() -> Status {
    const WriterScope writing(of);
    TENSORMOUNT_RETURN_IF_ERROR(writing.status());
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto view, of.Schema(true));
    const std::string to_path = JoinedPath(to_parent->path, to_name);
    if (const auto key = KeyOfPath(to_path); !key.ok()) {
      return Refused(ObjectNameError(to_path, key.status()).message());
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
  return status.ok() || status.code() == Code::kStale
             ? status
             : LogFailure("rename", label, RenameError(status));
}

}  // namespace tensormount::fs
