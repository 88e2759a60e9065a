// SPDX-License-Identifier: Apache-2.0
// Repair of a checkpoint with bytes of another checkpoint (docs/format.md, "Repair").
//
// COMMIT gives the expected manifests and index. Manifests give the hash of each 64 KiB of a data
// file. Bytes of the other checkpoint are used only if their hashes match. A new file is built in
// .staging/.repair/, synced, and exchanged with the damaged file. If other checkpoints share the
// damaged file, it is replaced in them first, and in the repaired checkpoint last: after an
// interruption, the next repair then finds the others again by the inode of the damaged file.
#include "index/store/repair.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/at_exit.h"
#include "base/counted.h"
#include "base/errors.h"
#include "index/read/derived_index.h"
#include "index/read/pinned_commit.h"
#include "index/read/rebuild.h"
#include "index/read/scan.h"
#include "index/read/verify_ranges.h"
#include "index/records/manifest.h"
#include "index/records/store_paths.h"
#include "index/store/repair_ranges.h"
#include "index/store/repair_source.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

// Block size for reading manifests and the index, which are compared as a whole.
constexpr std::size_t kRepairBlock = std::size_t{1} << 20;

// Path of the parent directory, for a sync. The path may begin with a link that stands for an open
// descriptor; "/." makes the sync follow this link.
std::string FolderOf(const std::string& path) {
  return JoinPath(path.substr(0, path.rfind('/')), ".");
}

bool SameInode(const FileInfo& a, const FileInfo& b) {
  return a.device == b.device && a.inode == b.inode;
}

class Repairer {
 public:
  Repairer(FileSystem& fs, Store store, std::string name, std::shared_ptr<OpenedCheckpoint> other,
           const RepairOptions& options)
      : fs_(fs),
        store_(std::move(store)),
        name_(std::move(name)),
        other_(std::move(other)),
        options_(options),
        work_(JoinPath(JoinPath(store_.path(), store_paths::kStagingFolder),
                       store_paths::kRepairFolder)),
        buffer_(kRepairBlock) {}

  Result<RepairReport> Run() {
    report_.path = store_.CheckpointPath(name_);
    report_.from = other_->directory();
    report_.dry_run = options_.dry_run;
    TENSORMOUNT_RETURN_IF_ERROR(OpenFolder());
    if (!options_.dry_run) TENSORMOUNT_RETURN_IF_ERROR(BeginWork());
    const AtExit end([this] { EndWork(); });
    TENSORMOUNT_RETURN_IF_ERROR(ReadOwnCommit());
    if (record_.read_compatible != 0 && !options_.dry_run) {
      return Status(Code::kReadOnly,
                    report_.path +
                        ": a checkpoint of a newer format, which this version can only "
                        "read: it has read-compatible feature bits");
    }
    report_.uuid = record_.uuid.ToString();
    TENSORMOUNT_RETURN_IF_ERROR(CheckManifests());
    TENSORMOUNT_RETURN_IF_ERROR(CheckIndex());
    if (inventory_) {
      if (!inventory_->info.self_contained) {
        return Status(Code::kUnsupported, report_.path +
                                              ": is an adopted checkpoint, whose data are files of "
                                              "another program below " +
                                              inventory_->info.root +
                                              ", which tensormount does not modify");
      }
      TENSORMOUNT_RETURN_IF_ERROR(CheckDataFiles());
    }
    TENSORMOUNT_RETURN_IF_ERROR(FinishCommit());
    return std::move(report_);
  }

 private:
  // Another checkpoint of the same store.
  struct Neighbour {
    std::string name;
    FileInfo folder;
    CommitRecord record;
  };
  // The existing file at the name of a listed file.
  struct OldFile {
    std::unique_ptr<File> file;  // Null: the file is missing or unreadable.
    // Identity of the existing file. Set only while `file` is open or a link to the file is in the
    // work directory, because otherwise a concurrent save could get the same inode number.
    std::optional<FileInfo> info;
    std::string damage;  // Why `file` is null.
  };
  struct SharedName {
    // Name of the checkpoint; empty for a directory of .staging/ or .trash/.
    std::string checkpoint;
    std::string folder;
    FileInfo folder_info;
    // True if no file has this name, so that the repaired file can be added.
    bool lacks = false;
  };

  std::string OwnPath(const std::string& file) const { return JoinPath(*directory_, file); }

  // ---- Begin and end ----

