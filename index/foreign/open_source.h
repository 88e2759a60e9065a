// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_
#define TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_

#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"

// What a user may name as SOURCE, found and opened in one place for the library, the mount and
// every command.

namespace tensormount {

enum class SourceKind {
  kStore,         // A store of ours.
  kCheckpoint,    // A checkpoint of ours (an adopted one too).
  kForeign,       // A checkpoint in a foreign format, a folder or a file.
  kForeignSteps,  // A training directory of such checkpoints.
};

struct FoundSource {
  SourceKind kind = SourceKind::kStore;
  std::string path;  // Resolved: symlinks and "latest" are taken once.
  // Damaged checkpoints that were passed over for the latest. OpenFound makes them warnings().
  std::vector<std::string> warnings = {};
};

// `roots`: folders that the operator named with --root: data of adopted checkpoints and links of
// foreign ones may lie in them. kNotFound; kUnsupported for what is none of these, with what it is.
Result<FoundSource> FindSource(FileSystem& fs, const std::string& text,
                               const std::vector<std::string>& roots);

// Opens a kCheckpoint or kForeign. For the others kInvalidArgument: choose one first
// (LatestOf). `whole_only`: of a foreign one that lacks something, only the tensors that are whole
// (LeaveOutLost).
Result<std::shared_ptr<OpenedCheckpoint>> OpenFound(FileSystem& fs, const FoundSource& source,
                                                    const std::vector<std::string>& roots,
                                                    bool whole_only = false);

// The latest checkpoint of a kStore or kForeignSteps; others as they are. kNotFound: it has none.
Result<FoundSource> LatestOf(FileSystem& fs, const FoundSource& source,
                             const std::vector<std::string>& roots);

// FindSource and OpenFound.
Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_
