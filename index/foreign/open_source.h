// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_
#define TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_

#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"

// What a user may name as SOURCE, found and opened in one way for the library, the mount and
// every command.

namespace tensormount {

// Told apart by names in the folder, never by what the user calls it.
enum class SourceKind {
  kStore,         // A store of ours.
  kCheckpoint,    // A checkpoint of ours (an adopted one too).
  kForeign,       // A checkpoint in a foreign format, a folder or a file.
  kForeignSteps,  // A training directory of such checkpoints.
};

// Finding and opening are two steps, since commands differ in what they take: `gc` wants a store,
// `cat` one checkpoint, a mount either.
struct FoundSource {
  SourceKind kind = SourceKind::kStore;
  std::string path;  // Resolved: symlinks and "latest" are taken once.
  // Damaged checkpoints that were passed over for the latest, and such. OpenFound makes them
  // warnings().
  std::vector<std::string> warnings = {};
};

// `roots`: folders that the operator named with --root: data of adopted checkpoints and links of
// foreign ones may lie in them. kNotFound; kUnsupported for what is none of these, with what it is.
// The order of the questions: COMMIT (ours), store.json, a foreign format, a training directory.
// Reads names, and at most the small files that tell formats apart.
Result<FoundSource> FindSource(FileSystem& fs, const std::string& text,
                               const std::vector<std::string>& roots);

// Opens a kCheckpoint or kForeign. For the others kInvalidArgument: choose one first
// (LatestOf). `whole_only`: of a foreign one that lacks something, only the tensors that are whole
// (LeaveOutLost).
Result<std::shared_ptr<OpenedCheckpoint>> OpenFound(FileSystem& fs, const FoundSource& source,
                                                    const std::vector<std::string>& roots,
                                                    bool whole_only = false);

// The latest checkpoint of a kStore or kForeignSteps; others as they are. kNotFound: it has none.
// Resolved once here: what is published later does not change the answer that somebody works with.
Result<FoundSource> LatestOf(FileSystem& fs, const FoundSource& source,
                             const std::vector<std::string>& roots);

// FindSource and OpenFound.
// A kStore or kForeignSteps is refused as OpenFound says; RUN/latest names one.
Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots);

// The same for who makes something of it that could not be told from a whole one: kDataLoss names
// what the files of a foreign checkpoint lack, unless `partial`, which takes the rest.
Result<std::shared_ptr<OpenedCheckpoint>> OpenWhole(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots,
                                                    bool partial);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_
