// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_DERIVED_INDEX_H_
#define TENSORMOUNT_INDEX_READ_DERIVED_INDEX_H_

#include <memory>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/checkpoint_index.h"
#include "index/records/commit_record.h"

// An index that fsck rebuilt: STORE/.derived/UUID/ with a RECORD (an encoded commit record whose
// only file is the index) beside it. Never the truth. `directory` is the checkpoint's, below its
// store.

namespace tensormount {

// A path with ".." in it, for `directory` may be named by whoever opened it and the store is the
// folder above.
std::string DerivedDirectory(const std::string& directory, const Uuid& uuid);
// Replaces what stands there.
// Needs whole manifests, all of which are read and merged in memory. Durable when it returns.
Status WriteDerivedIndex(FileSystem& fs, const std::string& directory, const CommitRecord& commit);
// Checked against `commit`: same uuid and content root, its own hashes whole. kNotFound where there
// is none.
Result<std::shared_ptr<const CheckpointIndex>> OpenDerivedIndex(FileSystem& fs,
                                                                const std::string& directory,
                                                                const CommitRecord& commit);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_DERIVED_INDEX_H_
