// SPDX-License-Identifier: Apache-2.0
// Store::Gc of store.h (docs/format.md, "Garbage"). An abandoned staging is moved to .trash by one
// rename, like an aborted one, so that its publisher fails with "not found". Stagings and
// checkpoints are deleted only in .trash.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <limits>
#include <optional>
#include <set>

#include "index/read/pinned_commit.h"
#include "index/records/store_paths.h"
#include "index/store/bucket.h"
#include "index/store/pins.h"
#include "index/store/retained_file.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "index/store/trash.h"

namespace tensormount {
namespace {

// Device and inode of a directory. Gc never deletes an entry of .staging or .trash with the id of a
// live checkpoint, whatever its name.
using FolderId = std::pair<std::uint64_t, std::uint64_t>;
FolderId IdOf(const FileInfo& info) { return {info.device, info.inode}; }

// Result of a search below a directory: the newest mtime, and the first error. An entry that
// disappears meanwhile is not an error.
struct NewestMtime {
  std::int64_t newest = std::numeric_limits<std::int64_t>::min();
  Status failed;
  void Fail(const Status& status) {
    if (failed.ok() && status.code() != Code::kNotFound) failed = status;
  }
};

// Bytes that deleting a directory frees: the sum of the files with a single link. Parts that cannot
// be read count as 0.
std::uint64_t BytesBelow(FileSystem& fs, const std::string& path, int depth) {
  const Result<FileInfo> info = fs.LinkStat(path);
  if (!info.ok()) return 0;
  if (info.value().kind != FileKind::kDirectory) {
    return info.value().links <= 1 ? info.value().size : 0;
  }
  if (depth == 0) return 0;
  const auto entries = fs.List(path);
  if (!entries.ok()) return 0;
  std::uint64_t bytes = 0;
  for (const DirectoryEntry& e : entries.value()) {
    bytes += BytesBelow(fs, JoinPath(path, e.name), depth - 1);
  }
  return bytes;
}

// Finds the newest mtime in and below `path`. A part that cannot be read is an error, because it
// may have the newest mtime.
void FindNewestMtime(FileSystem& fs, const std::string& path, int depth, NewestMtime& looked) {
  const Result<FileInfo> info = fs.LinkStat(path);
  if (!info.ok()) return looked.Fail(info.status());
  looked.newest = std::max(looked.newest, info.value().mtime_seconds);
  if (info.value().kind != FileKind::kDirectory || depth == 0) return;
  const auto entries = fs.List(path);
  if (!entries.ok()) return looked.Fail(entries.status());
  for (const DirectoryEntry& e : entries.value()) {
    FindNewestMtime(fs, JoinPath(path, e.name), depth - 1, looked);
  }
}

constexpr int kMaxGcDepth = 8;
// Suffix of an entry of .trash that gc is deleting, or was deleting when it was interrupted.
constexpr std::string_view kDeletingSuffix = ".deleting";

class Collector {
 public:
  Collector(FileSystem& fs, const std::string& store, const Store::GcOptions& options,
            std::int64_t now)
      : fs_(fs), store_(store), options_(options), now_(now) {}

  Status Run(const std::vector<CheckpointListing>& live) {
    for (const CheckpointListing& c : live) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool there, AddLive(c.name));
      if (!there) continue;
      if (c.problem.ok()) StagingLeftovers(c.name);
      if (c.state == CheckpointListing::State::kUnread) Fail(c.name, c.problem);
    }
    for (const DirectoryEntry& e : Entries("")) SuperblockLeftover(e);
    for (const DirectoryEntry& e : Entries(store_paths::kStagingFolder)) StagingEntry(e);
    const std::vector<DirectoryEntry> trash = Entries(store_paths::kTrashFolder);
    for (const DirectoryEntry& e : trash) TrashEntry(e, trash);
    Derived(live);
    Generations();
    SyncDeleted();
    return Status();
  }

  // Deletes entries of .trash that were just moved there, without a grace period. `names` are the
  // live checkpoints, `entries` the paths of the entries below the store.
  void Free(const std::vector<std::string>& names, const std::vector<std::string>& entries) {
    for (const std::string& name : names) {
      const Status known = AddLive(name).status();
      if (!known.ok()) return Fail(name, known);
    }
    for (const std::string& below : entries) {
      const std::string entry = below.substr(below.find('/') + 1);
      if (!KeepIfHeld(entry)) DeleteFromTrash(entry);
    }
    SyncDeleted();
  }

