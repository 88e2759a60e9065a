// SPDX-License-Identifier: Apache-2.0
// The folder and the COMMIT of a checkpoint, held open: paths may be renamed and removed under a
// reader, which then still reads the checkpoint that it began with. Gc sees the lock and waits.
#include "index/read/pinned_commit.h"

#include <atomic>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "index/records/commit_record.h"

namespace tensormount {
namespace {

// kBusy where gc deletes it. Ok without a lock where there are none; the first time that is logged.
// Filesystems without locks are read all the same; gc there deletes only what has been in .trash
// for the grace that the operator vouches for.
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
    // "directory/." follows a symlink as the last component: a user may name a checkpoint by a
    // link.
    TENSORMOUNT_ASSIGN_OR_RETURN(commit.directory, fs.PinDirectory(JoinPath(directory, ".")));
  }
  Result<std::unique_ptr<File>> file =
      fs.OpenReadBelow(*commit.directory, std::string(kCommitName));
  if (file.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, directory + ": not a checkpoint: it has no COMMIT");
  }
  TENSORMOUNT_RETURN_IF_ERROR(file.status());
  commit.file = std::move(file).value();
  // The order open, lock, stat is what makes it safe: gc deletes COMMIT while it has the lock
  // alone, so whoever gets the lock and still sees a link to COMMIT has a checkpoint that stays.
  if (Status locked = LockAsReader(*commit.file); !locked.ok()) {
    // Only gc asks for it alone, and only for what was removed.
    if (locked.code() != Code::kBusy) return locked;
    return Status(Code::kStale, directory + ": it is being deleted");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(commit.info, commit.file->Stat());
  // Gc had it before we had the lock.
  if (commit.info.links == 0) return Status(Code::kStale, directory + ": it was deleted");
  return commit;
}

}  // namespace tensormount
