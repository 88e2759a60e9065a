// SPDX-License-Identifier: Apache-2.0
// CommitWatch (commit_watch.h). Each look lists the names of the store and of .trash. The commit
// records of known names are looked at again only if the store's directory changed, and from time
// to time, in case a file system does not note an exchange of two names in the directory.
#include "index/store/commit_watch.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/doorbell.h"
#include "base/file_system_for.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/thread.h"
#include "index/read/value_totals.h"
#include "index/records/manifest.h"
#include "index/records/store_paths.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookInterval{1000};
constexpr std::chrono::milliseconds kFarLookInterval{5000};
// Interval while a local store does not exist yet.
constexpr std::chrono::milliseconds kWaitInterval{100};
// One of this many looks is at all commit records, although the directory did not change.
constexpr int kWholeLookEach = 12;
// For this long after a change, another change may leave the directory's time as it is.
constexpr std::chrono::seconds kDirectoryTimeGrain{2};
// How long the destructor waits for a look that hangs in storage.
constexpr std::chrono::seconds kEndPatience{2};
// Threads that look at commit records: one for each of so many names, and over the network.
constexpr std::size_t kNamesAThread = 256;
constexpr int kFarThreads = 16;
constexpr std::size_t kUuidDigits = 32;

// The uuid in the name of an entry of .trash that was a published checkpoint.
std::optional<Uuid> PublishedUuid(std::string_view entry) {
  if (entry.find(store_paths::kAbortedSuffix) != std::string_view::npos) return std::nullopt;
  if (entry.size() > kUuidDigits && entry[kUuidDigits] != '.') return std::nullopt;
  return Uuid::Parse(entry.substr(0, kUuidDigits));
}

// Tells commit records and directories apart without reading them.
using Stamp = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::int64_t, std::int64_t,
                         std::int64_t, std::int64_t>;
Stamp StampOf(const FileInfo& info) {
  return {info.device,
          info.inode,
          info.size,
          info.mtime_seconds,
          info.mtime_nanoseconds,
          info.ctime_seconds,
          info.ctime_nanoseconds};
}

}  // namespace

struct CommitWatch::Core {
  Core(FileSystem& f, std::string p, Options o)
      : fs(f), path(std::move(p)), options(std::move(o)), far(!f.Can(Ability::kKernelFiles)) {}

  FileSystem& fs;
  const std::string path;
  const Options options;
  const bool far;  // Each look at a name costs a round trip.

  std::mutex mutex;
  std::condition_variable wake;  // For Next() and the destructor.
  bool stop = false;
  bool over = false;  // The thread has ended.
  Status failure;     // Why the watch ended.
  std::deque<Commit> queue;
  std::vector<std::string> warnings;
  // Replaced when the store appears.
  std::shared_ptr<Doorbell> bell;

  // The members from here on are used by Start, and then by the watching thread.
  std::optional<Store> store;
  // Generation above which checkpoints of the first look are reported. nullopt: none are.
  std::optional<std::uint64_t> above;
  struct KnownName {
    Stamp commit;
    bool good = false;   // False: the commit record could not be read, and is read again.
    bool old = false;    // Found by the first look, and not read yet.
    std::string warned;  // The last warning about it.
  };
  std::map<std::string, KnownName> names;
  std::set<Uuid> seen;
  std::set<std::string> trash;   // Entries that the last look found.
  std::uint64_t newest_old = 0;  // The highest generation of the first look.
  std::optional<Stamp> stamp;    // Of the store's directory.
  Clock::time_point stamp_changed{};
  bool looked_once = false;
  int looks_since_whole = 0;
  std::optional<Clock::time_point> failing_since;
  std::string last_warning;
  std::vector<Commit> found;  // By the look in progress.

  std::chrono::milliseconds interval() const {
    if (options.interval.count() > 0) return options.interval;
    return far ? kFarLookInterval : store ? kLookInterval : kWaitInterval;
  }

  void Warn(std::string text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(std::move(text));
  }

