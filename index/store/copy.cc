// SPDX-License-Identifier: Apache-2.0
// Copies of checkpoints to another store (docs/format.md, "Copies").
//
// A copy is assembled in a directory of its own below the destination's .staging/. The name of the
// directory contains the checkpoint's uuid, so that a later copy of the same checkpoint continues
// there. A file gets its final name after it is complete and synced. Existing files are compared
// with their hashes before they are used. One rename publishes the checkpoint.
#include "index/store/copy.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/at_exit.h"
#include "base/coding.h"
#include "base/counted.h"
#include "base/deadline.h"
#include "base/errors.h"
#include "base/file_system_for.h"
#include "index/read/checkpoint.h"
#include "index/read/pinned_commit.h"
#include "index/read/proven_ranges.h"
#include "index/read/rebuild.h"
#include "index/read/scan.h"
#include "index/records/store_paths.h"
#include "index/store/range_check.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

// Block size for reading, hashing and writing.
constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
// Number of bytes after which writeback is started, so that the final sync has less to wait for.
constexpr std::uint64_t kWritebackBytes = std::uint64_t{8} << 20;
// In a copy's work directory, the subdirectory that becomes the checkpoint. The part files beside
// it are incomplete.
constexpr std::string_view kWholeFolder = "checkpoint";
constexpr std::string_view kPartPrefix = "part-";

// Reports progress and limits the rate. For one thread.
class Pace {
 public:
  Pace(const CopyOptions& options, std::uint64_t total) : options_(options), total_(total) {}

  // Reports progress after a read of `bytes`, and sleeps if reads are faster than the rate limit.
  Status Read(std::uint64_t bytes) {
    TENSORMOUNT_RETURN_IF_ERROR(ReportProgress());
    if (options_.limit_rate == 0) return Status();
    using Clock = std::chrono::steady_clock;
    // After idle time, reads may exceed the rate limit to make up for at most 100 ms.
    next_ = std::max(next_, Clock::now() - std::chrono::milliseconds(100));
    next_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
        static_cast<double>(bytes) / static_cast<double>(options_.limit_rate)));
    const Deadline until = Deadline::At(next_);
    while (!until.Passed()) {
      const std::chrono::nanoseconds most = std::chrono::milliseconds(100);
      std::this_thread::sleep_for(std::min(most, until.Left()));
      TENSORMOUNT_RETURN_IF_ERROR(ReportProgress());
    }
    return Status();
  }
  // Counts `bytes` of a checkpoint that are in place, and reports progress.
  Status Done(std::uint64_t bytes) {
    done_ += bytes;
    return ReportProgress();
  }
  // Size of a read; smaller than kBlockBytes if the rate limit is low.
  std::size_t Block() const {
    if (options_.limit_rate == 0) return kBlockBytes;
    return static_cast<std::size_t>(
        std::clamp<std::uint64_t>(options_.limit_rate / 4, kLeafBytes, kBlockBytes));
  }

 private:
  Status ReportProgress() const {
    return options_.watch ? options_.watch(done_, total_) : Status();
  }

  const CopyOptions& options_;
  const std::uint64_t total_;
  std::uint64_t done_ = 0;
  std::chrono::steady_clock::time_point next_{};
};

// A checkpoint to copy, as it was when the copy began.
struct CopyRequest {
  FileSystem* fs = nullptr;  // The file system of the source.
  std::string directory;
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  std::uint64_t bytes = 0;
  std::uint64_t files = 0;
  Status problem;  // Why the checkpoint cannot be read.
  // Whether the checkpoint was selected by copying a whole store, and not by name.
  bool from_whole_store = false;
};

// A source that is open and locked, with the records that tell the hashes of its bytes.
struct OpenedSource {
  FileSystem* fs = nullptr;
  PinnedCommit pinned;
  std::string commit;  // Content of the file COMMIT.
  CommitRecord record;
  Inventory inventory;
  // Stored ranges of each file, by file name; sorted by offset.
  std::map<std::string, std::vector<ScanRange>, std::less<>> ranges;

  // Whether the source was deleted meanwhile. Error codes of opens and reads do not show this.
  bool Deleted() const {
    const Result<FileInfo> now = pinned.file->Stat();
    return now.status().code() == Code::kStale ||
           (now.ok() && fs->Can(Ability::kStamps) && now.value().links == 0);
  }
};

