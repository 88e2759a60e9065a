// SPDX-License-Identifier: Apache-2.0
#include "index/store_layout.h"

#include <atomic>
#include <cerrno>
#include <chrono>

#include "base/log.h"

namespace tensormount::layout {
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
    to = JoinPath(trash, wanted + "." + RandomSuffix());
  }
  return Status(Code::kAlreadyExists, trash + "/" + wanted + ": no free name");
}

}  // namespace

std::string RandomSuffix() { return Uuid::Random().Short(); }

std::int64_t NowSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Result<std::vector<DirectoryEntry>> ListIfThere(FileSystem& fs, const std::string& path) {
  auto entries = fs.List(path);
  if (entries.status().code() == Code::kNotFound) return std::vector<DirectoryEntry>();
  return entries;
}

bool HasNoLocks(const Status& locked) {
  switch (locked.ToErrno()) {
    case EOPNOTSUPP:
    case ENOLCK:
    case ENOSYS:
    case EINVAL:
      return true;
    default:
      return false;
  }
}

Status LockAsReader(File& commit) {
  const Status locked = commit.TryLockShared();
  if (!HasNoLocks(locked)) return locked;
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    Log(LogLevel::kWarning, locked.message() +
                                ": read without a lock; gc there cannot see readers and keeps what "
                                "was removed unless it is given --grace");
  }
  return Status();
}

Result<std::string> ReadCommitBytes(FileSystem& fs, const std::string& directory) {
  const std::string path = JoinPath(directory, kCommitFile);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenRead(path));
  return tensormount::ReadCommitBytes(*file, path);
}

Result<DecodedCommit> ReadCommit(FileSystem& fs, const std::string& directory) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, ReadCommitBytes(fs, directory));
  return DecodeCommit(bytes, JoinPath(directory, kCommitFile));
}

Result<Uuid> ReadFolderUuid(FileSystem& fs, const std::string& directory) {
  const std::string path = JoinPath(directory, kUuidFile);
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

Status EnsureDirectory(FileSystem& fs, const std::string& path) {
  const Status made = fs.CreateDirectory(path);
  if (made.code() != Code::kAlreadyExists) return made;
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(path));
  if (info.kind == FileKind::kDirectory) return Status();
  return Status(Code::kAlreadyExists, path + ": not a folder");
}

void MarkTrashed(FileSystem& fs, const std::string& entry) {
  // Failing is no harm: gc makes the mark, and the grace period begins later.
  (void)fs.CreateExclusive(entry + std::string(kSinceSuffix));
}

Result<std::string> MoveToTrash(FileSystem& fs, const std::string& store, const std::string& from,
                                std::string_view suffix) {
  const std::string trash = JoinPath(store, kTrashFolder);
  TENSORMOUNT_RETURN_IF_ERROR(EnsureDirectory(fs, trash));
  const Result<Uuid> before = ReadFolderUuid(fs, from);
  const std::string wanted = before.ok() ? before.value().ToString() + std::string(suffix)
                                         : "unreadable." + RandomSuffix();
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

std::string DerivedDirectory(const std::string& directory, const Uuid& uuid) {
  return JoinPath(JoinPath(JoinPath(directory, ".."), kDerivedFolder), uuid.ToString());
}

Status WriteDerivedIndex(FileSystem& fs, const std::string& directory, const CommitRecord& commit) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Content content, RebuildContent(fs, directory, commit));
  const std::string derived = JoinPath(JoinPath(directory, ".."), kDerivedFolder);
  TENSORMOUNT_RETURN_IF_ERROR(EnsureDirectory(fs, derived));
  const std::string target = JoinPath(derived, commit.uuid.ToString());
  const std::string temporary = target + ".tmp-" + RandomSuffix();
  const auto build = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(temporary));
    TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(JoinPath(temporary, "index")));
    CommitRecord record = commit;
    record.files.clear();
    TENSORMOUNT_ASSIGN_OR_RETURN(CommitRecord::Entry entry,
                                 CheckpointIndex::WriteSst(fs, content, commit.content_root,
                                                           temporary, std::string(kIndexName)));
    record.files.push_back(std::move(entry));
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(temporary, "RECORD"), EncodeCommit(record)));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(JoinPath(temporary, "index")));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(temporary));
    Status moved = fs.RenameNoReplace(temporary, target);
    if (moved.code() == Code::kAlreadyExists) {
      // A derived copy is never the truth: an older one, perhaps damaged too, gives way.
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(target));
      moved = fs.RenameNoReplace(temporary, target);
    }
    TENSORMOUNT_RETURN_IF_ERROR(moved);
    return fs.SyncDirectory(derived);
  };
  const Status built = build();
  if (!built.ok()) (void)fs.RemoveTree(temporary);  // Gc takes what stays.
  return built.WithContext("rebuild the index of " + directory);
}

}  // namespace tensormount::layout

namespace tensormount {

Result<std::shared_ptr<const CheckpointIndex>> OpenDerivedIndex(FileSystem& fs,
                                                                const std::string& directory,
                                                                const CommitRecord& commit) {
  const std::string derived = layout::DerivedDirectory(directory, commit.uuid);
  const std::string path = JoinPath(derived, "RECORD");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, fs.ReadFile(path, kMaxCommitBytes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit decoded, DecodeCommit(bytes, path));
  if (decoded.record.uuid != commit.uuid || decoded.record.content_root != commit.content_root) {
    return Status(Code::kDataLoss, path + ": belongs to another checkpoint");
  }
  // It stands in for one that is damaged: a second damage must show now, not at some later read.
  return CheckpointIndex::OpenSst(fs, derived, decoded.record,
                                  {.check_bytes = ~std::uint64_t{0}, .again = {}});
}

}  // namespace tensormount