  Status SetBell(const std::string& watched) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<Doorbell> made, Doorbell::Make(watched));
    const std::lock_guard lock(mutex);
    bell = std::move(made);
    return Status();
  }

  // Opens the store. False: it does not exist yet.
  Result<bool> OpenStore() {
    Result<Store> opened = Store::Open(fs, path);
    if (opened.ok()) {
      TENSORMOUNT_RETURN_IF_ERROR(SetBell(far ? std::string() : opened.value().path()));
      store = std::move(opened).value();
      return true;
    }
    if (opened.status().code() != Code::kNotFound) return opened.status();
    const Result<FileInfo> info = fs.Stat(path);
    if (info.status().code() == Code::kNotFound) return false;
    if (!info.ok()) return info.status();
    if (info.value().kind != FileKind::kDirectory) {
      return Status(Code::kInvalidArgument, path + ": is not a directory");
    }
    if (fs.Exists(JoinPath(path, store_paths::kCommitFile))) {
      return Status(Code::kInvalidArgument,
                    path + ": is a checkpoint; watch the store that contains it");
    }
    // A new store has no such names before its store.json.
    if (store_paths::LooksLikeStore(fs, path)) return opened.status();
    return false;
  }

  // Notes a checkpoint. `old`: it was there when the watch began.
  void NoteCommit(Commit commit, bool old) {
    if (!seen.insert(commit.uuid).second) return;
    if (old && !(above && commit.generation > *above)) return;
    found.push_back(std::move(commit));
  }

  // The result of looking at one name.
  struct ExaminedName {
    Stamp commit;
    // False: the name is no checkpoint yet, such as a copy in progress.
    bool has_commit = false;
    bool unchanged = false;
    CheckpointListing listing;
    std::int64_t commit_mtime = 0;
  };

  ExaminedName ExamineName(const std::string& name, const KnownName* known) const {
    ExaminedName at;
    // Before COMMIT is read, so that a later change of COMMIT is a change of what was seen.
    const Result<FileInfo> info =
        fs.LinkStat(JoinPath(store->CheckpointPath(name), store_paths::kCommitFile));
    at.has_commit = info.status().code() != Code::kNotFound;
    if (info.ok()) {
      at.commit = StampOf(info.value());
      at.commit_mtime = info.value().mtime_seconds;
      at.unchanged = known != nullptr && known->good && known->commit == at.commit;
    }
    if (!at.unchanged) at.listing = store->FindListing(name);
    return at;
  }

  Commit CommitOf(const CheckpointListing& listing, const std::string& directory,
                  std::int64_t commit_mtime) const {
    Commit commit;
    commit.store = store->path();
    commit.name = listing.name;
    commit.uuid = listing.uuid;
    commit.generation = listing.generation;
    commit.parent = listing.parent;
    commit.derived = listing.derived;
    const Result<CheckpointInfo> info = ReadManifestInfo(fs, directory);
    const bool good = info.ok() && info.value().uuid == listing.uuid;
    commit.created = good ? info.value().created : commit_mtime;
    return commit;
  }

  // After the look at all names, which must be short: a checkpoint that moves meanwhile is reported
  // after later ones.
  void ReadNonfinite(Commit& commit) const {
    if (commit.removed || commit.name.empty()) return;
    const Result<std::optional<std::uint64_t>> nonfinite = CountNonfinite(fs, commit.path());
    if (!nonfinite.ok()) return;
    // If another checkpoint has the name by now, the counts may be of that one.
    const Result<CheckpointInfo> info = ReadManifestInfo(fs, commit.path());
    if (info.ok() && info.value().uuid == commit.uuid) commit.nonfinite = nonfinite.value();
  }

  Status ScanNames(bool whole, bool first, bool first_is_old) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> now, store->Names());
    if (now.empty() &&
        fs.LinkStat(JoinPath(store->path(), store_paths::kSuperblockFile)).status().code() ==
            Code::kNotFound) {
      return Status(Code::kStale, path + ": the store was removed");
    }
    std::vector<std::string> wanted;
    for (const std::string& name : now) {
      const auto known = names.find(name);
      if (whole || known == names.end() || !known->second.good) wanted.push_back(name);
    }
    std::vector<ExaminedName> looked(wanted.size());
    struct Nothing {};
    const int threads = far ? kFarThreads : wanted.size() >= kNamesAThread ? 0 : 1;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachParallel<Nothing>(wanted.size(), threads, [&](std::size_t i, Nothing&) {
          const auto known = names.find(wanted[i]);
          looked[i] = ExamineName(wanted[i], known == names.end() ? nullptr : &known->second);
          return Status();
        }));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      ExaminedName& at = looked[i];
      const std::string& name = wanted[i];
      if (at.unchanged) continue;
      if (at.listing.problem.code() == Code::kNotFound) {
        names.erase(name);
        continue;
      }
      const auto [entry, is_new] = names.try_emplace(name);
      KnownName& known = entry->second;
      if (is_new) known.old = first && first_is_old;
      known.commit = at.commit;
      known.good = at.listing.problem.ok();
      if (known.good) {
        // A name that the first look could not read has a new checkpoint if its generation is new.
        const bool old = known.old && (first || at.listing.generation <= newest_old);
        known.old = false;
        known.warned.clear();
        if (first) newest_old = std::max(newest_old, at.listing.generation);
        if (seen.contains(at.listing.uuid)) continue;
        const std::string directory = store->CheckpointPath(name);
        // Dates of checkpoints that are not reported are not needed.
        if (old && !(above && at.listing.generation > *above)) {
          seen.insert(at.listing.uuid);
        } else {
          NoteCommit(CommitOf(at.listing, directory, at.commit_mtime), old);
        }
      } else if (at.has_commit && known.warned != at.listing.problem.message()) {
        known.warned = at.listing.problem.message();
        Warn(name + " cannot be read: " + known.warned);
      }
    }
    const std::set<std::string_view> there(now.begin(), now.end());
    std::erase_if(names, [&](const auto& one) { return !there.contains(one.first); });
    return Status();
  }

  // Finds commits that were removed or replaced before a look. Looked at after the names, so that a
  // checkpoint that is removed meanwhile is found. `moved`: names that were in .trash.
  Status ScanTrash(const std::vector<std::string>& moved, bool old) {
    const std::string folder = JoinPath(store->path(), store_paths::kTrashFolder);
    {
      const std::lock_guard lock(mutex);
      if (!far) (void)bell->WatchMoves(folder);  // The folder may not exist yet.
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                                 store_moves::ListIfExists(fs, folder));
    std::set<std::string> now;
    std::set<std::string> candidates(moved.begin(), moved.end());
    for (const DirectoryEntry& entry : entries) {
      if (entry.kind != FileKind::kDirectory) continue;
      now.insert(entry.name);
      if (!trash.contains(entry.name)) candidates.insert(entry.name);
    }
    trash = std::move(now);
    for (const std::string& entry : candidates) {
      const std::optional<Uuid> uuid = PublishedUuid(entry);
      if (!uuid || seen.contains(*uuid)) continue;
      Commit commit;
      commit.store = store->path();
      commit.uuid = *uuid;
      const std::string directory = JoinPath(folder, entry);
      const Result<DecodedCommit> record = store_moves::ReadCommit(fs, directory);
      if (record.ok() && record.value().record.uuid == *uuid) {
        const CommitRecord& read = record.value().record;
        const bool derived = (read.compatible & kCommitDerived) != 0;
        CheckpointListing listing;
        listing.name = store_moves::NameInMark(fs, directory);
        listing.uuid = read.uuid;
        listing.generation = read.generation;
        listing.parent = read.parent;
        listing.derived = derived;
        commit = CommitOf(listing, directory, 0);
      }
      commit.removed = true;
      if (old) {
        seen.insert(*uuid);
      } else {
        NoteCommit(std::move(commit), false);
      }
    }
    return Status();
  }

  // Looks at the store once. `changed`: inotify reported a change. `first_is_old`: what the first
  // look finds was there when the watch began.
  Status ScanStore(bool changed, const std::vector<std::string>& moved, bool first_is_old) {
    const Clock::time_point now = Clock::now();
    const bool first = !looked_once;
    bool whole = first || changed || ++looks_since_whole >= kWholeLookEach;
    if (!far) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo directory, fs.LinkStat(store->path()));
      const Stamp own = StampOf(directory);
      if (stamp != own) {
        // The directory at this path is another one: inotify watches the old one.
        if (stamp && std::get<1>(*stamp) != std::get<1>(own)) {
          TENSORMOUNT_RETURN_IF_ERROR(SetBell(store->path()));
        }
        stamp = own;
        stamp_changed = now;
      }
      whole = whole || now - stamp_changed < kDirectoryTimeGrain;
    }
    found.clear();
    const Status names_read = ScanNames(whole, first, first_is_old);
    if (names_read.ok()) {
      looked_once = true;
      looks_since_whole = whole ? 0 : looks_since_whole;
    } else {
      looks_since_whole = kWholeLookEach;
    }
    const Status trash_read = ScanTrash(moved, first && first_is_old);
    std::ranges::sort(found, {}, [](const Commit& c) { return std::tie(c.generation, c.uuid); });
    for (Commit& commit : found) ReadNonfinite(commit);
    const std::lock_guard lock(mutex);
    std::ranges::move(found, std::back_inserter(queue));
    if (!found.empty()) wake.notify_all();
    return names_read.ok() ? trash_read : names_read;
  }

  // The store as it is, or the store that was waited for.
  Status ScanOrOpen(bool changed, const std::vector<std::string>& moved) {
    if (store) return ScanStore(changed, moved, /*first_is_old=*/false);
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool opened, OpenStore());
    return opened ? ScanStore(true, {}, /*first_is_old=*/false) : Status();
  }

  void Loop() {
    std::vector<std::string> moved;
    Status ended;
    while (ended.ok()) {
      std::shared_ptr<Doorbell> waits;
      {
        const std::lock_guard lock(mutex);
        if (stop) break;
        waits = bell;
      }
      const bool changed = waits->Wait(interval(), &moved);
      {
        const std::lock_guard lock(mutex);
        if (stop) break;
      }
      const Status looked = ScanOrOpen(changed, moved);
      if (looked.ok()) {
        moved.clear();
        failing_since.reset();
        last_warning.clear();
        continue;
      }
      const Code code = looked.code();
      if (store && (code == Code::kNotFound || code == Code::kStale)) {
        ended = Status(Code::kStale, path + ": the store was removed");
      } else if (code == Code::kInvalidArgument) {
        ended = looked;
      } else if (!failing_since) {
        failing_since = Clock::now();
      } else if (Clock::now() - *failing_since >= kGiveUp) {
        ended = looked;
      }
      if (ended.ok() && last_warning != looked.message()) {
        last_warning = looked.message();
        Warn(path + " cannot be read: " + last_warning);
      }
    }
    const std::lock_guard lock(mutex);
    failure = ended;
    over = true;
    wake.notify_all();
  }
};

