// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_FOREIGN_FILE_H_
#define TENSORMOUNT_INDEX_READ_FOREIGN_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/inventory.h"

// Checks on foreign files before and after their bytes are used.

namespace tensormount {

// Compares a foreign file with its record. kStale "NAME: changed since it was adopted (size is 1024
// bytes, was 2048)" if they differ. `adopted`: whether the record is stored in a checkpoint; if
// not, it was made when the source was opened. Always OK for the checkpoint's own files.
Status CheckUnchanged(const FileRecord& record, const FileInfo& info, bool adopted);

// The change time of each foreign file since its first use through one opened checkpoint, for
// detecting writes that restored the mtime. A record does not have the change time, because a copy
// of the file has another. Thread-safe.
class ForeignChanges {
 public:
  // kStale if the foreign file `number` was changed since its last accepted state, at first that of
  // the first call for it. `info` is its present state. A new change time is accepted if mode,
  // owner, link count or inode changed with it.
  Status Check(std::uint32_t number, const FileRecord& record, const FileInfo& info);

 private:
  std::mutex mutex_;
  std::map<std::uint32_t, FileInfo> seen_;  // Last accepted state, by file number.
};

// The directory that no path of a checkpoint's foreign files may leave, and the path of info.root
// below it. `directory` is info.root if COMMIT is trusted. If not, it is the directory that the
// operator named, because the publisher could make info.root a link to another place at any time.
struct ForeignBase {
  std::string directory;
  std::string below;  // Path of info.root below `directory`; empty if equal.
  // Narrower limits inside `directory`: a file is opened below the deepest of these directories
  // that contains it. Empty: `directory` is the only limit.
  std::vector<std::string> bounds = {};
};

// The deepest of `bounds` that contains `path`, and the path below it. nullopt if no bound contains
// `path`.
struct BoundedName {
  std::string bound;
  std::string name;
};
std::optional<BoundedName> NameWithin(const std::vector<std::string>& bounds,
                                      const std::string& path);

// Opens a foreign file below the base. kStale: the file changed, or the path of an adopted file now
// leaves the base; no other failure has this code. kPermissionDenied: the path of a file that is
// not adopted leaves the base, or the process may not read the file. kNotFound: the file or its
// root is missing; the message names the missing one.
Result<std::unique_ptr<File>> OpenForeignFile(FileSystem& fs, const ForeignBase& base,
                                              const FileRecord& record, bool adopted);

// Checks whether a stored checkpoint may make us read data outside of its directory with our
// permissions: COMMIT must belong to us or root, or info.root must be in a directory that the
// operator named. The message of kPermissionDenied says how to name it. Always OK for a
// self-contained checkpoint.
Result<ForeignBase> CheckMayReadForeign(FileSystem& fs, const std::string& directory,
                                        const CheckpointInfo& info, const FileInfo& commit,
                                        const std::vector<std::string>& roots);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_FILE_H_
