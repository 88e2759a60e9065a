// SPDX-License-Identifier: Apache-2.0
#include "index/foreign_file.h"

#include <unistd.h>

namespace tensormount {

Status CheckUnchanged(const FileRecord& record, const FileInfo& info, bool adopted) {
  if (record.placement != Placement::kForeign) return Status();
  const auto changed = [&](const std::string& how) {
    return Status(Code::kStale, record.name + ": changed since it was " +
                                    (adopted ? "adopted" : "opened") + " (" + how + ")");
  };
  if (info.kind != FileKind::kFile) return changed("it is no file any more");
  if (info.size != record.length) {
    return changed(std::to_string(info.size) + " bytes, " + std::to_string(record.length) +
                   " then");
  }
  if (info.mtime_seconds != record.mtime_seconds ||
      info.mtime_nanoseconds != record.mtime_nanoseconds) {
    return changed("written at another time");
  }
  return Status();
}

Result<std::unique_ptr<File>> OpenForeignFile(FileSystem& fs, const CheckpointInfo& info,
                                              const FileRecord& record, bool adopted) {
  Result<std::unique_ptr<File>> file = fs.OpenReadBeneath(info.root, record.name);
  if (file.status().code() == Code::kNotFound) {
    const std::string gone = fs.Exists(info.root) ? JoinPath(info.root, record.name) : info.root;
    return Status(Code::kNotFound, record.name + ": " + gone + " is gone");
  }
  TENSORMOUNT_RETURN_IF_ERROR(file.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo now, file.value()->Stat());
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(record, now, adopted));
  return file;
}

Status CheckMayReadForeign(FileSystem& fs, const std::string& directory, const CheckpointInfo& info,
                           const FileInfo& commit, const std::vector<std::string>& roots) {
  if (info.self_contained || commit.uid == 0 || commit.uid == geteuid()) return Status();
  for (const std::string& named : roots) {
    const Result<std::string> root = fs.Resolve(named);
    if (!root.ok()) continue;
    const std::string below = root.value() == "/" ? "/" : root.value() + "/";
    if (info.root == root.value() || info.root.starts_with(below)) return Status();
  }
  return Status(Code::kPermissionDenied,
                directory + ": its data lie outside of it, below " + info.root +
                    ", and neither you nor root published it: name that folder with --root if you "
                    "trust whoever did");
}

}  // namespace tensormount
