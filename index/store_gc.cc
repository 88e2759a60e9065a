// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "index/store.h"
#include "index/store_layout.h"

// docs/format.md, "Garbage". Nothing here decides what is true: a staging goes to .trash by one
// rename, as an abort does, so that whoever would still publish it finds it gone; only what lies in
// .trash is deleted.

namespace tensormount {
namespace {

struct FolderId {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::string name;
};

// Adds up what deleting frees: files that no other name keeps. Unreadable parts count nothing.
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

// When anything in it was last touched.
std::int64_t NewestMtime(FileSystem& fs, const std::string& path, int depth) {
  const Result<FileInfo> info = fs.LinkStat(path);
  if (!info.ok()) return 0;
  std::int64_t newest = info.value().mtime_seconds;
  if (info.value().kind != FileKind::kDirectory || depth == 0) return newest;
  const auto entries = fs.List(path);
  if (!entries.ok()) return newest;
  for (const DirectoryEntry& e : entries.value()) {
    newest = std::max(newest, NewestMtime(fs, JoinPath(path, e.name), depth - 1));
  }
  return newest;
}

constexpr int kMaxGcDepth = 8;

class Collector {
 public:
  Collector(FileSystem& fs, const std::string& store, const Store::GcOptions& options)
      : fs_(fs), store_(store), options_(options), now_(layout::NowSeconds()) {}

  Status Run(const std::vector<CheckpointListing>& live) {
    for (const CheckpointListing& c : live) {
      const Result<FileInfo> info = fs_.LinkStat(JoinPath(store_, c.name));
      // Without knowing what is alive nothing is deleted.
      if (!info.ok() && info.status().code() != Code::kNotFound) return info.status();
      if (!info.ok()) continue;
      live_.push_back({info.value().device, info.value().inode, c.name});
      // A publisher that died after its rename.
      if (c.problem.ok() && !options_.dry_run) {
        layout::SweepShared(fs_, JoinPath(store_, c.name));
      }
    }
    for (const DirectoryEntry& e : layout::ListOrNothing(fs_, store_)) SuperblockLeftover(e);
    for (const DirectoryEntry& e : layout::ListOrNothing(fs_, Path(layout::kStagingFolder)))
      StagingEntry(e);
    const std::vector<DirectoryEntry> trash =
        layout::ListOrNothing(fs_, Path(layout::kTrashFolder));
    for (const DirectoryEntry& e : trash) TrashEntry(e, trash);
    Derived(live);
    Generations();
    return Status();
  }

  Store::GcReport& report() { return report_; }

 private:
  std::string Path(std::string_view below) const { return JoinPath(store_, below); }
  void Keep(const std::string& below, std::string_view why) {
    report_.kept.push_back(below + ": " + std::string(why));
  }
  bool Young(std::int64_t since, std::chrono::seconds limit) const {
    return limit.count() > 0 && now_ - since < limit.count();
  }
  std::optional<std::string> LiveFolder(const std::string& below) const {
    const Result<FileInfo> info = fs_.LinkStat(Path(below));
    if (!info.ok()) return std::nullopt;
    for (const FolderId& id : live_) {
      if (id.device == info.value().device && id.inode == info.value().inode) return id.name;
    }
    return std::nullopt;
  }
  void Delete(const std::string& below) {
    const std::uint64_t bytes = BytesBelow(fs_, Path(below), kMaxGcDepth);
    if (!options_.dry_run) {
      const Status removed = fs_.RemoveTree(Path(below));
      if (!removed.ok()) return Keep(below, removed.message());
    }
    report_.removed.push_back(below);
    report_.bytes_freed += bytes;
  }

  // What a creator of the store left that lost the race or died.
  void SuperblockLeftover(const DirectoryEntry& entry) {
    if (!entry.name.starts_with("." + std::string(layout::kSuperblockFile) + ".")) return;
    if (Young(NewestMtime(fs_, Path(entry.name), 0), options_.grace)) {
      return Keep(entry.name, "too young");
    }
    Delete(entry.name);
  }

  void StagingEntry(const DirectoryEntry& entry) {
    const std::string below = std::string(layout::kStagingFolder) + "/" + entry.name;
    if (const auto name = LiveFolder(below)) {
      return Keep(below, "the same folder as checkpoint " + *name);
    }
    const Result<Uuid> uuid = layout::ReadFolderUuid(fs_, Path(below));
    // What an exchange put here and its publisher did not live to take away: a whole checkpoint
    // that was published once, under the name of another's staging.
    const std::size_t dot = entry.name.rfind('.');
    const std::string id = dot == std::string::npos ? "" : entry.name.substr(dot + 1);
    const bool shared = fs_.Exists(JoinPath(Path(below), layout::kSharedFile));
    const bool replaced = !shared && id.size() == 8 && uuid.ok() && uuid.value().Short() != id &&
                          !fs_.Exists(JoinPath(Path(below), layout::kUuidFile));
    if (!replaced && Young(NewestMtime(fs_, Path(below), kMaxGcDepth), options_.staging_age)) {
      return Keep(below, "too young to be called abandoned");
    }
    // Whoever has files open in it holds a shared lock. Kept until it is in .trash.
    std::unique_ptr<File> lock;
    if (shared) {
      // For writing: over NFS an exclusive lock asks for it.
      const std::string path = JoinPath(Path(below), layout::kLockFile);
      if (fs_.Exists(path)) {
        Result<std::unique_ptr<File>> opened = fs_.OpenShared(path);
        if (!opened.ok()) return Keep(below, opened.status().message());
        lock = std::move(opened).value();
        if (lock->TryLockExclusive().code() == Code::kBusy) {
          return Keep(below, "somebody writes or publishes it");
        }
      }
    }
    if (options_.dry_run) {
      report_.removed.push_back(below);
      report_.bytes_freed += BytesBelow(fs_, Path(below), kMaxGcDepth);
      return;
    }
    const auto moved =
        layout::MoveToTrash(fs_, store_, Path(below), replaced ? "" : layout::kAbortedSuffix);
    if (!moved.ok()) Keep(below, moved.status().message());
    // It is listed when it goes from .trash, in this run where there is no grace.
  }

