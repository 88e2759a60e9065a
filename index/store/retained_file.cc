// SPDX-License-Identifier: Apache-2.0
// Replaces a file (retained_file.h): writes under a hidden name, syncs, renames, and syncs the
// directory last.
#include "index/store/retained_file.h"

#include "index/records/inventory.h"

namespace tensormount {

RetainedText ReadRetained(FileSystem& fs, const std::string& path) {
  Result<std::string> text = fs.ReadFile(path, kMaxRetainedFileBytes);
  if (text.ok() || text.status().code() == Code::kNotFound) return {std::move(text)};
  const Result<FileInfo> info = fs.Stat(path);
  const bool wrong = info.ok() && (info.value().kind != FileKind::kFile ||
                                   info.value().size > kMaxRetainedFileBytes);
  return {std::move(text), !wrong};
}

Status ReplaceRetained(FileSystem& fs, const std::string& folder, std::string_view name,
                       std::string_view data, ExchangeFallback instead) {
  const std::string path = JoinPath(folder, name);
  const std::string hidden =
      JoinPath(folder, "." + std::string(name) + "." + Uuid::Random().Short());
  TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(hidden, data));
  const auto settle = [&]() -> Status {
    for (int attempt = 0; attempt < 16; ++attempt) {
      const Status placed = fs.RenameNoReplace(hidden, path);
      if (placed.ok()) return fs.SyncDirectory(folder);
      if (placed.code() != Code::kAlreadyExists) return placed;
      const Status exchanged = fs.Exchange(hidden, path);
      if (exchanged.ok()) {
        // The new name is made durable before the old file is removed.
        TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(folder));
        (void)fs.RemoveFile(hidden);  // If this fails, gc removes it.
        return Status();
      }
      // Another process removed the file meanwhile.
      if (exchanged.code() == Code::kNotFound) continue;
      if (exchanged.code() != Code::kUnsupported) return exchanged;
      if (instead == ExchangeFallback::kSecondName) {
        TENSORMOUNT_RETURN_IF_ERROR(
            fs.RenameNoReplace(hidden, path + "." + Uuid::Random().Short()));
        TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(folder));
      }
      const Status removed = fs.RemoveFile(path);
      if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
      if (instead == ExchangeFallback::kSecondName) return fs.SyncDirectory(folder);
    }
    return Status(Code::kBusy, path + ": other processes keep replacing it; try again");
  };
  const Status settled = settle();
  if (!settled.ok()) (void)fs.RemoveFile(hidden);  // If this fails, gc removes it.
  return settled;
}

Status EnsureFolderDurably(FileSystem& fs, const std::string& store, std::string_view name) {
  const std::string path = JoinPath(store, name);
  const Result<FileInfo> there = fs.LinkStat(path);
  if (there.ok() && there.value().kind == FileKind::kDirectory) return Status();
  TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(path));
  return fs.SyncDirectory(store);
}

}  // namespace tensormount
