// SPDX-License-Identifier: Apache-2.0
// Checks whether an export may write to its destination: the path is free, or is an earlier export
// in the same format. Other files are never replaced.
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

// Number of hex digits in NAME.<8 hex digits>.tmp, enough for concurrent exports not to collide.
// The exact length distinguishes leftovers from unrelated files.
constexpr std::size_t kMarkDigits = 8;

bool IsExportMark(std::string_view text) {
  return text.size() == kMarkDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Whether the path `inner` is `outer` or below it. Compares whole names: "/a/bc" is not within
// "/a/b".
bool IsWithin(std::string_view inner, std::string_view outer) {
  return inner == outer ||
         (inner.starts_with(outer) && inner.substr(outer.size()).starts_with('/'));
}

bool IsDigits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// Whether the name is that of a DCP data file, such as "__12_0.distcp".
bool IsDcpFile(std::string_view name) {
  constexpr std::string_view kEnd = "_0.distcp";
  return name.starts_with("__") && name.ends_with(kEnd) && name.size() > 2 + kEnd.size() &&
         IsDigits(name.substr(2, name.size() - 2 - kEnd.size()));
}

// Whether the name is like "model-00001-of-00002.safetensors".
bool IsHfPart(std::string_view name) {
  return name.starts_with("model-") && name.ends_with(".safetensors") &&
         name.find("-of-") != std::string_view::npos;
}

// How one entry at the top of a directory counts in deciding whether the directory is an export.
// kExport: the entry by which an export of this format is recognized. kNeutral: an export may have
// such an entry. kUnrelated: an export never has it, so the directory must not be replaced.
enum class EntryVerdict { kExport, kNeutral, kUnrelated };

EntryVerdict ClassifyEntry(const DirectoryEntry& entry, ExportFormat format,
                           const std::set<std::string>& written) {
  const bool file = entry.kind == FileKind::kFile;
  // These formats write only regular files: a directory or symlink with a matching name is
  // unrelated.
  const auto file_if = [file](bool ours) {
    return file && ours ? EntryVerdict::kNeutral : EntryVerdict::kUnrelated;
  };
  const std::string& name = entry.name;
  switch (format) {
    case ExportFormat::kHf:
      if (file && (name == "model.safetensors" || name == "model.safetensors.index.json")) {
        return EntryVerdict::kExport;
      }
      // Any other file, such as a tokenizer that a user added, is unrelated: the new export would
      // not contain it.
      return file_if(IsHfPart(name) || written.contains(name));
    case ExportFormat::kZarr:
      if (file && name == "zarr.json") return EntryVerdict::kExport;
      // Zarr groups and arrays have the names of keys, so any directory may be one.
      return entry.kind == FileKind::kDirectory ? EntryVerdict::kNeutral : EntryVerdict::kUnrelated;
    case ExportFormat::kDcp:
    case ExportFormat::kTorchDist:
      if (file && name == ".metadata") return EntryVerdict::kExport;
      return file_if(IsDcpFile(name) ||
                     (format == ExportFormat::kTorchDist && written.contains(name)));
    default:
      return EntryVerdict::kUnrelated;
  }
}

// Whether a directory is empty or an export of this format, so that it may be replaced. `written`:
// the files that the new export has at its top. An export to npy has no file of a known name, so
// all files in the directory must be .npy files.
// Except for npy only the top is examined, because reading a tree of a million files would take
// longer than writing it.
Result<bool> LooksExported(FileSystem& fs, const std::string& path, ExportFormat format,
                           const std::set<std::string>& written) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto entries, fs.List(path));
  if (entries.empty()) return true;
  bool known = format == ExportFormat::kNpy;
  for (const DirectoryEntry& entry : entries) {
    if (format != ExportFormat::kNpy) {
      const EntryVerdict says = ClassifyEntry(entry, format, written);
      if (says == EntryVerdict::kUnrelated) return false;
      known = known || says == EntryVerdict::kExport;
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

// Whether a file may be replaced by an export to a single file: it is empty, or begins like such an
// export.
Result<bool> FileLooksExported(FileSystem& fs, const std::string& path, ExportFormat format) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenRead(path));
  // A safetensors file begins with 8 bytes of length and the '{' of its JSON header, a zip archive
  // with "PK\3\4".
  char head[9] = {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, file->ReadAt(0, head, sizeof head));
  if (got == 0) return true;
  if (format == ExportFormat::kTorch) return std::string_view(head, got).starts_with("PK\3\4");
  return got == sizeof head && head[8] == '{';
}

}  // namespace

