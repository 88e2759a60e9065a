// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_
#define TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_

#include <string_view>

#include "index/records/commit_record.h"

// Names in a store (docs/format.md, "Store").

namespace tensormount::store_paths {

// No checkpoint may be called so: names of checkpoints have no leading dot, and "store.json" is
// refused.
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

// Whether `name`, in a folder that has a staging.json, is there because the folder is or was a
// shared staging, and belongs to no checkpoint.
// Shared by publish, verify and gc, which must agree on it: what one of them took for a leftover
// and another for a file of the checkpoint would be deleted or reported wrongly.
bool IsSharedLeftover(std::string_view name);

}  // namespace tensormount::store_paths

#endif  // TENSORMOUNT_INDEX_RECORDS_STORE_PATHS_H_