  // Deletes what earlier removals had to leave in .trash, as trash::FreeLeftovers describes.
  void FreeLeftovers(const std::vector<std::string>& names,
                     const std::vector<DirectoryEntry>& entries,
                     std::chrono::steady_clock::time_point end) {
    for (const std::string& name : names) {
      const Status known = AddLive(name).status();
      if (!known.ok()) return Fail(name, known);
    }
    for (const DirectoryEntry& e : entries) {
      if (no_locks_ || (deleted_ && std::chrono::steady_clock::now() >= end)) break;
      if (IsLeftover(e)) DeleteFromTrash(e.name);
    }
    SyncDeleted();
  }

  Store::GcReport& report() { return report_; }

 private:
  // Records a live checkpoint. Returns false if it does not exist. Any other failure stops gc,
  // because gc must know all live checkpoints.
  Result<bool> AddLive(const std::string& name) {
    const Result<FileInfo> info = fs_.LinkStat(Path(name));
    if (info.status().code() == Code::kNotFound) return false;
    TENSORMOUNT_RETURN_IF_ERROR(info.status());
    live_[IdOf(info.value())] = name;
    return true;
  }
  // Syncs deletions. Without this, on a filesystem without a journal, the next save may reuse
  // inodes and blocks whose deletion is not durable, and lose them when the filesystem is repaired
  // after a power failure (the data/ of a save was once found as a deleted .generations/7).
  void SyncDeleted() {
    if (!deleted_) return;
    const Status synced = fs_.SyncFileSystem(store_);
    if (!synced.ok()) Fail(".", synced);
  }
  std::string Path(std::string_view below) const { return JoinPath(store_, below); }
  void Keep(const std::string& below, std::string_view why) {
    report_.kept.push_back(below + ": " + std::string(why));
  }
  // Reports a failure. kNotFound is not reported, because it means that the object was removed
  // meanwhile.
  void Fail(const std::string& below, const Status& why) {
    if (why.code() != Code::kNotFound) report_.failed.push_back(below + ": " + why.message());
  }
  std::vector<DirectoryEntry> Entries(std::string_view below) {
    auto entries = store_moves::ListIfExists(fs_, below.empty() ? store_ : Path(below));
    if (entries.ok()) return std::move(entries).value();
    Fail(below.empty() ? "." : std::string(below), entries.status());
    return {};
  }
  bool IsYoung(std::int64_t since, std::chrono::seconds limit) const {
    if (limit.count() <= 0) return false;
    // Time stamps may have any value, so the difference may overflow.
    std::int64_t age = 0;
    if (__builtin_sub_overflow(now_, since, &age)) return since > now_;
    return age < limit.count();
  }
  // Whether a time is more than an hour ahead: the clock was set back, or the clock of another
  // machine is wrong.
  bool IsInFuture(std::int64_t since) const { return since > now_ && since - 3600 > now_; }
  // Returns true, and reports the entry, if it changed within `limit` or its age is unknown.
  bool KeepIfYoung(const std::string& below, int depth, std::chrono::seconds limit,
                   std::string_view why) {
    NewestMtime looked;
    FindNewestMtime(fs_, Path(below), depth, looked);
    if (!looked.failed.ok()) {
      Fail(below, looked.failed);
      return true;
    }
    if (!IsYoung(looked.newest, limit)) return false;
    Keep(below, std::string(why) +
                    (IsInFuture(looked.newest) ? ": its time stamps are in the future" : ""));
    return true;
  }
  // Returns true, and reports the entry, if it is or may be a live checkpoint under another name.
  bool KeepIfLive(const std::string& below) {
    const Result<FileInfo> info = fs_.LinkStat(Path(below));
    if (!info.ok()) {
      Fail(below, info.status());
      return true;
    }
    const auto live = live_.find(IdOf(info.value()));
    if (live == live_.end()) return false;
    Keep(below, "this is the same directory as checkpoint " + live->second);
    return true;
  }
  // Returns true, and reports the entry, if there is or may be a reason to keep it
  // (trash::FindHold). Except in a dry run, tries to move the entry back to its name in the store
  // (trash::MoveBack).
  bool KeepIfHeld(const std::string& entry) {
    const std::string below = JoinPath(store_paths::kTrashFolder, entry);
    const auto kept = trash::FindHold(fs_, store_, entry, now_);
    if (!kept.ok()) Fail(below, kept.status());
    if (!kept.ok()) return true;
    if (kept.value().why.empty()) return false;
    bool back = false;
    if (!options_.dry_run) {
      const Result<bool> moved = trash::MoveBack(fs_, store_, entry, kept.value());
      if (!moved.ok()) Fail(below, moved.status());
      back = moved.ok() && moved.value();
    }
    Keep(below, kept.value().why + (back ? ": moved back to " + kept.value().back_to
                                         : ": move it back to a name in the store, or remove what "
                                           "holds it"));
    return true;
  }
  // Whether an entry of .trash is a removed checkpoint that nothing holds, and that rules removed
  // or whose grace period is over; or a deletion that was interrupted.
  bool IsLeftover(const DirectoryEntry& entry) {
    if (entry.kind != FileKind::kDirectory ||
        entry.name.find(store_paths::kAbortedSuffix) != std::string::npos) {
      return false;
    }
    const std::string below = JoinPath(store_paths::kTrashFolder, entry.name);
    if (entry.name.ends_with(kDeletingSuffix)) {
      return !KeepIfYoung(below, kMaxGcDepth, options_.grace, "being deleted");
    }
    const Result<FileInfo> commit = fs_.LinkStat(JoinPath(Path(below), store_paths::kCommitFile));
    if (!commit.ok() || commit.value().kind != FileKind::kFile) return false;
    if (!store_moves::IsRemovedByRules(fs_, Path(below))) {
      const Result<FileInfo> since = fs_.LinkStat(store_moves::TrashMarkPath(Path(below)));
      // A full disk had no room for the mark, so the grace period begins now, as in gc.
      if (since.status().code() == Code::kNotFound) store_moves::MarkTrashed(fs_, Path(below));
      if (!since.ok() || IsYoung(since.value().mtime_seconds, options_.grace)) return false;
    }
    // A held checkpoint is left to gc, which moves it back into the store and reports it.
    const auto hold = trash::FindHold(fs_, store_, entry.name, now_);
    return hold.ok() && hold.value().why.empty();
  }
  // Deletes a directory or file and adds it to the report. `lock` is released after all files are
  // deleted. `as`: the path in the report, if it differs from `below`.
  void Delete(const std::string& below, std::unique_ptr<File> lock = nullptr,
              const std::string& as = {}) {
    const std::uint64_t bytes = BytesBelow(fs_, Path(below), kMaxGcDepth);
    if (!options_.dry_run) {
      Status removed = fs_.RemoveTree(Path(below));
      if (!removed.ok() && lock && fs_.LinkStat(lock->path()).status().code() == Code::kNotFound) {
        // NFS keeps a deleted file that is open under another name in its directory, so the
        // directory was not empty. Only the file of `lock` is left, so it is closed.
        lock.reset();
        removed = fs_.RemoveTree(Path(below));
      }
      deleted_ = true;
      if (!removed.ok()) return Fail(below, removed);
    }
    report_.removed.push_back(as.empty() ? below : as);
    report_.bytes_freed += bytes;
  }