Hash128 HashOfRange(const Inventory& inventory, const ScanRange& range) {
  switch (range.kind) {
    case ScanRange::Kind::kChunk:
      return inventory.tensors[range.owner].extents.At(range.row).value().hash;
    case ScanRange::Kind::kObject:
      return inventory.objects[range.owner].hash;
    case ScanRange::Kind::kExtra:
      break;
  }
  return inventory.extras[range.owner].hash;
}

// Compares the bytes of a file, which are added in order, with the recorded hashes. In a data file
// each stored range is compared with its chunk hash. (RebuildInventory has compared these hashes
// with the file root in COMMIT.) Any other file is compared as a whole with the hash in COMMIT.
class FileProof {
 public:
  FileProof(const OpenedSource& source, const CommitRecord::Entry& entry)
      : source_(source), entry_(entry) {
    if (const auto found = source.ranges.find(entry.name); found != source.ranges.end()) {
      for (const ScanRange& range : found->second) {
        hashed_.push_back({range.offset, range.length, HashOfRange(source.inventory, range)});
      }
      ranges_ = &found->second;
      check_.emplace(hashed_);
    } else if (!entry.name.starts_with("data/")) {
      whole_.emplace();
    }
  }
  FileProof(const FileProof&) = delete;
  FileProof& operator=(const FileProof&) = delete;

  Status Add(const std::byte* data, std::size_t size) {
    if (whole_) whole_->Update(data, size);
    if (!check_ || check_->Add(data, size)) return Status();
    const ScanRange& range = (*ranges_)[check_->next()];
    return Differs(RangeName(source_.inventory, range) + ", from byte " +
                   std::to_string(range.offset) + " on: ");
  }
  Status Finish() const {
    if (whole_ && whole_->Value() != entry_.hash) return Differs("");
    if (check_ && !check_->all_good()) {
      return DataLoss(entry_.name, "the file ends before the last range of its manifest");
    }
    return Status();
  }

 private:
  Status Differs(const std::string& what) const {
    return DataLoss(entry_.name, what + "checksum mismatch").With({.file = entry_.name});
  }

  const OpenedSource& source_;
  const CommitRecord::Entry& entry_;
  const std::vector<ScanRange>* ranges_ = nullptr;
  std::vector<CheckedRange> hashed_;  // Hashes of ranges_.
  std::optional<RangeCheck> check_;
  std::optional<Xxh3Stream> whole_;
};

// Key of a file by name, length and hash: two checkpoints that list a file with the same key may
// share it.
Hash128 AlikeKey(const CommitRecord::Entry& entry) {
  ByteWriter out;
  out.U64(entry.length);
  out.Hash(entry.hash);
  out.Raw(entry.name.data(), entry.name.size());
  return Xxh3(out.bytes());
}
struct KeyHasher {
  std::size_t operator()(const Hash128& key) const { return static_cast<std::size_t>(key.low); }
};
using Keys = std::unordered_set<Hash128, KeyHasher>;

// Whether a failure concerns only one checkpoint, so that the others are still copied.
bool ConcernsOneCheckpoint(const Status& status) {
  switch (status.code()) {
    case Code::kNotFound:
    case Code::kStale:
    case Code::kAlreadyExists:
    case Code::kDataLoss:
    case Code::kUnsupported:
    case Code::kInvalidArgument:
    case Code::kBusy:
    case Code::kPermissionDenied:
      return true;
    default:
      return false;
  }
}

class Copier {
 public:
  Copier(FileSystem& fs, const Store& destination, const CopyOptions& options, std::uint64_t total)
      : fs_(fs), store_(destination), pace_(options, total) {}

