// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_REBUILD_H_
#define TENSORMOUNT_INDEX_READ_REBUILD_H_

#include <string>

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/records/commit_record.h"
#include "index/records/manifest.h"

// The steps of RebuildInventory, which verify takes too.

namespace tensormount {

// Opens a file of a checkpoint of ours that COMMIT lists, below its folder `directory`; no symlink
// is followed. kDataLoss "data/x: the file is missing", or that something else stands in its place;
// other codes where it could not be opened, which says nothing about it.
Result<std::unique_ptr<File>> OpenListedFile(FileSystem& fs, const std::string& directory,
                                             const std::string& name);
// A manifest that COMMIT lists, checked against its entry. kDataLoss.
// Length and hash are compared before it is decoded.
Result<Manifest> ReadListedManifest(FileSystem& fs, const std::string& directory,
                                    const CommitRecord::Entry& entry);
// What was merged, checked against COMMIT: identity, completeness, content root, file roots.
// kDataLoss where any of these disagrees: an inventory that is not exactly the one that was
// published is none. `merger` is empty afterwards.
Result<Inventory> FinishRebuild(InventoryMerger& merger, const CommitRecord& commit);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_REBUILD_H_
