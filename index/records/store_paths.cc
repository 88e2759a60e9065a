// SPDX-License-Identifier: Apache-2.0
// Names in stagings and stores that several files of the library share.
#include "index/records/store_paths.h"

#include <algorithm>
#include <array>
#include <vector>

namespace tensormount::store_paths {
namespace {

// Entries of a shared staging besides data/, manifest/ and staging.json.
constexpr std::array<std::string_view, 9> kLeftovers = {
    "journal",    "schema",  "done",    "common",  "report.json",
    "report.txt", kLockFile, kUuidFile, kBaseFile,
};

}  // namespace

bool IsSharedLeftover(std::string_view name) {
  const std::string_view top = name.substr(0, name.find('/'));
  if (top == kSharedFile) return true;
  return std::any_of(kLeftovers.begin(), kLeftovers.end(), [&](std::string_view known) {
    // FileSystem::ReplaceFile writes the new content of a file under its name with the suffix
    // ".new".
    return top == known || (top.starts_with(known) && top.substr(known.size()) == ".new");
  });
}

bool LooksLikeStore(FileSystem& fs, const std::string& folder) {
  // Symbolic links do not count, because their targets belong to another directory.
  const auto is = [&](const std::string& path, FileKind kind) {
    const Result<FileInfo> info = fs.LinkStat(path);
    return info.ok() && info.value().kind == kind;
  };
  for (const std::string_view name : {kGenerationsFolder, kStagingFolder}) {
    if (is(JoinPath(folder, name), FileKind::kDirectory)) return true;
  }
  const Result<std::vector<DirectoryEntry>> entries = fs.List(folder);
  if (!entries.ok()) return false;
  return std::any_of(entries.value().begin(), entries.value().end(), [&](const DirectoryEntry& e) {
    if (e.name.starts_with('.')) return false;
    const std::string below = JoinPath(folder, e.name);
    return is(below, FileKind::kDirectory) && is(JoinPath(below, kCommitFile), FileKind::kFile) &&
           is(JoinPath(below, "manifest"), FileKind::kDirectory);
  });
}

std::string MissingSuperblockMessage(const std::string& folder) {
  return "store.json is missing, but the rest of a store exists; run `tensormount fsck " + folder +
         " --rebuild` to recreate it";
}

}  // namespace tensormount::store_paths