Result<std::unique_ptr<CommitWatch>> CommitWatch::Start(const std::string& path,
                                                        const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(path));
  return Start(*fs, path, options);
}

Result<std::unique_ptr<CommitWatch>> CommitWatch::Start(FileSystem& fs, const std::string& path,
                                                        const Options& options) {
  auto core = std::make_shared<Core>(fs, path, options);
  if (options.existing) core->above = options.above;
  TENSORMOUNT_RETURN_IF_ERROR(core->SetBell(std::string()));
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool exists, core->OpenStore());
  if (!options.since.empty()) {
    if (!exists) {
      return Status(Code::kNotFound,
                    path + ": not a store, so it has no checkpoint " + options.since);
    }
    const CheckpointListing since = core->store->FindListing(options.since);
    if (since.problem.code() == Code::kNotFound) {
      return Status(Code::kNotFound,
                    core->store->CheckpointPath(options.since) + ": no such checkpoint");
    }
    if (!since.problem.ok()) return since.problem;
    core->above = since.generation;
  }
  if (exists) TENSORMOUNT_RETURN_IF_ERROR(core->ScanStore(true, {}, /*first_is_old=*/true));
  Thread([core] { core->Loop(); }).detach();
  return std::unique_ptr<CommitWatch>(new CommitWatch(std::move(core)));
}

