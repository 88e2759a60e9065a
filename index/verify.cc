// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "base/checked.h"
#include "index/checkpoint.h"
#include "index/file_cache.h"
#include "index/foreign_file.h"
#include "index/index_records.h"
#include "index/manifest.h"
#include "index/memory_table.h"
#include "index/rebuild.h"
#include "index/sst_table.h"
#include "index/store_layout.h"
#include "index/verify_pieces.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// Reads and checks everything, collecting damages. One thread; the data are checked by
// VerifyPieces.
class CheckpointVerifier {
 public:
  CheckpointVerifier(FileSystem& fs, std::string directory, const VerifyOptions& options)
      : fs_(fs), directory_(std::move(directory)), options_(options) {}

  Result<VerifyReport> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(ReadCommit());
    if (!decoded_) return std::move(report_);
    CheckListing();
    CheckManifests();
    CheckIndexFiles();
    TENSORMOUNT_RETURN_IF_ERROR(CheckIndexRecords());
    CheckDataFiles();
    TENSORMOUNT_RETURN_IF_ERROR(unread_);
    if (content_) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, commit_file_->Stat());
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const ForeignBase base,
          CheckMayReadForeign(fs_, directory_, content_->info, info, options_.roots));
      CheckForeignFiles(base);
      report_.tensors = content_->tensors.size();
      for (const TensorContent& t : content_->tensors) report_.chunks += t.extents.size();
      if (!options_.quick) {
        TENSORMOUNT_RETURN_IF_ERROR(
            VerifyPieces(fs_, directory_, base, *content_, leaves_, options_, report_));
      }
    }
    return std::move(report_);
  }

 private:
  // What could not be read: damage where the disk or the bytes say so; nothing is known where this
  // process has no descriptors or no permission.
  void Unreadable(const std::string& object, const std::string& file, const Status& status) {
    switch (status.code()) {
      case Code::kPermissionDenied:
      case Code::kResourceExhausted:
      case Code::kUnavailable:
      case Code::kDeadlineExceeded:
      case Code::kBusy:
      case Code::kCancelled:
        if (unread_.ok()) unread_ = status;
        return;
      default:
        Damage(object, file, status.message());
    }
  }
  void Damage(std::string object, std::string file, std::string reason) {
    report_.damages.push_back({.object = std::move(object),
                               .file = std::move(file),
                               .offset = 0,
                               .reason = std::move(reason)});
  }

  Status ReadCommit() {
    const std::string path = JoinPath(directory_, kCommitName);
    Result<std::unique_ptr<File>> file = fs_.OpenRead(path);
    if (file.status().code() == Code::kNotFound) {
      return Status(Code::kNotFound, directory_ + ": not a checkpoint: it has no COMMIT");
    }
    TENSORMOUNT_RETURN_IF_ERROR(file.status());
    commit_file_ = std::move(file).value();
    if (Status locked = layout::LockAsReader(*commit_file_); !locked.ok()) {
      if (locked.code() != Code::kBusy) return locked;
      return Status(Code::kStale, directory_ + ": it is being deleted");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, commit_file_->Stat());
    std::string bytes(std::min(info.size, kMaxCommitBytes), '\0');
    TENSORMOUNT_RETURN_IF_ERROR(commit_file_->ReadExactAt(0, bytes.data(), bytes.size()));
    report_.bytes_checked += bytes.size();
    Result<DecodedCommit> decoded = DecodeCommit(bytes, kCommitName);
    if (decoded.status().code() == Code::kUnsupported) return decoded.status();
    if (!decoded.ok()) {
      Damage("COMMIT", "COMMIT", decoded.status().message());
      return Status();
    }
    decoded_ = std::move(decoded).value();
    if (decoded_->one_copy_damaged) Damage("COMMIT", "COMMIT", decoded_->damage);
    return Status();
  }
  const CommitRecord& commit() const { return decoded_->record; }

  // What stands there and is not listed.
  void CheckListing() {
    std::set<std::string, std::less<>> folders;
    for (const CommitRecord::Entry& entry : commit().files) {
      for (std::size_t at = entry.name.find('/'); at != std::string::npos;
           at = entry.name.find('/', at + 1)) {
        folders.insert(entry.name.substr(0, at));
      }
    }
    for (const char* name : {"data", "manifest", "index"}) folders.insert(name);
    swept_ = !fs_.Exists(JoinPath(directory_, layout::kSharedFile));
    CheckFolder("", folders);
  }

  void CheckFolder(const std::string& below, const std::set<std::string, std::less<>>& folders) {
    Result<std::vector<DirectoryEntry>> entries =
        fs_.List(below.empty() ? directory_ : JoinPath(directory_, below));
    if (!entries.ok()) {
      Unreadable(below, below, entries.status());
      return;
    }
    for (const DirectoryEntry& entry : entries.value()) {
      const std::string name = below.empty() ? entry.name : below + "/" + entry.name;
      // What a publisher that died did not come to take away; gc does.
      if (!swept_ && commit().Find(name) == nullptr &&
          (layout::IsSharedLeftover(name) || name.starts_with("data/"))) {
        continue;
      }
      if (entry.kind == FileKind::kDirectory && folders.contains(name)) {
        CheckFolder(name, folders);
      } else if (name != kCommitName && commit().Find(name) == nullptr) {
        Damage(name, name, "not part of this checkpoint");
        report_.damages.back().surplus = true;
      } else if (entry.kind != FileKind::kFile) {
        Damage(name, name, "not a file");
      }
    }
  }

  void CheckManifests() {
    ContentMerger merger;
    Status status;
    for (const CommitRecord::Entry& entry : commit().files) {
      if (!entry.name.starts_with("manifest/")) continue;
      Result<Manifest> manifest = ReadListedManifest(fs_, directory_, entry);
      if (manifest.ok()) {
        report_.bytes_checked += entry.length;
        // Each is named for what is wrong with itself; without one of them none can be merged.
        const Status added =
            status.ok() ? merger.Add(manifest.value().content, entry.name) : Status();
        if (!added.ok()) {
          Damage(entry.name, entry.name, added.message());
          status = added;
        }
        leaves_[entry.name] = std::move(manifest.value().leaves);
      } else {
        status = manifest.status();
        Unreadable(entry.name, entry.name, status);
      }
    }
    if (!status.ok()) return;
    Result<Content> content = FinishRebuild(merger, commit());
    if (content.ok()) {
      content_ = std::move(content).value();
    } else {
      Damage("manifests", "manifest", content.status().message());
    }
  }

  void CheckIndexFiles() {
    for (const CommitRecord::Entry& entry : commit().files) {
      if (!entry.name.starts_with("index/")) continue;
      Result<std::unique_ptr<File>> file = fs_.OpenRead(JoinPath(directory_, entry.name));
      if (!file.ok()) {
        Unreadable("index", entry.name, file.status());
        continue;
      }
      const Result<FileInfo> info = file.value()->Stat();
      if (!info.ok()) {
        Damage("index", entry.name, info.status().message());
        continue;
      }
      if (info.value().size != entry.length) {
        Damage("index", entry.name,
               std::to_string(info.value().size) + " bytes, " + std::to_string(entry.length) +
                   " expected");
        continue;
      }
      Xxh3Stream hash;
      std::string block(std::size_t{1} << 20, '\0');
      Status read;
      for (std::uint64_t at = 0; at < entry.length && read.ok();) {
        const std::size_t n = std::min<std::uint64_t>(block.size(), entry.length - at);
        read = file.value()->ReadExactAt(at, block.data(), n);
        hash.Update(block.data(), n);
        at += n;
      }
      report_.bytes_checked += entry.length;
      if (!read.ok()) {
        Damage("index", entry.name, read.message());
      } else if (hash.Value() != entry.hash) {
        Damage("index", entry.name, "checksum differs");
      }
    }
  }

  // Every record against what the manifests say.
  Status CheckIndexRecords() {
    const std::string name(kIndexName);
    Result<std::shared_ptr<const CheckpointIndex>> index =
        CheckpointIndex::OpenSst(fs_, directory_, commit());
    if (!index.ok()) {
      Unreadable("index", name, index.status());
      return Status();
    }
    if (!content_) {  // The index is the only one left to say what the data should be.
      Result<Content> content = index.value()->ToContent();
      if (content.ok()) {
        content_ = std::move(content).value();
      } else {
        Damage("index", name, content.status().message());
      }
      return Status();
    }
    MemoryTable wanted;
    TENSORMOUNT_RETURN_IF_ERROR(
        index_record::ForEach(*content_, false, [&](std::string_view key, std::string_view value) {
          wanted.Append(key, value);
          return Status();
        }));
    std::uint64_t seen = 0;
    std::uint64_t differ = 0;
    const Status scanned =
        index.value()->table().Scan("", "", [&](std::string_view key, std::string_view value) {
          ++seen;
          Result<std::string> record = wanted.Get(key);
          if (!record.ok() || record.value() != value) ++differ;
          return true;
        });
    if (!scanned.ok()) {
      Damage("index", name, scanned.message());
    } else if (differ != 0 || seen != wanted.size()) {
      Damage("index", name,
             std::to_string(differ) + " of " + std::to_string(seen) +
                 " records differ from what the manifests say (" + std::to_string(wanted.size()) +
                 " wanted)");
    }
    return Status();
  }

  void CheckDataFiles() {
    for (const CommitRecord::Entry& entry : commit().files) {
      if (!entry.name.starts_with("data/")) continue;
      Result<FileInfo> info = fs_.LinkStat(JoinPath(directory_, entry.name));
      if (info.status().code() == Code::kNotFound) {
        Damage(entry.name, entry.name, "the file is missing");
      } else if (!info.ok()) {
        Unreadable(entry.name, entry.name, info.status());
      } else if (info.value().size != entry.length) {
        Damage(entry.name, entry.name,
               std::to_string(info.value().size) + " bytes, " + std::to_string(entry.length) +
                   " expected");
      }
    }
  }

  // Damage of each is named once, here; their pieces then say nothing more of it.
  void CheckForeignFiles(const ForeignBase& base) {
    for (const FileRecord& file : content_->files) {
      if (file.placement != Placement::kForeign) continue;
      const Status opened = OpenForeignFile(fs_, base, file, true).status();
      if (!opened.ok()) Damage(file.name, file.name, opened.message());
    }
  }

  FileSystem& fs_;
  const std::string directory_;
  const VerifyOptions& options_;
  VerifyReport report_;
  std::unique_ptr<File> commit_file_;
  std::optional<DecodedCommit> decoded_;
  Status unread_;  // Why a part of it could not be checked at all.
  std::map<std::string, std::vector<Hash128>> leaves_;  // By name of manifest.
  bool swept_ = true;  // False: leftovers of a shared staging may stand here.
  std::optional<Content> content_;
};

}  // namespace

Result<VerifyReport> VerifyCheckpoint(FileSystem& fs, const std::string& directory,
                                      const VerifyOptions& options) {
  return CheckpointVerifier(fs, directory, options).Run();
}

}  // namespace tensormount
