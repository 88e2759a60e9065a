// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_PINNED_COMMIT_H_
#define TENSORMOUNT_INDEX_READ_PINNED_COMMIT_H_

#include <memory>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"

// How readers hold a checkpoint: nobody deletes it while they read, whatever becomes of its name.

// Gc takes the same lock alone before it deletes anything, and moves what it deletes to .trash
// first. So a reader that has the lock keeps the checkpoint, and one that comes too late is told
// kStale instead of finding half of it.
namespace tensormount {

// Keep it as long as anything of the checkpoint is read.
struct PinnedCommit {
  // FileSystem::PinDirectory: everything is opened below this very folder, which may be renamed,
  // removed or replaced.
  std::shared_ptr<const std::string> directory;
  std::unique_ptr<File> file;  // COMMIT. The shared lock on it ends with the file.
  FileInfo info;               // Of COMMIT, once the lock was held.
};

// `pinned`: the folder where the caller has pinned it; null: done here. kNotFound: there is no
// COMMIT; kStale: gc deletes the checkpoint, or has.
Result<PinnedCommit> PinCommit(FileSystem& fs, const std::string& directory,
                               std::shared_ptr<const std::string> pinned = nullptr);

// Whether a lock was refused because the filesystem has none (some network filesystems: Lustre
// without -o flock, NFS version 3 without its lock daemon), not because somebody holds it.
bool HasNoLocks(const Status& locked);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PINNED_COMMIT_H_