// Waits only for a limited time, because storage may block the watching thread. The thread then
// keeps Core, and ends by itself later.
CommitWatch::~CommitWatch() {
  std::unique_lock lock(core_->mutex);
  core_->stop = true;
  core_->bell->Ring();
  if (!core_->wake.wait_for(lock, kEndPatience, [&] { return core_->over; })) {
    Log(LogLevel::kWarning, core_->path + " does not answer: a thread still waits for it");
  }
}

Result<std::optional<Commit>> CommitWatch::Next(std::chrono::milliseconds patience) {
  std::unique_lock lock(core_->mutex);
  core_->wake.wait_for(lock, patience, [&] { return core_->over || !core_->queue.empty(); });
  if (core_->queue.empty()) {
    if (!core_->failure.ok()) return core_->failure;
    return std::optional<Commit>();
  }
  std::optional<Commit> next = std::move(core_->queue.front());
  core_->queue.pop_front();
  return next;
}

std::vector<std::string> CommitWatch::TakeWarnings() {
  const std::lock_guard lock(core_->mutex);
  return std::exchange(core_->warnings, {});
}

nlohmann::ordered_json CommitJson(const Commit& commit) {
  nlohmann::ordered_json json = {{"event", "committed"},
                                 {"checkpoint", nullptr},
                                 {"uuid", commit.uuid.ToString()},
                                 {"generation", nullptr},
                                 {"parent", nullptr},
                                 {"created", nullptr},
                                 {"derived", commit.derived},
                                 {"removed", commit.removed},
                                 {"nonfinite", nullptr},
                                 {"path", nullptr}};
  if (commit.nonfinite) json["nonfinite"] = *commit.nonfinite;
  if (!commit.name.empty()) {
    json["checkpoint"] = commit.name;
    if (!commit.removed) json["path"] = commit.path();
  }
  if (commit.generation != 0) {
    json["generation"] = commit.generation;
    if (!commit.parent.IsZero()) json["parent"] = commit.parent.ToString();
    if (commit.created != 0) json["created"] = commit.created;
  }
  return json;
}

}  // namespace tensormount
