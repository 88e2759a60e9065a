// SPDX-License-Identifier: Apache-2.0
// Store::AbortOrDecide of store.h: if the ranks of a save cannot agree, the store decides whether
// the save was published. Surviving ranks call it while a publisher may still be running. The first
// rename of the staging, to its published name or to .trash, decides (docs/format.md, "The store as
// arbiter").
#include <chrono>

#include "index/records/store_paths.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace store_moves {

UuidLocation Locate(FileSystem& fs, const Staging& staging) {
  const std::string trash = JoinPath(staging.store, store_paths::kTrashFolder);
  const std::string uuid = staging.uuid.ToString();
  bool unreadable = false;
  const auto holds = [&](const Result<Uuid>& found) {
    if (found.ok()) return found.value() == staging.uuid;
    unreadable = unreadable || found.status().code() != Code::kNotFound;
    return false;
  };
  const auto committed = [&](const std::string& directory) -> Result<Uuid> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit commit, ReadCommit(fs, directory));
    return commit.record.uuid;
  };
  if (holds(committed(JoinPath(staging.store, staging.name)))) return UuidLocation::kPublished;
  if (holds(ReadFolderUuid(fs, JoinPath(trash, uuid + std::string(store_paths::kAbortedSuffix))))) {
    return UuidLocation::kAborted;
  }
  if (holds(committed(JoinPath(trash, uuid)))) return UuidLocation::kRemoved;
  // After an exchange, the replaced checkpoint is at the staging's path; it has another uuid, so it
  // does not match here.
  if (holds(ReadFolderUuid(fs, staging.directory))) return UuidLocation::kStaging;
  return unreadable ? UuidLocation::kUnreadable : UuidLocation::kNowhere;
}

}  // namespace store_moves

Result<Verdict> Store::AbortOrDecide(const Staging& staging) const {
  using store_moves::UuidLocation;
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(staging.name));
  FileSystem& fs = *fs_;
  const std::string trash = JoinPath(path_, store_paths::kTrashFolder);
  const std::string staging_folder = JoinPath(path_, store_paths::kStagingFolder);
  const std::string aborted =
      JoinPath(trash, staging.uuid.ToString() + std::string(store_paths::kAbortedSuffix));
  // Directories are synced before a verdict is returned, so that a power failure cannot reverse it.
  const auto durably = [&](Verdict verdict, const std::string& folder,
                           const std::string& to) -> Result<Verdict> {
    const Status synced = fs.SyncMovedFolder(folder, to, staging_folder);
    if (!synced.ok()) {
      return Status(Code::kUnknown,
                    std::string(verdict == Verdict::kCommitted ? "published" : "aborted") +
                        ", but a power failure may undo it: " + synced.message());
    }
    return verdict;
  };
  Status why;
  // Each pass of the loop returns a verdict or moves the staging. A pass that does neither is
  // repeated: a directory could not be read or renamed, or the staging moved during the search,
  // which then may find it nowhere.
  for (int round = 0; round < 16; ++round) {
    switch (store_moves::Locate(fs, staging)) {
      case UuidLocation::kPublished:
        return durably(Verdict::kCommitted, CheckpointPath(staging.name), path_);
      case UuidLocation::kRemoved:
        return durably(Verdict::kCommitted, JoinPath(trash, staging.uuid.ToString()), trash);
      case UuidLocation::kAborted:
        return durably(Verdict::kAborted, aborted, trash);
      case UuidLocation::kStaging: {
        const Status made = fs.EnsureDirectory(trash);
        const Status moved = made.ok() ? fs.RenameNoReplace(staging.directory, aborted) : made;
        if (!moved.ok()) {
          why = moved;
          break;
        }
        // If the publisher exchanged the staging with an old checkpoint between Locate and the
        // rename, the old checkpoint is now at `aborted`. It is moved on to the entry of its own
        // uuid.
        const Result<Uuid> got = store_moves::ReadFolderUuid(fs, aborted);
        if (got.ok() && got.value() != staging.uuid) {
          // No suffix, because this checkpoint was published and not aborted.
          (void)store_moves::MoveToTrash(fs, path_, aborted, "");
        } else {
          store_moves::MarkTrashed(fs, aborted);
        }
        continue;
      }
      case UuidLocation::kNowhere:
        why =
            Status(Code::kNotFound, "the checkpoint is neither at " + CheckpointPath(staging.name) +
                                        " nor in " + trash + " nor at " + staging.directory);
        break;
      case UuidLocation::kUnreadable:
        why = Status(Code::kUnavailable, "one of " + CheckpointPath(staging.name) + ", " + trash +
                                             " and " + staging.directory + " cannot be read");
        break;
    }
    fs.SleepFor(std::chrono::milliseconds(1 << (round < 4 ? round : 4)));
  }
  return Status(Code::kUnknown, "cannot tell whether " + staging.name + " (" +
                                    staging.uuid.ToString() + ") was published: " + why.message() +
                                    "; run `tensormount fsck " + path_ + "`");
}

}  // namespace tensormount
