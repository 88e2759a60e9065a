// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <tuple>

#include "index/store.h"
#include "index/store_layout.h"

namespace tensormount {
namespace {

using Finding = Store::FsckFinding;

class Checker {
 public:
  Checker(FileSystem& fs, const std::string& store, const Store::FsckOptions& options)
      : fs_(fs), store_(store), options_(options) {}

  Status Checkpoint(const CheckpointListing& listing) {
    if (!listing.problem.ok()) {
      Damage(listing.name, listing.problem.message(),
             "without its commit record a checkpoint cannot be trusted: save it again, then "
             "`rm` it");
      return Status();
    }
    const std::string directory = JoinPath(store_, listing.name);
    VerifyOptions verify;
    verify.quick = !options_.read_data;
    verify.roots = options_.roots;
    const Result<VerifyReport> verified = VerifyCheckpoint(fs_, directory, verify);
    if (verified.status().code() == Code::kPermissionDenied) {
      // Data that somebody else adopted are no matter of the store, and must not hide the rest.
      Note(listing.name, verified.status().message(), "");
      return Status();
    }
    TENSORMOUNT_RETURN_IF_ERROR(verified.status());
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
      Damage(listing.name, problem,
             d.file == layout::kCommitFile ? "the other copy serves; save it again, or copy it anew"
                                           : "restore the file from a copy, or save it again");
    }
    return Status();
  }

  // Names that share what no two checkpoints share.
  void Duplicates(const std::vector<CheckpointListing>& all) {
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::string> folders;
    std::map<Uuid, std::string> uuids;
    for (const CheckpointListing& c : all) {
      const Result<FileInfo> info = fs_.LinkStat(JoinPath(store_, c.name));
      if (info.ok()) {
        const auto [it, inserted] =
            folders.try_emplace({info.value().device, info.value().inode}, c.name);
        if (!inserted) {
          Damage(c.name, "the same folder as " + it->second + " (a crash of the filesystem)",
                 "check the filesystem before anything is removed");
        }
      }
      if (!c.problem.ok()) continue;
      const auto [it, inserted] = uuids.try_emplace(c.uuid, c.name);
      if (!inserted) Note(c.name, "has the uuid of " + it->second + ": a copy of it", "");
    }
  }

  void Leftovers(const std::vector<CheckpointListing>& all) {
    for (const DirectoryEntry& e : layout::ListOrNothing(fs_, store_)) {
      if (e.name == layout::kSuperblockFile || e.name == layout::kStagingFolder ||
          e.name == layout::kTrashFolder || e.name == layout::kDerivedFolder ||
          e.name == layout::kGenerationsFolder) {
        continue;
      }
      if (e.name.starts_with("." + std::string(layout::kSuperblockFile) + ".")) {
        Note(e.name, "left by the creation of the store", "gc removes it");
      } else if (e.kind != FileKind::kDirectory || e.name.starts_with('.')) {
        Note(e.name, "does not belong to the store", "");
      }
    }
    for (const DirectoryEntry& e :
         layout::ListOrNothing(fs_, JoinPath(store_, layout::kStagingFolder))) {
      Note(std::string(layout::kStagingFolder) + "/" + e.name,
           "a save that is under way, or was given up", "gc removes it after a day");
    }
    for (const DirectoryEntry& e :
         layout::ListOrNothing(fs_, JoinPath(store_, layout::kTrashFolder))) {
      if (e.name.ends_with(layout::kSinceSuffix)) continue;
      Note(std::string(layout::kTrashFolder) + "/" + e.name, "removed", "gc deletes it");
    }
    for (const DirectoryEntry& e :
         layout::ListOrNothing(fs_, JoinPath(store_, layout::kDerivedFolder))) {
      const bool used = std::any_of(all.begin(), all.end(), [&](const CheckpointListing& c) {
        return c.problem.ok() && c.uuid.ToString() == e.name;
      });
      if (used) continue;
      Note(std::string(layout::kDerivedFolder) + "/" + e.name, "derived of no checkpoint here",
           "gc removes it");
    }
  }

  std::vector<Finding>& findings() { return findings_; }

 private:
  void Damage(const std::string& object, std::string problem, std::string remedy) {
    findings_.push_back({object, std::move(problem), std::move(remedy), false, true});
  }
  void Note(const std::string& object, std::string problem, std::string remedy) {
    findings_.push_back({object, std::move(problem), std::move(remedy), false, false});
  }

  void Index(const CheckpointListing& listing, const std::string& directory,
             const VerifyReport::Damage& damage) {
    Finding f;
    f.object = listing.name;
    f.problem = "index: " + damage.file + ": " + damage.reason;
    const std::string derived = std::string(layout::kDerivedFolder) + "/" + listing.uuid.ToString();
    const auto commit = layout::ReadCommit(fs_, directory);
    if (!commit.ok()) {
      f.remedy = commit.status().message();
    } else if (!options_.rebuild) {
      f.remedy = "fsck --rebuild makes it again from manifest/, in " + derived;
    } else {
      const Status rebuilt = layout::WriteDerivedIndex(fs_, directory, commit.value().record);
      // Nothing is repaired before it was opened as readers do.
      Status served = rebuilt;
      if (served.ok()) {
        OpenedCheckpoint::Options options;
        options.roots = options_.roots;
        const auto opened = OpenedCheckpoint::Open(fs_, directory, options);
        served = opened.ok() && opened.value()->index_was_rebuilt()
                     ? Status(Code::kDataLoss, "what was rebuilt is not used")
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
};

}  // namespace

Result<std::vector<Store::FsckFinding>> Store::Fsck(const FsckOptions& options) const {
  if (options.rebuild) TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, List());
  Checker checker(*fs_, path_, options);
  for (const CheckpointListing& listing : all) {
    const Status checked = checker.Checkpoint(listing);
    // Removed while we read it.
    if (checked.code() == Code::kNotFound && !fs_->Exists(CheckpointPath(listing.name))) continue;
    TENSORMOUNT_RETURN_IF_ERROR(checked.WithContext(listing.name));
  }
  checker.Duplicates(all);
  checker.Leftovers(all);
  return std::move(checker.findings());
}

}  // namespace tensormount