  // Deletes leftovers of a published shared staging, after the grace period.
  void StagingLeftovers(const std::string& name) {
    const std::string mark = JoinPath(name, store_paths::kSharedFile);
    const Result<FileInfo> there = fs_.LinkStat(Path(mark));
    if (!there.ok()) return Fail(mark, there.status());
    const Result<FileInfo> commit = fs_.LinkStat(JoinPath(Path(name), store_paths::kCommitFile));
    if (!commit.ok()) return Fail(name, commit.status());
    if (IsYoung(commit.value().mtime_seconds, options_.grace)) return;
    const auto swept = store_moves::SweepShared(fs_, Path(name), options_.dry_run);
    deleted_ = deleted_ || !options_.dry_run;
    if (!swept.ok()) return Fail(name, swept.status());
    for (const std::string& file : swept.value().data_files) {
      report_.removed.push_back(JoinPath(name, file));
    }
    report_.bytes_freed += swept.value().bytes;
  }

  // Deletes a hidden file that a writer of store.json or of the policy left when it lost a race or
  // died.
  void SuperblockLeftover(const DirectoryEntry& entry) {
    const auto left_of = [&](std::string_view file) {
      return entry.name.starts_with("." + std::string(file) + ".");
    };
    if (!left_of(store_paths::kSuperblockFile) && !left_of(store_paths::kPolicyFile)) return;
    // The file may still be being written, so the limit is at least kHiddenFileAge.
    const auto limit = std::max(options_.grace, kHiddenFileAge);
    if (!KeepIfYoung(entry.name, 0, limit, "too young to be deleted")) Delete(entry.name);
  }

