// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_DERIVED_INDEX_H_
#define TENSORMOUNT_INDEX_READ_DERIVED_INDEX_H_

#include <memory>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/checkpoint_index.h"
#include "index/records/commit_record.h"

// The derived index of a checkpoint, which fsck rebuilt: STORE/.derived/UUID/ has the index and a
// RECORD, an encoded commit record that lists only the index. A derived index is used only if the
// checkpoint's own index is damaged or missing. `directory` is the checkpoint's directory in its
// store.

namespace tensormount {

// Path of the derived index. The path contains "..", because the store is the parent of
// `directory`, which may be a path that a user typed.
std::string DerivedDirectory(const std::string& directory, const Uuid& uuid);
// Writes the derived index durably, replacing an older one. All manifests must be intact: they are
// read and merged in memory.
Status WriteDerivedIndex(FileSystem& fs, const std::string& directory, const CommitRecord& commit);
// Opens the derived index and checks it against `commit` (uuid, content root) and its own hashes.
// kNotFound if there is no derived index.
Result<std::shared_ptr<const CheckpointIndex>> OpenDerivedIndex(FileSystem& fs,
                                                                const std::string& directory,
                                                                const CommitRecord& commit);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_DERIVED_INDEX_H_
