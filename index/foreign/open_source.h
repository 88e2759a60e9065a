// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_
#define TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_

#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"

// Finds and opens a SOURCE argument, in the same way for the library, mounts and all commands.

namespace tensormount {

// The kind of a source. The files in the directory decide it.
enum class SourceKind {
  kStore,         // A tensormount store.
  kCheckpoint,    // A tensormount checkpoint, which may be an adopted one.
  kForeign,       // A checkpoint in a foreign format: a directory or a file.
  kForeignSteps,  // A training directory with several foreign checkpoints.
};

// The result of FindSource. Finding and opening are separate, because commands accept different
// kinds: `gc` a store, `cat` one checkpoint, a mount both.
struct FoundSource {
  FileSystem* fs = nullptr;  // The file system of the source.
  SourceKind kind = SourceKind::kStore;
  // The resolved path, without symlinks and "latest". A weight index itself may be a symlink.
  std::string path;
  // Warnings of the search, such as damaged checkpoints that were skipped to find the latest.
  // OpenFound adds them to the warnings of the opened checkpoint.
  std::vector<std::string> warnings = {};
};

// Looks for COMMIT, store.json, a foreign format and a training directory, in this order. Reads
// only names and the small files that tell formats apart. `roots`: the --root directories, which
// may contain data of adopted checkpoints and targets of links. kNotFound: the path does not exist.
// kUnsupported: the path is not a source (the message describes it), or is in a store of a newer
// format.
Result<FoundSource> FindSource(FileSystem& fs, const std::string& text,
                               const std::vector<std::string>& roots);
// FindSource on the file system that `text` names (FileSystemFor).
Result<FoundSource> FindSource(const std::string& text, const std::vector<std::string>& roots);

// Opens a source of kind kCheckpoint or kForeign; kInvalidArgument for other kinds (call LatestOf
// first). `whole_only`: whether to remove incomplete tensors of a foreign checkpoint
// (RemoveIncompleteTensors).
Result<std::shared_ptr<OpenedCheckpoint>> OpenFound(const FoundSource& source,
                                                    const std::vector<std::string>& roots,
                                                    bool whole_only = false);

// The latest checkpoint of a kStore or kForeignSteps; other kinds are returned unchanged.
// kNotFound: there is no checkpoint.
Result<FoundSource> LatestOf(const FoundSource& source, const std::vector<std::string>& roots);

// Calls FindSource and OpenFound. `text` must name one checkpoint: the path RUN of a store or
// training directory is refused, and RUN/latest is its latest checkpoint.
Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots);
Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(const std::string& text,
                                                    const std::vector<std::string>& roots);

// Like OpenNamed, for commands whose output must be complete. kDataLoss: a foreign checkpoint lacks
// data, which the message names. With `partial`, incomplete tensors are left out instead.
Result<std::shared_ptr<OpenedCheckpoint>> OpenComplete(const std::string& text,
                                                       const std::vector<std::string>& roots,
                                                       bool partial);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_OPEN_SOURCE_H_
