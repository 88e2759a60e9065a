// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_DESTINATION_H_
#define TENSORMOUNT_FS_EXPORT_DESTINATION_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/export/export_plan.h"

namespace tensormount::fs {

// The destination of an export, used by rank 0 only (RoomAt: by all ranks). The export is written
// beside its destination NAME, as NAME.<8 hex digits>.tmp, and gets the name NAME in one step.
//
// Order of calls: Prepare, then all ranks write below temporary(), then Publish or Discard. Without
// Publish or Discard the files stay, and the next export reports them as a leftover.
//
// A mistyped path must not destroy a user's files: Publish replaces only what looks like an export
// of the same format or is empty, and never a directory that contains the source.
class ExportDestination {
 public:
  // Makes all checks that are possible before writing, creates the temporary directory, and adds a
  // warning for each leftover of an earlier export.
  // kAlreadyExists: `path` exists and replacing was not requested. kInvalidArgument: `path` exists
  // and is not an export of this format, contains a source, or is in a store or checkpoint.
  // kNotFound: the parent directory does not exist. kResourceExhausted: too few bytes are free.
  // Space may still run out later, since other programs write to the same filesystem.
  // `sources`: paths of the files and directories that the export reads; no directory that contains
  // one of them is replaced. `options` and `plan` must outlive this object.
  static Result<ExportDestination> Prepare(FileSystem& fs, const std::string& path,
                                           const ExportOptions& options, const ExportPlan& plan,
                                           std::vector<std::string> sources,
                                           std::vector<std::string>& warnings);

  // Free bytes for this user (f_bavail, without root's reserve) on the filesystem of `path`'s
  // parent directory; the largest u64 if this is unknown.
  static std::uint64_t RoomAt(const std::string& path);

  const std::string& path() const { return path_; }  // Absolute.
  const std::string& temporary() const { return temporary_; }

  // Gives the complete, synced export its final name, durably. kAlreadyExists: meanwhile another
  // file or directory got the name.
  // Uses RENAME_NOREPLACE or, to replace an export, an exchange of the two names, so that at every
  // moment one of the two exports has the name. kUnsupported: the filesystem cannot exchange names.
  // kUnknown: the export is in place, but syncing the parent directory failed, so a power loss may
  // undo the rename. Other errors may follow a success, if the replaced export cannot be removed.
  Status Publish();
  // Removes all that was written to temporary(). On failure the message names temporary().
  Status Discard();

 private:
  ExportDestination(FileSystem& fs, const ExportOptions& options, const ExportPlan& plan,
                    std::vector<std::string> sources)
      : fs_(&fs), options_(&options), plan_(&plan), sources_(std::move(sources)) {}
  // CheckParent checks that the parent directory may get a new entry, CheckOld that an existing
  // destination may be replaced, and CheckRoom that enough bytes are free.
  Status CheckParent() const;
  Status CheckOld(const FileInfo& old) const;
  Status CheckRoom() const;
  void FindLeftovers(std::vector<std::string>& warnings) const;

  FileSystem* fs_;
  const ExportOptions* options_;
  const ExportPlan* plan_;
  std::vector<std::string> sources_;
  std::string parent_;
  std::string name_;
  std::string path_;
  std::string temporary_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_DESTINATION_H_