  void StagingEntry(const DirectoryEntry& entry) {
    const std::string below = std::string(store_paths::kStagingFolder) + "/" + entry.name;
    if (KeepIfLive(below)) return;
    const Result<Uuid> uuid = store_moves::ReadFolderUuid(fs_, Path(below));
    // `replaced`: the entry is a checkpoint that a publisher replaced by an exchange, so it has the
    // staging's name. The publisher has not moved it to .trash, for example because it died.
    const std::size_t dot = entry.name.rfind('.');
    const std::string id = dot == std::string::npos ? "" : entry.name.substr(dot + 1);
    const Status mark = fs_.LinkStat(JoinPath(Path(below), store_paths::kSharedFile)).status();
    const Status own = fs_.LinkStat(JoinPath(Path(below), store_paths::kUuidFile)).status();
    for (const Status& looked : {mark, own}) {
      if (!looked.ok() && looked.code() != Code::kNotFound) return Fail(below, looked);
    }
    const bool shared = mark.ok();
    const bool replaced =
        !shared && id.size() == 8 && uuid.ok() && uuid.value().Short() != id && !own.ok();
    if (!replaced &&
        KeepIfYoung(below, kMaxGcDepth, options_.staging_age, "too young to count as abandoned")) {
      return;
    }
    // Mounts with open files of a shared staging hold a shared lock; copies and repairs hold an
    // exclusive one. Our lock is held until the entry is in .trash.
    std::unique_ptr<File> lock;
    if (shared || entry.name.starts_with(store_paths::kCopyPrefix) ||
        entry.name == store_paths::kRepairFolder) {
      // Opened for writing, because NFS requires it for an exclusive lock.
      const std::string path = JoinPath(Path(below), store_paths::kLockFile);
      const Status there = fs_.LinkStat(path).status();
      if (!there.ok() && there.code() != Code::kNotFound) return Fail(below, there);
      if (there.ok()) {
        Result<std::unique_ptr<File>> opened = fs_.OpenShared(path);
        if (!opened.ok()) return Fail(below, opened.status());
        lock = std::move(opened).value();
        const Status locked = lock->TryLockExclusive();
        if (locked.code() == Code::kBusy)
          return Keep(below, "in use by a running save, copy or repair");
        // On filesystems without locks writers work without a lock, so only the age decides.
        if (!locked.ok() && !HasNoLocks(locked)) return Fail(below, locked);
      }
    }
    if (options_.dry_run) {
      report_.removed.push_back(below);
      report_.bytes_freed += BytesBelow(fs_, Path(below), kMaxGcDepth);
      return;
    }
    const auto moved = store_moves::MoveToTrash(fs_, store_, Path(below),
                                                replaced ? "" : store_paths::kAbortedSuffix);
    if (!moved.ok()) Fail(below, moved.status());
    // The report lists the entry when it is deleted from .trash. Without a grace period this is
    // done later in this run.
  }

  void TrashEntry(const DirectoryEntry& entry, const std::vector<DirectoryEntry>& all) {
    const std::string below = std::string(store_paths::kTrashFolder) + "/" + entry.name;
    if (entry.name.ends_with(store_paths::kSinceSuffix)) {
      const std::string_view of =
          std::string_view(entry.name)
              .substr(0, entry.name.size() - store_paths::kSinceSuffix.size());
      const bool used = std::any_of(all.begin(), all.end(),
                                    [&](const DirectoryEntry& e) { return e.name == of; });
      // If this fails, the next run removes the mark.
      if (!used && !options_.dry_run) (void)fs_.RemoveFile(Path(below));
      return;
    }
    if (entry.name.ends_with(kDeletingSuffix)) return DeleteFromTrash(entry.name);
    if (KeepIfHeld(entry.name)) return;
    const std::string mark = store_moves::TrashMarkPath(Path(below));
    const Result<FileInfo> since = fs_.LinkStat(mark);
    if (!since.ok() && since.status().code() != Code::kNotFound) return Fail(below, since.status());
    // A mark with a time in the future would keep the entry until then, so the mark is made again,
    // and the grace period begins again.
    const bool known = since.ok() && !IsInFuture(since.value().mtime_seconds);
    if (!known && !options_.dry_run) {
      if (since.ok()) (void)fs_.RemoveFile(mark);  // If this fails, the next run removes it.
      store_moves::MarkTrashed(fs_, Path(below));
    }
    if (IsYoung(known ? since.value().mtime_seconds : now_, options_.grace)) {
      return Keep(below, "too young to be deleted");
    }
    DeleteFromTrash(entry.name);
  }