  Status OpenFolder() {
    Result<PinnedCommit> pinned = PinCommit(fs_, report_.path);
    if (pinned.ok()) {
      pinned_ = std::move(pinned).value();
      directory_ = pinned_.directory;
    } else {
      // A directory with manifests but without COMMIT is a checkpoint that lost its COMMIT.
      const bool is_one = pinned.status().code() == Code::kNotFound &&
                          fs_.LinkStat(JoinPath(report_.path, "manifest")).ok();
      if (!is_one) return pinned.status();
      TENSORMOUNT_ASSIGN_OR_RETURN(directory_, fs_.PinDirectory(JoinPath(report_.path, ".")));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(folder_, fs_.Stat(JoinPath(*directory_, ".")));
    const Result<FileInfo> there = fs_.Stat(JoinPath(other_->pinned_directory(), "."));
    if (there.ok() && SameInode(folder_, there.value())) {
      return InvalidArgument(
          report_.path +
          ": is the checkpoint to repair; pass another one that has the same tensors");
    }
    return Status();
  }

  Status BeginWork() {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.EnsureDirectory(FolderOf(work_)));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        lock_, store_moves::LockWorkFolder(fs_, work_, "another repair is running"));
    // Files in the work directory are left from an interrupted repair.
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_.List(work_));
    for (const DirectoryEntry& e : entries) {
      if (e.name == store_paths::kLockFile) continue;
      TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveTree(JoinPath(work_, e.name)));
    }
    return Status();
  }

  // Removes the work directory; if this fails, gc removes it. The deletions are synced: otherwise,
  // on a filesystem without a journal, a new file could get the blocks of a deleted file, and lose
  // them when the filesystem is repaired.
  void EndWork() {
    if (lock_ == nullptr) return;
    (void)fs_.RemoveTree(work_);
    if (changed_) (void)fs_.SyncFileSystem(store_.path());
  }

  std::string WorkPath() const { return JoinPath(work_, "part-" + Uuid::Random().Short()); }

  void ReportRemaining(const std::string& file, const std::string& object, std::uint64_t offset,
                       std::string reason) {
    report_.left.push_back(
        {.file = file, .object = object, .offset = offset, .reason = std::move(reason)});
  }

  Status ReportProgress(std::uint64_t bytes) {
    report_.bytes_checked += bytes;
    return options_.watch ? options_.watch(report_.bytes_checked, total_) : Status();
  }

  // ---- COMMIT, manifests, index ----

  Status ReadOwnCommit() {
    const std::string name(kCommitName);
    std::string bytes;
    Status damage(Code::kDataLoss, "the file is missing");
    if (pinned_.file != nullptr) {
      Result<std::string> read = ReadCommitBytes(*pinned_.file, kCommitName);
      Result<DecodedCommit> decoded = read.ok() ? DecodeCommit(read.value(), kCommitName)
                                                : Result<DecodedCommit>(read.status());
      damage = decoded.status();
      if (decoded.ok()) {
        record_ = std::move(decoded.value().record);
        if (!decoded.value().one_copy_damaged) return Status();
        damage = DataLoss(decoded.value().damage);
        bytes = read.value();
      } else if (!ProvesDamage(damage)) {
        return damage;
      }
    }
    RepairedFile file{.file = name, .damage = ReasonWithoutFile(name, damage)};
    if (bytes.empty()) {
      TENSORMOUNT_RETURN_IF_ERROR(TakeCommit(damage));
    } else {
      commit_ = EncodeCommit(record_);
      // The intact copy must equal the copy that this version would write: a newer version may have
      // written fields that this version does not know.
      file.bytes_damaged = commit_.size();
      const std::size_t copy = commit_.size() / 2;
      const std::string_view whole = std::string_view(commit_).substr(0, copy);
      const std::string_view there = bytes;
      if (!there.starts_with(whole) && (there.size() < copy || !there.ends_with(whole))) {
        ReportRemaining(name, name, 0,
                        "the intact copy of COMMIT has fields that this version does not know");
        commit_.clear();
      }
    }
    file.bytes_damaged = std::max<std::uint64_t>(file.bytes_damaged, commit_.size());
    file.bytes_repaired = commit_.size();
    file.whole = !commit_.empty();
    report_.files.push_back(std::move(file));
    return Status();
  }

  // If both copies of COMMIT are lost, takes the COMMIT of the other checkpoint, provided that the
  // other checkpoint is a copy of this one. This is proven by a manifest of this checkpoint that
  // the other COMMIT lists with the same hash, because manifests contain the uuid of their save.
  Status TakeCommit(const Status& damage) {
    const Status refused = DataLoss(
        JoinPath(report_.path, kCommitName),
        ReasonWithoutFile(kCommitName, damage) + ", and " + other_->directory() +
            " is not a copy of this checkpoint: without COMMIT the expected files are unknown");
    const DecodedCommit* commit = other_->commit();
    if (commit == nullptr) return refused;
    bool same = false;
    for (const CommitRecord::Entry& entry : commit->record.files) {
      if (!entry.name.starts_with("manifest/")) continue;
      const Result<Manifest> manifest = ReadListedManifest(fs_, *directory_, entry);
      same = same || (manifest.ok() && manifest.value().inventory.info.uuid == commit->record.uuid);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string own,
        fs_.ReadFile(JoinPath(other_->pinned_directory(), kCommitName), kMaxCommitBytes));
    if (!same) return refused;
    record_ = commit->record;
    commit_ = EncodeCommit(record_);
    if (!own.starts_with(std::string_view(commit_).substr(0, commit_.size() / 2)) &&
        !own.ends_with(std::string_view(commit_).substr(0, commit_.size() / 2))) {
      return DataLoss(JoinPath(other_->directory(), kCommitName),
                      "COMMIT has fields that this version does not know");
    }
    return Status();
  }

  // Whether the other checkpoint's COMMIT lists the same file (name, length and hash).
  bool IsListedByOther(const CommitRecord::Entry& entry) const {
    const DecodedCommit* commit = other_->commit();
    const CommitRecord::Entry* there =
        commit == nullptr ? nullptr : commit->record.Find(entry.name);
    return there != nullptr && there->length == entry.length && there->hash == entry.hash;
  }

  Status CheckManifests() {
    InventoryMerger merger;
    Status merged;
    for (const CommitRecord::Entry& entry : record_.files) {
      if (!entry.name.starts_with("manifest/")) continue;
      Result<Manifest> manifest = ReadListedManifest(fs_, *directory_, entry);
      report_.bytes_checked += entry.length;
      if (!manifest.ok()) {
        if (!ProvesDamage(manifest.status())) return manifest.status();
        RepairedFile file{.file = entry.name,
                          .damage = ReasonWithoutFile(entry.name, manifest.status()),
                          .bytes_damaged = entry.length};
        manifest = TakeManifest(entry);
        if (manifest.ok()) {
          TENSORMOUNT_RETURN_IF_ERROR(CopyWhole(entry, file));
        } else {
          ReportRemaining(entry.name, entry.name, 0, manifest.status().message());
        }
        report_.files.push_back(std::move(file));
      }
      if (merged.ok()) {
        merged =
            manifest.ok() ? merger.Add(manifest.value().inventory, entry.name) : manifest.status();
      }
      if (manifest.ok()) leaves_[entry.name] = std::move(manifest.value().leaves);
    }
    if (merged.ok()) {
      Result<Inventory> inventory = FinishRebuild(merger, record_);
      TENSORMOUNT_RETURN_IF_ERROR(inventory.status());
      inventory_ = std::move(inventory).value();
    }
    return Status();
  }

  Result<Manifest> TakeManifest(const CommitRecord::Entry& entry) const {
    if (!IsListedByOther(entry)) {
      return DataLoss(other_->directory() +
                      " is not a copy of this checkpoint, and only a copy has its manifests");
    }
    return ReadListedManifest(fs_, other_->pinned_directory(), entry);
  }

  // Compares the index with COMMIT and repairs it. If a manifest is lost, the index gives the
  // records (inventory_).
  Status CheckIndex() {
    const CommitRecord::Entry* entry = record_.Find(kIndexName);
    if (entry == nullptr) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(OldFile old, OpenOld(entry->name));
    Status damage = old.file == nullptr ? DataLoss(old.damage) : CompareWhole(*entry, *old.file);
    if (!damage.ok() && !ProvesDamage(damage)) return damage;
    if (!damage.ok()) {
      RepairedFile file{
          .file = entry->name, .damage = damage.message(), .bytes_damaged = entry->length};
      if (IsListedByOther(*entry)) {
        TENSORMOUNT_RETURN_IF_ERROR(CopyWhole(*entry, file));
      } else {
        ReportRemaining(
            entry->name, entry->name, 0,
            other_->directory() +
                " is not a copy of this checkpoint, and only a copy has its index; `tensormount "
                "fsck STORE --rebuild` rebuilds a usable one");
      }
      report_.files.push_back(std::move(file));
    }
    if (inventory_) return Status();
    Result<std::shared_ptr<const CheckpointIndex>> index =
        CheckpointIndex::OpenSst(fs_, *directory_, record_, ~std::uint64_t{0});
    if (!index.ok()) index = OpenDerivedIndex(fs_, report_.path, record_);
    Result<Inventory> inventory =
        index.ok() ? index.value()->ToInventory() : Result<Inventory>(index.status());
    if (inventory.ok()) {
      inventory_ = std::move(inventory).value();
    } else {
      ReportRemaining(
          "data", "all data files", 0,
          "the expected contents of data files are unknown without all manifests or the index");
    }
    return Status();
  }

  Result<OldFile> OpenOld(const std::string& name) {
    OldFile old;
    Result<std::unique_ptr<File>> opened = OpenListedFile(fs_, *directory_, name);
    if (opened.ok()) {
      old.file = std::move(opened).value();
      TENSORMOUNT_ASSIGN_OR_RETURN(old.info, old.file->Stat());
      return old;
    }
    if (!ProvesDamage(opened.status())) return opened.status();
    old.damage = ReasonWithoutFile(name, opened.status());
    const Result<FileInfo> info = fs_.LinkStat(OwnPath(name));
    if (options_.dry_run || !info.ok() || info.value().kind != FileKind::kFile) return old;
    // If the link fails, `info` stays unset, and the file's names in other checkpoints are not
    // found.
    const std::string link = WorkPath();
    if (!fs_.Link(OwnPath(name), link).ok()) return old;
    TENSORMOUNT_ASSIGN_OR_RETURN(old.info, fs_.LinkStat(link));
    return old;
  }

  // Compares a file with the hash of the whole file in COMMIT, and copies it to `out` if that is
  // not null. kDataLoss: the file differs; the message says how.
  Status CompareWhole(const CommitRecord::Entry& entry, File& file, File* out = nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
    if (info.size != entry.length) return DataLoss(LengthText(info.size, entry.length));
    Xxh3Stream hash;
    for (std::uint64_t at = 0; at < entry.length;) {
      const auto n =
          static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), entry.length - at));
      TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(at, buffer_.data(), n));
      hash.Update(buffer_.data(), n);
      if (out != nullptr) TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(at, buffer_.data(), n));
      at += n;
    }
    return hash.Value() == entry.hash ? Status() : DataLoss("checksum mismatch");
  }

  static std::string LengthText(std::uint64_t is, std::uint64_t wanted) {
    return "the file has " + std::to_string(is) + " bytes, " + std::to_string(wanted) + " expected";
  }

  // Copies a manifest or the index from the other checkpoint, whose COMMIT must list the same file.
  Status CopyWhole(const CommitRecord::Entry& entry, RepairedFile& file) {
    const std::string part = WorkPath();
    std::unique_ptr<File> out;
    if (!options_.dry_run) {
      TENSORMOUNT_ASSIGN_OR_RETURN(out, fs_.CreateExclusive(part));
    }
    const Result<std::unique_ptr<File>> from =
        OpenListedFile(fs_, other_->pinned_directory(), entry.name);
    const Status copied = from.ok() ? CompareWhole(entry, *from.value(), out.get()) : from.status();
    if (copied.code() == Code::kResourceExhausted) return copied;
    if (!copied.ok()) {
      ReportRemaining(entry.name, entry.name, 0, other_->directory() + ": " + copied.message());
      return Status();
    }
    file.bytes_repaired = entry.length;
    file.whole = true;
    if (options_.dry_run) return Status();
    TENSORMOUNT_RETURN_IF_ERROR(out->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(out->Close());
    TENSORMOUNT_ASSIGN_OR_RETURN(const OldFile old, OpenOld(entry.name));
    return GiveNames(part, entry, old.info, file);
  }

  // Replaces a damaged COMMIT. This is done last, after the repair of the files that COMMIT lists.
  // Readers have a shared lock on COMMIT, which gc checks, so COMMIT is not exchanged while it is
  // locked.
  Status FinishCommit() {
    if (commit_.empty() || options_.dry_run) return Status();
    const std::string name(kCommitName);
    RepairedFile& file = *std::find_if(report_.files.begin(), report_.files.end(),
                                       [&](const RepairedFile& f) { return f.file == name; });
    if (pinned_.file != nullptr) {
      const Status locked = pinned_.file->TryLockExclusive();
      if (locked.code() == Code::kBusy) {
        file.whole = false;
        file.bytes_repaired = 0;
        ReportRemaining(
            name, name, 0,
            "the checkpoint is in use: unmount it, end its readers, and repair it again");
        return Status();
      }
      if (!locked.ok() && !HasNoLocks(locked)) return locked;
    }
    const std::string part = WorkPath();
    TENSORMOUNT_RETURN_IF_ERROR(fs_.WriteFileDurably(part, commit_));
    TENSORMOUNT_ASSIGN_OR_RETURN(const OldFile old, OpenOld(name));
    return GiveNames(part, {.name = name, .length = commit_.size(), .hash = {}, .tail = {}},
                     old.info, file);
  }

  // ---- Data files ----

  Status CheckDataFiles() {
    std::set<Uuid> writers{record_.uuid, record_.parent};
    TENSORMOUNT_RETURN_IF_ERROR(FindNeighbours());
    for (const Neighbour& neighbour : neighbours_) writers.insert(neighbour.record.uuid);
    if (other_->commit() != nullptr) writers.insert(other_->commit()->record.uuid);
    TENSORMOUNT_ASSIGN_OR_RETURN(source_,
                                 RepairSource::Make(other_, *inventory_, record_, writers));
    ranges_.emplace(*inventory_, leaves_, *source_, other_->directory(),
                    [this](std::uint64_t bytes) { return ReportProgress(bytes); });
    std::map<std::string, std::vector<ScanRange>, std::less<>> ranges;
    for (const ScanRange& range : RangesOf(*inventory_)) {
      if (range.length == 0 || range.file >= inventory_->files.size()) continue;
      ranges[inventory_->files[range.file].name].push_back(range);
    }
    total_ = report_.bytes_checked;
    for (const CommitRecord::Entry& entry : record_.files) {
      if (entry.name.starts_with("data/")) total_ += entry.length;
    }
    for (const CommitRecord::Entry& entry : record_.files) {
      if (!entry.name.starts_with("data/")) continue;
      std::vector<ScanRange>& of_file = ranges[entry.name];
      std::ranges::sort(of_file, {}, &ScanRange::offset);
      TENSORMOUNT_RETURN_IF_ERROR(CheckDataFile(entry, of_file));
    }
    return Status();
  }

  // Finds the other readable checkpoints of the store. A repair does not add files to unreadable
  // checkpoints.
  Status FindNeighbours() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, store_.Names());
    for (const std::string& name : names) {
      const Result<FileInfo> info = fs_.LinkStat(store_.CheckpointPath(name));
      if (!info.ok() || SameInode(info.value(), folder_)) continue;
      Neighbour neighbour{.name = name, .folder = info.value(), .record = {}};
      if (store_.FindListing(name, &neighbour.record).problem.ok()) {
        neighbours_.push_back(std::move(neighbour));
      }
    }
    return Status();
  }

  Status CheckDataFile(const CommitRecord::Entry& entry, const std::vector<ScanRange>& ranges) {
    TENSORMOUNT_ASSIGN_OR_RETURN(OldFile old, OpenOld(entry.name));
    RepairedFile file{.file = entry.name, .damage = old.damage};
    bool length_differs = old.file == nullptr;
    if (old.file != nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, old.file->Stat());
      length_differs = info.size != entry.length;
      if (length_differs) file.damage = LengthText(info.size, entry.length);
    }
    std::uint64_t damaged = 0;
    for (const ScanRange& range : ranges) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                                   ranges_->BadBytes(old.file.get(), range, true));
      file.bytes_damaged += bytes;
      damaged += bytes > 0 ? 1 : 0;
    }
    if (damaged == 0 && !length_differs) return Status();
    if (damaged > 0 && file.damage.empty()) {
      file.damage = "checksum mismatch in " + std::to_string(damaged) + " of " +
                    Counted(ranges.size(), "stored range");
    }
    TENSORMOUNT_RETURN_IF_ERROR(RepairFile(entry, ranges, old, file));
    report_.files.push_back(std::move(file));
    return Status();
  }

  Status RepairFile(const CommitRecord::Entry& entry, const std::vector<ScanRange>& ranges,
                    const OldFile& old, RepairedFile& file) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string same, FindWhole(entry, ranges, old));
    if (!same.empty()) {
      file.bytes_repaired = file.bytes_damaged;
      file.whole = true;
      return options_.dry_run ? Status() : GiveNames(same, entry, old.info, file);
    }
    const std::string part = WorkPath();
    std::unique_ptr<File> out;
    if (!options_.dry_run) {
      TENSORMOUNT_ASSIGN_OR_RETURN(out, fs_.CreateExclusive(part));
    }
    const std::size_t left = report_.left.size();
    std::uint64_t at = 0;
    for (const ScanRange& range : ranges) {
      TENSORMOUNT_RETURN_IF_ERROR(
          ranges_->CopyUncovered(old.file.get(), out.get(), at, range.offset));
      TENSORMOUNT_ASSIGN_OR_RETURN(
          std::optional<RepairLeft> what,
          ranges_->RepairRange(range, old.file.get(), out.get(), file.bytes_repaired));
      if (what) report_.left.push_back(std::move(*what));
      at = range.offset + range.length;  // Within the file; the merger has checked that.
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        ranges_->CopyUncovered(old.file.get(), out.get(), at, entry.length));
    file.whole = report_.left.size() == left;
    if (out == nullptr) return Status();
    if (!file.whole && file.bytes_repaired == 0) {
      out.reset();
      return fs_.RemoveFile(part);
    }
    TENSORMOUNT_RETURN_IF_ERROR(out->Truncate(entry.length));
    TENSORMOUNT_RETURN_IF_ERROR(out->Seal());
    TENSORMOUNT_RETURN_IF_ERROR(out->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(out->Close());
    return GiveNames(part, entry, old.info, file);
  }

  // Finds an undamaged copy of the file (with another inode) in another checkpoint of the store. An
  // interrupted repair leaves such a copy, or a save whose link was refused. Returns the path of a
  // link to the copy in the work directory (in a dry run, of the copy itself); empty if there is no
  // such copy.
  Result<std::string> FindWhole(const CommitRecord::Entry& entry,
                                const std::vector<ScanRange>& ranges, const OldFile& old) {
    std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
    if (old.info) seen.emplace(old.info->device, old.info->inode);
    for (const Neighbour& neighbour : neighbours_) {
      if (!ListsAlike(neighbour.record, entry)) continue;
      const std::string folder = store_.CheckpointPath(neighbour.name);
      const Result<std::unique_ptr<File>> opened = OpenListedFile(fs_, folder, entry.name);
      if (!opened.ok()) continue;
      const Result<FileInfo> info = opened.value()->Stat();
      if (!info.ok() || !info.value().sealed() || info.value().size != entry.length ||
          !seen.emplace(info.value().device, info.value().inode).second) {
        continue;
      }
      bool whole = true;
      for (const ScanRange& range : ranges) {
        const Result<std::uint64_t> bad = ranges_->BadBytes(opened.value().get(), range, false);
        whole = bad.ok() && bad.value() == 0;
        if (!whole) break;
      }
      if (!whole) continue;
      // The bytes were read through a descriptor. Meanwhile another file may have got this name.
      const std::string path = JoinPath(folder, entry.name);
      const Result<FileInfo> named = fs_.LinkStat(path);
      if (!named.ok() || !SameInode(named.value(), info.value())) continue;
      if (options_.dry_run) return path;
      const std::string link = WorkPath();
      const Status linked = fs_.Link(path, link);
      if (linked.ok()) return link;
      if (linked.code() == Code::kNotFound || store_moves::IsLinkRefused(linked)) continue;
      return linked;
    }
    return std::string();
  }

  static bool ListsAlike(const CommitRecord& record, const CommitRecord::Entry& entry) {
    const CommitRecord::Entry* there = record.Find(entry.name);
    return there != nullptr && there->length == entry.length && there->hash == entry.hash;
  }

  // ---- Names ----

  // Whether all parent directories of `file` below `folder` are directories and not symbolic links.
  Result<bool> HasFolders(const std::string& folder, const std::string& file) {
    for (std::size_t at = file.find('/'); at != std::string::npos; at = file.find('/', at + 1)) {
      const Result<FileInfo> info = fs_.LinkStat(JoinPath(folder, file.substr(0, at)));
      if (info.status().code() == Code::kNotFound) return false;
      TENSORMOUNT_RETURN_IF_ERROR(info.status());
      if (info.value().kind != FileKind::kDirectory) return false;
    }
    return true;
  }

  // Recreates missing parent directories of a file in this checkpoint.
  Status MakeFolders(const std::string& file) {
    for (std::size_t at = file.find('/'); at != std::string::npos; at = file.find('/', at + 1)) {
      const std::string folder = OwnPath(file.substr(0, at));
      if (fs_.LinkStat(folder).status().code() != Code::kNotFound) continue;
      TENSORMOUNT_RETURN_IF_ERROR(fs_.CreateDirectory(folder));
      TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(FolderOf(folder)));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool there, HasFolders(*directory_, file));
    if (there) return Status();
    return DataLoss(JoinPath(report_.path, file),
                    "a link or a file has the name of a parent directory of this file; remove the "
                    "link or file, and repair the checkpoint again");
  }

  // Finds the other names that the repaired file must get: names with the inode of the damaged
  // file, also in stagings and .trash, and missing files of other checkpoints that list the same
  // file.
  Result<std::vector<SharedName>> OtherNames(const CommitRecord::Entry& entry,
                                             const std::optional<FileInfo>& old) {
    std::vector<SharedName> names;
    // A name that cannot be examined may lead to the damaged file, so this error ends the repair.
    const auto look = [&](const std::string& checkpoint, const std::string& folder,
                          const Neighbour* lists) -> Status {
      const Result<FileInfo> there = fs_.LinkStat(folder);
      if (there.status().code() == Code::kNotFound) return Status();
      TENSORMOUNT_RETURN_IF_ERROR(there.status());
      if (SameInode(there.value(), folder_)) return Status();
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool folders, HasFolders(folder, entry.name));
      if (!folders) return Status();
      const Result<FileInfo> info = fs_.LinkStat(JoinPath(folder, entry.name));
      if (!info.ok() && info.status().code() != Code::kNotFound) return info.status();
      const bool same = info.ok() && old && SameInode(info.value(), *old);
      // The directory must be the same as when `lists` was read, because another checkpoint may
      // have the name now.
      const bool lacks = !info.ok() && lists != nullptr && SameInode(there.value(), lists->folder);
      if (same || lacks) {
        names.push_back({.checkpoint = checkpoint,
                         .folder = folder,
                         .folder_info = there.value(),
                         .lacks = lacks});
      }
      return Status();
    };
    const auto look_below = [&](std::string_view below) -> Status {
      const std::string folder = JoinPath(store_.path(), below);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                                   store_moves::ListIfExists(fs_, folder));
      for (const DirectoryEntry& e : entries) {
        if (e.kind != FileKind::kDirectory) continue;
        TENSORMOUNT_RETURN_IF_ERROR(look("", JoinPath(folder, e.name), nullptr));
      }
      return Status();
    };
    // The search follows the order in which directories usually move (staging, store, trash), so it
    // also finds a directory that moves meanwhile.
    TENSORMOUNT_RETURN_IF_ERROR(look_below(store_paths::kStagingFolder));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> published, store_.Names());
    for (const std::string& name : published) {
      const auto known =
          std::find_if(neighbours_.begin(), neighbours_.end(),
                       [&](const Neighbour& neighbour) { return neighbour.name == name; });
      const bool lists = known != neighbours_.end() && ListsAlike(known->record, entry);
      TENSORMOUNT_RETURN_IF_ERROR(
          look(name, store_.CheckpointPath(name), lists ? &*known : nullptr));
    }
    TENSORMOUNT_RETURN_IF_ERROR(look_below(store_paths::kTrashFolder));
    return names;
  }

  // Puts `fresh`, a file of the work directory, at the other names of the damaged file, then at its
  // name in this checkpoint, and then at other names that the damaged file got meanwhile.
  Status GiveNames(const std::string& fresh, const CommitRecord::Entry& entry,
                   const std::optional<FileInfo>& old, RepairedFile& file) {
    TENSORMOUNT_RETURN_IF_ERROR(MakeFolders(entry.name));
    changed_ = true;
    std::set<std::string> refused;
    TENSORMOUNT_RETURN_IF_ERROR(GiveToOthers(fresh, entry, old, refused, file));
    TENSORMOUNT_RETURN_IF_ERROR(GiveOwnName(fresh, OwnPath(entry.name)));
    // Until the exchange above a save may have linked the damaged file again, so the other names
    // are searched again. The damaged file is now at `fresh`, which keeps its inode in use. If it
    // has only this one link, no other name is left. (Links may remain in a directory that moved
    // during the search, or outside of the store.)
    for (int attempt = 0; attempt < 2; ++attempt) {
      TENSORMOUNT_RETURN_IF_ERROR(GiveToOthers(OwnPath(entry.name), entry, old, refused, file));
      const Result<FileInfo> replaced = fs_.LinkStat(fresh);
      if (!replaced.ok() || replaced.value().links < 2) break;
    }
    return fs_.RemoveTree(fresh);
  }

  // Replaces the damaged file at its other names. `refused` receives the directories in which the
  // file could not be replaced, because a hard link was refused. Of these, checkpoints are reported
  // once.
  Status GiveToOthers(const std::string& from, const CommitRecord::Entry& entry,
                      const std::optional<FileInfo>& old, std::set<std::string>& refused,
                      RepairedFile& file) {
    // The search is repeated, because a save that shares the file may be published meanwhile.
    for (int attempt = 0; attempt < 3; ++attempt) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<SharedName> names, OtherNames(entry, old));
      bool any = false;
      for (const SharedName& name : names) {
        if (refused.contains(name.folder)) continue;
        const std::string link = WorkPath();
        const Status linked = fs_.Link(from, link);
        if (store_moves::IsLinkRefused(linked)) {
          refused.insert(name.folder);
          if (!name.checkpoint.empty()) {
            ReportRemaining(
                entry.name, store_.CheckpointPath(name.checkpoint), 0,
                "the checkpoint still has the damaged file, because a hard link was refused (" +
                    linked.message() + "): repair that checkpoint separately");
          }
          continue;
        }
        // The repaired file was removed meanwhile, with this checkpoint or with the work directory.
        if (linked.code() == Code::kNotFound) continue;
        TENSORMOUNT_RETURN_IF_ERROR(linked);
        const Result<bool> given = GiveOtherName(link, entry.name, name, old);
        TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveTree(link));
        // The other directory was deleted or moved. If it moved, the next search finds it.
        any = any || given.status().code() == Code::kNotFound;
        if (given.status().code() == Code::kNotFound) continue;
        TENSORMOUNT_RETURN_IF_ERROR(given.status());
        if (!given.value()) continue;
        any = true;
        if (!name.checkpoint.empty()) file.shared_with.push_back(name.checkpoint);
      }
      if (!any) break;
    }
    return Status();
  }

  // Puts the repaired file `fresh` at `path` in this checkpoint, durably. A damaged file at `path`
  // is moved to `fresh`.
  Status GiveOwnName(const std::string& fresh, const std::string& path) {
    const bool taken = fs_.LinkStat(path).status().code() != Code::kNotFound;
    TENSORMOUNT_RETURN_IF_ERROR(taken ? Swap(fresh, path) : fs_.RenameNoReplace(fresh, path));
    return SyncNames(path);
  }

  // Puts `fresh`, a link to the repaired file, at another name. Returns false, and changes nothing,
  // if the name leads to another file now. kNotFound: the file was removed, or its directory was
  // renamed.
  Result<bool> GiveOtherName(const std::string& fresh, const std::string& file,
                             const SharedName& name, const std::optional<FileInfo>& old) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto folder, fs_.PinDirectory(name.folder));
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo there, fs_.Stat(JoinPath(*folder, ".")));
    if (!SameInode(there, name.folder_info)) {
      return Status(Code::kNotFound, name.folder + ": the directory was replaced by another one");
    }
    const std::string path = JoinPath(*folder, file);
    if (name.lacks) {
      const Status given = fs_.RenameNoReplace(fresh, path);
      if (given.code() == Code::kAlreadyExists) return false;
      TENSORMOUNT_RETURN_IF_ERROR(given);
      TENSORMOUNT_RETURN_IF_ERROR(SyncNames(path));
      return true;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo before, fs_.LinkStat(path));
    if (!old || !SameInode(before, *old)) return false;
    TENSORMOUNT_RETURN_IF_ERROR(Swap(fresh, path));
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo replaced, fs_.LinkStat(fresh));
    const bool meant = SameInode(replaced, *old);
    if (!meant) TENSORMOUNT_RETURN_IF_ERROR(Swap(fresh, path));
    TENSORMOUNT_RETURN_IF_ERROR(SyncNames(path));
    return meant;
  }

  // Exchanges two files; atomic if the filesystem can do that.
  Status Swap(const std::string& fresh, const std::string& path) {
    const Status swapped = fs_.Exchange(fresh, path);
    if (swapped.code() != Code::kUnsupported) return swapped;
    // Without an exchange, the file is missing for a moment. If a crash leaves it missing, the next
    // repair adds it.
    const std::string aside = WorkPath();
    const Status moved = fs_.RenameNoReplace(path, aside);
    // Without RENAME_NOREPLACE an empty directory at this name cannot be moved, so it is deleted.
    // The removal fails if something has appeared in the directory, or in its place, meanwhile.
    TENSORMOUNT_RETURN_IF_ERROR(moved.code() == Code::kUnsupported ? fs_.RemoveDirectory(path)
                                                                   : moved);
    const Status given = fs_.RenameNoReplace(fresh, path);
    if (!given.ok()) (void)fs_.RenameNoReplace(aside, path);
    TENSORMOUNT_RETURN_IF_ERROR(given);
    return moved.ok() ? fs_.RenameNoReplace(aside, fresh) : Status();
  }

  // Makes an exchange durable: both directories are synced.
  Status SyncNames(const std::string& path) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(FolderOf(path)));
    return fs_.SyncDirectory(work_);
  }

  FileSystem& fs_;
  const Store store_;
  const std::string name_;
  const std::shared_ptr<OpenedCheckpoint> other_;
  const RepairOptions& options_;
  const std::string work_;
  RepairReport report_;
  PinnedCommit pinned_;  // Has no file if COMMIT is missing.
  std::shared_ptr<const std::string> directory_;
  FileInfo folder_;
  std::unique_ptr<File> lock_;  // Lock of the work directory; null in a dry run.
  bool changed_ = false;
  CommitRecord record_;
  // The new content of COMMIT; empty if COMMIT is intact or cannot be repaired.
  std::string commit_;
  // Leaf hashes of each manifest, by the manifest's name.
  std::map<std::string, std::vector<Hash128>> leaves_;
  std::optional<Inventory> inventory_;
  std::vector<Neighbour> neighbours_;
  std::unique_ptr<RepairSource> source_;
  std::optional<RangeRepair> ranges_;
  std::uint64_t total_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace

Result<RepairReport> RepairOn(FileSystem& fs, const std::string& path,
                              std::shared_ptr<OpenedCheckpoint> from,
                              const RepairOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StoreAndName parts, SplitCheckpointPath(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::Open(fs, parts.store));
  if (!options.dry_run) TENSORMOUNT_RETURN_IF_ERROR(store.CheckWritable());
  const std::string where = store.path();
  Result<RepairReport> repaired =
      Repairer(fs, std::move(store), std::move(parts.name), std::move(from), options).Run();
  if (repaired.ok()) return repaired;
  return retention::WithTrashHint(fs, where, repaired.status().WithContext("repair " + path));
}

}  // namespace tensormount