  // Finds out which checkpoints the destination has, and which of the files in `keys`.
  Status InspectDestination(Keys keys) {
    keys_ = std::move(keys);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, store_.Names());
    for (const std::string& name : names) {
      CommitRecord record;
      const CheckpointListing listing = store_.FindListing(name, &record);
      if (!listing.problem.ok()) continue;
      names_[listing.uuid] = name;
      Remember(name, record);
    }
    return Status();
  }

  Status Copy(const CopyRequest& wanted, CopiedCheckpoint& out);
  // Removes work directories of finished copies. After a failure gc removes them.
  void CleanUp();

 private:
  Status CopySteps(const CopyRequest& wanted, const std::string& outer, OpenedSource& source,
                   CopiedCheckpoint& out);
  Result<OpenedSource> Open(const CopyRequest& wanted);
  CheckpointListing DestinationEntry(const std::string& name) const;
  Status CheckName(const CopyRequest& wanted, CopiedCheckpoint& out);
  Result<std::unique_ptr<File>> Lock(const std::string& outer);
  Status Sweep(const std::string& inner, const std::string& below, const CommitRecord& record,
               const std::set<std::string>& folders);
  Status Place(const OpenedSource& source, const CommitRecord::Entry& entry,
               const std::string& outer, const std::string& inner, CopiedCheckpoint& out);
  Result<bool> TryLink(const OpenedSource& source, const CommitRecord::Entry& entry,
                       const std::string& inner, bool sealed, CopiedCheckpoint& out);
  Status CopyFile(const OpenedSource& source, const CommitRecord::Entry& entry, File& from,
                  bool sealed, const std::string& outer, const std::string& to);
  Result<bool> IsWhole(const OpenedSource& source, const CommitRecord::Entry& entry,
                       const std::string& folder, bool sealed);
  Status Publish(const CopyRequest& wanted, const std::string& outer, const std::string& inner,
                 CopiedCheckpoint& out);
  Status MakeDurable(const std::string& checkpoint, std::uint64_t generation,
                     const std::string& from);

  void Remember(const std::string& name, const CommitRecord& record) {
    for (const CommitRecord::Entry& entry : record.files) {
      if (!entry.name.starts_with("data/")) continue;
      const Hash128 key = AlikeKey(entry);
      if (keys_.contains(key)) holders_[key] = name;
    }
  }
  std::string StagingFolder() const { return JoinPath(store_.path(), store_paths::kStagingFolder); }
  void RememberProven(const std::string& path) {
    if (const Result<FileInfo> info = fs_.LinkStat(path); info.ok()) {
      proven_[{info.value().device, info.value().inode}] = FileStamp::OfStoreFile(info.value());
    }
  }

  FileSystem& fs_;
  const Store& store_;
  Pace pace_;
  Keys keys_;
  // For each key of a file, a checkpoint of the destination that has the file.
  std::unordered_map<Hash128, std::string, KeyHasher> holders_;
  std::map<Uuid, std::string> names_;  // Checkpoints of the destination.
  // Files of the destination that this copy has verified, by device and inode, with their state at
  // that time.
  std::map<std::pair<std::uint64_t, std::uint64_t>, FileStamp> proven_;
  std::vector<std::string> finished_;  // Work directories of finished copies.
  std::vector<std::byte> buffer_;
};

Result<OpenedSource> Copier::Open(const CopyRequest& wanted) {
  OpenedSource source;
  source.fs = wanted.fs;
  TENSORMOUNT_ASSIGN_OR_RETURN(source.pinned, PinCommit(*wanted.fs, wanted.directory));
  TENSORMOUNT_ASSIGN_OR_RETURN(source.commit, ReadCommitBytes(*source.pinned.file, kCommitName));
  TENSORMOUNT_ASSIGN_OR_RETURN(DecodedCommit decoded, DecodeCommit(source.commit, kCommitName));
  // COMMIT contains two copies of the record. If one of them is damaged, the checkpoint is not
  // copied: a copy would have the same damage, or would need another COMMIT.
  if (decoded.one_copy_damaged) return DataLoss(decoded.damage).With({.file = "COMMIT"});
  source.record = std::move(decoded.record);
  if (source.record.uuid != wanted.uuid) {
    return Status(Code::kStale, wanted.directory + ": the checkpoint was replaced by another one");
  }
  Result<Inventory> inventory =
      RebuildInventory(*source.fs, *source.pinned.directory, source.record);
  if (!inventory.ok()) {
    if (source.Deleted()) {
      return Status(Code::kStale,
                    wanted.directory + ": the checkpoint was deleted while it was copied");
    }
    return inventory.status();
  }
  source.inventory = std::move(inventory).value();
  if (!source.inventory.info.self_contained) {
    return Status(Code::kUnsupported,
                  wanted.directory +
                      ": is an adopted checkpoint, whose data stay in the original files below " +
                      source.inventory.info.root +
                      "; copy those files and adopt the copy, or import the checkpoint");
  }
  for (const ScanRange& range : RangesOf(source.inventory)) {
    if (range.length == 0 || range.file >= source.inventory.files.size()) continue;
    source.ranges[source.inventory.files[range.file].name].push_back(range);
  }
  for (auto& [name, ranges] : source.ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const ScanRange& a, const ScanRange& b) { return a.offset < b.offset; });
  }
  return source;
}

