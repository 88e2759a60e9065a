// SPDX-License-Identifier: Apache-2.0
// Whether an export may write where the user said: onto nothing, or in the place of an earlier
// export of the same kind, never over files that somebody made otherwise.
#include "fs/export/destination.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <set>
#include <sys/statvfs.h>

#include <fmt/core.h>

#include "index/records/inventory.h"
#include "index/records/store_paths.h"

namespace tensormount::fs {
namespace {

// Of NAME.<8 hex digits>.tmp: enough that two exports at once do not meet, and an exact length, so
// that leftovers are told from files of others.
constexpr std::size_t kMarkDigits = 8;

bool IsExportMark(std::string_view text) {
  return text.size() == kMarkDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// By whole names: "/a/bc" is not within "/a/b".
bool Within(std::string_view inner, std::string_view outer) {
  return inner == outer ||
         (inner.starts_with(outer) && inner.substr(outer.size()).starts_with('/'));
}

bool IsDigits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// "__12_0.distcp"
bool IsDcpFile(std::string_view name) {
  constexpr std::string_view kEnd = "_0.distcp";
  return name.starts_with("__") && name.ends_with(kEnd) && name.size() > 2 + kEnd.size() &&
         IsDigits(name.substr(2, name.size() - 2 - kEnd.size()));
}

// "model-00001-of-00002.safetensors"
bool IsHfPart(std::string_view name) {
  return name.starts_with("model-") && name.ends_with(".safetensors") &&
         name.find("-of-") != std::string_view::npos;
}

// What an entry at the top of a folder says of it.
// kExport: only such an export has it. kNothing: it may have it. kElse: it has not, so the folder
// is somebody's.
enum class Says { kExport, kNothing, kElse };

Says EntrySays(const DirectoryEntry& entry, ExportFormat format,
               const std::set<std::string>& written) {
  const bool file = entry.kind == FileKind::kFile;
  // Folders and links of the right name are not ours.
  const auto file_if = [file](bool ours) { return file && ours ? Says::kNothing : Says::kElse; };
  const std::string& name = entry.name;
  switch (format) {
    case ExportFormat::kHf:
      if (file && (name == "model.safetensors" || name == "model.safetensors.index.json")) {
        return Says::kExport;
      }
      // A tokenizer that somebody put beside it is not in what would replace it.
      return file_if(IsHfPart(name) || written.contains(name));
    case ExportFormat::kZarr:
      if (file && name == "zarr.json") return Says::kExport;
      // Groups and arrays, whose names are keys.
      return entry.kind == FileKind::kDirectory ? Says::kNothing : Says::kElse;
    case ExportFormat::kDcp:
      if (file && name == ".metadata") return Says::kExport;
      return file_if(IsDcpFile(name));
    default:
      return Says::kElse;
  }
}

// Whether a folder may be replaced by an export that writes files called `written` at its top: it
// is one itself, or holds nothing. An .npy folder has no file of a known name: nothing else may be
// in it.
// Only the top is looked at, except for .npy: reading a tree of a million files to be sure would
// take longer than writing it.
Result<bool> LooksExported(FileSystem& fs, const std::string& path, ExportFormat format,
                           const std::set<std::string>& written) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, fs.List(path));
  if (entries.empty()) return true;
  bool known = format == ExportFormat::kNpy;
  for (const DirectoryEntry& entry : entries) {
    if (format != ExportFormat::kNpy) {
      const Says says = EntrySays(entry, format, written);
      if (says == Says::kElse) return false;
      known = known || says == Says::kExport;
    } else if (entry.kind == FileKind::kDirectory) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool below,
                                   LooksExported(fs, JoinPath(path, entry.name), format, written));
      if (!below) return false;
    } else if (entry.kind != FileKind::kFile || !entry.name.ends_with(".npy")) {
      return false;
    }
  }
  return known;
}

// Whether a file may be replaced by an export to one file: it begins like one, or holds nothing.
Result<bool> FileLooksExported(FileSystem& fs, const std::string& path, ExportFormat format) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenRead(path));
  // safetensors: 8 bytes of length, then '{'. A zip begins with "PK\3\4".
  char head[9] = {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, file->ReadAt(0, head, sizeof head));
  if (got == 0) return true;
  if (format == ExportFormat::kTorch) return std::string_view(head, got).starts_with("PK\3\4");
  return got == sizeof head && head[8] == '{';  // Behind the length of a safetensors header.
}

}  // namespace

Result<ExportDestination> ExportDestination::Prepare(FileSystem& fs, const std::string& path,
                                                     const ExportOptions& options,
                                                     const ExportPlan& plan,
                                                     std::vector<std::string> sources,
                                                     std::vector<std::string>& warnings) {
  // Resolved once: later steps must not depend on the working directory, nor on links that somebody
  // changes meanwhile.
  ExportDestination out(fs, options, plan, std::move(sources));
  const std::string trimmed = WithoutTrailingSlashes(path);
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
  TENSORMOUNT_RETURN_IF_ERROR(out.CheckParent());
  out.path_ = JoinPath(out.parent_, out.name_);
  const Result<FileInfo> old = fs.LinkStat(out.path_);
  if (old.ok()) {
    TENSORMOUNT_RETURN_IF_ERROR(out.CheckOld(old.value()));
  } else if (old.status().code() != Code::kNotFound) {
    return old.status();
  }
  // Only told of: whether one still runs cannot be known from here, it may be on another machine.
  out.FindLeftovers(warnings);
  TENSORMOUNT_RETURN_IF_ERROR(out.CheckRoom());
  // In the same folder, hence on the same filesystem, as a rename needs it.
  out.temporary_ = fmt::format("{}.{}.tmp", out.path_, Uuid::Random().Short());
  if (plan.folder) TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(out.temporary_));
  return out;
}

