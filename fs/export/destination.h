// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_DESTINATION_H_
#define TENSORMOUNT_FS_EXPORT_DESTINATION_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/export/export_plan.h"

namespace tensormount::fs {

// Where an export goes: it is made whole under another name beside it, NAME.<8 hex digits>.tmp, and
// appears under its own in one step. Rank 0's.
class ExportDestination {
 public:
  struct Options {
    ExportFormat format = ExportFormat::kSafetensors;
    bool folder = false;
    bool replace = false;
    std::uint64_t bytes = 0;           // That will be written.
    std::set<std::string> written;     // Names of files that it will have at its top.
    std::vector<std::string> sources;  // Paths of what is read: nothing that holds one is replaced.
  };
  // Checks all that can be known beforehand, then makes the folder of the temporary name and, of
  // what others left behind, a warning each. kAlreadyExists: `path` is taken, and not to be
  // replaced, or holds what no export of this format is (kInvalidArgument). kNotFound: the folder
  // above it is not there. kResourceExhausted: too little room.
  static Result<ExportDestination> Prepare(FileSystem& fs, const std::string& path,
                                           const Options& options,
                                           std::vector<std::string>& warnings);

  // Bytes that the filesystem has for what is to be called `path`; all there could be where that
  // cannot be told.
  static std::uint64_t RoomAt(const std::string& path);

  const std::string& path() const { return path_; }  // Absolute.
  const std::string& temporary() const { return temporary_; }

  // Everything is written and synced: gives it its name, durably. kAlreadyExists where somebody has
  // taken that meanwhile.
  Status Publish();
  // Removes what was written. Says what is left where that fails.
  Status Discard();

 private:
  ExportDestination(FileSystem& fs, const Options& options) : fs_(&fs), options_(options) {}
  Status CheckPlace() const;
  Status CheckOld(const FileInfo& old) const;
  Status CheckRoom() const;
  void FindLeftovers(std::vector<std::string>& warnings) const;

  FileSystem* fs_;
  Options options_;
  std::string parent_;
  std::string name_;
  std::string path_;
  std::string temporary_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_DESTINATION_H_