// The entry with this name in the destination. Symbolic links are not followed, because a link to a
// checkpoint elsewhere is not a copy.
CheckpointListing Copier::DestinationEntry(const std::string& name) const {
  const std::string path = store_.CheckpointPath(name);
  const Result<FileInfo> info = fs_.LinkStat(path);
  if (!info.ok() || info.value().kind == FileKind::kDirectory) return store_.FindListing(name);
  CheckpointListing listing;
  listing.name = name;
  listing.state = CheckpointListing::State::kNoCheckpoint;
  listing.problem =
      Status(Code::kDataLoss, info.value().kind == FileKind::kSymlink
                                  ? "the name is a symbolic link, not a checkpoint of this store"
                                  : "not a directory");
  return listing;
}

// Checks whether the name can be used in the destination. OK if it is free. Also OK if this
// checkpoint already has the name there, which sets `out.was_there`.
Status Copier::CheckName(const CopyRequest& wanted, CopiedCheckpoint& out) {
  const std::string path = store_.CheckpointPath(wanted.name);
  const CheckpointListing now = DestinationEntry(wanted.name);
  if (now.problem.ok()) {
    out.was_there = now.uuid == wanted.uuid;
    if (out.was_there) return Status();
    return Status(Code::kAlreadyExists,
                  path + ": another checkpoint (" + now.uuid.ToString() + ") has this name");
  }
  if (now.problem.code() != Code::kNotFound) {
    if (now.state == CheckpointListing::State::kUnread) return now.problem;
    return Status(Code::kAlreadyExists, path + ": the name is taken: " + now.problem.message());
  }
  const auto named = names_.find(wanted.uuid);
  if (named == names_.end()) return Status();
  const CheckpointListing other = DestinationEntry(named->second);
  if (!other.problem.ok() || other.uuid != wanted.uuid) return Status();
  return Status(Code::kAlreadyExists,
                store_.CheckpointPath(named->second) +
                    ": the store already has this checkpoint under this other name");
}

// Takes the lock of the work directory, which keeps gc and other copies of the same checkpoint
// away. Filesystems without locks do not have this protection, but there, too, files and
// checkpoints are published by renames that never replace anything.
Result<std::unique_ptr<File>> Copier::Lock(const std::string& outer) {
  return store_moves::LockWorkFolder(fs_, outer, "another copy of this checkpoint is running");
}

// Removes files of an earlier, interrupted copy that do not belong to this checkpoint. Also removes
// COMMIT, which this copy writes last.
Status Copier::Sweep(const std::string& inner, const std::string& below, const CommitRecord& record,
                     const std::set<std::string>& folders) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               fs_.List(below.empty() ? inner : JoinPath(inner, below)));
  for (const DirectoryEntry& entry : entries) {
    const std::string name = below.empty() ? entry.name : below + "/" + entry.name;
    if (entry.kind == FileKind::kDirectory && folders.contains(name)) {
      TENSORMOUNT_RETURN_IF_ERROR(Sweep(inner, name, record, folders));
    } else if (entry.kind != FileKind::kFile || record.Find(name) == nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveTree(JoinPath(inner, name)));
    }
  }
  return Status();
}

// Whether the file in `folder` has the bytes of the source's file, and is sealed if `sealed` is
// set. False also if the file cannot be read. An error is returned only if the caller's watch ends
// the copy.
Result<bool> Copier::IsWhole(const OpenedSource& source, const CommitRecord::Entry& entry,
                             const std::string& folder, bool sealed) {
  const Result<std::unique_ptr<File>> file = OpenListedFile(fs_, folder, entry.name);
  if (!file.ok()) return false;
  const Result<FileInfo> info = file.value()->Stat();
  if (!info.ok() || info.value().size != entry.length) return false;
  if (sealed && !info.value().sealed()) return false;
  const FileStamp stamp = FileStamp::OfStoreFile(info.value());
  const std::pair<std::uint64_t, std::uint64_t> id{info.value().device, info.value().inode};
  if (const auto known = proven_.find(id);
      known != proven_.end() && stamp.IsUnwrittenSince(known->second)) {
    known->second = stamp;
    return true;
  }
  FileProof proof(source, entry);
  buffer_.resize(pace_.Block());
  for (std::uint64_t at = 0; at < entry.length;) {
    const auto n =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), entry.length - at));
    if (!file.value()->ReadExactAt(at, buffer_.data(), n).ok()) return false;
    if (!proof.Add(buffer_.data(), n).ok()) return false;
    at += n;
    TENSORMOUNT_RETURN_IF_ERROR(pace_.Read(n));
  }
  if (!proof.Finish().ok()) return false;
  proven_[id] = stamp;
  return true;
}

