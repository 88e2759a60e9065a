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

// A folder of a hub's cache may have nothing but links that lead out of it, by which no format can
// be found: kPermissionDenied, with what to name as root.
// Such a folder lists names only of links; no probe can open one of them, and "nothing that we
// read" would send the user looking for the wrong fault.
Status LinksLeadOut(const ForeignFolder& folder) {
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

// The folder of a file where that is a checkpoint, as that of a .metadata; empty: it is none.
std::string CheckpointAbove(const ForeignFolder& file) {
  const std::string& path = file.path();
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return {};
  const std::string above = path.substr(0, slash);
  if (file.fs().LinkStat(JoinPath(above, kCommitName)).ok()) return above;
  const Result<ForeignFolder> folder = ForeignFolder::Open(file.fs(), above, {});
  // A note beside a model is no part of it.
  if (!folder.ok()) return {};
  if (!file.file().ends_with(".metadata") && !file.file().ends_with(".distcp")) return {};
  return FindForeignFormat(folder.value()) != nullptr ? above : std::string();
}

// What is there instead of a checkpoint, where that can be told.
// Looks at names only, as probes do. The first guess that fits is told; it is a hint and no
// verdict.
std::string Instead(const ForeignFolder& folder) {
  if (!folder.file().empty()) {
    if (BeginOf(folder, folder.file()) == FileBegin::kLfsPointer) {
      return IsLfsPointer(folder.file()).message();
    }
    const std::string above = CheckpointAbove(folder);
    if (!above.empty()) return "a file of the checkpoint " + above + ": open that folder";
    return "no file of a format that we read (.safetensors, .pt, .npz and such)";
  }
  if (store_paths::EvidentlyStore(folder.fs(), folder.path())) {
    return store_paths::LostSuperblock(folder.path());
  }
  const Result<std::vector<DirectoryEntry>> entries = folder.List("");
  if (!entries.ok()) return entries.status().message();
  if (entries.value().empty()) return "an empty folder";
  const auto any = [&](auto matches) {
    return std::any_of(entries.value().begin(), entries.value().end(), matches);
  };
  const auto named = [&](std::string_view name) {
    return any([&](const DirectoryEntry& e) { return e.name == name; });
  };
  const auto ends = [&](std::string_view suffix) {
    return any([&](const DirectoryEntry& e) { return e.name.ends_with(suffix); });
  };
  if (ends(".distcp")) return ".distcp files without .metadata: a save that did not end";
  if (named(".metadata.tmp")) return "a .metadata.tmp without .metadata: a save that did not end";
  if (ends(".ckpt-manifest.tmp") || named("data") || named("manifest")) {
    return "no COMMIT and no store.json in it: a checkpoint of tensormount whose save did not end, "
           "or none";
  }
  if (named("variables") || ends(".h5") || ends(".gguf") || ends(".onnx")) {
    return "in a format that we do not read";
  }
  return "no COMMIT, no store.json, and nothing that a format which we read begins with";
}

// Data in the folder that the format did not take: a trainer's optimizer.pt beside its model. By
// names, for files, and by what a probe says of folders.
void NoteBeside(const ForeignFolder& folder, ForeignBuilder& builder) {
  constexpr std::array<std::string_view, 11> kData = {".safetensors", ".pt",  ".pth", ".bin",
                                                      ".ckpt",        ".tar", ".npy", ".npz",
                                                      ".distcp",      ".pkl", ".gguf"};
  constexpr std::size_t kMaxNoted = 100;
  constexpr std::size_t kMaxProbed = 100;
  // Of a file that the user named nothing else is looked at.
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
      const Result<ForeignFolder> below = folder.Below(entry.name);
      data = below.ok() && FindForeignFormat(below.value()) != nullptr;
    } else {
      data = std::ranges::any_of(kData,
                                 [&](std::string_view end) { return entry.name.ends_with(end); });
    }
    if (!data) continue;
    if (++noted > kMaxNoted) return;
    builder.Beside(entry.name + (entry.kind == FileKind::kDirectory ? "/" : ""));
  }
}

}  // namespace

// Asked in this order: what names itself most clearly comes first.
std::span<const ForeignFormat* const> ForeignFormats() {
  static const std::vector<const ForeignFormat*> kFormats = {
      &MegatronZarrFormat(), &OlmoFormat(),      &TorchDcpFormat(), &TorchDcpRankFormat(),
      &HuggingFaceFormat(),  &TorchSaveFormat(), &NumpyFormat(),
  };
  return kFormats;
}

// Probes are a few stats and at most one small read each: a store of training steps is probed
// folder by folder every time that it is listed.
const ForeignFormat* FindForeignFormat(const ForeignFolder& folder) {
  for (const ForeignFormat* format : ForeignFormats()) {
    if (format->Probe(folder)) return format;
  }
  return nullptr;
}

Result<ForeignInventory> ReadForeign(const ForeignFolder& folder) {
  const ForeignFormat* format = FindForeignFormat(folder);
  if (format == nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(LinksLeadOut(folder));
    return Status(Code::kUnsupported, folder.path() + ": " + Instead(folder));
  }
  // The mark is taken on both sides of the read, and compared even where the read failed: a file
  // that vanished under it is a save under way (kStale, try again) and not damage.
  const Result<FileInfo> before = MarkOf(folder);
  ForeignBuilder builder(folder, std::string(format->name()));
  const Status read = format->Read(folder, builder);
  // A save that ended meanwhile, in place: sizes and times are of its files, records of the last.
  const Result<FileInfo> after = MarkOf(folder);
  const auto mark = [](const FileInfo& info) {
    return std::tuple(info.inode, info.size, info.mtime_seconds, info.mtime_nanoseconds);
  };
  if (before.ok() && after.ok() && mark(before.value()) != mark(after.value())) {
    return Status(Code::kStale, folder.path() + ": was written to while it was opened");
  }
  TENSORMOUNT_RETURN_IF_ERROR(read);
  NoteBeside(folder, builder);
  return builder.Finish();
}

}  // namespace tensormount
