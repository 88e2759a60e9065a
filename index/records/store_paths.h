// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_
#define TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_

#include <string>
#include <string_view>

#include "base/file_system.h"
#include "index/records/commit_record.h"

// Names in a store (docs/format.md, "Store").

namespace tensormount::store_paths {

// No checkpoint may be called so: names of checkpoints have no leading dot, and "store.json" and
// "policy.json" are refused.
inline constexpr std::string_view kSuperblockFile = "store.json";
inline constexpr std::string_view kPolicyFile = "policy.json";
inline constexpr std::string_view kStagingFolder = ".staging";
inline constexpr std::string_view kTrashFolder = ".trash";
inline constexpr std::string_view kDerivedFolder = ".derived";
inline constexpr std::string_view kGenerationsFolder = ".generations";
inline constexpr std::string_view kPinsFolder = ".pins";
inline constexpr std::string_view kEphemeralFolder = ".ephemeral";
inline constexpr std::string_view kCommitFile = kCommitName;
inline constexpr std::string_view kUuidFile = "UUID";  // In a staging that has no COMMIT yet.
// In a staging whose save links files: the uuids of the checkpoints that these are of.
inline constexpr std::string_view kBaseFile = "BASE";
inline constexpr std::string_view kManifestSuffix = ".tmm";
// Of a staging that several writers share (docs/format.md, "Staging of mounts"): makes it one.
inline constexpr std::string_view kSharedFile = "staging.json";
inline constexpr std::string_view kLockFile = "lock";  // Beside it; writers and publishers lock it.
// ".copy-<uuid>" in .staging/: where a checkpoint of another store is copied to (docs/format.md,
// "Copies"). No name of a checkpoint begins with a dot, so it is nobody's staging.
inline constexpr std::string_view kCopyPrefix = ".copy-";
// In .staging/: where a repair builds files (docs/format.md, "Repair"). One for a store.
inline constexpr std::string_view kRepairFolder = ".repair";
// In .trash: UUID.aborted was never published, UUID was. Beside each stands ENTRY.since, a file
// whose mtime says since when.
inline constexpr std::string_view kAbortedSuffix = ".aborted";
inline constexpr std::string_view kSinceSuffix = ".since";

// Whether `name`, in a folder that has a staging.json, is there because the folder is or was a
// shared staging, and belongs to no checkpoint.
// Shared by publish, verify and gc, which must agree on it: what one of them took for a leftover
// and another for a file of the checkpoint would be deleted or reported wrongly.
bool IsSharedLeftover(std::string_view name);

// Whether a folder that has no store.json evidently is a store all the same: .generations/ or
// .staging/ is in it, or a folder with COMMIT and manifest/ directly below. What cannot be looked
// at is no evidence. One listing, and at most three stats an entry.
bool EvidentlyStore(FileSystem& fs, const std::string& folder);
// What to tell of one: where store.json went, and what makes it again.
std::string LostSuperblock(const std::string& folder);

}  // namespace tensormount::store_paths

#endif  // TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_
