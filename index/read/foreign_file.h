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

// Foreign files that records point into: what must hold before and after bytes of them are
// believed.

namespace tensormount {

// kStale "NAME: changed since it was adopted (1024 bytes, 2048 then)" where a foreign file is not
// what it was when it was looked at. `adopted`: a store has the record; else it was made when the
// source was opened. Files of our own are never changed: ok.
Status CheckUnchanged(const FileRecord& record, const FileInfo& info, bool adopted);

// When inodes of foreign files were changed last, as it was when each was first opened here.
// Records lack that: a copy has another. Whoever writes in place and puts the old time back changes
// it. Thread-safe.
class ForeignChanges {
 public:
  // kStale where file `number`, which is as `info` says, was changed since it was first asked
  // about, and not only its mode, owner or names.
  Status Check(std::uint32_t number, const FileRecord& record, const FileInfo& info);

 private:
  std::mutex mutex_;
  std::map<std::uint32_t, FileInfo> seen_;  // By number of file, as it was last found unchanged.
};

// The folder that nothing of a checkpoint's foreign files may lead out of, and where below it they
// are: info.root itself where that is trusted, else the folder that the operator named. Whoever can
// write there could make info.root a link to elsewhere at any time.
struct ForeignBase {
  std::string directory;
  std::string below;  // Empty: directly in it.
  // Folders in `directory`: each file is opened below the one that holds it. Empty: all below
  // `directory` itself.
  std::vector<std::string> bounds = {};
};

// The deepest of `bounds` that `path` lies below, and its name there. nullopt: none.
struct BoundedName {
  std::string bound;
  std::string name;
};
std::optional<BoundedName> NameWithin(const std::vector<std::string>& bounds,
                                      const std::string& path);

// Opens it below the base, which nothing leads out of (kPermissionDenied; adopted: kStale, it did
// not), and checks that it did not change (kStale; nothing else is). kNotFound names the file and
// the root where it is gone, or the root is.
Result<std::unique_ptr<File>> OpenForeignFile(FileSystem& fs, const ForeignBase& base,
                                              const FileRecord& record, bool adopted);

// Whether a stored checkpoint may have us read what lies outside of it, with our rights: its COMMIT
// belongs to us or to root, or info.root lies in one of the folders that the operator named.
// kPermissionDenied says how to name it. Ok for a checkpoint that has all its data.
Result<ForeignBase> CheckMayReadForeign(FileSystem& fs, const std::string& directory,
                                        const CheckpointInfo& info, const FileInfo& commit,
                                        const std::vector<std::string>& roots);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_FILE_H_