// Hard-links the file from another checkpoint of the destination. Returns false if the file must be
// copied.
Result<bool> Copier::TryLink(const OpenedSource& source, const CommitRecord::Entry& entry,
                             const std::string& inner, bool sealed, CopiedCheckpoint& out) {
  const auto holder = holders_.find(AlikeKey(entry));
  if (holder == holders_.end()) return false;
  const std::string from = JoinPath(store_.CheckpointPath(holder->second), entry.name);
  const std::string to = JoinPath(inner, entry.name);
  const Status linked = fs_.Link(from, to);
  // The other checkpoint, or its file, was removed meanwhile.
  if (linked.code() == Code::kNotFound || linked.code() == Code::kStale) return false;
  if (!linked.ok()) {
    if (!store_moves::IsLinkRefused(linked)) return linked;
    if (out.links_refused++ == 0) out.refusal = linked.message();
    return false;
  }
  // The link stays only if the file that it leads to is intact.
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool whole, IsWhole(source, entry, inner, sealed));
  if (whole) return true;
  out.warnings.push_back(
      from + ": the file is damaged or not sealed, so it was copied instead of hard-linked");
  holders_.erase(holder);
  TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveFile(to));
  return false;
}

// Copies a file under a temporary name, and renames it after it is complete, synced and, if
// `sealed` is set, sealed.
Status Copier::CopyFile(const OpenedSource& source, const CommitRecord::Entry& entry, File& from,
                        bool sealed, const std::string& outer, const std::string& to) {
  const std::string part = JoinPath(outer, std::string(kPartPrefix) + Uuid::Random().Short());
  const auto write = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs_.CreateExclusive(part));
    FileProof proof(source, entry);
    buffer_.resize(pace_.Block());
    std::uint64_t started = 0;
    for (std::uint64_t at = 0; at < entry.length;) {
      const auto n =
          static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), entry.length - at));
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                   from.ReadAtWithin(at, buffer_.data(), n, entry.length));
      if (got != n) TENSORMOUNT_RETURN_IF_ERROR(from.ReadExactAt(at, buffer_.data(), n));
      TENSORMOUNT_RETURN_IF_ERROR(proof.Add(buffer_.data(), n));
      TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(at, buffer_.data(), n));
      at += n;
      if (at - started >= kWritebackBytes) {
        file->StartWriteback(started, at - started);
        started = at;
      }
      TENSORMOUNT_RETURN_IF_ERROR(pace_.Read(n));
    }
    TENSORMOUNT_RETURN_IF_ERROR(proof.Finish());
    if (sealed) TENSORMOUNT_RETURN_IF_ERROR(file->Seal());
    TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(file->Close());
    return fs_.RenameNoReplace(part, to);
  };
  const Status written = write();
  if (written.ok()) {
    RememberProven(to);
  } else {
    (void)fs_.RemoveFile(part);  // If this fails, the next copy removes it.
  }
  return written;
}

Status Copier::Place(const OpenedSource& source, const CommitRecord::Entry& entry,
                     const std::string& outer, const std::string& inner, CopiedCheckpoint& out) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> from,
                               OpenListedFile(*source.fs, *source.pinned.directory, entry.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, from->Stat());
  if (info.size != entry.length) {
    return DataLoss(entry.name, "the file has " + std::to_string(info.size) + " bytes, " +
                                    std::to_string(entry.length) + " expected")
        .With({.file = entry.name});
  }
  const bool sealed = info.sealed();
  const std::string to = JoinPath(inner, entry.name);
  const auto count = [&](std::uint64_t& files, std::uint64_t& bytes) {
    ++files;
    bytes += entry.length;
    return pace_.Done(entry.length);
  };
  if (fs_.LinkStat(to).ok()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool whole, IsWhole(source, entry, inner, sealed));
    if (whole) return count(out.files_kept, out.bytes_kept);
    TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveFile(to));
  }
  if (entry.name.starts_with("data/")) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool linked, TryLink(source, entry, inner, sealed, out));
    if (linked) return count(out.files_linked, out.bytes_linked);
  }
  TENSORMOUNT_RETURN_IF_ERROR(CopyFile(source, entry, *from, sealed, outer, to));
  return count(out.files_copied, out.bytes_copied);
}

