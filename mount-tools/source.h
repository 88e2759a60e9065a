// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_
#define TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/checkpoint.h"
#include "mount-tools/terminal.h"

namespace tensormount::tools {

// What a user may name as SOURCE.
struct Source {
  enum class Kind { kCheckpoint, kStore, kSafetensors } kind = Kind::kCheckpoint;
  std::string path;  // Resolved: symlinks and "latest" are taken once.
};

// kNotFound where there is nothing; kUnsupported for a folder that is neither a checkpoint nor a
// store (formats of others are not read yet).
Result<Source> ResolveSource(FileSystem& fs, const std::string& text);

// Opens a source as one checkpoint; of a store the latest, said in a note. Warnings of the open
// (damaged copy, rebuilt index) are printed.
Result<std::shared_ptr<OpenedCheckpoint>> OpenSource(FileSystem& fs, const std::string& text,
                                                     Terminal& terminal);

// --map RULES.json: no map where the option was not given (empty `path`). kInvalidArgument names
// the file and the rule.
Result<std::shared_ptr<const KeyMap>> ReadKeyMap(FileSystem& fs, const std::string& path);

// "STORE/NAME" in its two parts; a trailing slash is ignored. kInvalidArgument without a slash is
// not an error: the store is then ".".
struct StoreAndName {
  std::string store;
  std::string name;
};
Result<StoreAndName> SplitCheckpointPath(const std::string& path);

// fnmatch without FNM_PATHNAME: '*' crosses '/'.
bool GlobMatches(const std::string& glob, const std::string& text);

// Where a tensor's chunks lie, in words: "tensor-file", "rank-shard", "pack", or "mixed".
std::string PlacementOf(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_
