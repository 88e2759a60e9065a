// SPDX-License-Identifier: Apache-2.0
// Moves to .trash and back. The syncs are ordered so that after a power failure the checkpoint is
// at one of its two names.
#include "index/store/store_moves.h"

#include <cerrno>

#include "index/read/pinned_commit.h"
#include "index/records/store_paths.h"
#include "index/store/bucket.h"

namespace tensormount::store_moves {
namespace {

// Ends the text of a mark if rules removed the checkpoint. Names have no slash.
constexpr char kByRules = '/';
constexpr std::uint64_t kMaxMark = 256;

// Deletes the marks of entries in .trash, so that another entry can be moved there on a full disk.
// Gc makes the marks again, and their grace periods begin again. Returns false if no mark was
// deleted.
bool DropMarks(FileSystem& fs, const std::string& trash) {
  const auto entries = fs.List(trash);
  if (!entries.ok()) return false;
  bool any = false;
  for (const DirectoryEntry& e : entries.value()) {
    if (!e.name.ends_with(store_paths::kSinceSuffix)) continue;
    any |= fs.RemoveFile(JoinPath(trash, e.name)).ok();
  }
  return any;
}

// Renames a directory to `wanted` in .trash, or to a similar name if that is taken. The mark is
// written first, so that it exists even if the process dies after the rename.
Result<std::string> RenameIntoTrash(FileSystem& fs, const std::string& trash,
                                    const std::string& from, const std::string& wanted,
                                    std::string_view name) {
  std::string to = JoinPath(trash, wanted);
  bool room = true;
  for (int attempt = 0; attempt < 16; ++attempt) {
    if (room && fs.LinkStat(to).status().code() == Code::kNotFound) {
      // The mark of an earlier entry with this name has an old time, which would end the grace
      // period at once.
      (void)fs.RemoveFile(TrashMarkPath(to));
      MarkTrashed(fs, to, name);
    }
    const Status moved = fs.RenameNoReplace(from, to);
    if (moved.ok()) return to;
    if (room && moved.code() == Code::kResourceExhausted && DropMarks(fs, trash)) {
      room = false;
      continue;
    }
    // The name may be taken, because a checkpoint and its copy have the same uuid, and both may
    // have been removed.
    if (moved.code() != Code::kAlreadyExists) return moved;
    to = JoinPath(trash, wanted + "." + Uuid::Random().Short());
  }
  return Status(Code::kAlreadyExists, trash + "/" + wanted + ": no free name in .trash");
}

}  // namespace

std::string TrashMarkPath(const std::string& entry) {
  return entry + std::string(store_paths::kSinceSuffix);
}

Status SyncClaim(FileSystem& fs, const std::string& store, std::uint64_t generation) {
  const std::string claims = JoinPath(store, store_paths::kGenerationsFolder);
  const Status synced = fs.SyncDirectory(JoinPath(claims, std::to_string(generation)));
  // kNotFound: a later save has claimed a higher number, and gc has removed this claim.
  if (!synced.ok() && synced.code() != Code::kNotFound) return synced;
  return fs.SyncDirectory(claims);
}

bool IsEmptyDirectory(FileSystem& fs, const std::string& path) {
  const Result<FileInfo> info = fs.LinkStat(path);
  if (!info.ok() || info.value().kind != FileKind::kDirectory) return false;
  const auto entries = fs.List(path);
  return entries.ok() && entries.value().empty();
}

bool IsLinkRefused(const Status& status) {
  switch (status.ToErrno()) {
    case EXDEV:
    case EMLINK:
    case EPERM:
    case EACCES:
    case EDQUOT:
    case ENOSYS:
    case EOPNOTSUPP:
      return true;
    default:
      return false;
  }
}

Result<std::unique_ptr<File>> LockWorkFolder(FileSystem& fs, const std::string& folder,
                                             std::string_view busy) {
  const std::string path = JoinPath(folder, store_paths::kLockFile);
  for (int attempt = 0; attempt < 16; ++attempt) {
    // The process that used the directory last, or gc, may remove it between two of these steps.
    const Status made = fs.EnsureDirectory(folder);
    if (made.code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(made);
    Result<std::unique_ptr<File>> lock = fs.OpenShared(path);
    if (lock.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(lock.status());
    const Status locked = lock.value()->TryLockExclusive();
    if (locked.code() == Code::kBusy) {
      return Status(Code::kBusy, folder + ": " + std::string(busy));
    }
    if (!locked.ok() && !HasNoLocks(locked)) return locked;
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo mine, lock.value()->Stat());
    const Result<FileInfo> named = fs.LinkStat(path);
    if (named.ok() && named.value().device == mine.device && named.value().inode == mine.inode) {
      return lock;
    }
  }
  return Status(Code::kBusy, folder + ": other processes keep removing it; try again");
}

Result<std::vector<DirectoryEntry>> ListIfExists(FileSystem& fs, const std::string& path) {
  auto entries = fs.List(path);
  if (entries.status().code() != Code::kNotFound) return entries;
  // kNotFound may also mean ENOTDIR: a file stands in place of the directory. This is damage and
  // must not look like an empty directory.
  const Result<FileInfo> there = fs.LinkStat(path);
  if (there.status().code() == Code::kNotFound) return std::vector<DirectoryEntry>();
  TENSORMOUNT_RETURN_IF_ERROR(there.status());
  if (there.value().kind == FileKind::kDirectory) return fs.List(path);  // Created meanwhile.
  return Status(Code::kDataLoss,
                path + ": the entry is not a directory; `tensormount fsck` shows the remedy");
}

Result<std::string> ReadCommitBytes(FileSystem& fs, const std::string& directory) {
  const std::string path = JoinPath(directory, store_paths::kCommitFile);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenRead(path));
  return tensormount::ReadCommitBytes(*file, path);
}

Result<DecodedCommit> ReadCommit(FileSystem& fs, const std::string& directory) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, ReadCommitBytes(fs, directory));
  return DecodeCommit(bytes, JoinPath(directory, store_paths::kCommitFile));
}

