// SPDX-License-Identifier: Apache-2.0
// Moves to .trash and back, durable in an order that leaves a name at one end or the other after a
// power cut.
#include "index/store/store_moves.h"

#include <cerrno>
#include <chrono>

#include "index/records/store_paths.h"

namespace tensormount::store_moves {
namespace {

// The first name that nobody has in .trash, `wanted` where it is free.
Result<std::string> RenameIntoTrash(FileSystem& fs, const std::string& trash,
                                    const std::string& from, const std::string& wanted) {
  std::string to = JoinPath(trash, wanted);
  for (int attempt = 0; attempt < 16; ++attempt) {
    const Status moved = fs.RenameNoReplace(from, to);
    if (moved.ok()) return to;
    // A copy of a checkpoint has its uuid: both may be removed.
    if (moved.code() != Code::kAlreadyExists) return moved;
    to = JoinPath(trash, wanted + "." + Uuid::Random().Short());
  }
  return Status(Code::kAlreadyExists, trash + "/" + wanted + ": no free name");
}

}  // namespace

bool LinkIsRefused(const Status& status) {
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

std::int64_t NowSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Result<std::vector<DirectoryEntry>> ListIfThere(FileSystem& fs, const std::string& path) {
  auto entries = fs.List(path);
  if (entries.status().code() != Code::kNotFound) return entries;
  // ENOTDIR is kNotFound, too: a file in the folder's place says nothing of what was in it.
  const Result<FileInfo> there = fs.LinkStat(path);
  if (there.status().code() == Code::kNotFound) return std::vector<DirectoryEntry>();
  TENSORMOUNT_RETURN_IF_ERROR(there.status());
  if (there.value().kind == FileKind::kDirectory) return fs.List(path);  // Made since we looked.
  return Status(Code::kDataLoss, path + ": no folder");
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
  // A crash may have left an empty UUID; it is gone once COMMIT is written.
  const Result<DecodedCommit> commit = ReadCommit(fs, directory);
  if (commit.ok()) return commit.value().record.uuid;
  if (commit.status().code() != Code::kNotFound) return commit.status();
  if (text.ok()) return Status(Code::kDataLoss, path + ": does not hold a uuid");
  return text.status();
}

Status PutBack(FileSystem& fs, const std::string& store, const std::string& name,
               const Uuid& uuid) {
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(trash));
  Status unread;
  for (const DirectoryEntry& e : entries) {
    // "<uuid>", or with a few digits more where that was taken: a copy, as good as the other.
    if (e.kind != FileKind::kDirectory || !e.name.starts_with(uuid.ToString()) ||
        e.name.ends_with(store_paths::kAbortedSuffix)) {
      continue;
    }
    const std::string entry = JoinPath(trash, e.name);
    const Result<DecodedCommit> commit = ReadCommit(fs, entry);
    if (unread.ok()) unread = commit.status();
    if (!commit.ok() || commit.value().record.uuid != uuid) continue;
    const std::string to = JoinPath(store, name);
    TENSORMOUNT_RETURN_IF_ERROR(fs.RenameNoReplace(entry, to));
    (void)fs.RemoveFile(entry + std::string(store_paths::kSinceSuffix));  // Gc takes it otherwise.
    return fs.SyncMovedFolder(to, store, trash);
  }
  TENSORMOUNT_RETURN_IF_ERROR(unread);
  return Status(Code::kNotFound, trash + ": no checkpoint " + uuid.ToString());
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
  if (deleted) (void)fs.SyncDirectory(JoinPath(entry, "data"));  // Gc does it, too.
}

void MarkTrashed(FileSystem& fs, const std::string& entry) {
  // Failing is no harm: gc makes the mark, and the grace period begins later.
  (void)fs.CreateExclusive(entry + std::string(store_paths::kSinceSuffix));
}

Result<std::string> MoveToTrash(FileSystem& fs, const std::string& store, const std::string& from,
                                std::string_view suffix) {
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(trash));
  const Result<Uuid> before = ReadFolderUuid(fs, from);
  const std::string wanted = before.ok() ? before.value().ToString() + std::string(suffix)
                                         : "unreadable." + Uuid::Random().Short();
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string entry, RenameIntoTrash(fs, trash, from, wanted));
  // Somebody may have exchanged the folder between our look and the rename: what lies under a
  // uuid's name must have that uuid, because the arbiter looks there.
  const Result<Uuid> moved = ReadFolderUuid(fs, entry);
  if (before.ok() && moved.ok() && moved.value() != before.value()) {
    // Without the suffix, which was said of the other one: a committed checkpoint that was
    // exchanged for what we looked at must not be found as "aborted".
    TENSORMOUNT_ASSIGN_OR_RETURN(entry,
                                 RenameIntoTrash(fs, trash, entry, moved.value().ToString()));
  }
  MarkTrashed(fs, entry);
  return entry;
}

}  // namespace tensormount::store_moves
