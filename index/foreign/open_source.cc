// SPDX-License-Identifier: Apache-2.0
// Everything that a user may name as a SOURCE, found and opened: the one way for library, mount and
// commands (OpenFound). A folder of a checkpoint of ours is told from a foreign one by COMMIT, a
// store by store.json, a training directory by the names of its steps.
#include "index/foreign/open_source.h"

#include <new>
#include <optional>
#include <utility>

#include "index/foreign/foreign.h"
#include "index/foreign/format.h"
#include "index/foreign/weight_files.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"

namespace tensormount {
namespace {

constexpr std::string_view kLatest = "latest";

// "run1" of "run1/latest", where no such name exists. nullopt: something else.
// The name is a word of ours and no file: where somebody has a file or folder called "latest", that
// is meant.
std::optional<std::string> LatestIn(FileSystem& fs, std::string_view given) {
  const std::string path = WithoutTrailingSlashes(given);
  const std::size_t slash = path.rfind('/');
  if (path.substr(slash == std::string::npos ? 0 : slash + 1) != kLatest || fs.Exists(path)) {
    return std::nullopt;
  }
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// A checkpoint that stands in a store is read by the rules of that store: one of a newer version is
// refused before anything else is looked at. Others stand alone, as copies do.
// A store.json that is damaged or cannot be read does not stand in the way: the checkpoint is whole
// by itself, and fsck is for the store.
Status CheckStoreAbove(FileSystem& fs, const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return Status();
  const std::string store = path.substr(0, slash);
  if (!fs.Exists(JoinPath(store, store_paths::kSuperblockFile))) return Status();
  const Status opened = Store::Open(fs, store).status();
  return opened.code() == Code::kUnsupported ? opened : Status();
}

// Ours first: a checkpoint of ours that holds safetensors files in data/ would pass for a foreign
// one. LinkStat for COMMIT, since a link of that name is no sign of ours.
Result<FoundSource> FindResolved(FileSystem& fs, const std::string& path,
                                 const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  if (info.kind == FileKind::kDirectory) {
    if (fs.LinkStat(JoinPath(path, kCommitName)).ok()) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckStoreAbove(fs, path));
      return FoundSource{.kind = SourceKind::kCheckpoint, .path = path};
    }
    if (fs.Exists(JoinPath(path, store_paths::kSuperblockFile))) {
      return FoundSource{.kind = SourceKind::kStore, .path = path};
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, roots));
  if (FindForeignFormat(folder) != nullptr) {
    return FoundSource{.kind = SourceKind::kForeign, .path = path};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ForeignSteps> steps, ReadForeignSteps(folder));
  if (steps) return FoundSource{.kind = SourceKind::kForeignSteps, .path = path};
  return ReadForeign(folder).status();  // Says what is there instead.
}

// The path of an index of weights without links but for its own name: the files that it lists stand
// beside the name and not beside what a hub's link leads to. nullopt: no such file.
std::optional<std::string> AsWeightIndex(FileSystem& fs, const std::string& text) {
  if (!IsWeightIndex(text)) return std::nullopt;
  const Result<FileInfo> info = fs.Stat(text);
  if (!info.ok() || info.value().kind != FileKind::kFile) return std::nullopt;
  const std::size_t slash = text.rfind('/');
  const std::string folder = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : text.substr(0, slash);
  const Result<std::string> resolved = fs.Resolve(folder);
  if (!resolved.ok()) return std::nullopt;
  return JoinPath(resolved.value(), text.substr(slash + 1));
}

}  // namespace

Result<FoundSource> FindSource(FileSystem& fs, const std::string& text,
                               const std::vector<std::string>& roots) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsPath(text));
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
  // ResolveSourcePath knows stores; of training directories "latest" is looked up here. Its error
  // is the better one where there is neither.
  if (!found.ok() || found.value().kind != SourceKind::kForeignSteps) return path.status();
  return LatestOf(fs, found.value(), roots);
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenFound(FileSystem& fs, const FoundSource& source,
                                                    const std::vector<std::string>& roots,
                                                    bool whole_only) {
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
      // Metadata of gigabytes are legal. A command should say that memory ran out, and a mount
      // should go on serving what it has.
      try {
        TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory inventory, ReadForeign(folder));
        if (whole_only) LeaveOutLost(inventory);
        TENSORMOUNT_ASSIGN_OR_RETURN(
            auto opened,
            OpenedCheckpoint::OpenForeign(fs, std::move(inventory), source.path, options));
        for (const std::string& warning : source.warnings) opened->AddWarning(warning);
        return opened;
      } catch (const std::bad_alloc&) {
        return Status(Code::kResourceExhausted, source.path + ": not enough memory to open it");
      }
    }
    case SourceKind::kStore:
    case SourceKind::kForeignSteps:
      break;
  }
  return Status(Code::kInvalidArgument, source.path + ": holds several checkpoints: name one");
}

Result<FoundSource> LatestOf(FileSystem& fs, const FoundSource& source,
                             const std::vector<std::string>& roots) {
  if (source.kind == SourceKind::kStore) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, source.path));
    TENSORMOUNT_ASSIGN_OR_RETURN(LatestCheckpoint latest, store.Latest());
    return FoundSource{.kind = SourceKind::kCheckpoint,
                       .path = store.CheckpointPath(latest.name),
                       .warnings = std::move(latest.warnings)};
  }
  if (source.kind != SourceKind::kForeignSteps) return source;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(fs, source.path, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ForeignSteps> steps, ReadForeignSteps(folder));
  if (!steps) return Status(Code::kNotFound, source.path + ": no checkpoint in it any more");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path,
                               fs.Resolve(JoinPath(source.path, steps->latest)));
  return FoundSource{.kind = SourceKind::kForeign, .path = path};
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenNamed(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(fs, text, roots));
  return OpenFound(fs, found, roots);
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenWhole(FileSystem& fs, const std::string& text,
                                                    const std::vector<std::string>& roots,
                                                    bool partial) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindSource(fs, text, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, OpenFound(fs, found, roots, partial));
  if (!partial) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNoLoss(opened->lost()).WithContext(opened->directory()));
  }
  return opened;
}

}  // namespace tensormount
