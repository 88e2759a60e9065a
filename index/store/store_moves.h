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

// The few steps that more than one operation on a store makes.

namespace tensormount::store_moves {

// The entries of a folder; none where there is no such folder.
Result<std::vector<DirectoryEntry>> ListIfThere(FileSystem& fs, const std::string& path);

// COMMIT as it stands there, not looked at.
Result<std::string> ReadCommitBytes(FileSystem& fs, const std::string& directory);
Result<DecodedCommit> ReadCommit(FileSystem& fs, const std::string& directory);

// Of a staging or of anything in .trash: its file UUID, or else its COMMIT. At every moment of a
// publish one of the two can be read. kNotFound where neither is there (or the folder is gone).
Result<Uuid> ReadFolderUuid(FileSystem& fs, const std::string& directory);

// Why store.json cannot be used: kNotFound, or the decoder's kDataLoss of what was read. Ok: it
// can, or it could not be read, or is of a newer format.
Status SuperblockDamage(FileSystem& fs, const std::string& store);
// Another store.json for a store that lost its own; what stands there is kept under a name that gc
// removes.
Status RemakeSuperblock(FileSystem& fs, const std::string& store);

// Renames a folder of this store into .trash under its uuid and `suffix` (a name of its own where
// it has none), marked with the time and with `name`, what it was called (empty: not said), and
// returns its new path. kNotFound where it is gone. Not durable: the caller calls SyncMovedFolder.
Result<std::string> MoveToTrash(FileSystem& fs, const std::string& store, const std::string& from,
                                std::string_view suffix, std::string_view name = {});
// The path in .trash of the folder that is this one by device and inode. kNotFound: none is.
Result<std::string> FindInTrash(FileSystem& fs, const std::string& store, const FileInfo& folder);
// Moves what lies at `entry`, a path in .trash, to STORE/NAME, durably. kNotFound: it is not there
// any more; kAlreadyExists: the name is taken.
Status PutBack(FileSystem& fs, const std::string& store, const std::string& name,
               const std::string& entry);
// Frees the space of an aborted staging that was moved to `entry`: deletes the files of its data/,
// or those of them that `names` has ("data/x"), and makes that durable. Folders stay for gc, which
// syncs the filesystem: where there is no journal, a save could get the inode of a folder that is
// deleted here, and lose it to a repair after a power cut. Best effort.
void DeleteData(FileSystem& fs, const std::string& entry);
void DeleteData(FileSystem& fs, const std::string& entry, std::span<const std::string> names);
// The path of the mark beside a trash entry.
std::string MarkOf(const std::string& entry);
// The mark beside a trash entry: since when it is there, and what it was called. Gc makes it where
// it is missing, so failing is no harm.
void MarkTrashed(FileSystem& fs, const std::string& entry, std::string_view name = {});
// What the mark says that it was called; empty where it says nothing.
std::string NameInMark(FileSystem& fs, const std::string& entry);

// Removes from a published checkpoint what its shared staging left there, staging.json last: names
// that IsSharedLeftover, and files of data/ and manifest/ that COMMIT does not list. Nothing where
// there is no staging.json. kDataLoss, and nothing is removed, where COMMIT is of another
// checkpoint than staging.json. Failing is no harm: gc does it again. Only gc calls it.
struct SweptShared {
  std::vector<std::string> data_files;  // Below the checkpoint.
  std::uint64_t bytes = 0;              // Those of data_files that no other name keeps.
};
// `dry_run`: says what it would remove.
Result<SweptShared> SweepShared(FileSystem& fs, const std::string& directory, bool dry_run = false);

// Where the uuid of a save is.
enum class UuidLocation {
  kPublished,   // At STORE/NAME.
  kRemoved,     // In .trash, after it was published.
  kAborted,     // In .trash, never published.
  kStaging,     // At its path in .staging.
  kNowhere,     // Every folder could be read, and it is not there (or moved while we looked).
  kUnreadable,  // Some folder could not be read, and the others do not have it.
};
UuidLocation Locate(FileSystem& fs, const Staging& staging);

// Makes the folder `folder` in .staging/ where it is missing, and holds the exclusive lock of its
// file `lock`, which gc looks for, as long as the result lives; without a lock where the filesystem
// has none. kBusy "FOLDER: `busy`" where somebody else holds it.
Result<std::unique_ptr<File>> LockWorkFolder(FileSystem& fs, const std::string& folder,
                                             std::string_view busy);

// Whether a hard link is refused for what the file or the filesystem is: no failure of whoever
// wanted it, as the file can be copied.
bool LinkIsRefused(const Status& status);
}  // namespace tensormount::store_moves

#endif  // TENSORMOUNT_INDEX_STORE_STORE_MOVES_H_
