// SPDX-License-Identifier: Apache-2.0
// Store::Gc of store.h (docs/format.md, "Garbage"). Nothing here decides what is true: a staging
// goes to .trash by one rename, as an abort does, so that whoever would still publish it finds it
// gone; only what lies in .trash is deleted.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <limits>
#include <optional>
#include <set>

#include "index/read/pinned_commit.h"
#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/retained_file.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "index/store/trash.h"

namespace tensormount {
namespace {

// The last line of defence: whatever went wrong with names, a folder that a live checkpoint is (by
// device and inode) is never deleted.
using FolderId = std::pair<std::uint64_t, std::uint64_t>;
FolderId IdOf(const FileInfo& info) { return {info.device, info.inode}; }

// The first thing that went wrong while a folder was looked at; what went away meanwhile is no
// failure.
struct Looked {
  std::int64_t newest = std::numeric_limits<std::int64_t>::min();
  Status failed;
  void Fail(const Status& status) {
    if (failed.ok() && status.code() != Code::kNotFound) failed = status;
  }
};

// Adds up what deleting frees: files that no other name keeps. Unreadable parts count nothing.
// Hard links make a byte belong to several names: it is freed with the last.
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

// When anything in it was last touched. A part that cannot be looked at may be the newest.
void LookAtMtimes(FileSystem& fs, const std::string& path, int depth, Looked& looked) {
  const Result<FileInfo> info = fs.LinkStat(path);
  if (!info.ok()) return looked.Fail(info.status());
  looked.newest = std::max(looked.newest, info.value().mtime_seconds);
  if (info.value().kind != FileKind::kDirectory || depth == 0) return;
  const auto entries = fs.List(path);
  if (!entries.ok()) return looked.Fail(entries.status());
  for (const DirectoryEntry& e : entries.value()) {
    LookAtMtimes(fs, JoinPath(path, e.name), depth - 1, looked);
  }
}

constexpr int kMaxGcDepth = 8;
// Of an entry of .trash that is being deleted, or was when gc ended.
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

  // Run for entries of .trash that have just come.
  void Free(const std::vector<std::string>& names, const std::vector<std::string>& entries) {
    for (const std::string& name : names) {
      const Status known = AddLive(name).status();
      if (!known.ok()) return Fail(name, known);
    }
    for (const std::string& below : entries) {
      const std::string entry = below.substr(below.find('/') + 1);
      if (!KeptAsHeld(entry)) DeleteFromTrash(entry);
    }
    SyncDeleted();
  }

  Store::GcReport& report() { return report_; }

