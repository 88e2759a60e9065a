// SPDX-License-Identifier: Apache-2.0
// Store::Fsck of store.h checks a store. With --rebuild it also rebuilds indexes, which are stored
// beside the checkpoints (.derived/), and store.json; without --rebuild it changes nothing.
#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "index/read/derived_index.h"
#include "index/records/store_paths.h"
#include "index/store/bucket.h"
#include "index/store/costs.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "index/store/trash.h"

namespace tensormount {
namespace {

using Finding = Store::FsckFinding;

// Collects all findings, because an operator wants the whole list. Repairs only with `rebuild`, and
// only data that can be made from verified data (an index from manifests) or from nothing (a new
// store.json).
class Checker {
 public:
  Checker(FileSystem& fs, const std::string& store, const Store::FsckOptions& options)
      : fs_(fs), store_(store), options_(options) {}

  void Checkpoint(const CheckpointListing& listing) {
    using State = CheckpointListing::State;
    switch (listing.state) {
      case State::kGood:
        break;
      case State::kDamaged:
        Damage(
            listing.name, listing.problem.message(),
            "without its commit record a checkpoint cannot be trusted: save the checkpoint again, "
            "then `rm` the damaged one");
        return;
      case State::kNoCheckpoint:
        Note(listing.name, "a directory that is not a checkpoint: it has no COMMIT", "");
        return;
      case State::kUnread:
        ReportUnread(listing.name, listing.problem);
        return;
    }
    const std::string directory = JoinPath(store_, listing.name);
    VerifyOptions verify;
    verify.quick = !options_.read_data;
    verify.roots = options_.roots;
    Result<VerifyReport> verified = VerifyCheckpoint(fs_, directory, verify);
    // kStale: the checkpoint was replaced meanwhile, so the new one is checked.
    if (verified.status().code() == Code::kStale) {
      verified = VerifyCheckpoint(fs_, directory, verify);
    }
    if (!verified.ok()) {
      // A checkpoint that was removed meanwhile is ignored. Other failures must not prevent the
      // check of the other checkpoints.
      if (fs_.LinkStat(directory).status().code() != Code::kNotFound) {
        ReportUnread(listing.name, verified.status());
      }
      return;
    }
    NameSharers(fs_, store_, listing.name, verified.value());
    const VerifyReport& report = verified.value();
    bool index_damaged = false;
    for (const std::string& warning : report.warnings) {
      findings_.push_back({listing.name, warning, "", true, true});
    }
    for (const VerifyReport::Damage& d : report.damages) {
      if (d.file.starts_with("index/") || d.object == "index") {
        if (!index_damaged) Index(listing, directory, d);
        index_damaged = true;
        continue;
      }
      std::string problem = d.object + ": " + d.file;
      if (d.offset != 0) problem += ": byte " + std::to_string(d.offset);
      problem += ": " + d.reason;
      for (std::size_t i = 0; i < d.shared_with.size(); ++i) {
        problem += (i == 0 ? "; the same file is in " : ", ") + d.shared_with[i];
      }
      Damage(listing.name, problem, RemedyOf(d));
      findings_.back().shared_with = d.shared_with;
    }
  }

  // Reports checkpoints that have the same inode or the same uuid.
  void Duplicates(const std::vector<CheckpointListing>& all) {
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::string> folders;
    std::map<Uuid, std::string> uuids;
    for (const CheckpointListing& c : all) {
      const Result<FileInfo> info = fs_.LinkStat(JoinPath(store_, c.name));
      if (info.ok() && info.value().inode != 0) {
        const auto [it, inserted] =
            folders.try_emplace({info.value().device, info.value().inode}, c.name);
        if (!inserted) {
          Damage(c.name, "the same directory as " + it->second + " (the filesystem is damaged)",
                 "check the filesystem before anything is removed");
        }
      }
      if (!c.problem.ok()) continue;
      const auto [it, inserted] = uuids.try_emplace(c.uuid, c.name);
      if (!inserted)
        Note(c.name, "the checkpoint is a copy of " + it->second + ": both have the same uuid", "");
    }
  }