// What is in a store or a checkpoint without being of it is damage to both.
// `gc`, `fsck` and rsync of a store would meet files that they do not know.
Status ExportDestination::CheckParent() const {
  const auto refuse = [this](const std::string& what) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {}: nothing is exported into it", parent_, what));
  };
  if (fs_->Exists(JoinPath(parent_, store_paths::kSuperblockFile))) return refuse("is a store");
  const std::string above = parent_.substr(0, std::max<std::size_t>(parent_.rfind('/'), 1));
  for (const std::string& folder : {parent_, above}) {  // The other is its data/ and the like.
    if (fs_->Exists(JoinPath(folder, store_paths::kCommitFile)))
      return refuse("is in a checkpoint");
  }
  return {};
}

Status ExportDestination::CheckOld(const FileInfo& old) const {
  if (!options_->replace) return Status::FromErrno(EEXIST, "export to", path_);
  const auto refuse = [this](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("{}: {}: not replaced", path_, why));
  };
  const bool folder = old.kind == FileKind::kDirectory;
  if (folder != plan_->folder || (!folder && old.kind != FileKind::kFile)) {
    return refuse(plan_->folder ? "is no folder" : "is no file");
  }
  // An export into the folder of its own source would remove what it reads.
  for (const std::string& source : sources_) {
    if (Within(source, path_)) return refuse(fmt::format("holds {}, which is exported", source));
  }
  std::set<std::string> written;  // Names of files that this export will have at its top.
  for (const ExportFile& file : plan_->files) {
    if (folder && file.name.find('/') == std::string::npos) written.insert(file.name);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool exported,
                               folder ? LooksExported(*fs_, path_, options_->format, written)
                                      : FileLooksExported(*fs_, path_, options_->format));
  if (exported) return {};
  return refuse(
      fmt::format("holds something else than an export to {}", ExportFormatName(options_->format)));
}

std::uint64_t ExportDestination::RoomAt(const std::string& path) {
  std::string above = WithoutTrailingSlashes(path);
  const std::size_t slash = above.rfind('/');
  above = slash == std::string::npos ? "." : above.substr(0, std::max<std::size_t>(slash, 1));
  // Where it fails (no such folder yet, an odd filesystem) the writes will tell.
  struct statvfs space {};
  if (statvfs(above.c_str(), &space) != 0) return std::numeric_limits<std::uint64_t>::max();
  return static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
}

Status ExportDestination::CheckRoom() const {
  std::uint64_t bytes = 0;
  for (const ExportFile& file : plan_->files) bytes += file.backed ? 0 : file.size;
  const std::uint64_t free = RoomAt(path_);
  if (free >= bytes) return {};
  return Status(Code::kResourceExhausted,
                fmt::format("{}: the export takes {} bytes, and its filesystem has room for {}",
                            path_, bytes, free));
}

void ExportDestination::FindLeftovers(std::vector<std::string>& warnings) const {
  const Result<std::vector<DirectoryEntry>> entries = fs_->List(parent_);
  if (!entries.ok()) return;
  for (const DirectoryEntry& entry : entries.value()) {
    std::string_view rest = entry.name;
    if (!rest.starts_with(name_) || !rest.ends_with(".tmp")) continue;
    rest = rest.substr(name_.size());
    if (rest.size() != 1 + kMarkDigits + 4 || rest[0] != '.' ||
        !IsExportMark(rest.substr(1, kMarkDigits))) {
      continue;
    }
    warnings.push_back(fmt::format(
        "{}: left by an export that did not end, or that runs now; remove it if none does",
        JoinPath(parent_, entry.name)));
  }
}

Status ExportDestination::Publish() {
  // Always first without replacing, also with --if-exists replace: mostly nothing is there.
  const Status renamed = fs_->RenameNoReplace(temporary_, path_);
  if (!renamed.ok()) {
    if (renamed.code() != Code::kAlreadyExists || !options_->replace) return renamed;
    // Looked at again: it may not be what it was.
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo old, fs_->LinkStat(path_));
    TENSORMOUNT_RETURN_IF_ERROR(CheckOld(old));
    const Status exchanged = fs_->Exchange(temporary_, path_);
    if (exchanged.code() == Code::kUnsupported) {
      // Never by two renames: between them there would be nothing of that name.
      return Status(Code::kUnsupported,
                    fmt::format("{}: its filesystem cannot exchange two names in one step, so that "
                                "it is not replaced: remove it first",
                                path_));
    }
    TENSORMOUNT_RETURN_IF_ERROR(exchanged);
  }
  // The rename is done and seen by all; only its durability is open.
  const Status synced = fs_->SyncDirectory(parent_);
  if (!synced.ok()) {
    return Status(Code::kUnknown, fmt::format("{} is there, but may not survive a power cut: {}",
                                              path_, synced.message()));
  }
  // Exchanged: the old export has the temporary name now, and goes.
  if (renamed.ok()) return {};
  return Discard().WithContext("the export is there; what was there before is not all removed");
}

Status ExportDestination::Discard() {
  const Status removed = fs_->RemoveTree(temporary_);
  return removed.WithContext(fmt::format("{} is left", temporary_));
}

}  // namespace tensormount::fs
