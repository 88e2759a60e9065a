// SPDX-License-Identifier: Apache-2.0
// Foreign files belong to other programs, so they may change, disappear, or become links to other
// places at any time. Each file is opened below its root without leaving it, and its size and mtime
// are compared with the record before bytes are read, and again after bytes that no hash proves.
#include "index/read/foreign_file.h"

#include <cerrno>

namespace tensormount {

// Compares the kind, the size and the mtime (in nanoseconds). A record has nothing else of a
// foreign file.
Status CheckUnchanged(const FileRecord& record, const FileInfo& info, bool adopted) {
  if (record.placement != Placement::kForeign) return Status();
  const auto changed = [&](const std::string& how) {
    return Status(Code::kStale, record.name + ": changed since it was " +
                                    (adopted ? "adopted" : "opened") + " (" + how + ")");
  };
  if (info.kind != FileKind::kFile) return changed("the file is no longer a regular file");
  if (info.size != record.length) {
    return changed("size is " + std::to_string(info.size) + " bytes, was " +
                   std::to_string(record.length));
  }
  if (info.mtime_seconds != record.mtime_seconds ||
      info.mtime_nanoseconds != record.mtime_nanoseconds) {
    return changed("the modification time differs");
  }
  return Status();
}

// The kernel sets an inode's change time whenever bytes, mode, owner, links or names change, and
// programs cannot set it; so a write with a restored mtime still shows. If mode, owner, link count
// or inode changed too, the new change time is accepted and applies from then on.
Status ForeignChanges::Check(std::uint32_t number, const FileRecord& record, const FileInfo& info) {
  const std::lock_guard lock(mutex_);
  const auto [at, first] = seen_.try_emplace(number, info);
  FileInfo& before = at->second;
  if (first || (info.ctime_seconds == before.ctime_seconds &&
                info.ctime_nanoseconds == before.ctime_nanoseconds)) {
    return Status();
  }
  // Changes of these attributes set the change time without a write.
  const bool attributes = info.links != before.links || info.mode != before.mode ||
                          info.uid != before.uid || info.gid != before.gid;
  if (info.inode == before.inode && !attributes) {
    return Status(
        Code::kStale,
        record.name +
            ": changed since it was opened (its change time differs: it was renamed, or rewritten "
            "with its old modification time)");
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
  // The message tells a missing file from a missing root (an unmounted disk), because the remedies
  // differ.
  if (file.status().code() == Code::kNotFound) {
    const std::string root =
        base.below.empty() ? base.directory : JoinPath(base.directory, base.below);
    const std::string gone = fs.Exists(root) ? JoinPath(root, record.name) : root;
    return Status(Code::kNotFound, record.name + ": " + gone + " does not exist");
  }
  if (!file.ok() && file.status().ToErrno() == EXDEV) {
    const std::string out = JoinPath(base.directory, name) + " leads out of " + base.directory;
    // Adoption refuses files outside of the root, so an adopted file was changed since.
    return adopted
               ? Status(Code::kStale, record.name + ": changed since it was adopted (" + out + ")")
               : Status(Code::kPermissionDenied, record.name + ": " + out);
  }
  // A stale NFS handle does not mean that the file changed.
  const auto unless_changed = [](const Status& status) {
    return status.code() == Code::kStale ? Status(Code::kUnavailable, status.message()) : status;
  };
  if (!file.ok()) return unless_changed(file.status());
  const Result<FileInfo> now = file.value()->Stat();
  if (!now.ok()) return unless_changed(now.status());
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(record, now.value(), adopted));
  return file;
}

// Without this check, anybody who can write the directory could publish a "checkpoint" whose
// records point to your private files, and your mount or job would read them. A COMMIT that belongs
// to you or root is trusted, because nobody else could have written it.
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
  return Status(
      Code::kPermissionDenied,
      directory + ": its data are outside of it, below " + info.root +
          ", and it was published neither by you nor by root: pass that directory with --root if "
          "you trust its publisher");
}

}  // namespace tensormount