  void Leftovers(const std::vector<CheckpointListing>& all) {
    for (const DirectoryEntry& e : Entries("")) {
      if (e.name == store_paths::kSuperblockFile || e.name == store_paths::kPolicyFile) continue;
      if (IsOurFolder(e.name)) {
        if (e.kind != FileKind::kDirectory && e.kind != FileKind::kSymlink) ReportNotFolder(e.name);
        continue;
      }
      if (e.name.starts_with("." + std::string(store_paths::kSuperblockFile) + ".")) {
        Note(e.name, "left over from creating the store", "gc removes it");
      } else if (e.name.starts_with("." + std::string(store_paths::kPolicyFile) + ".")) {
        Note(e.name, "left over from setting the policy", "gc removes it");
      } else if (e.kind != FileKind::kDirectory || e.name.starts_with('.')) {
        Note(e.name, "the entry does not belong to the store", "");
      }
    }
    Retention();
    for (const DirectoryEntry& e : Entries(store_paths::kStagingFolder)) {
      if (e.name == store_paths::kRepairFolder) {
        Note(std::string(store_paths::kStagingFolder) + "/" + e.name,
             "a repair that is running or was interrupted",
             "run the repair again, or gc removes it after a day");
        continue;
      }
      const bool copy = e.name.starts_with(store_paths::kCopyPrefix);
      Note(std::string(store_paths::kStagingFolder) + "/" + e.name,
           copy ? "a copy that is running or was interrupted"
                : "a save that is running or was abandoned",
           copy ? "run the copy again to continue it, or gc removes it after a day"
                : "gc removes it after a day");
    }
    for (const DirectoryEntry& e : Entries(store_paths::kTrashFolder)) {
      if (e.name.ends_with(store_paths::kSinceSuffix)) continue;
      const std::string object = JoinPath(store_paths::kTrashFolder, e.name);
      const auto kept = trash::FindHold(fs_, store_, e.name, fs_.NowSeconds());
      if (!kept.ok()) {
        ReportUnread(object, kept.status());
      } else if (kept.value().why.empty()) {
        Note(object, "removed", "gc deletes it");
      } else {
        Note(object, "removed, but " + kept.value().why,
             kept.value().back_to.empty()
                 ? "gc keeps it: move it back to a name in the store"
                 : "gc moves it back to " + kept.value().back_to + " where that name is free");
      }
    }
    for (const DirectoryEntry& e : Entries(store_paths::kGenerationsFolder)) {
      const std::string below = JoinPath(store_paths::kGenerationsFolder, e.name);
      if (e.kind != FileKind::kDirectory || Entries(below).empty()) continue;
      Note(below, "a generation claim that is not empty, left by a power failure",
           "gc removes it once a later save has begun");
    }
    for (const DirectoryEntry& e : Entries(store_paths::kDerivedFolder)) {
      const bool used = std::any_of(all.begin(), all.end(), [&](const CheckpointListing& c) {
        return c.problem.ok() && c.uuid.ToString() == e.name;
      });
      if (used) continue;
      Note(std::string(store_paths::kDerivedFolder) + "/" + e.name,
           "a rebuilt index, or statistics, of a checkpoint that is not in this store",
           "gc removes it");
    }
  }

  // Checks pins and policy. Damage in them does not damage checkpoints: a damaged policy stops
  // removals by rule, and a damaged pin protects its checkpoint without end.
  void Retention() {
    bool unread = false;
    const Status policy = pins::ReadPolicy(fs_, store_, &unread).status();
    if (policy.code() == Code::kDataLoss && !unread) {
      Note(store_paths::kPolicyFile, policy.message() + ": nothing is removed by rule",
           "`prune --set-policy` replaces it, `prune --clear-policy` removes it");
    } else if (!policy.ok()) {
      ReportUnread(std::string(store_paths::kPolicyFile), policy);
    }
    if (not_folders_.contains(store_paths::kPinsFolder)) return;
    const auto all = pins::ReadAll(fs_, store_, fs_.NowSeconds());
    if (!all.ok()) return ReportUnread(std::string(store_paths::kPinsFolder), all.status());
    for (const auto& [uuid, pin] : all.value()) {
      if (pin.problem.empty()) continue;
      const std::string object = JoinPath(store_paths::kPinsFolder, pin.uuid);
      if (pin.unread) {
        ReportUnread(object, Status(Code::kDataLoss, pin.problem));
        continue;
      }
      Note(object, "a pin that cannot be read, so it does not expire: " + pin.problem,
           "pin the checkpoint again, or `unpin` it");
    }
  }

  std::vector<Finding>& findings() { return findings_; }

  // Reports an unusable store.json. `read` is the error of reading it.
  void Superblock(const Status& read) {
    Finding f;
    f.object = store_paths::kSuperblockFile;
    f.problem = read.code() == Code::kNotFound ? "the file is missing" : read.message();
    if (options_.rebuild) {
      const Status made = store_moves::RemakeSuperblock(fs_, store_);
      f.repaired = made.ok();
      f.remedy = made.ok() ? "recreated, with another uuid" : made.message();
    } else {
      f.remedy = "`fsck --rebuild` recreates it: it only marks this directory as a store";
    }
    findings_.push_back(std::move(f));
  }

 private:
  static bool IsOurFolder(std::string_view name) {
    return name == store_paths::kStagingFolder || name == store_paths::kTrashFolder ||
           name == store_paths::kDerivedFolder || name == store_paths::kGenerationsFolder ||
           name == store_paths::kPinsFolder || name == store_paths::kEphemeralFolder ||
           name == store_paths::kClaimsFolder;
  }

  // Reports a directory of the store itself whose name leads to something else. A power failure on
  // a filesystem without a journal may leave a name with another inode.
  void ReportNotFolder(const std::string& name) {
    not_folders_.insert(name);
    const bool pins = name == store_paths::kPinsFolder;
    Damage(name,
           pins ? "not a directory: pins are lost, and nothing is removed until this is fixed"
                : "not a directory: its contents are lost",
           pins ? "remove it, then pin the checkpoints to keep again"
                : "remove it: it is recreated when needed");
  }