 private:
  // Whether a checkpoint is there. Without knowing what is alive nothing is deleted.
  Result<bool> AddLive(const std::string& name) {
    const Result<FileInfo> info = fs_.LinkStat(Path(name));
    if (info.status().code() == Code::kNotFound) return false;
    TENSORMOUNT_RETURN_IF_ERROR(info.status());
    live_[IdOf(info.value())] = name;
    return true;
  }
  // Without a journal the next save may get inodes and blocks that deleted files and folders still
  // have on the disk, and repairing the filesystem after a power cut would take them from it: its
  // data/ was found as a deleted .generations/7.
  void SyncDeleted() {
    if (!deleted_) return;
    const Status synced = fs_.SyncFileSystem(store_);
    if (!synced.ok()) Fail(".", synced);
  }
  std::string Path(std::string_view below) const { return JoinPath(store_, below); }
  void Keep(const std::string& below, std::string_view why) {
    report_.kept.push_back(below + ": " + std::string(why));
  }
  // Nothing is done to what could not be looked at; what went meanwhile is no failure.
  void Fail(const std::string& below, const Status& why) {
    if (why.code() != Code::kNotFound) report_.failed.push_back(below + ": " + why.message());
  }
  std::vector<DirectoryEntry> Entries(std::string_view below) {
    auto entries = store_moves::ListIfThere(fs_, below.empty() ? store_ : Path(below));
    if (entries.ok()) return std::move(entries).value();
    Fail(below.empty() ? "." : std::string(below), entries.status());
    return {};
  }
  bool Young(std::int64_t since, std::chrono::seconds limit) const {
    if (limit.count() <= 0) return false;
    // Time stamps may be anything: their difference may not fit.
    std::int64_t age = 0;
    if (__builtin_sub_overflow(now_, since, &age)) return since > now_;
    return age < limit.count();
  }
  // Of a clock that was set back, or another machine's that is ahead. A little is normal.
  bool InFuture(std::int64_t since) const { return since > now_ && since - 3600 > now_; }
  // Whether anything in it was touched within `limit`; then, and where that is not known, it is
  // kept.
  bool KeptAsYoung(const std::string& below, int depth, std::chrono::seconds limit,
                   std::string_view why) {
    Looked looked;
    LookAtMtimes(fs_, Path(below), depth, looked);
    if (!looked.failed.ok()) {
      Fail(below, looked.failed);
      return true;
    }
    if (!Young(looked.newest, limit)) return false;
    Keep(below,
         std::string(why) + (InFuture(looked.newest) ? ": its time stamps are in the future" : ""));
    return true;
  }
  // Whether it is, under another name, a live checkpoint; or may be.
  bool KeptAsLive(const std::string& below) {
    const Result<FileInfo> info = fs_.LinkStat(Path(below));
    if (!info.ok()) {
      Fail(below, info.status());
      return true;
    }
    const auto live = live_.find(IdOf(info.value()));
    if (live == live_.end()) return false;
    Keep(below, "the same folder as checkpoint " + live->second);
    return true;
  }
  // Whether something holds what lies there, which then goes back to its name where that is known.
  bool KeptAsHeld(const std::string& entry) {
    const std::string below = JoinPath(store_paths::kTrashFolder, entry);
    const auto kept = trash::WhyKept(fs_, store_, entry, now_);
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
  // `lock` is held until all is deleted. `as`: what the report calls it.
  void Delete(const std::string& below, std::unique_ptr<File> lock = nullptr,
              const std::string& as = {}) {
    const std::uint64_t bytes = BytesBelow(fs_, Path(below), kMaxGcDepth);
    if (!options_.dry_run) {
      Status removed = fs_.RemoveTree(Path(below));
      if (!removed.ok() && lock && fs_.LinkStat(lock->path()).status().code() == Code::kNotFound) {
        // NFS keeps what is open in the folder, under another name: then the file of the lock is
        // what is left, and nobody can open it any more.
        lock.reset();
        removed = fs_.RemoveTree(Path(below));
      }
      deleted_ = true;
      if (!removed.ok()) return Fail(below, removed);
    }
    report_.removed.push_back(as.empty() ? below : as);
    report_.bytes_freed += bytes;
  }

  // What a publish of a shared staging leaves to us. Not at once: see Run().
  void StagingLeftovers(const std::string& name) {
    const std::string mark = JoinPath(name, store_paths::kSharedFile);
    const Result<FileInfo> there = fs_.LinkStat(Path(mark));
    if (!there.ok()) return Fail(mark, there.status());
    const Result<FileInfo> commit = fs_.LinkStat(JoinPath(Path(name), store_paths::kCommitFile));
    if (!commit.ok()) return Fail(name, commit.status());
    if (Young(commit.value().mtime_seconds, options_.grace)) return;
    const auto swept = store_moves::SweepShared(fs_, Path(name), options_.dry_run);
    deleted_ = deleted_ || !options_.dry_run;
    if (!swept.ok()) return Fail(name, swept.status());
    for (const std::string& file : swept.value().data_files) {
      report_.removed.push_back(JoinPath(name, file));
    }
    report_.bytes_freed += swept.value().bytes;
  }

  // What a creator of the store left that lost the race or died.
  void SuperblockLeftover(const DirectoryEntry& entry) {
    const auto left_of = [&](std::string_view file) {
      return entry.name.starts_with("." + std::string(file) + ".");
    };
    if (!left_of(store_paths::kSuperblockFile) && !left_of(store_paths::kPolicyFile)) return;
    // Somebody may be writing it, whatever the grace for checkpoints is.
    const auto limit = std::max(options_.grace, kHiddenFileAge);
    if (!KeptAsYoung(entry.name, 0, limit, "too young")) Delete(entry.name);
  }

  void StagingEntry(const DirectoryEntry& entry) {
    const std::string below = std::string(store_paths::kStagingFolder) + "/" + entry.name;
    if (KeptAsLive(below)) return;
    const Result<Uuid> uuid = store_moves::ReadFolderUuid(fs_, Path(below));
    // What an exchange put here and its publisher did not live to take away: a whole checkpoint
    // that was published once, under the name of another's staging.
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
        KeptAsYoung(below, kMaxGcDepth, options_.staging_age, "too young to be called abandoned")) {
      return;
    }
    // Whoever has files open in it holds a shared lock; who copies into one, or repairs, has it
    // alone. Kept until it is in .trash.
    std::unique_ptr<File> lock;
    if (shared || entry.name.starts_with(store_paths::kCopyPrefix) ||
        entry.name == store_paths::kRepairFolder) {
      // For writing: over NFS an exclusive lock asks for it.
      const std::string path = JoinPath(Path(below), store_paths::kLockFile);
      const Status there = fs_.LinkStat(path).status();
      if (!there.ok() && there.code() != Code::kNotFound) return Fail(below, there);
      if (there.ok()) {
        Result<std::unique_ptr<File>> opened = fs_.OpenShared(path);
        if (!opened.ok()) return Fail(below, opened.status());
        lock = std::move(opened).value();
        const Status locked = lock->TryLockExclusive();
        if (locked.code() == Code::kBusy) return Keep(below, "somebody writes or publishes it");
        // Writers go on without locks where there are none; then its age alone counts.
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
    // It is listed when it goes from .trash, in this run where there is no grace.
  }

  void TrashEntry(const DirectoryEntry& entry, const std::vector<DirectoryEntry>& all) {
    const std::string below = std::string(store_paths::kTrashFolder) + "/" + entry.name;
    if (entry.name.ends_with(store_paths::kSinceSuffix)) {
      const std::string_view of =
          std::string_view(entry.name)
              .substr(0, entry.name.size() - store_paths::kSinceSuffix.size());
      const bool used = std::any_of(all.begin(), all.end(),
                                    [&](const DirectoryEntry& e) { return e.name == of; });
      if (!used && !options_.dry_run) (void)fs_.RemoveFile(Path(below));  // Next time.
      return;
    }
    if (entry.name.ends_with(kDeletingSuffix)) return DeleteFromTrash(entry.name);
    if (KeptAsHeld(entry.name)) return;
    const std::string mark = store_moves::MarkOf(Path(below));
    const Result<FileInfo> since = fs_.LinkStat(mark);
    if (!since.ok() && since.status().code() != Code::kNotFound) return Fail(below, since.status());
    // A mark that a clock set in the future would hold the entry until then: its grace begins anew.
    const bool known = since.ok() && !InFuture(since.value().mtime_seconds);
    if (!known && !options_.dry_run) {
      if (since.ok()) (void)fs_.RemoveFile(mark);  // Next time.
      store_moves::MarkTrashed(fs_, Path(below));
    }
    if (Young(known ? since.value().mtime_seconds : now_, options_.grace)) {
      return Keep(below, "too young");
    }
    DeleteFromTrash(entry.name);
  }

  // What its grace is over for. Whoever moves it back needs it under its name here: so it gets
  // another one, and one of the two renames happens. Then what holds it is looked for once more.
  void DeleteFromTrash(const std::string& entry) {
    const std::string below = JoinPath(store_paths::kTrashFolder, entry);
    // After a crash on a filesystem without a journal one folder may stand under two names.
    if (KeptAsLive(below)) return;
    // Readers hold a shared lock on COMMIT. Kept until all is deleted. What is no file, nobody
    // could open to read from.
    const std::string path = JoinPath(Path(below), store_paths::kCommitFile);
    const Result<FileInfo> info = fs_.LinkStat(path);
    if (!info.ok() && info.status().code() != Code::kNotFound) return Fail(below, info.status());
    std::unique_ptr<File> commit;
    if (info.ok() && info.value().kind == FileKind::kFile) {
      Result<std::unique_ptr<File>> opened = fs_.OpenRead(path);
      if (!opened.ok()) return Fail(below, opened.status());
      commit = std::move(opened).value();
      Status locked = commit->TryLockExclusive();
      if (locked.ToErrno() == EBADF) {  // Over NFS only what is open for writing is locked alone.
        opened = fs_.OpenShared(path);
        if (!opened.ok()) return Fail(below, opened.status());
        commit = std::move(opened).value();
        locked = commit->TryLockExclusive();
      }
      if (locked.code() == Code::kBusy) return Keep(below, "still read");
      if (HasNoLocks(locked)) {
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
    // Another folder may have got the name since its COMMIT was opened.
    const Result<FileInfo> now = fs_.LinkStat(JoinPath(Path(doomed), store_paths::kCommitFile));
    const bool same = commit == nullptr ? now.status().code() == Code::kNotFound ||
                                              (now.ok() && now.value().kind != FileKind::kFile)
                                        : now.ok() && now.value().inode == info.value().inode;
    const auto kept = trash::WhyKept(fs_, store_, doomed.substr(doomed.find('/') + 1), now_);
    if (!same || !kept.ok() || !kept.value().why.empty()) {
      // Where its name is taken it stays under this one: what lies there counts, not the name.
      const Status undone = fs_.RenameNoReplace(Path(doomed), Path(below));
      if (!kept.ok()) return Fail(below, kept.status());
      return Keep(undone.ok() ? below : doomed, same ? kept.value().why : "it has just come");
    }
    Delete(doomed, std::move(commit), below);
    (void)fs_.RemoveFile(store_moves::MarkOf(Path(below)));  // Next time.
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
          Keep(below, "some checkpoint cannot be read, it may be that one's");
          continue;
        }
      } else if (KeptAsYoung(below, kMaxGcDepth, options_.grace, "too young")) {
        continue;
      }
      Delete(below);
    }
  }

  // In ascending order and never the highest: Store::ClaimGeneration relies on it.
  void Generations() {
    std::vector<std::uint64_t> claims;
    for (const DirectoryEntry& e : Entries(store_paths::kGenerationsFolder)) {
      std::uint64_t n = 0;
      const auto end = std::from_chars(e.name.data(), e.name.data() + e.name.size(), n);
      if (end.ec == std::errc() && std::to_string(n) == e.name) claims.push_back(n);
    }
    std::sort(claims.begin(), claims.end());
    for (std::size_t i = 0; i + 1 < claims.size(); ++i) {
      const std::string below =
          std::string(store_paths::kGenerationsFolder) + "/" + std::to_string(claims[i]);
      if (!options_.dry_run) {
        // Empty, unless a filesystem without a journal gave its block to somebody after a power
        // cut: then what is in it are second names of files.
        const Status removed = fs_.RemoveTree(Path(below));
        if (!removed.ok()) {
          Fail(below, removed);
          // A gap in the order would break what claims rely on.
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
  std::map<FolderId, std::string> live_;  // Names of checkpoints.
  Store::GcReport report_;
  bool deleted_ = false;
};

}  // namespace

Store::GcReport Store::FreeTrash(const std::vector<std::string>& entries, std::int64_t now) const {
  GcOptions options;
  options.grace = std::chrono::seconds(0);
  Collector collector(*fs_, path_, options, now);
  const Result<std::vector<std::string>> names = Names();
  if (names.ok()) collector.Free(names.value(), entries);
  return std::move(collector.report());
}

Result<Store::GcReport> Store::Gc(const GcOptions& options) const {
  if (!options.dry_run) TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> live, List());
  Collector collector(*fs_, path_, options, fs_->NowSeconds());
  TENSORMOUNT_RETURN_IF_ERROR(collector.Run(live));
  pins::Sweep(*fs_, *this, options, collector.report());
  return std::move(collector.report());
}

}  // namespace tensormount
