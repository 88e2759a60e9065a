// SPDX-License-Identifier: Apache-2.0
// The small files of a staging: the lock, done marks and common.json. A reader never gets a partial
// text.
#include "fs/save/staging_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tensormount/common_value.h"

#include "fs/save/schema.h"
#include "fs/save/staging_common.h"
#include "index/read/pinned_commit.h"
#include "index/records/store_paths.h"
#include "index/store/store_moves.h"

namespace tensormount::fs {
namespace {

constexpr std::array<std::string_view, 4> kFolders = {"journal", "schema", "done", "common"};
constexpr std::uint64_t kMaxMarkBytes = 64 * 1024;
constexpr std::uint64_t kMaxStagedCommonBytes = std::uint64_t{1} << 30;

std::string Below(const Staging& staging, std::string_view name) {
  return JoinPath(staging.directory, name);
}

Status GoneError(const Staging& staging) {
  return Status(Code::kStale,
                staging.directory + ": this staging directory was published or removed meanwhile");
}

// Returns the lock file, which `take` has locked; null if the filesystem has no locks.
// The UUID is checked after locking: if the staging was published between open and lock, the lock
// is on a file of the checkpoint.
template <typename Take>
Result<std::unique_ptr<File>> LockStaging(FileSystem& fs, const Staging& staging, Take take) {
  Result<std::unique_ptr<File>> opened = fs.OpenRead(Below(staging, store_paths::kLockFile));
  if (opened.status().code() == Code::kNotFound && !IsStagingInPlace(fs, staging)) {
    return GoneError(staging);
  }
  if (!opened.ok()) return opened.status();
  std::unique_ptr<File> lock = std::move(opened).value();
  Status locked = take(*lock);
  if (locked.ToErrno() == EBADF) {
    // NFS allows an exclusive lock only on a file that is open for writing.
    Result<std::unique_ptr<File>> writable = fs.OpenShared(Below(staging, store_paths::kLockFile));
    if (!writable.ok()) return writable.status();
    lock = std::move(writable).value();
    locked = take(*lock);
  }
  if (!locked.ok() && !HasNoLocks(locked)) return locked;
  if (!IsStagingInPlace(fs, staging)) return GoneError(staging);
  if (!locked.ok()) lock.reset();
  return lock;
}

std::optional<std::uint64_t> ParseNumber(std::string_view text) {
  std::uint64_t n = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), n);
  if (end.ec != std::errc() || end.ptr != text.data() + text.size()) return std::nullopt;
  if (text.size() > 1 && text.front() == '0') return std::nullopt;
  return n;
}

// Replaces `name` in `folder` durably. Readers get the old text, the new text or, between the two,
// no file.
Status ReplaceDurably(FileSystem& fs, const std::string& folder, const std::string& name,
                      std::string_view text) {
  const std::string path = JoinPath(folder, name);
  const std::string fresh = JoinPath(folder, "." + name + "." + Uuid::Random().Short());
  Status status = fs.WriteFileDurably(fresh, text);
  for (int attempt = 0; status.ok() && attempt < 16; ++attempt) {
    status = fs.RenameNoReplace(fresh, path);
    if (status.ok()) return fs.SyncDirectory(folder);
    if (status.code() != Code::kAlreadyExists) break;
    status = fs.RemoveFile(path);
    if (status.code() == Code::kNotFound) status = Status();
  }
  if (status.ok())
    status = Status(Code::kBusy, path + ": other processes keep replacing it; try again");
  (void)fs.RemoveFile(fresh);  // A hidden file that remains is never read.
  return status;
}

struct NumberedFile {
  std::uint64_t number = 0;
  std::string name;
};

// The files <incarnation>-<n>.json of a directory, the newest last. Mounts that write at once may
// choose equal numbers; these are ordered by name, so that all machines agree on the newest.
Result<std::vector<NumberedFile>> ListNumbered(FileSystem& fs, const std::string& folder) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(folder));
  std::vector<NumberedFile> files;
  for (const DirectoryEntry& e : entries) {
    if (e.name.starts_with('.') || !e.name.ends_with(".json")) continue;
    const std::string_view stem = std::string_view(e.name).substr(0, e.name.size() - 5);
    const std::size_t dash = stem.rfind('-');
    if (dash == std::string_view::npos) continue;
    if (const auto n = ParseNumber(stem.substr(dash + 1))) files.push_back({*n, e.name});
  }
  std::sort(files.begin(), files.end(), [](const NumberedFile& a, const NumberedFile& b) {
    return std::tie(a.number, a.name) < std::tie(b.number, b.name);
  });
  return files;
}

}  // namespace

Result<Staging> CreateStaging(const Store& store, FileSystem& fs, const std::string& name) {
  (void)fs;  // Unused: a store has its own file system.
  return store.BeginShared(name, kFolders);
}

Result<Staging> OpenStaging(const Store& store, FileSystem& fs, const std::string& name) {
  (void)fs;
  return store.OpenShared(name);
}

Result<std::vector<std::string>> ListStagings(const Store& store, FileSystem& fs) {
  (void)fs;
  return store.ListShared();
}

bool IsStagingInPlace(FileSystem& fs, const Staging& staging) {
  const Result<Uuid> there = store_moves::ReadFolderUuid(fs, staging.directory);
  return there.ok() && there.value() == staging.uuid;
}

