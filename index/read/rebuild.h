// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_REBUILD_H_
#define TENSORMOUNT_INDEX_READ_REBUILD_H_

#include <string>

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/records/commit_record.h"
#include "index/records/manifest.h"

// The steps of RebuildInventory. Verify uses them, too.

namespace tensormount {

// Opens a file that COMMIT lists, below the checkpoint's `directory`. No symlink is followed.
// kDataLoss: the file is missing ("data/x: the file is missing") or not a regular file. Any other
// code: the open failed for another reason (ProvesDamage).
Result<std::unique_ptr<File>> OpenListedFile(FileSystem& fs, const std::string& directory,
                                             const std::string& name);
// Reads a manifest that COMMIT lists. Its length and hash are compared with the entry in COMMIT
// before it is decoded. kDataLoss if they differ or the manifest is malformed; kUnsupported for a
// newer version.
Result<Manifest> ReadListedManifest(FileSystem& fs, const std::string& directory,
                                    const CommitRecord::Entry& entry);
// Finishes the merge and compares the result with COMMIT: identity, completeness, content root,
// file roots. kDataLoss if one of these differs. `merger` is empty afterwards.
Result<Inventory> FinishRebuild(InventoryMerger& merger, const CommitRecord& commit);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_REBUILD_H_
