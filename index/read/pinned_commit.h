// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_PINNED_COMMIT_H_
#define TENSORMOUNT_INDEX_READ_PINNED_COMMIT_H_

#include <memory>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"

// Readers lock a checkpoint, so that it is not deleted while they read, even if it is renamed or
// removed.

// A removal moves a checkpoint to .trash. Gc takes the same lock exclusively before it deletes
// anything there (without locks it deletes only with --grace). If a reader has the lock, gc keeps
// the checkpoint; a reader that comes later gets kStale instead of half a checkpoint.
namespace tensormount {

// A reader's lock on a checkpoint: its directory and the open COMMIT. Keep the object as long as
// any file of the checkpoint is read.
struct PinnedCommit {
  // Result of FileSystem::PinDirectory: opens below this path reach the same directory even after
  // it was renamed, removed or replaced.
  std::shared_ptr<const std::string> directory;
  std::unique_ptr<File> file;  // COMMIT; has the shared lock, if any, until closed.
  FileInfo info;               // State of COMMIT under the lock.
};

// Pins the directory and locks COMMIT. `pinned` is the directory if the caller has pinned it
// already, else null. On a filesystem without locks, succeeds without a lock and logs that once.
// kNotFound: no COMMIT. kStale: gc is deleting the checkpoint or has deleted it, or a repair is
// replacing COMMIT.
Result<PinnedCommit> PinCommit(FileSystem& fs, const std::string& directory,
                               std::shared_ptr<const std::string> pinned = nullptr);

// Whether a lock failed because the filesystem has no locks (Lustre without -o flock, NFS version 3
// without its lock daemon), and not because another process has the lock.
bool HasNoLocks(const Status& locked);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PINNED_COMMIT_H_
