// SPDX-License-Identifier: Apache-2.0
#include "fs/export/destination.h"

#include <algorithm>
#include <cerrno>
#include <sys/statvfs.h>

#include <fmt/core.h>

#include "index/content.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kMarkDigits = 8;

bool IsMark(std::string_view text) {
  return text.size() == kMarkDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool Within(std::string_view inner, std::string_view outer) {
  return inner == outer ||
         (inner.starts_with(outer) && inner.substr(outer.size()).starts_with('/'));
}

// A name that exports of this format have at their top, and nothing else is likely to.
bool MarksExport(ExportFormat format, const std::string& name) {
  switch (format) {
    case ExportFormat::kHf:
      return name == "model.safetensors" || name == "model.safetensors.index.json";
    case ExportFormat::kZarr:
      return name == "zarr.json";
    case ExportFormat::kDcp:
      return name == ".metadata";
    default:
      return false;
  }
}

// Whether a folder may be replaced by an export: it is one, or holds nothing. An .npy folder has no
// file of a known name: nothing else may be in it.
Result<bool> LooksExported(FileSystem& fs, const std::string& path, ExportFormat format) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, fs.List(path));
  if (entries.empty()) return true;
  if (format != ExportFormat::kNpy) {
    return std::any_of(entries.begin(), entries.end(), [&](const DirectoryEntry& entry) {
      return entry.kind == FileKind::kFile && MarksExport(format, entry.name);
    });
  }
  for (const DirectoryEntry& entry : entries) {
    if (entry.kind == FileKind::kDirectory) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool below,
                                   LooksExported(fs, JoinPath(path, entry.name), format));
      if (!below) return false;
    } else if (entry.kind != FileKind::kFile || !entry.name.ends_with(".npy")) {
      return false;
    }
  }
  return true;
}

}  // namespace

Result<ExportDestination> ExportDestination::Prepare(FileSystem& fs, const std::string& path,
                                                     const Options& options,
                                                     std::vector<std::string>& warnings) {
  ExportDestination out(fs, options);
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  const std::size_t slash = trimmed.rfind('/');
  out.name_ = slash == std::string::npos ? trimmed : trimmed.substr(slash + 1);
  if (out.name_.empty() || out.name_ == "." || out.name_ == "..") {
    return Status(Code::kInvalidArgument, fmt::format("{}: names no file or folder to make", path));
  }
  const std::string above =
      slash == std::string::npos ? "." : trimmed.substr(0, std::max<std::size_t>(slash, 1));
  Result<std::string> parent = fs.Resolve(above);
  if (!parent.ok()) {
    return parent.status().WithContext(fmt::format("the folder that {} is to be in", path));
  }
  out.parent_ = std::move(parent).value();
  out.path_ = JoinPath(out.parent_, out.name_);
  const Result<FileInfo> old = fs.LinkStat(out.path_);
  if (old.ok()) {
    TENSORMOUNT_RETURN_IF_ERROR(out.CheckOld(old.value()));
  } else if (old.status().code() != Code::kNotFound) {
    return old.status();
  }
  out.FindLeftovers(warnings);
  TENSORMOUNT_RETURN_IF_ERROR(out.CheckRoom());
  out.temporary_ = fmt::format("{}.{}.tmp", out.path_, Uuid::Random().Short());
  if (options.folder) TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(out.temporary_));
  return out;
}

Status ExportDestination::CheckOld(const FileInfo& old) const {
  if (!options_.replace) return Status::FromErrno(EEXIST, "export to", path_);
  const auto refuse = [this](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("{}: {}: not replaced", path_, why));
  };
  const bool folder = old.kind == FileKind::kDirectory;
  if (folder != options_.folder || (!folder && old.kind != FileKind::kFile)) {
    return refuse(options_.folder ? "is no folder" : "is no file");
  }
  for (const std::string& source : options_.sources) {
    if (Within(source, path_)) return refuse(fmt::format("holds {}, which is exported", source));
  }
  if (!folder) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool exported, LooksExported(*fs_, path_, options_.format));
  if (exported) return {};
  return refuse(
      fmt::format("holds something else than an export to {}", ExportFormatName(options_.format)));
}

Status ExportDestination::CheckRoom() const {
  struct statvfs space {};
  if (statvfs(parent_.c_str(), &space) != 0) return {};  // It will be seen.
  const std::uint64_t free = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
  if (free >= options_.bytes) return {};
  return Status(Code::kResourceExhausted,
                fmt::format("{}: the export takes {} bytes, and its filesystem has room for {}",
                            path_, options_.bytes, free));
}

void ExportDestination::FindLeftovers(std::vector<std::string>& warnings) const {
  const Result<std::vector<DirectoryEntry>> entries = fs_->List(parent_);
  if (!entries.ok()) return;
  for (const DirectoryEntry& entry : entries.value()) {
    std::string_view rest = entry.name;
    if (!rest.starts_with(name_) || !rest.ends_with(".tmp")) continue;
    rest = rest.substr(name_.size());
    if (rest.size() != 1 + kMarkDigits + 4 || rest[0] != '.' ||
        !IsMark(rest.substr(1, kMarkDigits))) {
      continue;
    }
    warnings.push_back(fmt::format(
        "{}: left by an export that did not end, or that runs now; remove it if none does",
        JoinPath(parent_, entry.name)));
  }
}

Status ExportDestination::Publish() {
  const Status renamed = fs_->RenameNoReplace(temporary_, path_);
  if (!renamed.ok()) {
    if (renamed.code() != Code::kAlreadyExists || !options_.replace) return renamed;
    // Looked at again: it may not be what it was.
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo old, fs_->LinkStat(path_));
    TENSORMOUNT_RETURN_IF_ERROR(CheckOld(old));
    const Status exchanged = fs_->Exchange(temporary_, path_);
    if (exchanged.code() == Code::kUnsupported) {
      // Where the filesystem cannot exchange names, the old one steps aside.
      const std::string aside = fmt::format("{}.{}.tmp", path_, Uuid::Random().Short());
      TENSORMOUNT_RETURN_IF_ERROR(fs_->RenameNoReplace(path_, aside));
      const Status second = fs_->RenameNoReplace(temporary_, path_);
      if (!second.ok()) {
        return second.WithContext(fmt::format("what was there before is {} now", aside));
      }
      temporary_ = aside;
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(exchanged);
    }
  }
  const Status synced = fs_->SyncDirectory(parent_);
  if (!synced.ok()) {
    return Status(Code::kUnknown, fmt::format("{} is there, but may not survive a power cut: {}",
                                              path_, synced.message()));
  }
  if (renamed.ok()) return {};
  return Discard().WithContext("the export is there; what was there before is not all removed");
}

Status ExportDestination::Discard() {
  const Status removed = fs_->RemoveTree(temporary_);
  return removed.WithContext(fmt::format("{} is left", temporary_));
}

}  // namespace tensormount::fs