  void TrashEntry(const DirectoryEntry& entry, const std::vector<DirectoryEntry>& all) {
    const std::string below = std::string(layout::kTrashFolder) + "/" + entry.name;
    if (entry.name.ends_with(layout::kSinceSuffix)) {
      const std::string_view of =
          std::string_view(entry.name).substr(0, entry.name.size() - layout::kSinceSuffix.size());
      const bool used = std::any_of(all.begin(), all.end(),
                                    [&](const DirectoryEntry& e) { return e.name == of; });
      if (!used && !options_.dry_run) (void)fs_.RemoveFile(Path(below));  // Next time.
      return;
    }
    const std::string mark = Path(below) + std::string(layout::kSinceSuffix);
    const Result<FileInfo> since = fs_.LinkStat(mark);
    if (!since.ok() && !options_.dry_run) layout::MarkTrashed(fs_, Path(below));
    if (Young(since.ok() ? since.value().mtime_seconds : now_, options_.grace)) {
      return Keep(below, "too young");
    }
    // After a crash on a filesystem without a journal one folder may stand under two names.
    if (const auto name = LiveFolder(below)) {
      return Keep(below, "the same folder as checkpoint " + *name);
    }
    // Readers hold a shared lock on COMMIT. Kept until all is deleted.
    const auto commit = fs_.OpenRead(JoinPath(Path(below), layout::kCommitFile));
    if (commit.ok()) {
      const Status locked = commit.value()->TryLockExclusive();
      if (locked.code() == Code::kBusy) return Keep(below, "still read");
      if (!locked.ok()) return Keep(below, locked.message());
    } else if (commit.status().code() != Code::kNotFound) {
      return Keep(below, commit.status().message());
    }
    Delete(below);
    if (!options_.dry_run && !fs_.Exists(Path(below))) (void)fs_.RemoveFile(mark);  // Next time.
  }

  void Derived(const std::vector<CheckpointListing>& live) {
    std::set<std::string> known;
    bool all_known = true;
    for (const CheckpointListing& c : live) {
      all_known = all_known && c.problem.ok();
      known.insert(c.uuid.ToString());
    }
    for (const DirectoryEntry& e : layout::ListOrNothing(fs_, Path(layout::kDerivedFolder))) {
      const std::string below = std::string(layout::kDerivedFolder) + "/" + e.name;
      if (known.contains(e.name)) continue;
      if (!Uuid::Parse(e.name) &&
          Young(NewestMtime(fs_, Path(below), kMaxGcDepth), options_.grace)) {
        Keep(below, "too young");
      } else if (Uuid::Parse(e.name) && !all_known) {
        Keep(below, "some checkpoint cannot be read, it may be that one's");
      } else {
        Delete(below);
      }
    }
  }

  // In ascending order and never the highest: Store::ClaimGeneration relies on it.
  void Generations() {
    std::vector<std::uint64_t> claims;
    for (const DirectoryEntry& e : layout::ListOrNothing(fs_, Path(layout::kGenerationsFolder))) {
      std::uint64_t n = 0;
      const auto end = std::from_chars(e.name.data(), e.name.data() + e.name.size(), n);
      if (end.ec == std::errc() && std::to_string(n) == e.name) claims.push_back(n);
    }
    std::sort(claims.begin(), claims.end());
    for (std::size_t i = 0; i + 1 < claims.size(); ++i) {
      const std::string below =
          std::string(layout::kGenerationsFolder) + "/" + std::to_string(claims[i]);
      if (!options_.dry_run) {
        const Status removed = fs_.RemoveDirectory(Path(below));
        if (!removed.ok()) {
          Keep(below, removed.message());
          // A gap in the order would break what claims rely on.
          return;
        }
      }
      report_.removed.push_back(below);
    }
  }

  FileSystem& fs_;
  const std::string store_;
  const Store::GcOptions options_;
  const std::int64_t now_;
  std::vector<FolderId> live_;
  Store::GcReport report_;
};

}  // namespace

Result<Store::GcReport> Store::Gc(const GcOptions& options) const {
  if (!options.dry_run) TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> live, List());
  Collector collector(*fs_, path_, options);
  TENSORMOUNT_RETURN_IF_ERROR(collector.Run(live));
  return std::move(collector.report());
}

}  // namespace tensormount
