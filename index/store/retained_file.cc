// SPDX-License-Identifier: Apache-2.0
// See retained_file.h. Written under a hidden name, fsynced, renamed; the folder last.
#include "index/store/retained_file.h"

#include "index/records/inventory.h"

namespace tensormount {

Status ReplaceRetained(FileSystem& fs, const std::string& folder, std::string_view name,
                       std::string_view data, InsteadOfExchange instead) {
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
        // The new name first: the old file must not go before the new one is sure to be found.
        TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(folder));
        (void)fs.RemoveFile(hidden);  // Gc takes it otherwise.
        return Status();
      }
      if (exchanged.code() == Code::kNotFound) continue;  // Somebody has just removed it.
      if (exchanged.code() != Code::kUnsupported) return exchanged;
      if (instead == InsteadOfExchange::kSecondName) {
        TENSORMOUNT_RETURN_IF_ERROR(
            fs.RenameNoReplace(hidden, path + "." + Uuid::Random().Short()));
        TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(folder));
      }
      const Status removed = fs.RemoveFile(path);
      if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
      if (instead == InsteadOfExchange::kSecondName) return fs.SyncDirectory(folder);
    }
    return Status(Code::kBusy, path + ": others write it all the time");
  };
  const Status settled = settle();
  if (!settled.ok()) (void)fs.RemoveFile(hidden);  // Gc takes it otherwise.
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
