// SPDX-License-Identifier: Apache-2.0
// The table of foreign formats (format.h). A format is added as a file of its own and a row here.
#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "index/foreign/file_begin.h"
#include "index/foreign/format.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"

namespace tensormount {
namespace {

// kPermissionDenied, with the directory to pass as --root, if the directory contains a link that
// leads out of its bounds. No probe can open such a link, so the message for an unknown format
// would be misleading.
Status CheckLinksWithinRoots(const ForeignFolder& folder) {
  constexpr std::size_t kMaxLookedAt = 1000;
  const Result<std::vector<DirectoryEntry>> entries = folder.List("");
  if (!folder.file().empty() || !entries.ok()) return Status();
  for (std::size_t i = 0; i < std::min(entries.value().size(), kMaxLookedAt); ++i) {
    const DirectoryEntry& entry = entries.value()[i];
    if (entry.kind != FileKind::kSymlink) continue;
    const Status status = folder.Stat(entry.name).status();
    if (status.code() == Code::kPermissionDenied) return status;
  }
  return Status();
}

// The directory above the file, if it is a checkpoint that the file belongs to; else empty.
std::string CheckpointAbove(const ForeignFolder& file) {
  const std::string& path = file.path();
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return {};
  const std::string above = path.substr(0, slash);
  if (file.fs().LinkStat(JoinPath(above, kCommitName)).ok()) return above;
  const Result<ForeignFolder> folder = ForeignFolder::Open(file.fs(), above, {});
  if (!folder.ok()) return {};
  // In a foreign checkpoint only these files are recognised as parts; another file, such as a text
  // beside a model, is not.
  if (!file.file().ends_with(".metadata") && !file.file().ends_with(".distcp")) return {};
  return FindForeignFormat(folder.value()) != nullptr ? above : std::string();
}

// Describes a source that has no supported format, mostly by the names in the directory.
std::string DescribeUnknownSource(const ForeignFolder& folder) {
  if (!folder.file().empty()) {
    if (FileTypeOf(folder, folder.file()) == FileType::kLfsPointer) {
      return IsLfsPointer(folder.file()).message();
    }
    const std::string above = CheckpointAbove(folder);
    if (!above.empty()) return "part of the checkpoint " + above + "; open that directory instead";
    return "not a file of a supported format (.safetensors, .pt, .npz and others)";
  }
  if (store_paths::LooksLikeStore(folder.fs(), folder.path())) {
    return store_paths::MissingSuperblockMessage(folder.path());
  }
  const Result<std::vector<DirectoryEntry>> entries = folder.List("");
  if (!entries.ok()) return entries.status().message();
  if (entries.value().empty()) return "the directory is empty";
  const auto any = [&](auto matches) {
    return std::any_of(entries.value().begin(), entries.value().end(), matches);
  };
  const auto named = [&](std::string_view name) {
    return any([&](const DirectoryEntry& e) { return e.name == name; });
  };
  const auto ends = [&](std::string_view suffix) {
    return any([&](const DirectoryEntry& e) { return e.name.ends_with(suffix); });
  };
  if (ends(".distcp")) return ".distcp files without .metadata: the save did not finish";
  if (named(".metadata.tmp")) return ".metadata.tmp without .metadata: the save did not finish";
  if (ends(".ckpt-manifest.tmp") || named("data") || named("manifest")) {
    return "no COMMIT and no store.json: an unfinished tensormount save, or not a checkpoint";
  }
  if (named("variables") || ends(".h5") || ends(".gguf") || ends(".onnx")) {
    return "not in a supported format";
  }
  return "not a checkpoint: no COMMIT, no store.json and no file of a supported format";
}

// Reports data in the directory that the format did not read, such as optimizer.pt beside a model
// (ForeignInventory::beside). A file counts as data by the end of its name, a directory if a format
// matches.
void AddEntriesBeside(const ForeignFolder& folder, ForeignBuilder& builder) {
  constexpr std::array<std::string_view, 11> kData = {".safetensors", ".pt",  ".pth", ".bin",
                                                      ".ckpt",        ".tar", ".npy", ".npz",
                                                      ".distcp",      ".pkl", ".gguf"};
  constexpr std::size_t kMaxNoted = 100;
  constexpr std::size_t kMaxProbed = 100;
  // If the source is one file, the user does not want the files beside it.
  if (!folder.file().empty()) return;
  const Result<std::vector<DirectoryEntry>> entries = folder.List("");
  if (!entries.ok()) return;
  std::size_t noted = 0;
  std::size_t probed = 0;
  for (const DirectoryEntry& entry : entries.value()) {
    if (entry.name.starts_with('.') || builder.Uses(entry.name)) continue;
    bool data = false;
    if (entry.kind == FileKind::kDirectory) {
      if (++probed > kMaxProbed) continue;
      const Result<ForeignFolder> below = folder.Subfolder(entry.name);
      data = below.ok() && FindForeignFormat(below.value()) != nullptr;
    } else {
      data = std::ranges::any_of(kData,
                                 [&](std::string_view end) { return entry.name.ends_with(end); });
    }
    if (!data) continue;
    if (++noted > kMaxNoted) return;
    builder.AddBeside(entry.name + (entry.kind == FileKind::kDirectory ? "/" : ""));
  }
}

}  // namespace

// Formats that are recognised with most certainty come first, because the first match is used.
std::span<const ForeignFormat* const> ForeignFormats() {
  static const std::vector<const ForeignFormat*> kFormats = {
      &MegatronZarrFormat(), &OlmoFormat(),      &TorchDcpFormat(), &TorchDcpRankFormat(),
      &HuggingFaceFormat(),  &TorchSaveFormat(), &NumpyFormat(),
  };
  return kFormats;
}

// A probe may take a few stats and small reads, not more, because each step of a training directory
// is probed whenever the directory is listed.
const ForeignFormat* FindForeignFormat(const ForeignFolder& folder) {
  for (const ForeignFormat* format : ForeignFormats()) {
    if (format->Probe(folder)) return format;
  }
  return nullptr;
}

Result<ForeignInventory> ReadForeign(const ForeignFolder& folder) {
  const ForeignFormat* format = FindForeignFormat(folder);
  if (format == nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckLinksWithinRoots(folder));
    return Status(Code::kUnsupported, folder.path() + ": " + DescribeUnknownSource(folder));
  }
  // The stamps are compared even if the read failed: a file that vanished during the read means
  // that the checkpoint is being replaced (kStale), not damage.
  const Result<FileInfo> before = FormatStamp(folder);
  ForeignBuilder builder(folder, std::string(format->name()));
  const Status read = format->Read(folder, builder);
  // If a save into the same directory ended meanwhile, the records may be from the previous save
  // and the sizes of files from this one.
  const Result<FileInfo> after = FormatStamp(folder);
  const auto mark = [](const FileInfo& info) {
    return std::tuple(info.inode, info.size, info.mtime_seconds, info.mtime_nanoseconds);
  };
  if (before.ok() && after.ok() && mark(before.value()) != mark(after.value())) {
    return Status(
        Code::kStale,
        folder.path() + ": the directory was modified while it was being opened; try again");
  }
  TENSORMOUNT_RETURN_IF_ERROR(read);
  AddEntriesBeside(folder, builder);
  return builder.Finish();
}

}  // namespace tensormount
