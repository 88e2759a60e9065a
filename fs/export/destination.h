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

// Where an export goes: it is made whole under another name beside it, NAME.<8 hex digits>.tmp, and
// appears under its own in one step. Rank 0's.
//
// Why rank 0 alone: checks and the rename must be done once, and the others learn the temporary
// name or the failure from it (export.cc).
// In order: Prepare, then all ranks write below temporary(), then Publish or Discard. One that is
// dropped without either leaves what was written, to be told of by the next export as a leftover.
// What may be replaced is decided narrowly, because a slip in a path must not cost anybody their
// files: only what looks like an export of the same format, and nothing that holds the source, a
// store or a checkpoint.
class ExportDestination {
 public:
  // Checks all that can be known beforehand, then makes the folder of the temporary name and, of
  // what others left behind, a warning each. kAlreadyExists: `path` is taken, and not to be
  // replaced, or holds what no export of this format is (kInvalidArgument). kNotFound: the folder
  // above it is not there. kResourceExhausted: too little room.
  // `sources`: paths of what is read; nothing that holds one is replaced. `options` and `plan`
  // must outlive this.
  // All of it before any byte is written: an export of a terabyte should not fail at its end for
  // something that was known at its begin. Room can still run out, since others write to the same
  // filesystem.
  static Result<ExportDestination> Prepare(FileSystem& fs, const std::string& path,
                                           const ExportOptions& options, const ExportPlan& plan,
                                           std::vector<std::string> sources,
                                           std::vector<std::string>& warnings);

  // Bytes that the filesystem has for what is to be called `path`; all there could be where that
  // cannot be told.
  // Asked of the folder that `path` is in, for the user that runs this (f_bavail, without root's
  // reserve).
  static std::uint64_t RoomAt(const std::string& path);

  const std::string& path() const { return path_; }  // Absolute.
  const std::string& temporary() const { return temporary_; }

  // Everything is written and synced: gives it its name, durably. kAlreadyExists where somebody has
  // taken that meanwhile.
  // RENAME_NOREPLACE, or, to replace, an exchange of the two names: at no time there is no file or
  // folder of that name. The folder above is synced then; kUnknown where that fails, because the
  // export is there and may yet be lost in a power cut.
  Status Publish();
  // Removes what was written. Says what is left where that fails.
  Status Discard();

 private:
  ExportDestination(FileSystem& fs, const ExportOptions& options, const ExportPlan& plan,
                    std::vector<std::string> sources)
      : fs_(&fs), options_(&options), plan_(&plan), sources_(std::move(sources)) {}
  // Whether the folder above may have a new entry, whether what is there may be replaced, and
  // whether there is room.
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