Status Copier::MakeDurable(const std::string& checkpoint, std::uint64_t generation,
                           const std::string& from) {
  Status synced = fs_.SyncMovedFolder(checkpoint, store_.path(), from);
  // On a filesystem without locks another copy may have removed the work directory. A sync of its
  // parent then makes the move durable.
  if (synced.code() == Code::kNotFound && fs_.LinkStat(from).status().code() == Code::kNotFound) {
    synced = fs_.SyncMovedFolder(checkpoint, store_.path(), StagingFolder());
  }
  // The claim of the generation must be durable, too, because it outlives the checkpoint.
  // Another process may have made it and not synced it.
  if (synced.ok()) synced = store_moves::SyncClaim(fs_, store_.path(), generation);
  if (synced.ok()) return Status();
  return Status(Code::kUnknown, checkpoint +
                                    ": the copy was published, but a power failure may undo it: " +
                                    synced.message());
}

Status Copier::Publish(const CopyRequest& wanted, const std::string& outer,
                       const std::string& inner, CopiedCheckpoint& out) {
  const std::string to = store_.CheckpointPath(wanted.name);
  const Status moved = fs_.RenameNoReplace(inner, to);
  if (!moved.ok()) {
    // The rename may have succeeded nevertheless: NFS may report a successful rename as failed, and
    // on a filesystem without locks another process may have published the same copy. So the
    // location of the checkpoint decides.
    const bool here = fs_.LinkStat(inner).status().code() != Code::kNotFound;
    const CheckpointListing now = DestinationEntry(wanted.name);
    if (!now.problem.ok() || now.uuid != wanted.uuid) {
      if (!here)
        return Status(Code::kUnknown, "cannot tell whether " + to +
                                          " was published: " + moved.message() +
                                          "; run `tensormount fsck " + store_.path() + "`");
      if (moved.code() != Code::kAlreadyExists) return moved;
      return Status(Code::kAlreadyExists, to + ": the name was taken during the copy");
    }
    out.was_there = here;
  }
  return MakeDurable(to, wanted.generation, outer);
}

Status Copier::CopySteps(const CopyRequest& wanted, const std::string& outer, OpenedSource& source,
                         CopiedCheckpoint& out) {
  const std::string inner = JoinPath(outer, kWholeFolder);
  const CommitRecord& record = source.record;
  // Sorted, so that a directory comes before the directories in it.
  std::set<std::string> folders{"data", "manifest", "index"};
  for (const CommitRecord::Entry& entry : record.files) {
    for (std::size_t at = entry.name.find('/'); at != std::string::npos;
         at = entry.name.find('/', at + 1)) {
      folders.insert(entry.name.substr(0, at));
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(fs_.EnsureDirectory(inner));
  TENSORMOUNT_RETURN_IF_ERROR(Sweep(inner, "", record, folders));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> parts, fs_.List(outer));
  for (const DirectoryEntry& part : parts) {
    if (!part.name.starts_with(kPartPrefix)) continue;
    TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveTree(JoinPath(outer, part.name)));
  }
  for (const std::string& folder : folders) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.EnsureDirectory(JoinPath(inner, folder)));
  }
  for (const CommitRecord::Entry& entry : record.files) {
    TENSORMOUNT_RETURN_IF_ERROR(Place(source, entry, outer, inner, out));
  }
  // As in a publish: directory entries are synced before COMMIT is written, and the entry of COMMIT
  // is synced before the rename.
  for (auto it = folders.rbegin(); it != folders.rend(); ++it) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(JoinPath(inner, *it)));
  }
  TENSORMOUNT_RETURN_IF_ERROR(
      fs_.WriteFileDurably(JoinPath(inner, store_paths::kCommitFile), source.commit));
  TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(inner));
  ++out.files_copied;
  out.bytes_copied += source.commit.size();
  TENSORMOUNT_RETURN_IF_ERROR(pace_.Done(source.commit.size()));
  TENSORMOUNT_RETURN_IF_ERROR(store_.ClaimUpTo(wanted.generation));
  return Publish(wanted, outer, inner, out);
}