Result<ExportDestination> ExportDestination::Prepare(FileSystem& fs, const std::string& path,
                                                     const ExportOptions& options,
                                                     const ExportPlan& plan,
                                                     std::vector<std::string> sources,
                                                     std::vector<std::string>& warnings) {
  TENSORMOUNT_RETURN_IF_ERROR(fs.Need(Ability::kWrite, path));
  // The parent directory is resolved once, so that later steps do not depend on the working
  // directory, or on symlinks that change meanwhile.
  ExportDestination out(fs, options, plan, std::move(sources));
  const std::string trimmed = WithoutTrailingSlashes(path);
  const std::size_t slash = trimmed.rfind('/');
  out.name_ = slash == std::string::npos ? trimmed : trimmed.substr(slash + 1);
  if (out.name_.empty() || out.name_ == "." || out.name_ == "..") {
    return Status(
        Code::kInvalidArgument,
        fmt::format("{}: the path does not end with a name for the file or directory to create",
                    path));
  }
  const std::string above =
      slash == std::string::npos ? "." : trimmed.substr(0, std::max<std::size_t>(slash, 1));
  Result<std::string> parent = fs.Resolve(above);
  if (!parent.ok()) {
    return parent.status().WithContext(fmt::format("the parent directory of {}", path));
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
  // A leftover is only a warning, because its export may still be running on another machine.
  out.FindLeftovers(warnings);
  TENSORMOUNT_RETURN_IF_ERROR(out.CheckRoom());
  // The temporary directory has the same parent and is thus on the same filesystem, as rename(2)
  // requires.
  out.temporary_ = fmt::format("{}.{}.tmp", out.path_, Uuid::Random().Short());
  if (plan.folder) TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(out.temporary_));
  return out;
}

// Refuses a parent directory that is a store or in a checkpoint, because `gc`, `fsck` and copies do
// not expect other files there.
Status ExportDestination::CheckParent() const {
  const auto refuse = [this](const std::string& what) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {}; choose another directory to export to", parent_, what));
  };
  if (fs_->Exists(JoinPath(parent_, store_paths::kSuperblockFile))) return refuse("is a store");
  const std::string above = parent_.substr(0, std::max<std::size_t>(parent_.rfind('/'), 1));
  // `above` catches subdirectories such as data/.
  for (const std::string& folder : {parent_, above}) {
    if (fs_->Exists(JoinPath(folder, store_paths::kCommitFile)))
      return refuse("is part of a checkpoint");
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
    return refuse(plan_->folder ? "is not a directory" : "is not a regular file");
  }
  // Replacing a directory that contains the source would remove the data being read.
  for (const std::string& source : sources_) {
    if (IsWithin(source, path_))
      return refuse(fmt::format("contains {}, the source of this export", source));
  }
  std::set<std::string> written;  // Names that this export will have at its top.
  for (const ExportFile& file : plan_->files) {
    if (folder && file.name.find('/') == std::string::npos) written.insert(file.name);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool exported,
                               folder ? LooksExported(*fs_, path_, options_->format, written)
                                      : FileLooksExported(*fs_, path_, options_->format));
  if (exported) return {};
  return refuse(
      fmt::format("is not an export in the format {}", ExportFormatName(options_->format)));
}

std::uint64_t ExportDestination::RoomAt(const std::string& path) {
  std::string above = WithoutTrailingSlashes(path);
  const std::size_t slash = above.rfind('/');
  above = slash == std::string::npos ? "." : above.substr(0, std::max<std::size_t>(slash, 1));
  // If statvfs fails (no such directory, unusual filesystem), a full disk is noticed only by the
  // writes.
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
                fmt::format("{}: the export needs {} bytes, but its filesystem has only {} free",
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
    warnings.push_back(
        fmt::format("{}: left by an export that did not finish or is still running; remove it if "
                    "no export is running",
                    JoinPath(parent_, entry.name)));
  }
}

Status ExportDestination::Publish() {
  // This rename is tried first, also with --if-exists replace, because the path is usually free.
  const Status renamed = fs_->RenameNoReplace(temporary_, path_);
  if (!renamed.ok()) {
    if (renamed.code() != Code::kAlreadyExists || !options_->replace) return renamed;
    // The destination is checked again, because it may have changed since Prepare.
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo old, fs_->LinkStat(path_));
    TENSORMOUNT_RETURN_IF_ERROR(CheckOld(old));
    const Status exchanged = fs_->Exchange(temporary_, path_);
    if (exchanged.code() == Code::kUnsupported) {
      // Two renames are no replacement, because between them nothing would have the name.
      return Status(Code::kUnsupported,
                    fmt::format("{}: not replaced: its filesystem cannot exchange two names "
                                "atomically; remove it first",
                                path_));
    }
    TENSORMOUNT_RETURN_IF_ERROR(exchanged);
  }
  // The rename has happened and is visible; only its durability is unknown.
  const Status synced = fs_->SyncDirectory(parent_);
  if (!synced.ok()) {
    return Status(Code::kUnknown,
                  fmt::format("{} was exported, but may not survive a power failure: {}", path_,
                              synced.message()));
  }
  // After the exchange the old export has the temporary name; remove it.
  if (renamed.ok()) return {};
  return Discard().WithContext(
      "the export succeeded, but the previous one was not completely removed");
}

Status ExportDestination::Discard() {
  const Status removed = fs_->RemoveTree(temporary_);
  return removed.WithContext(fmt::format("cannot remove {}", temporary_));
}

}  // namespace tensormount::fs