Result<Uuid> ReadFolderUuid(FileSystem& fs, const std::string& directory) {
  const std::string path = JoinPath(directory, store_paths::kUuidFile);
  const Result<std::string> text = fs.ReadFile(path, 64);
  if (text.ok()) {
    if (const std::optional<Uuid> uuid = Uuid::Parse(text.value())) return *uuid;
  }
  // A crash may leave an empty file UUID. COMMIT, if it exists, has the uuid too.
  const Result<DecodedCommit> commit = ReadCommit(fs, directory);
  if (commit.ok()) return commit.value().record.uuid;
  if (commit.status().code() != Code::kNotFound) return commit.status();
  if (text.ok()) return Status(Code::kDataLoss, path + ": the file does not contain a uuid");
  return text.status();
}

Status PutBack(FileSystem& fs, const std::string& store, const std::string& name,
               const std::string& entry) {
  if (fs.object_writer() != nullptr) return bucket::PutBack(fs, store, name);
  const std::string to = JoinPath(store, name);
  TENSORMOUNT_RETURN_IF_ERROR(fs.RenameNoReplace(entry, to));
  (void)fs.RemoveFile(TrashMarkPath(entry));  // If this fails, gc removes it.
  return fs.SyncMovedFolder(to, store, JoinPath(store, store_paths::kTrashFolder));
}

void DeleteData(FileSystem& fs, const std::string& entry) {
  std::vector<std::string> names;
  if (const auto files = fs.List(JoinPath(entry, "data")); files.ok()) {
    for (const DirectoryEntry& file : files.value()) names.push_back("data/" + file.name);
  }
  DeleteData(fs, entry, names);
}

void DeleteData(FileSystem& fs, const std::string& entry, std::span<const std::string> names) {
  bool deleted = false;
  for (const std::string& name : names) deleted |= fs.RemoveFile(JoinPath(entry, name)).ok();
  if (deleted) (void)fs.SyncDirectory(JoinPath(entry, "data"));  // If this fails, gc syncs it.
}

void MarkTrashed(FileSystem& fs, const std::string& entry, std::string_view name) {
  // If the mark cannot be written, the deletion is only delayed: gc creates the mark, and the grace
  // period begins then.
  const auto mark = fs.CreateExclusive(TrashMarkPath(entry));
  if (mark.ok() && !name.empty()) (void)mark.value()->WriteAt(0, name.data(), name.size());
}

void MarkRemovedByRules(FileSystem& fs, const std::string& entry, const std::string& name) {
  if (!fs.LinkStat(entry).ok()) return;  // A mark of its own would be left behind.
  MarkTrashed(fs, entry, name);
  if (!fs.LinkStat(TrashMarkPath(entry)).ok()) return;  // OpenShared would create it.
  const std::string text = name + kByRules;
  const auto mark = fs.OpenShared(TrashMarkPath(entry));
  if (mark.ok()) (void)mark.value()->WriteAt(0, text.data(), text.size());
}

bool IsRemovedByRules(FileSystem& fs, const std::string& entry) {
  const Result<std::string> text = fs.ReadFile(TrashMarkPath(entry), kMaxMark);
  return text.ok() && text.value().ends_with(kByRules);
}

std::string NameInMark(FileSystem& fs, const std::string& entry) {
  const Result<std::string> text = fs.ReadFile(TrashMarkPath(entry), kMaxMark);
  if (!text.ok()) return {};
  std::string name = text.value();
  if (name.ends_with(kByRules)) name.pop_back();
  return CheckCheckpointName(name).ok() ? name : std::string();
}

Result<std::string> FindInTrash(FileSystem& fs, const std::string& store, const FileInfo& folder) {
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, ListIfExists(fs, trash));
  for (const DirectoryEntry& e : entries) {
    const std::string entry = JoinPath(trash, e.name);
    const Result<FileInfo> info = fs.LinkStat(entry);
    if (info.ok() && info.value().device == folder.device && info.value().inode == folder.inode) {
      return entry;
    }
  }
  return Status(Code::kNotFound, trash + ": the removed checkpoint is not in it");
}

Result<std::string> MoveToTrash(FileSystem& fs, const std::string& store, const std::string& from,
                                std::string_view suffix, std::string_view name) {
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(trash));
  const Result<Uuid> before = ReadFolderUuid(fs, from);
  const std::string wanted = before.ok() ? before.value().ToString() + std::string(suffix)
                                         : "unreadable." + Uuid::Random().Short();
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string entry, RenameIntoTrash(fs, trash, from, wanted, name));
  // Another directory may have got the name `from` between ReadFolderUuid and the rename. An entry
  // that is named by a uuid must have that uuid, because AbortOrDecide looks there.
  const Result<Uuid> moved = ReadFolderUuid(fs, entry);
  if (before.ok() && moved.ok() && moved.value() != before.value()) {
    // `suffix` was meant for the other directory, so it is omitted here: a committed checkpoint
    // must not be found as "aborted".
    const std::string mark = TrashMarkPath(entry);
    TENSORMOUNT_ASSIGN_OR_RETURN(entry,
                                 RenameIntoTrash(fs, trash, entry, moved.value().ToString(), name));
    (void)fs.RemoveFile(mark);  // If this fails, gc removes it.
  }
  return entry;
}

}  // namespace tensormount::store_moves
