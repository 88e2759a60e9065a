// SPDX-License-Identifier: Apache-2.0
// FindSource and OpenFound of open_source.h. A tensormount checkpoint is recognised by COMMIT, a
// store by store.json, a training directory by the names of its steps.
#include "index/foreign/open_source.h"

#include <new>
#include <optional>
#include <utility>

#include "base/file_system_for.h"
#include "index/foreign/foreign.h"
#include "index/foreign/format.h"
#include "index/foreign/weight_files.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"

namespace tensormount {
namespace {

constexpr std::string_view kLatest = "latest";

// Returns "run1" for "run1/latest", unless a file or directory "run1/latest" exists. nullopt for
// other texts.
std::optional<std::string> LatestIn(FileSystem& fs, std::string_view given) {
  const std::string path = WithoutTrailingSlashes(given);
  const std::size_t slash = path.rfind('/');
  if (path.substr(slash == std::string::npos ? 0 : slash + 1) != kLatest || fs.Exists(path)) {
    return std::nullopt;
  }
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Refuses a checkpoint in a store with a newer version of the format. A checkpoint outside of a
// store, such as a copy, passes. A checkpoint in a store whose store.json is damaged or unreadable
// passes too, because the checkpoint does not need store.json, and fsck reports the damage.
Status CheckStoreAbove(FileSystem& fs, const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return Status();
  const std::string store = path.substr(0, slash);
  if (!fs.Exists(JoinPath(store, store_paths::kSuperblockFile))) return Status();
  const Status opened = Store::Open(fs, store).status();
  return opened.code() == Code::kUnsupported ? opened : Status();
}

// Looks for tensormount's files first: a tensormount checkpoint with safetensors files in data/
// would also match a foreign format. LinkStat does not follow links, so a COMMIT that is a symlink
// counts too, and the open then refuses it.
Result<FoundSource> FindResolved(FileSystem& fs, const std::string& path,
                                 const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  if (info.kind == FileKind::kDirectory) {
    if (fs.LinkStat(JoinPath(path, kCommitName)).ok()) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckStoreAbove(fs, path));
      return FoundSource{.fs = &fs, .kind = SourceKind::kCheckpoint, .path = path};
    }
    if (fs.Exists(JoinPath(path, store_paths::kSuperblockFile))) {
      return FoundSource{.fs = &fs, .kind = SourceKind::kStore, .path = path};
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, roots));
  if (FindForeignFormat(folder) != nullptr) {
    return FoundSource{.fs = &fs, .kind = SourceKind::kForeign, .path = path};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ForeignSteps> steps, ReadForeignSteps(folder));
  if (steps) return FoundSource{.fs = &fs, .kind = SourceKind::kForeignSteps, .path = path};
  // ReadForeign fails with an error that describes the source.
  return ReadForeign(folder).status();
}

// The path of a weight index; nullopt if `text` does not name an existing one. Only the path of its
// directory is resolved: in the cache of a Hugging Face hub the index may be a link, and the files
// that it lists are beside the link, not beside the target.
std::optional<std::string> AsWeightIndex(FileSystem& fs, const std::string& text) {
  if (!IsWeightIndex(text)) return std::nullopt;
  const Result<FileInfo> info = fs.Stat(text);
  if (!info.ok() || info.value().kind != FileKind::kFile) return std::nullopt;
  const std::size_t slash = text.rfind('/');
  const std::string folder = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : text.substr(0, slash);
  (void)fs.Resolve(text);  // A server's file system notes what the user typed.
  const Result<std::string> resolved = fs.Resolve(folder);
  if (!resolved.ok()) return std::nullopt;
  return JoinPath(resolved.value(), text.substr(slash + 1));
}

}  // namespace

Result<FoundSource> FindSource(FileSystem& fs, const std::string& text,
                               const std::vector<std::string>& roots) {
  std::vector<std::string> warnings;
  const std::optional<std::string> index = AsWeightIndex(fs, text);
  const Result<std::string> path =
      index ? Result<std::string>(*index) : ResolveSourcePath(fs, text, &warnings);
  if (path.ok()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(FoundSource found, FindResolved(fs, path.value(), roots));
    found.warnings = std::move(warnings);
    return found;
  }
  const std::optional<std::string> parent = LatestIn(fs, text);
  if (!parent) return path.status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string resolved, fs.Resolve(*parent));
  const Result<FoundSource> found = FindResolved(fs, resolved, roots);
  // ResolveSourcePath resolves "latest" in stores; here "latest" is resolved in a training
  // directory. If the parent is not one, the error of ResolveSourcePath is returned.
  if (!found.ok() || found.value().kind != SourceKind::kForeignSteps) return path.status();
  return LatestOf(found.value(), roots);
}

Result<FoundSource> FindSource(const std::string& text, const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(text));
  return FindSource(*fs, text, roots);
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenFound(const FoundSource& source,
                                                    const std::vector<std::string>& roots,
                                                    bool whole_only) {
  FileSystem& fs = *source.fs;
  OpenedCheckpoint::Options options;
  options.roots = roots;
  switch (source.kind) {
    case SourceKind::kCheckpoint: {
      TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, OpenedCheckpoint::Open(fs, source.path, options));
      for (const std::string& warning : source.warnings) opened->AddWarning(warning);
      return opened;
    }
    case SourceKind::kForeign: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                                   ForeignFolder::Open(fs, source.path, roots));
      // Valid metadata may need gigabytes. If memory does not suffice, this error is returned, so
      // that a mount can continue.
      try {
        TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory inventory, ReadForeign(folder));
        if (whole_only) RemoveIncompleteTensors(inventory);
        TENSORMOUNT_ASSIGN_OR_RETURN(
            auto opened,
            OpenedCheckpoint::OpenForeign(fs, std::move(inventory), source.path, options));
        for (const std::string& warning : source.warnings) opened->AddWarning(warning);
        return opened;
      } catch (const std::bad_alloc&) {
        return Status(Code::kResourceExhausted,
                      source.path + ": not enough memory to open the checkpoint");
      }
    }
    case SourceKind::kStore:
    case SourceKind::kForeignSteps:
      break;
  }
  return Status(Code::kInvalidArgument,
                source.path + ": contains several checkpoints: name one of them");
}

Result<FoundSource> LatestOf(const FoundSource& source, const std::vector<std::string>& roots) {
  FileSystem& fs = *source.fs;
  if (source.kind == SourceKind::kStore) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, source.path));
    TENSORMOUNT_ASSIGN_OR_RETURN(LatestCheckpoint latest, store.Latest());
    return FoundSource{.fs = &fs,
                       .kind = SourceKind::kCheckpoint,
                       .path = store.CheckpointPath(latest.name),
                       .warnings = std::move(latest.warnings)};
  }
  if (source.kind != SourceKind::kForeignSteps) return source;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(fs, source.path, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ForeignSteps> steps, ReadForeignSteps(folder));
  if (!steps)
    return Status(Code::kNotFound,
                  source.path + ": the training directory no longer contains a checkpoint");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path,
                               fs.Resolve(JoinPath(source.path, steps->latest)));
  return FoundSource{.fs = &fs, .kind = SourceKind::kForeign, .path = path};
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(fs, text, roots));
  return OpenFound(found, roots);
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(const std::string& text,
                                                    const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(text, roots));
  return OpenFound(found, roots);
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenComplete(const std::string& text,
                                                       const std::vector<std::string>& roots,
                                                       bool partial) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(text, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, OpenFound(found, roots, partial));
  if (!partial) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNoLoss(opened->lost()).WithContext(opened->directory()));
  }
  return opened;
}

}  // namespace tensormount