  // Deletes an entry of .trash. It is renamed first: a process that moves the entry back to the
  // store uses the old name, so only one of the two renames succeeds. After the rename, the reasons
  // to keep the entry are checked again.
  void DeleteFromTrash(const std::string& entry) {
    const std::string below = JoinPath(store_paths::kTrashFolder, entry);
    // After a crash, on a filesystem without a journal, a directory may have two names.
    if (KeepIfLive(below)) return;
    // Readers hold a shared lock on COMMIT. Our exclusive lock is held until everything is deleted.
    // If COMMIT is not a regular file, there can be no readers.
    const std::string path = JoinPath(Path(below), store_paths::kCommitFile);
    const Result<FileInfo> info = fs_.LinkStat(path);
    if (!info.ok() && info.status().code() != Code::kNotFound) return Fail(below, info.status());
    std::unique_ptr<File> commit;
    if (info.ok() && info.value().kind == FileKind::kFile) {
      Result<std::unique_ptr<File>> opened = fs_.OpenRead(path);
      if (!opened.ok()) return Fail(below, opened.status());
      commit = std::move(opened).value();
      Status locked = commit->TryLockExclusive();
      // NFS gives an exclusive lock only for a file that is open for writing.
      if (locked.ToErrno() == EBADF) {
        opened = fs_.OpenShared(path);
        if (!opened.ok()) return Fail(below, opened.status());
        commit = std::move(opened).value();
        locked = commit->TryLockExclusive();
      }
      if (locked.code() == Code::kBusy) return Keep(below, "still being read");
      if (HasNoLocks(locked)) {
        no_locks_ = true;
        if (!options_.trust_grace) {
          return Keep(below,
                      "this filesystem has no locks, so its readers cannot be seen: pass --grace "
                      "with more seconds than the longest read takes");
        }
      } else if (!locked.ok()) {
        return Fail(below, locked);
      }
    }
    if (options_.dry_run) return Delete(below);
    std::string doomed = below;
    if (!entry.ends_with(kDeletingSuffix)) {
      doomed += "." + Uuid::Random().Short() + std::string(kDeletingSuffix);
      const Status taken = fs_.RenameNoReplace(Path(below), Path(doomed));
      if (!taken.ok()) return Fail(below, taken);
    }
    // Another directory may have got this name after COMMIT was opened.
    const Result<FileInfo> now = fs_.LinkStat(JoinPath(Path(doomed), store_paths::kCommitFile));
    const bool same = commit == nullptr ? now.status().code() == Code::kNotFound ||
                                              (now.ok() && now.value().kind != FileKind::kFile)
                                        : now.ok() && now.value().inode == info.value().inode;
    const auto kept = trash::FindHold(fs_, store_, doomed.substr(doomed.find('/') + 1), now_);
    if (!same || !kept.ok() || !kept.value().why.empty()) {
      // The entry gets its old name back. If that name is taken, it keeps the new one: FindHold
      // identifies an entry by its content.
      const Status undone = fs_.RenameNoReplace(Path(doomed), Path(below));
      if (!kept.ok()) return Fail(below, kept.status());
      return Keep(undone.ok() ? below : doomed,
                  same ? kept.value().why : "the directory was moved here just now");
    }
    Delete(doomed, std::move(commit), below);
    (void)fs_.RemoveFile(
        store_moves::TrashMarkPath(Path(below)));  // A failure is left to the next run.
  }

  void Derived(const std::vector<CheckpointListing>& live) {
    std::set<std::string> known;
    bool all_known = true;
    for (const CheckpointListing& c : live) {
      all_known = all_known && c.problem.ok();
      known.insert(c.uuid.ToString());
    }
    for (const DirectoryEntry& e : Entries(store_paths::kDerivedFolder)) {
      const std::string below = std::string(store_paths::kDerivedFolder) + "/" + e.name;
      if (known.contains(e.name)) continue;
      if (Uuid::Parse(e.name)) {
        if (!all_known) {
          Keep(below, "it may belong to a checkpoint that cannot be read");
          continue;
        }
      } else if (KeepIfYoung(below, kMaxGcDepth, options_.grace, "too young to be deleted")) {
        continue;
      }
      Delete(below);
    }
  }