  // The entries of a directory of the store. A directory that cannot be listed is reported, so that
  // it does not pass for an empty one.
  std::vector<DirectoryEntry> Entries(std::string_view below) {
    if (not_folders_.contains(below)) return {};
    auto entries = store_moves::ListIfExists(fs_, below.empty() ? store_ : JoinPath(store_, below));
    if (entries.ok()) return std::move(entries).value();
    ReportUnread(below.empty() ? "." : std::string(below), entries.status());
    return {};
  }

  static std::string RemedyOf(const VerifyReport::Damage& damage) {
    if (damage.file == store_paths::kCommitFile) {
      return "the other copy is used; save or copy the checkpoint again";
    }
    if (damage.surplus) return "nothing reads it: remove it, or move it elsewhere";
    return "restore the file from a copy, or save the checkpoint again";
  }

  // Reports an object that could not be read. Its state is unknown, so the remedy must not suggest
  // a change.
  void ReportUnread(const std::string& object, const Status& why) {
    const char* remedy = "it could not be read now and may be intact: try again";
    if (why.code() == Code::kUnsupported)
      remedy = "it needs a newer version of tensormount and may be intact";
    if (why.code() == Code::kPermissionDenied)
      remedy = "run fsck as its owner, or pass the directory of its data with --root";
    findings_.push_back({.object = object,
                         .problem = "not checked: " + why.message(),
                         .remedy = remedy,
                         .repaired = false,
                         .damage = false,
                         .unread = true});
  }
  void Damage(const std::string& object, std::string problem, std::string remedy) {
    findings_.push_back({object, std::move(problem), std::move(remedy), false, true, false, {}});
  }
  void Note(std::string_view object, std::string problem, std::string remedy) {
    findings_.push_back(
        {std::string(object), std::move(problem), std::move(remedy), false, false, false, {}});
  }

  void Index(const CheckpointListing& listing, const std::string& directory,
             const VerifyReport::Damage& damage) {
    Finding f;
    f.object = listing.name;
    f.problem = "index: " + damage.file + ": " + damage.reason;
    const std::string derived =
        std::string(store_paths::kDerivedFolder) + "/" + listing.uuid.ToString();
    const auto commit = store_moves::ReadCommit(fs_, directory);
    if (!commit.ok()) {
      f.remedy = commit.status().message();
    } else if (!options_.rebuild) {
      f.remedy = "`fsck --rebuild` rebuilds it from manifest/, in " + derived;
    } else {
      const Status rebuilt = WriteDerivedIndex(fs_, directory, commit.value().record);
      // The index counts as repaired only if a normal open, as readers make it, uses the new index.
      Status served = rebuilt;
      if (served.ok()) {
        OpenedCheckpoint::Options options;
        options.roots = options_.roots;
        const auto opened = OpenedCheckpoint::Open(fs_, directory, options);
        served = opened.ok() && opened.value()->index_was_rebuilt()
                     ? Status(Code::kDataLoss, "the rebuilt index is not used")
                     : opened.status();
      }
      f.repaired = served.ok();
      f.remedy = served.ok() ? "rebuilt in " + derived : served.message();
    }
    findings_.push_back(std::move(f));
  }

  FileSystem& fs_;
  const std::string store_;
  const Store::FsckOptions options_;
  std::vector<Finding> findings_;
  // Names of the store's own directories that are something else, such as a file. Each was
  // reported.
  std::set<std::string, std::less<>> not_folders_;
};

}  // namespace

Result<std::vector<Store::FsckFinding>> Store::Fsck(const FsckOptions& options) const {
  if (options.rebuild) TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, List());
  Checker checker(*fs_, path_, options);
  for (const CheckpointListing& listing : all) checker.Checkpoint(listing);
  checker.Duplicates(all);
  checker.Leftovers(all);
  if (fs_->object_writer() != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<FsckFinding> more, bucket::FindLeftovers(*fs_, *this));
    std::move(more.begin(), more.end(), std::back_inserter(checker.findings()));
  }
  return std::move(checker.findings());
}

Result<std::vector<Store::FsckFinding>> Store::FsckFolder(FileSystem& fs, const std::string& path,
                                                          const FsckOptions& options) {
  Result<Store> store = Open(fs, path);
  if (store.ok()) return store.value().Fsck(options);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string resolved, fs.Resolve(path));
  const Status lost = store_moves::SuperblockDamage(fs, resolved);
  if (lost.ok()) return store.status();
  const Store bare(fs, resolved, Uuid(), 0);
  // Without store.json, a directory that does not look like a store is left alone.
  if (lost.code() == Code::kNotFound && !store_paths::LooksLikeStore(fs, resolved)) {
    return store.status();
  }
  Checker checker(fs, resolved, options);
  checker.Superblock(lost);
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<Finding> rest, bare.Fsck(options));
  std::vector<Finding> all = std::move(checker.findings());
  all.insert(all.end(), std::make_move_iterator(rest.begin()), std::make_move_iterator(rest.end()));
  return all;
}

}  // namespace tensormount
