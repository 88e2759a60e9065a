// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_LAYOUT_H_
#define TENSORMOUNT_INDEX_STORE_LAYOUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/commit_record.h"
#include "index/content.h"
#include "index/store.h"

// What store*.cc share: names on disk (docs/format.md, "Store") and the few moves that more than
// one operation makes.

namespace tensormount::layout {

inline constexpr std::string_view kSuperblockFile = "store.json";
inline constexpr std::string_view kStagingFolder = ".staging";
inline constexpr std::string_view kTrashFolder = ".trash";
inline constexpr std::string_view kDerivedFolder = ".derived";
inline constexpr std::string_view kGenerationsFolder = ".generations";
inline constexpr std::string_view kCommitFile = kCommitName;
inline constexpr std::string_view kUuidFile = "UUID";  // In a staging that has no COMMIT yet.
inline constexpr std::string_view kManifestSuffix = ".tmm";
// Of a staging that several writers share (docs/format.md, "Staging of mounts"): makes it one.
inline constexpr std::string_view kSharedFile = "staging.json";
inline constexpr std::string_view kLockFile = "lock";  // Beside it; writers and publishers lock it.
// In .trash: UUID.aborted was never published, UUID was. Beside each stands ENTRY.since, a file
// whose mtime says since when.
inline constexpr std::string_view kAbortedSuffix = ".aborted";
inline constexpr std::string_view kSinceSuffix = ".since";

// The entries of a folder; none where there is no such folder.
Result<std::vector<DirectoryEntry>> ListIfThere(FileSystem& fs, const std::string& path);

// Whether a lock was refused because the filesystem has none (some network filesystems: Lustre
// without -o flock, NFS version 3 without its lock daemon), not because somebody holds it.
bool HasNoLocks(const Status& locked);
// The shared lock of a reader on COMMIT: kBusy where gc deletes it. Where there are no locks it is
// ok without one; the first time that is logged.
Status LockAsReader(File& commit);

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

// mkdir where it is missing.
Status EnsureDirectory(FileSystem& fs, const std::string& path);

// Renames a folder of this store into .trash under its uuid and `suffix` (a name of its own where
// it has none), marks since when it is there, and returns its new path. kNotFound where it is gone.
// Not durable: the caller calls SyncMovedFolder.
Result<std::string> MoveToTrash(FileSystem& fs, const std::string& store, const std::string& from,
                                std::string_view suffix);
// The mark beside a trash entry. Gc makes it where it is missing, so failing is no harm.
void MarkTrashed(FileSystem& fs, const std::string& entry);

// Whether `name`, in a folder that has a staging.json, is there because the folder is or was a
// shared staging, and belongs to no checkpoint.
bool IsSharedLeftover(std::string_view name);
// Removes from a published checkpoint what its shared staging left there, staging.json last: names
// that IsSharedLeftover, and files of data/ and manifest/ that COMMIT does not list. Nothing where
// there is no staging.json. Failing is no harm: gc does it again. Only gc calls it.
Status SweepShared(FileSystem& fs, const std::string& directory);

// Where the uuid of a save is.
enum class Place {
  kPublished,   // At STORE/NAME.
  kRemoved,     // In .trash, after it was published.
  kAborted,     // In .trash, never published.
  kStaging,     // At the staging's place.
  kNowhere,     // Every place could be read, and it is not there (or moved while we looked).
  kUnreadable,  // Some place could not be read, and the others do not have it.
};
Place Locate(FileSystem& fs, const Staging& staging);

// 8 random hex digits.
std::string RandomSuffix();
std::int64_t NowSeconds();

// An index rebuilt by fsck: STORE/.derived/UUID/ with a RECORD (an encoded commit record whose only
// file is the index) beside it. `directory` is the checkpoint's, below its store.
std::string DerivedDirectory(const std::string& directory, const Uuid& uuid);
Status WriteDerivedIndex(FileSystem& fs, const std::string& directory, const CommitRecord& commit);

}  // namespace tensormount::layout

namespace tensormount {

// The derived index of a checkpoint, checked against `commit`: same uuid and content root, its own
// hashes whole. kNotFound where there is none; never the truth.
Result<std::shared_ptr<const CheckpointIndex>> OpenDerivedIndex(FileSystem& fs,
                                                                const std::string& directory,
                                                                const CommitRecord& commit);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_LAYOUT_H_