  // Deletes all claims except the highest, in ascending order. Store::ClaimGeneration relies on
  // both.
  void Generations() {
    std::vector<std::uint64_t> claims;
    for (const DirectoryEntry& e : Entries(store_paths::kGenerationsFolder)) {
      std::uint64_t n = 0;
      const auto end = std::from_chars(e.name.data(), e.name.data() + e.name.size(), n);
      if (end.ec == std::errc() && std::to_string(n) == e.name) claims.push_back(n);
    }
    std::sort(claims.begin(), claims.end());
    if (claims.size() > 1 && !options_.dry_run) {
      // A save that has just begun may not have synced the highest claim. Without this sync a power
      // failure could lose that claim and keep the removal of durable ones below it.
      const Status synced = store_moves::SyncClaim(fs_, store_, claims.back());
      if (!synced.ok()) return Fail(std::string(store_paths::kGenerationsFolder), synced);
    }
    for (std::size_t i = 0; i + 1 < claims.size(); ++i) {
      const std::string below =
          std::string(store_paths::kGenerationsFolder) + "/" + std::to_string(claims[i]);
      if (!options_.dry_run) {
        // The directory of a claim is normally empty. On a filesystem without a journal a power
        // failure may have given it a block of another directory. The files in it are then
        // additional names of existing files, so deleting them loses nothing.
        const Status removed = fs_.RemoveTree(Path(below));
        if (!removed.ok()) {
          Fail(below, removed);
          // The next claims stay too, because claims must be deleted in ascending order.
          return;
        }
        deleted_ = true;
      }
      report_.removed.push_back(below);
    }
  }

  FileSystem& fs_;
  const std::string store_;
  const Store::GcOptions options_;
  const std::int64_t now_;
  std::map<FolderId, std::string> live_;  // Live checkpoints by device and inode.
  Store::GcReport report_;
  bool deleted_ = false;
  bool no_locks_ = false;  // A COMMIT could not be locked, because the filesystem has no locks.
};

}  // namespace

Store::GcReport Store::FreeTrash(const std::vector<std::string>& entries, std::int64_t now) const {
  GcOptions options;
  if (fs_->object_writer() != nullptr) {  // Without locks: after the grace period.
    GcReport report;
    std::vector<std::string> claimed;
    for (const std::string& entry : entries) claimed.push_back(entry.substr(entry.find('/') + 1));
    if (!claimed.empty()) bucket::Collect(*fs_, path_, options, claimed, report);
    return report;
  }
  options.grace = std::chrono::seconds(0);
  Collector collector(*fs_, path_, options, now);
  const Result<std::vector<std::string>> names = Names();
  if (names.ok()) collector.Free(names.value(), entries);
  return std::move(collector.report());
}

Store::GcReport trash::FreeLeftovers(const Store& store, std::int64_t now,
                                     std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  if (store.fs().object_writer() != nullptr) {
    Store::GcReport report;
    bucket::Collect(store.fs(), store.path(), {}, {}, report);
    return report;
  }
  Collector collector(store.fs(), store.path(), {}, now);
  // An error is ignored, because the next save or gc frees them.
  const auto entries =
      store_moves::ListIfExists(store.fs(), JoinPath(store.path(), store_paths::kTrashFolder));
  if (!entries.ok() || entries.value().empty()) return {};
  const Result<std::vector<std::string>> names = store.Names();
  if (names.ok()) collector.FreeLeftovers(names.value(), entries.value(), end);
  return std::move(collector.report());
}

Result<Store::GcReport> Store::Gc(const GcOptions& options) const {
  if (!options.dry_run) TENSORMOUNT_RETURN_IF_ERROR(CheckChangeable());
  if (fs_->object_writer() != nullptr) {
    GcReport report;
    bucket::Collect(*fs_, path_, options, {}, report);
    return report;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> live, List());
  Collector collector(*fs_, path_, options, fs_->NowSeconds());
  TENSORMOUNT_RETURN_IF_ERROR(collector.Run(live));
  pins::Sweep(*fs_, *this, options, collector.report());
  return std::move(collector.report());
}

}  // namespace tensormount
