// SPDX-License-Identifier: Apache-2.0
// VerifyCheckpoint of checkpoint.h checks COMMIT, the listing, manifests, index and data files in
// this order, each as far as the previous ones allow. It continues after damage, because an
// operator wants the whole list. A failure to read is reported as damage only if it proves damage
// (ProvesDamage).
#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "base/checked.h"
#include "index/read/checkpoint.h"
#include "index/read/derived_index.h"
#include "index/read/file_cache.h"
#include "index/read/foreign_file.h"
#include "index/read/pinned_commit.h"
#include "index/read/rebuild.h"
#include "index/read/verify_ranges.h"
#include "index/records/manifest.h"
#include "index/records/memory_table.h"
#include "index/records/store_paths.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// Collects all damages of a checkpoint. Single-threaded, except for the data, which VerifyRanges
// reads.
class CheckpointVerifier {
 public:
  CheckpointVerifier(FileSystem& fs, std::string directory, const VerifyOptions& options)
      : fs_(fs), directory_(std::move(directory)), options_(options) {}

  Result<VerifyReport> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(ReadCommit());
    if (!decoded_) return std::move(report_);
    CheckListing();
    CheckManifests();
    TENSORMOUNT_RETURN_IF_ERROR(CheckIndex());
    CheckDataFiles();
    if (inventory_ && unread_.ok()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const ForeignBase base,
          CheckMayReadForeign(fs_, directory_, inventory_->info, pinned_.info, options_.roots));
      CheckForeignFiles(base);
      report_.tensors = inventory_->tensors.size();
      for (const TensorRecord& t : inventory_->tensors) report_.chunks += t.extents.size();
      if (!options_.quick) {
        const Status data =
            VerifyRanges(fs_, *pinned_.directory, base, *inventory_, leaves_, options_, report_);
        if (unread_.ok()) unread_ = data;
      }
    }
    return ConcludeReport(std::move(report_), unread_);
  }

 private:
  // Reports an unreadable file as damage if the failure proves damage. If not (no descriptors, no
  // permission), the verification is incomplete.
  void ReportUnreadable(const std::string& object, const std::string& file, const Status& status) {
    if (ProvesDamage(status)) {
      Damage(object, file, status.message());
    } else if (unread_.ok()) {
      unread_ = status;
    }
  }
  void Damage(std::string object, std::string file, std::string reason) {
    report_.damages.push_back({.object = std::move(object),
                               .file = std::move(file),
                               .offset = 0,
                               .reason = std::move(reason)});
  }

  Status ReadCommit() {
    TENSORMOUNT_ASSIGN_OR_RETURN(pinned_, PinCommit(fs_, directory_));
    report_.bytes_checked += std::min(pinned_.info.size, kMaxCommitBytes);
    Result<DecodedCommit> decoded = ReadCommitFile(*pinned_.file, kCommitName);
    if (!decoded.ok() && decoded.status().code() != Code::kDataLoss) return decoded.status();
    if (!decoded.ok()) {
      Damage("COMMIT", "COMMIT", decoded.status().message());
      return Status();
    }
    decoded_ = std::move(decoded).value();
    if (decoded_->one_copy_damaged) Damage("COMMIT", "COMMIT", decoded_->damage);
    return Status();
  }
  const CommitRecord& commit() const { return decoded_->record; }

  // Reports files that COMMIT does not list as surplus, which is separate from damage that harms
  // readers.
  void CheckListing() {
    std::set<std::string, std::less<>> folders;
    for (const CommitRecord::Entry& entry : commit().files) {
      for (std::size_t at = entry.name.find('/'); at != std::string::npos;
           at = entry.name.find('/', at + 1)) {
        folders.insert(entry.name.substr(0, at));
      }
    }
    for (const char* name : {"data", "manifest", "index"}) folders.insert(name);
    swept_ = !fs_.Exists(JoinPath(*pinned_.directory, store_paths::kSharedFile));
    CheckFolder("", folders);
  }

  void CheckFolder(const std::string& below, const std::set<std::string, std::less<>>& folders) {
    Result<std::vector<DirectoryEntry>> entries = fs_.List(
        below.empty() ? JoinPath(*pinned_.directory, ".") : JoinPath(*pinned_.directory, below));
    if (!entries.ok()) {
      ReportUnreadable(below, below, entries.status());
      return;
    }
    for (const DirectoryEntry& entry : entries.value()) {
      const std::string name = below.empty() ? entry.name : below + "/" + entry.name;
      // A publisher that died may leave such a file of a shared staging. Gc removes it.
      if (!swept_ && commit().Find(name) == nullptr &&
          (store_paths::IsSharedLeftover(name) || name.starts_with("data/"))) {
        continue;
      }
      if (entry.kind == FileKind::kDirectory && folders.contains(name)) {
        CheckFolder(name, folders);
      } else if (name != kCommitName && commit().Find(name) == nullptr) {
        Damage(name, name, "the file is not part of this checkpoint");
        report_.damages.back().surplus = true;
      } else if (entry.kind != FileKind::kFile) {
        Damage(name, name, "not a regular file");
      }
    }
  }

  void CheckManifests() {
    InventoryMerger merger;
    Status status;
    for (const CommitRecord::Entry& entry : commit().files) {
      if (!entry.name.starts_with("manifest/")) continue;
      Result<Manifest> manifest = ReadListedManifest(fs_, *pinned_.directory, entry);
      if (manifest.ok()) {
        report_.bytes_checked += entry.length;
        // Each bad manifest is reported as damage. After the first, manifests are no longer merged,
        // because the merge needs all of them.
        const Status added =
            status.ok() ? merger.Add(manifest.value().inventory, entry.name) : Status();
        if (!added.ok()) {
          Damage(entry.name, entry.name, added.message());
          status = added;
        }
        leaves_[entry.name] = std::move(manifest.value().leaves);
        if (entry.name == kCoordinatorManifest) {
          coordinator_ = std::move(manifest.value().inventory.tensors);
        }
      } else {
        status = manifest.status();
        ReportUnreadable(entry.name, entry.name, status);
      }
    }
    if (!status.ok()) return;
    Result<Inventory> inventory = FinishRebuild(merger, commit());
    if (inventory.ok()) {
      inventory_ = std::move(inventory).value();
      CompareCounts();
    } else {
      Damage("manifests", "manifest", inventory.status().message());
    }
  }

  // Compares the value counts of tensors, which the coordinator's manifest has, with the sums of
  // the writers' manifests. The merge has compared the lists of tensors.
  void CompareCounts() {
    std::map<std::string_view, const TensorRecord*> merged;
    for (const TensorRecord& tensor : inventory_->tensors) merged[tensor.meta.key()] = &tensor;
    for (const TensorRecord& listed : coordinator_) {
      const auto at = merged.find(listed.meta.key());
      if (!listed.counts || at == merged.end() || at->second->counts == listed.counts) continue;
      Damage("tensor " + listed.meta.key(), std::string(kCoordinatorManifest),
             "the value counts differ from those of the writers' manifests");
    }
    coordinator_.clear();
  }

  // Checks the index by its hash, then record by record, because a matching hash does not prove
  // that the writer stored the right records. A damaged index is only a warning if the manifests
  // are intact and a derived index passes the same checks.
  Status CheckIndex() {
    const std::string name(kIndexName);
    const CommitRecord::Entry* entry = commit().Find(name);
    Result<std::shared_ptr<const CheckpointIndex>> index = CheckpointIndex::OpenSst(
        fs_, *pinned_.directory, commit(), /*check_bytes=*/~std::uint64_t{0});
    if (entry != nullptr) report_.bytes_checked += entry->length;
    const Status damage = index.ok() ? CheckRecords(*index.value()) : index.status();
    if (damage.ok()) return Status();
    if (!CheckpointIndex::IsCopyDamaged(damage)) return damage;
    index = OpenDerivedIndex(fs_, directory_, commit());
    Status derived = index.status();
    if (derived.ok()) derived = CheckRecords(*index.value());
    if (derived.ok() && inventory_) {
      report_.warnings.push_back(damage.message() + "; using the index that fsck rebuilt");
    } else {
      ReportUnreadable("index", name,
                       Status(damage.code(), ReasonWithoutFile("index: " + name, damage)));
    }
    return Status();
  }

  // Compares every record of the index with the manifests.
  Status CheckRecords(const CheckpointIndex& index) {
    if (!inventory_) {  // If the manifests are damaged, the index describes the data.
      TENSORMOUNT_ASSIGN_OR_RETURN(inventory_, index.ToInventory());
      return Status();
    }
    if (wanted_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(wanted_, CheckpointIndex::RecordsOf(*inventory_));
    }
    std::uint64_t seen = 0;
    std::uint64_t differ = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        index.table().Scan("", "", [&](std::string_view key, std::string_view value) {
          ++seen;
          Result<std::string> record = wanted_->Get(key);
          if (!record.ok() || record.value() != value) ++differ;
          return true;
        }));
    if (differ == 0 && seen == wanted_->size()) return Status();
    return {Code::kDataLoss, std::to_string(differ) + " of " + std::to_string(seen) +
                                 " records differ from the manifests (" +
                                 std::to_string(wanted_->size()) + " expected)"};
  }

  // Compares only the lengths of the data files. VerifyRanges reads the bytes, except with
  // `--quick`.
  void CheckDataFiles() {
    for (const CommitRecord::Entry& entry : commit().files) {
      if (!entry.name.starts_with("data/")) continue;
      Result<FileInfo> info = fs_.LinkStat(JoinPath(*pinned_.directory, entry.name));
      if (info.status().code() == Code::kNotFound) {
        Damage(entry.name, entry.name, "the file is missing");
      } else if (!info.ok()) {
        ReportUnreadable(entry.name, entry.name, info.status());
      } else if (info.value().kind == FileKind::kFile && info.value().size != entry.length) {
        Damage(entry.name, entry.name,
               "the file has " + std::to_string(info.value().size) + " bytes, " +
                   std::to_string(entry.length) + " expected");
      }
    }
  }

  // Reports each foreign file that changed or cannot be opened once. VerifyRanges does not report
  // the ranges of such a file.
  void CheckForeignFiles(const ForeignBase& base) {
    for (const FileRecord& file : inventory_->files) {
      if (file.placement != Placement::kForeign) continue;
      const Status opened = OpenForeignFile(fs_, base, file, true).status();
      if (opened.code() == Code::kStale) {  // The file changed.
        Damage(file.name, file.name, opened.message());
      } else if (!opened.ok()) {
        ReportUnreadable(file.name, file.name, opened);
      }
    }
  }

  FileSystem& fs_;
  const std::string directory_;
  const VerifyOptions& options_;
  VerifyReport report_;
  PinnedCommit pinned_;
  std::optional<DecodedCommit> decoded_;
  // The first reason why something could not be checked.
  Status unread_;
  // Leaf hashes of each manifest, by the manifest's name.
  std::map<std::string, std::vector<Hash128>> leaves_;
  // False if staging.json exists, so that files of a shared staging may be left.
  bool swept_ = true;
  std::vector<TensorRecord> coordinator_;  // The tensors that the coordinator's manifest lists.
  std::optional<Inventory> inventory_;
  std::shared_ptr<const MemoryTable> wanted_;  // The records of inventory_.
};

}  // namespace

Result<VerifyReport> VerifyCheckpoint(FileSystem& fs, const std::string& directory,
                                      const VerifyOptions& options) {
  return CheckpointVerifier(fs, directory, options).Run();
}

}  // namespace tensormount