Status Copier::Copy(const CopyRequest& wanted, CopiedCheckpoint& out) {
  TENSORMOUNT_RETURN_IF_ERROR(wanted.problem);
  if (wanted.generation >= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return InvalidArgument("generation " + std::to_string(wanted.generation) +
                           " is the largest possible: no later save could follow it");
  }
  const std::string outer =
      JoinPath(StagingFolder(), std::string(store_paths::kCopyPrefix) + wanted.uuid.ToString());
  // For a checkpoint that the destination has already: claims its generation and syncs again,
  // because an earlier copy may have failed to do so.
  const auto already = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(store_.ClaimUpTo(wanted.generation));
    TENSORMOUNT_RETURN_IF_ERROR(
        MakeDurable(store_.CheckpointPath(wanted.name), wanted.generation, StagingFolder()));
    return pace_.Done(wanted.bytes);
  };
  TENSORMOUNT_RETURN_IF_ERROR(CheckName(wanted, out));
  if (out.was_there) {
    // The work directory is a leftover, unless another copy holds its lock.
    if (fs_.LinkStat(outer).ok() && Lock(outer).ok()) finished_.push_back(outer);
    return already();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(OpenedSource source, Open(wanted));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> lock, Lock(outer));
  // Another copy may have finished while the source was opened.
  TENSORMOUNT_RETURN_IF_ERROR(CheckName(wanted, out));
  if (out.was_there) {
    finished_.push_back(outer);
    return already();
  }
  Status copied = CopySteps(wanted, outer, source, out);
  if (!copied.ok()) {
    if ((copied.code() == Code::kDataLoss || copied.code() == Code::kNotFound) &&
        source.Deleted()) {
      return Status(Code::kStale,
                    wanted.directory + ": the checkpoint was deleted while it was copied");
    }
    if (copied.code() == Code::kNotFound &&
        fs_.LinkStat(outer).status().code() == Code::kNotFound) {
      return Status(Code::kStale,
                    outer + ": the directory was removed during the copy: " + copied.message());
    }
    return copied;
  }
  names_[wanted.uuid] = wanted.name;
  Remember(wanted.name, source.record);
  finished_.push_back(outer);
  return Status();
}

// Removes the work directories in finished_, then syncs the filesystem once. Without this sync, on
// a filesystem without a journal, a new file could get the inode of a deleted directory and be lost
// when the filesystem is repaired.
void Copier::CleanUp() {
  if (finished_.empty()) return;
  for (const std::string& outer : finished_) {
    // If a new copy has begun in this directory, it holds the lock, and the directory stays.
    if (!fs_.LinkStat(outer).ok()) continue;
    const Result<std::unique_ptr<File>> lock = Lock(outer);
    if (lock.ok()) (void)fs_.RemoveTree(outer);
  }
  (void)fs_.SyncFileSystem(StagingFolder());
}