Status RemoveStaging(const Store& store, FileSystem& fs, const Staging& staging) {
  if (!IsStagingInPlace(fs, staging)) return GoneError(staging);
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string entry,
      store_moves::MoveToTrash(fs, store.path(), staging.directory, store_paths::kAbortedSuffix));
  TENSORMOUNT_RETURN_IF_ERROR(
      fs.SyncMovedFolder(entry, JoinPath(store.path(), store_paths::kTrashFolder),
                         JoinPath(store.path(), store_paths::kStagingFolder)));
  // Deletes the data at once; gc removes the rest, and the data if this fails.
  store_moves::DeleteData(fs, entry);
  return Status();
}

Result<std::unique_ptr<StagingLease>> StagingLease::ForWriting(FileSystem& fs,
                                                               const Staging& staging) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> lock, LockStaging(fs, staging, [](File& file) {
                                 return file.TryLockShared();
                               }));
  return std::unique_ptr<StagingLease>(new StagingLease(std::move(lock)));
}

// kBusy for writers and for another publisher: either may still change the staging.
Result<std::unique_ptr<StagingLease>> StagingLease::ForPublishing(FileSystem& fs,
                                                                  const Staging& staging) {
  Result<std::unique_ptr<File>> lock =
      LockStaging(fs, staging, [](File& file) { return file.TryLockExclusive(); });
  if (lock.status().code() == Code::kBusy) {
    return Status(
        Code::kBusy,
        staging.directory + ": another process has files open for writing, or is publishing it");
  }
  if (!lock.ok()) return lock.status();
  return std::unique_ptr<StagingLease>(new StagingLease(std::move(lock).value()));
}

bool ParseRank(std::string_view name, std::uint32_t* rank) {
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), *rank);
  return error == std::errc() && end == name.data() + name.size() && std::to_string(*rank) == name;
}

Status MakeDoneMark(FileSystem& fs, const Staging& staging, const DoneMark& mark) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StagingSchema schema, ReadSchemas(fs, staging.directory));
  if (schema.writers() && mark.rank >= *schema.writers()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("done mark {}: schema.json declares {} writers, numbered 0 to {}",
                              mark.rank, *schema.writers(), *schema.writers() - 1));
  }
  nlohmann::ordered_json json;
  json["journal"] = mark.journal;
  json["journal_bytes"] = mark.journal_bytes;
  return ReplaceDurably(fs, Below(staging, "done"), std::to_string(mark.rank), json.dump() + "\n");
}

Status RemoveDoneMark(FileSystem& fs, const Staging& staging, std::uint32_t rank) {
  const std::string folder = Below(staging, "done");
  TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveFile(JoinPath(folder, std::to_string(rank))));
  return fs.SyncDirectory(folder);
}

Result<std::vector<DoneMark>> ReadDoneMarks(FileSystem& fs, const Staging& staging) {
  const std::string folder = Below(staging, "done");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(folder));
  std::vector<DoneMark> marks;
  for (const DirectoryEntry& e : entries) {
    const std::optional<std::uint64_t> rank = ParseNumber(e.name);
    if (!rank || *rank > 0xFFFFFFFFu) continue;
    const Result<std::string> text = fs.ReadFile(JoinPath(folder, e.name), kMaxMarkBytes);
    // The mark was replaced or removed since the listing.
    if (text.status().code() == Code::kNotFound) continue;
    if (!text.ok()) return text.status();
    const nlohmann::json json = nlohmann::json::parse(text.value(), nullptr, false);
    const auto journal = json.is_object() ? json.find("journal") : json.end();
    const auto bytes = json.is_object() ? json.find("journal_bytes") : json.end();
    if (!json.is_object() || journal == json.end() || !journal->is_string() ||
        bytes == json.end() || !bytes->is_number_unsigned()) {
      return Status(Code::kDataLoss, "done/" + e.name + ": not a valid done mark");
    }
    DoneMark mark;
    mark.rank = static_cast<std::uint32_t>(*rank);
    mark.journal = journal->get<std::string>();
    mark.journal_bytes = bytes->get<std::uint64_t>();
    marks.push_back(std::move(mark));
  }
  std::sort(marks.begin(), marks.end(),
            [](const DoneMark& a, const DoneMark& b) { return a.rank < b.rank; });
  return marks;
}

Status WriteCommonJson(FileSystem& fs, const Staging& staging, const std::string& incarnation,
                       std::string_view json) {
  TENSORMOUNT_RETURN_IF_ERROR(CommonRecordsOf(json).status());
  const std::string folder = Below(staging, "common");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<NumberedFile> before, ListNumbered(fs, folder));
  const std::uint64_t number = before.empty() ? 0 : before.back().number + 1;
  TENSORMOUNT_RETURN_IF_ERROR(
      ReplaceDurably(fs, folder, fmt::format("{}-{}.json", incarnation, number), json));
  // The older files are not needed, because only the newest is read.
  for (const NumberedFile& old : before) (void)fs.RemoveFile(JoinPath(folder, old.name));
  return Status();
}

Result<std::string> ReadCommonJson(FileSystem& fs, const Staging& staging) {
  const std::string folder = Below(staging, "common");
  for (int attempt = 0; attempt < 16; ++attempt) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<NumberedFile> files, ListNumbered(fs, folder));
    if (files.empty()) return std::string();
    Result<std::string> text =
        fs.ReadFile(JoinPath(folder, files.back().name), kMaxStagedCommonBytes);
    // A newer file has replaced this one since the listing.
    if (text.status().code() != Code::kNotFound) return text;
  }
  return Status(Code::kBusy, folder + ": other processes keep replacing common.json; try again");
}

}  // namespace tensormount::fs
