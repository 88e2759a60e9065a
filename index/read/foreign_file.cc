// SPDX-License-Identifier: Apache-2.0
// Foreign files are somebody else's: they may change, go, or be links to elsewhere at any time.
// Each is opened below its root without leaving it, and its size and times are compared with the
// record, before bytes are taken and after.
#include "index/read/foreign_file.h"

#include <cerrno>

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

Status ForeignChanges::Check(std::uint32_t number, const FileRecord& record, const FileInfo& info) {
  const Seen now{.seconds = info.ctime_seconds,
                 .nanoseconds = info.ctime_nanoseconds,
                 .inode = info.inode,
                 .links = info.links,
                 .mode = info.mode,
                 .uid = info.uid,
                 .gid = info.gid};
  const std::lock_guard lock(mutex_);
  const auto [at, first] = seen_.try_emplace(number, now);
  Seen& before = at->second;
  if (first || (now.seconds == before.seconds && now.nanoseconds == before.nanoseconds)) {
    return Status();
  }
  const bool attributes = now.links != before.links || now.mode != before.mode ||
                          now.uid != before.uid || now.gid != before.gid;
  if (now.inode == before.inode && !attributes) {
    return Status(Code::kStale, record.name +
                                    ": changed since it was opened (its old time was put "
                                    "back, or it was renamed)");
  }
  before = now;
  return Status();
}

Result<std::unique_ptr<File>> OpenForeignFile(FileSystem& fs, const ForeignBase& base,
                                              const FileRecord& record, bool adopted) {
  const std::string name = base.below.empty() ? record.name : JoinPath(base.below, record.name);
  Result<std::unique_ptr<File>> file = fs.OpenReadBeneath(base.directory, name);
  if (file.status().code() == Code::kNotFound) {
    const std::string root =
        base.below.empty() ? base.directory : JoinPath(base.directory, base.below);
    const std::string gone = fs.Exists(root) ? JoinPath(root, record.name) : root;
    return Status(Code::kNotFound, record.name + ": " + gone + " is gone");
  }
  if (!file.ok() && file.status().ToErrno() == EXDEV) {
    const std::string out = JoinPath(base.directory, name) + " leads out of " + base.directory;
    // Nothing that does is adopted.
    return adopted
               ? Status(Code::kStale, record.name + ": changed since it was adopted (" + out + ")")
               : Status(Code::kPermissionDenied, record.name + ": " + out);
  }
  // A handle that a server forgot says nothing of the file.
  const auto unless_changed = [](const Status& status) {
    return status.code() == Code::kStale ? Status(Code::kUnavailable, status.message()) : status;
  };
  if (!file.ok()) return unless_changed(file.status());
  const Result<FileInfo> now = file.value()->Stat();
  if (!now.ok()) return unless_changed(now.status());
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(record, now.value(), adopted));
  return file;
}

Result<ForeignBase> CheckMayReadForeign(FileSystem& fs, const std::string& directory,
                                        const CheckpointInfo& info, const FileInfo& commit,
                                        const std::vector<std::string>& roots) {
  if (info.self_contained || commit.uid == 0 || commit.uid == geteuid()) {
    return ForeignBase{info.root, ""};
  }
  for (const std::string& named : roots) {
    const Result<std::string> root = fs.Resolve(named);
    if (!root.ok()) continue;
    if (info.root == root.value()) return ForeignBase{root.value(), ""};
    const std::string above = root.value() == "/" ? "/" : root.value() + "/";
    if (info.root.starts_with(above)) {
      return ForeignBase{root.value(), info.root.substr(above.size())};
    }
  }
  return Status(Code::kPermissionDenied,
                directory + ": its data lie outside of it, below " + info.root +
                    ", and neither you nor root published it: name that folder with --root if you "
                    "trust whoever did");
}

}  // namespace tensormount
