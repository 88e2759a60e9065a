// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_
#define TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_

#include <string>
#include <string_view>

#include "base/file_system.h"
#include "index/records/commit_record.h"

// Names in a store (docs/format.md, "Store").

namespace tensormount::store_paths {

// Files and directories of a store, and COMMIT of a checkpoint. A checkpoint cannot be named like
// an entry of the store: "store.json", "policy.json" and names with a leading dot are refused.
inline constexpr std::string_view kSuperblockFile = "store.json";
inline constexpr std::string_view kPolicyFile = "policy.json";
inline constexpr std::string_view kStagingFolder = ".staging";
inline constexpr std::string_view kTrashFolder = ".trash";
inline constexpr std::string_view kDerivedFolder = ".derived";
inline constexpr std::string_view kGenerationsFolder = ".generations";
// File in .generations/ (docs/format.md, "Known generations").
inline constexpr std::string_view kKnownFile = "known";
inline constexpr std::string_view kPinsFolder = ".pins";
inline constexpr std::string_view kEphemeralFolder = ".ephemeral";
// In a bucket: who changes what lies below a name (docs/format.md, "Stores in buckets").
inline constexpr std::string_view kClaimsFolder = ".claims";
inline constexpr std::string_view kCommitFile = kCommitName;
// File with the staging's uuid, in a staging without COMMIT.
inline constexpr std::string_view kUuidFile = "UUID";
// File in a staging whose save links data files: the uuids of the checkpoints that the linked files
// belong to.
inline constexpr std::string_view kBaseFile = "BASE";
inline constexpr std::string_view kManifestSuffix = ".tmm";
// File that marks a staging that several writers share (docs/format.md, "Staging of mounts").
inline constexpr std::string_view kSharedFile = "staging.json";
// Lock file: beside staging.json for writers and publishers, and in the work directories of copies
// and repairs.
inline constexpr std::string_view kLockFile = "lock";
// ".copy-<uuid>" in .staging/: work directory for copying a checkpoint from another store
// (docs/format.md, "Copies"). The leading dot keeps it apart from stagings.
inline constexpr std::string_view kCopyPrefix = ".copy-";
// Work directory of repairs in .staging/ (docs/format.md, "Repair"). A store has one.
inline constexpr std::string_view kRepairFolder = ".repair";
// Suffixes in .trash. A checkpoint that was published has the entry UUID, an unpublished one
// UUID.aborted. The mtime of the file ENTRY.since is the time at which ENTRY was moved to .trash.
inline constexpr std::string_view kAbortedSuffix = ".aborted";
inline constexpr std::string_view kSinceSuffix = ".since";

// Whether `name`, in a directory with staging.json, is left from a shared staging and belongs to no
// checkpoint. Publish, verify and gc must agree, or one would delete or report a file that another
// needs.
bool IsSharedLeftover(std::string_view name);

// Whether a directory without store.json is evidently a store: it has .generations/ or .staging/,
// or a checkpoint, that is, a directory with COMMIT and manifest/. Unreadable entries are ignored.
// Costs one listing and at most three stat calls for each entry.
bool LooksLikeStore(FileSystem& fs, const std::string& folder);
// Message for a directory that LooksLikeStore: store.json is missing, and how to restore it.
std::string MissingSuperblockMessage(const std::string& folder);

}  // namespace tensormount::store_paths

#endif  // TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_
