// SPDX-License-Identifier: Apache-2.0
// Keeps a checkpoint's directory and COMMIT open, so that a reader continues with the same
// checkpoint after a rename or removal. Gc sees the lock and keeps the checkpoint.
#include "index/read/pinned_commit.h"

#include <atomic>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "index/records/commit_record.h"

namespace tensormount {
namespace {

// Takes the reader's lock. kBusy while gc deletes the checkpoint, or a repair replaces COMMIT. On
// filesystems without locks the function succeeds, and logs that once. There gc deletes only
// checkpoints that have been in .trash for as long as the operator specifies with --grace.
Status LockAsReader(const FileSystem& fs, File& commit) {
  const Status lockable = fs.Need(Ability::kLocks, commit.path());
  const Status locked = lockable.ok() ? commit.TryLockShared() : lockable;
  if (!HasNoLocks(locked)) return locked;
  if (!fs.Can(Ability::kWrite)) return Status();  // Behind a server, where no gc runs.
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    Log(LogLevel::kWarning, locked.message() +
                                ": reading without a lock; gc cannot see readers there and deletes "
                                "removed checkpoints only with --grace");
  }
  return Status();
}

}  // namespace

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

Result<PinnedCommit> PinCommit(FileSystem& fs, const std::string& directory,
                               std::shared_ptr<const std::string> pinned) {
  PinnedCommit commit;
  commit.directory = std::move(pinned);
  if (commit.directory == nullptr) {
    // "directory/." follows a symlink as the last component, because a user may name a checkpoint
    // by a symlink.
    TENSORMOUNT_ASSIGN_OR_RETURN(commit.directory, fs.PinDirectory(JoinPath(directory, ".")));
  }
  Result<std::unique_ptr<File>> file =
      fs.OpenReadBelow(*commit.directory, std::string(kCommitName));
  if (file.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, directory + ": not a checkpoint: it has no COMMIT");
  }
  TENSORMOUNT_RETURN_IF_ERROR(file.status());
  commit.file = std::move(file).value();
  // The order open, lock, stat matters: gc deletes COMMIT while it has the exclusive lock. If a
  // reader has the lock and the link count is above 0, the checkpoint stays.
  if (Status locked = LockAsReader(fs, *commit.file); !locked.ok()) {
    // Gc takes the exclusive lock on removed checkpoints, and a repair while it replaces COMMIT.
    if (locked.code() != Code::kBusy) return locked;
    return Status(Code::kStale, directory +
                                    ": the checkpoint is being deleted, or a repair is replacing "
                                    "its COMMIT; if the checkpoint still exists, try again");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(commit.info, commit.file->Stat());
  // A link count of 0 means that gc had the lock before us and deleted COMMIT, or that a repair
  // replaced COMMIT.
  if (fs.Can(Ability::kStamps) && commit.info.links == 0) {
    return Status(Code::kStale,
                  directory + ": the checkpoint was deleted, or a repair has replaced its COMMIT");
  }
  return commit;
}

}  // namespace tensormount
