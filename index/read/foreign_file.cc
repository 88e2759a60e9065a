// SPDX-License-Identifier: Apache-2.0
// Foreign files are somebody else's: they may change, go, or be links to elsewhere at any time.
// Each is opened below its root without leaving it, and its size and times are compared with the
// record, before bytes are taken and after.
#include "index/read/foreign_file.h"

#include <cerrno>

namespace tensormount {

// Size and mtime, to the nanosecond, are all that a record has of a foreign file.
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

// The kernel sets the change time of an inode to now whenever bytes, mode, owner, links or names
// change, and programs cannot set it: so a write whose mtime was put back still shows. A change of
// mode, owner or links alone is told by these fields and accepted, with the new time from then on.
Status ForeignChanges::Check(std::uint32_t number, const FileRecord& record, const FileInfo& info) {
  const std::lock_guard lock(mutex_);
  const auto [at, first] = seen_.try_emplace(number, info);
  FileInfo& before = at->second;
  if (first || (info.ctime_seconds == before.ctime_seconds &&
                info.ctime_nanoseconds == before.ctime_nanoseconds)) {
    return Status();
  }
  // What changes the time without a byte being written.
  const bool attributes = info.links != before.links || info.mode != before.mode ||
                          info.uid != before.uid || info.gid != before.gid;
  if (info.inode == before.inode && !attributes) {
    return Status(Code::kStale, record.name +
                                    ": changed since it was opened (its old time was put "
                                    "back, or it was renamed)");
  }
  before = info;
  return Status();
}

std::optional<BoundedName> NameWithin(const std::vector<std::string>& bounds,
                                      const std::string& path) {
  std::optional<BoundedName> out;
  for (const std::string& bound : bounds) {
    const std::string above = bound == "/" ? bound : bound + "/";
    if (!path.starts_with(above) || (out && out->bound.size() >= bound.size())) continue;
    out = {.bound = bound, .name = path.substr(above.size())};
  }
  return out;
}

Result<std::unique_ptr<File>> OpenForeignFile(FileSystem& fs, const ForeignBase& base,
                                              const FileRecord& record, bool adopted) {
  const std::string name = base.below.empty() ? record.name : JoinPath(base.below, record.name);
  const auto within = NameWithin(base.bounds, JoinPath(base.directory, name));
  Result<std::unique_ptr<File>> file = within ? fs.OpenReadBeneath(within->bound, within->name)
                                              : fs.OpenReadBeneath(base.directory, name);
  // Says whether the file or its whole root is gone (an unmounted disk): two different repairs.
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

// Why this matters: whoever can write a folder could publish a "checkpoint" whose records point at
// your private files, and a mount or a job of yours would read it for them. COMMIT that belongs to
// you or root is trusted, since only you or root could have written it.
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