// Finds the checkpoints that the caller named, and sorts them in the order of copying. Adds the
// keys of all their data files to `keys`.
Result<std::vector<CopyRequest>> FindSources(const std::vector<std::string>& sources,
                                             const std::vector<FileSystem*>& from, FileSystem& to,
                                             const std::string& destination, Keys& keys) {
  std::vector<CopyRequest> wanted;
  std::set<std::string> seen;
  const Result<FileInfo> target = to.Stat(destination);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::string& text = sources[i];
    FileSystem& fs = *from[i];
    Result<Store> store = Store::Open(fs, text);
    const bool all = store.ok();
    std::vector<std::string> names;
    if (all) {
      TENSORMOUNT_ASSIGN_OR_RETURN(names, store.value().Names());
    } else {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, ResolveSourcePath(fs, text));
      TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName parts, SplitCheckpointPath(path));
      store = Store::Open(fs, parts.store);
      TENSORMOUNT_RETURN_IF_ERROR(store.status());
      names.push_back(parts.name);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(store.value().path()));
    if (&fs == &to && target.ok() && target.value().device == info.device &&
        target.value().inode == info.inode) {
      return InvalidArgument(destination + ": is the store of the source " + text +
                             "; choose another destination");
    }
    for (const std::string& name : names) {
      CopyRequest one{.fs = &fs,
                      .directory = store.value().CheckpointPath(name),
                      .name = name,
                      .from_whole_store = all};
      if (!seen.insert(one.directory).second) continue;
      CommitRecord record;
      const CheckpointListing listing = store.value().FindListing(name, &record);
      // The checkpoint was removed since the listing, or the directory is not a checkpoint.
      if (all && (listing.problem.code() == Code::kNotFound ||
                  listing.state == CheckpointListing::State::kNoCheckpoint)) {
        continue;
      }
      if (listing.problem.code() == Code::kNotFound) return listing.problem;
      one.uuid = listing.uuid;
      one.generation = listing.generation;
      one.problem = listing.problem;
      one.bytes = listing.commit_bytes;
      one.files = record.files.size() + 1;
      for (const CommitRecord::Entry& entry : record.files) {
        one.bytes += entry.length;
        if (entry.name.starts_with("data/")) keys.insert(AlikeKey(entry));
      }
      wanted.push_back(std::move(one));
    }
  }
  std::stable_sort(wanted.begin(), wanted.end(), [](const CopyRequest& a, const CopyRequest& b) {
    return std::tie(a.generation, a.uuid) < std::tie(b.generation, b.uuid);
  });
  return wanted;
}

}  // namespace

namespace {

// `from`: the file system of each source.
Result<CopyReport> CopyBetween(const std::vector<std::string>& sources,
                               const std::vector<FileSystem*>& from, FileSystem& fs,
                               const std::string& destination, const CopyOptions& options) {
  TENSORMOUNT_RETURN_IF_ERROR(fs.Need(Ability::kWrite, destination));
  if (sources.empty())
    return InvalidArgument("copy to " + destination + ": no checkpoint to copy was given");
  Keys keys;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CopyRequest> wanted,
                               FindSources(sources, from, fs, destination, keys));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::OpenOrCreate(fs, destination));
  TENSORMOUNT_RETURN_IF_ERROR(store.PrepareToWrite());
  std::uint64_t total = 0;
  for (const CopyRequest& one : wanted) total += one.bytes;
  Copier copier(fs, store, options, total);
  TENSORMOUNT_RETURN_IF_ERROR(copier.InspectDestination(std::move(keys)));
  const AtExit clean_up([&copier] { copier.CleanUp(); });
  CopyReport report{.destination = store.path(), .checkpoints = {}};
  for (const CopyRequest& one : wanted) {
    CopiedCheckpoint out{.name = one.name,
                         .uuid = one.uuid.ToString(),
                         .generation = one.generation,
                         .bytes = one.bytes,
                         .files = one.files};
    out.status = copier.Copy(one, out).WithContext("copy " + one.name);
    out.status = retention::WithTrashHint(fs, store.path(), out.status);
    const bool removed =
        (out.status.code() == Code::kNotFound || out.status.code() == Code::kStale) &&
        one.fs->LinkStat(one.directory).status().code() == Code::kNotFound;
    if (removed) {
      // The checkpoint was removed from the source meanwhile. In a copy of a whole store this is
      // not an error.
      if (one.from_whole_store) continue;
      out.status = Status(Code::kStale, "copy " + one.name + ": " + one.directory +
                                            " was removed while it was copied");
    }
    const bool goes_on = out.status.ok() || !one.problem.ok() || ConcernsOneCheckpoint(out.status);
    if (!goes_on || (!out.status.ok() && wanted.size() == 1)) return out.status;
    report.checkpoints.push_back(std::move(out));
  }
  return report;
}

}  // namespace

Result<CopyReport> CopyCheckpoints(FileSystem& fs, const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options) {
  return CopyBetween(sources, std::vector<FileSystem*>(sources.size(), &fs), fs, destination,
                     options);
}

Result<CopyReport> CopyCheckpoints(const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(destination));
  std::vector<FileSystem*> from;
  for (const std::string& source : sources) {
    TENSORMOUNT_ASSIGN_OR_RETURN(from.emplace_back(), FileSystemFor(source));
  }
  return CopyBetween(sources, from, *fs, destination, options);
}

}  // namespace tensormount
