// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_STORE_MOVES_H_
#define TENSORMOUNT_INDEX_STORE_STORE_MOVES_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/commit_record.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

// Steps that several operations on a store share.

namespace tensormount::store_moves {

// The entries of a directory; none if it does not exist.
Result<std::vector<DirectoryEntry>> ListIfExists(FileSystem& fs, const std::string& path);

// Reads COMMIT without checking its content.
Result<std::string> ReadCommitBytes(FileSystem& fs, const std::string& directory);
Result<DecodedCommit> ReadCommit(FileSystem& fs, const std::string& directory);

// The uuid of a staging or of an entry of .trash: from its file UUID or, if that has no uuid, from
// COMMIT. At every moment of a publish one of the two files has the uuid. kNotFound: neither file
// exists, or the directory does not exist.
Result<Uuid> ReadFolderUuid(FileSystem& fs, const std::string& directory);

// The reason why store.json is unusable: kNotFound (missing) or kDataLoss (damaged). OK in all
// other cases: store.json is usable, could not be read, or has a newer format.
Status SuperblockDamage(FileSystem& fs, const std::string& store);
// Creates a new store.json for a store that lost it. A damaged file is renamed to a name that gc
// removes.
Status RemakeSuperblock(FileSystem& fs, const std::string& store);

// Renames a directory of this store into .trash and returns its new path. The new name is the uuid
// and `suffix`, or "unreadable.<hex>" if the uuid cannot be read; if it is taken, a random part is
// added. Adds a mark with the time and the checkpoint's `name` (empty: unknown). kNotFound: the
// directory does not exist. Not durable before a SyncMovedFolder of the caller.
Result<std::string> MoveToTrash(FileSystem& fs, const std::string& store, const std::string& from,
                                std::string_view suffix, std::string_view name = {});
// The path in .trash of the directory with the device and inode of `folder`. kNotFound: there is
// none.
Result<std::string> FindInTrash(FileSystem& fs, const std::string& store, const FileInfo& folder);
// Moves `entry`, a path in .trash, to STORE/NAME durably. kNotFound: `entry` does not exist.
// kAlreadyExists: the name is taken.
Status PutBack(FileSystem& fs, const std::string& store, const std::string& name,
               const std::string& entry);
// Frees the space of an aborted staging at `entry` in .trash: deletes the files of its data/, or
// only `names` ("data/x"), durably. Errors are ignored. The directories are left to gc, which syncs
// the whole filesystem after deletions. Without that, on a filesystem without a journal, a save
// could get the inode of a deleted directory, and after a power failure e2fsck could delete its
// directory.
void DeleteData(FileSystem& fs, const std::string& entry);
void DeleteData(FileSystem& fs, const std::string& entry, std::span<const std::string> names);
// Path of the mark of a trash entry, a file with the time at which the entry was moved to .trash.
std::string TrashMarkPath(const std::string& entry);
// Writes the mark of a trash entry: a file with the entry's old name, whose mtime is now. Failures
// are ignored, because gc creates missing marks.
void MarkTrashed(FileSystem& fs, const std::string& entry, std::string_view name = {});
// Notes in the mark of a trash entry that rules removed the checkpoint `name`, or that a save
// replaced it, so that a later one frees it without a grace period. Failures are ignored: the grace
// period then applies.
void MarkRemovedByRules(FileSystem& fs, const std::string& entry, const std::string& name);
bool IsRemovedByRules(FileSystem& fs, const std::string& entry);
// The old name in the mark of a trash entry; empty if it is unknown.
std::string NameInMark(FileSystem& fs, const std::string& entry);

// Result of SweepShared.
struct SweptShared {
  std::vector<std::string> data_files;  // Paths below the checkpoint.
  // Size of those data_files that have no other link.
  std::uint64_t bytes = 0;
};
// Removes leftovers of a shared staging from the published checkpoint: names of IsSharedLeftover,
// files of data/ that COMMIT does not list, and staging.json last. Does nothing if there is no
// staging.json. kDataLoss, and nothing is removed, if COMMIT and staging.json have different uuids.
// With `dry_run`, only reports the leftovers. Only gc calls SweepShared, and repeats it after a
// failure.
Result<SweptShared> SweepShared(FileSystem& fs, const std::string& directory, bool dry_run = false);

// Where the directory with the uuid of a save was found.
enum class UuidLocation {
  kPublished,  // At STORE/NAME.
  kRemoved,    // In .trash, and was published.
  kAborted,    // In .trash, and was never published.
  kStaging,    // At its path in .staging.
  // All directories could be read, and none has the uuid. It may have moved during the search.
  kNowhere,
  // Some directory could not be read, and the others do not have the uuid.
  kUnreadable,
};
UuidLocation Locate(FileSystem& fs, const Staging& staging);

// Creates the work directory `folder` in .staging/ if it is missing, and takes the exclusive lock
// of its file `lock`, which gc checks. The lock is released when the result is destroyed. On
// filesystems without locks, no lock is taken. kBusy "FOLDER: `busy`": another process has the
// lock.
Result<std::unique_ptr<File>> LockWorkFolder(FileSystem& fs, const std::string& folder,
                                             std::string_view busy);

// Makes the claim of a generation durable: syncs the directory .generations/N, and .generations,
// which contains its name. N itself must be synced: on a filesystem without a journal, a power
// failure could otherwise leave a block of a deleted directory in it, with old names of files.
Status SyncClaim(FileSystem& fs, const std::string& store, std::uint64_t generation);

// Whether `path` is a directory without entries. Symbolic links are not followed.
bool IsEmptyDirectory(FileSystem& fs, const std::string& path);

// Whether this error of a hard link comes from a limit or rule of the file or the filesystem. The
// caller can then copy the file.
bool IsLinkRefused(const Status& status);
}  // namespace tensormount::store_moves

#endif  // TENSORMOUNT_INDEX_STORE_STORE_MOVES_H_
