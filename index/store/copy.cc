// SPDX-License-Identifier: Apache-2.0
// Copies of checkpoints to another store (docs/format.md, "Copies").
//
// A copy is assembled in a directory of its own below the destination's .staging/. The name of the
// directory contains the checkpoint's uuid, so that a later copy of the same checkpoint continues
// there. A file gets its final name after it is complete and synced. Existing files are compared
// with their hashes before they are used. One rename publishes the checkpoint.
#include "index/store/copy.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/file_system_for.h"
#include "index/read/checkpoint.h"
#include "index/read/proven_ranges.h"
#include "index/read/rebuild.h"
#include "index/records/store_paths.h"
#include "index/store/bucket_copy.h"
#include "index/store/copy_source.h"
#include "index/store/copy_target.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

using copies::AlikeKey;
using copies::CopyRequest;
using copies::CopyTarget;
using copies::FileProof;
using copies::FindSources;
using copies::Keys;
using copies::OpenedSource;
using copies::OpenFile;
using copies::OpenSource;

// Number of bytes after which writeback is started, so that the final sync has less to wait for.
constexpr std::uint64_t kWritebackBytes = std::uint64_t{8} << 20;
// In a copy's work directory, the subdirectory that becomes the checkpoint. The part files beside
// it are incomplete.
constexpr std::string_view kWholeFolder = "checkpoint";
constexpr std::string_view kPartPrefix = "part-";

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

class DirectoryTarget : public CopyTarget {
 public:
  DirectoryTarget(FileSystem& fs, const Store& destination, const CopyOptions& options)
      : CopyTarget(destination, options), fs_(fs) {}
  // Removes work directories of finished copies. After a failure gc removes them.
  ~DirectoryTarget() override;

  Status Copy(const CopyRequest& wanted, CopiedCheckpoint& out) override;

 private:
  Status CopySteps(const CopyRequest& wanted, const std::string& outer, OpenedSource& source,
                   CopiedCheckpoint& out);
  CheckpointListing EntryAt(const std::string& name) const override;
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

  std::string StagingFolder() const { return JoinPath(store_.path(), store_paths::kStagingFolder); }
  void RememberProven(const std::string& path) {
    if (const Result<FileInfo> info = fs_.LinkStat(path); info.ok()) {
      proven_[{info.value().device, info.value().inode}] = FileStamp::OfStoreFile(info.value());
    }
  }

  FileSystem& fs_;
  // Files of the destination that this copy has verified, by device and inode, with their state at
  // that time.
  std::map<std::pair<std::uint64_t, std::uint64_t>, FileStamp> proven_;
  std::vector<std::string> finished_;  // Work directories of finished copies.
  std::vector<std::byte> buffer_;
};
// The entry with this name in the destination. Symbolic links are not followed, because a link to a
// checkpoint elsewhere is not a copy.
CheckpointListing DirectoryTarget::EntryAt(const std::string& name) const {
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

// Takes the lock of the work directory, which keeps gc and other copies of the same checkpoint
// away. Filesystems without locks do not have this protection, but there, too, files and
// checkpoints are published by renames that never replace anything.
Result<std::unique_ptr<File>> DirectoryTarget::Lock(const std::string& outer) {
  return store_moves::LockWorkFolder(fs_, outer, "another copy of this checkpoint is running");
}

// Removes files of an earlier, interrupted copy that do not belong to this checkpoint. Also removes
// COMMIT, which this copy writes last.
Status DirectoryTarget::Sweep(const std::string& inner, const std::string& below,
                              const CommitRecord& record, const std::set<std::string>& folders) {
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
Result<bool> DirectoryTarget::IsWhole(const OpenedSource& source, const CommitRecord::Entry& entry,
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
Result<bool> DirectoryTarget::TryLink(const OpenedSource& source, const CommitRecord::Entry& entry,
                                      const std::string& inner, bool sealed,
                                      CopiedCheckpoint& out) {
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
Status DirectoryTarget::CopyFile(const OpenedSource& source, const CommitRecord::Entry& entry,
                                 File& from, bool sealed, const std::string& outer,
                                 const std::string& to) {
  const std::string part = JoinPath(outer, std::string(kPartPrefix) + Uuid::Random().Short());
  const auto write = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs_.CreateExclusive(part));
    std::uint64_t started = 0;
    const auto put = [&](std::uint64_t at, const std::byte* data, std::size_t n) -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(at, data, n));
      at += n;
      if (at - started >= kWritebackBytes) {
        file->StartWriteback(started, at - started);
        started = at;
      }
      return {};
    };
    TENSORMOUNT_RETURN_IF_ERROR(ReadProven(source, entry, from, put));
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

Status DirectoryTarget::Place(const OpenedSource& source, const CommitRecord::Entry& entry,
                              const std::string& outer, const std::string& inner,
                              CopiedCheckpoint& out) {
  FileInfo info;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> from, OpenFile(source, entry, &info));
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

Status DirectoryTarget::MakeDurable(const std::string& checkpoint, std::uint64_t generation,
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

Status DirectoryTarget::Publish(const CopyRequest& wanted, const std::string& outer,
                                const std::string& inner, CopiedCheckpoint& out) {
  const std::string to = store_.CheckpointPath(wanted.name);
  const Status moved = fs_.RenameNoReplace(inner, to);
  if (!moved.ok()) {
    // The rename may have succeeded nevertheless: NFS may report a successful rename as failed, and
    // on a filesystem without locks another process may have published the same copy. So the
    // location of the checkpoint decides.
    const bool here = fs_.LinkStat(inner).status().code() != Code::kNotFound;
    const CheckpointListing now = EntryAt(wanted.name);
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

Status DirectoryTarget::CopySteps(const CopyRequest& wanted, const std::string& outer,
                                  OpenedSource& source, CopiedCheckpoint& out) {
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

Status DirectoryTarget::Copy(const CopyRequest& wanted, CopiedCheckpoint& out) {
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
  TENSORMOUNT_ASSIGN_OR_RETURN(OpenedSource source, OpenSource(wanted));
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
  RememberCopied(wanted.name, source.record);
  finished_.push_back(outer);
  return Status();
}

// Removes the work directories in finished_, then syncs the filesystem once. Without this sync, on
// a filesystem without a journal, a new file could get the inode of a deleted directory and be lost
// when the filesystem is repaired.
DirectoryTarget::~DirectoryTarget() {
  if (finished_.empty()) return;
  for (const std::string& outer : finished_) {
    // If a new copy has begun in this directory, it holds the lock, and the directory stays.
    if (!fs_.LinkStat(outer).ok()) continue;
    const Result<std::unique_ptr<File>> lock = Lock(outer);
    if (lock.ok()) (void)fs_.RemoveTree(outer);
  }
  (void)fs_.SyncFileSystem(StagingFolder());
}
}  // namespace

CopyJob::CopyJob(FileSystem& fs, std::string destination, const CopyOptions& options)
    : fs_(fs), destination_(std::move(destination)), options_(options) {}
CopyJob::~CopyJob() = default;

Status CopyJob::Open() {
  if (target_ != nullptr) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::OpenOrCreate(fs_, destination_));
  TENSORMOUNT_RETURN_IF_ERROR(store.PrepareToWrite());
  store_ = std::make_unique<Store>(std::move(store));
  if (ObjectWriter* const writer = fs_.object_writer()) {
    target_ = std::make_unique<bucket::BucketTarget>(*writer, *store_, options_);
  } else {
    target_ = std::make_unique<DirectoryTarget>(fs_, *store_, options_);
  }
  return {};
}

Result<CopyReport> CopyJob::Run(const std::vector<std::string>& sources,
                                const std::vector<FileSystem*>& from) {
  if (fs_.object_writer() == nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.Need(Ability::kWrite, destination_));
  }
  if (sources.empty()) {
    return InvalidArgument("copy to " + destination_ + ": no checkpoint to copy was given");
  }
  Keys keys;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CopyRequest> wanted,
                               FindSources(sources, from, fs_, destination_, keys));
  TENSORMOUNT_RETURN_IF_ERROR(Open());
  std::uint64_t total = 0;
  for (const CopyRequest& one : wanted) total += one.bytes;
  TENSORMOUNT_RETURN_IF_ERROR(target_->Prepare(std::move(keys), total));
  CopyReport report{.destination = store_->path(), .checkpoints = {}};
  for (const CopyRequest& one : wanted) {
    CopiedCheckpoint out{.name = one.name,
                         .uuid = one.uuid.ToString(),
                         .generation = one.generation,
                         .bytes = one.bytes,
                         .files = one.files};
    out.status = target_->Copy(one, out).WithContext("copy " + one.name);
    out.status = retention::WithTrashHint(fs_, store_->path(), out.status);
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

Result<CopyReport> CopyCheckpoints(FileSystem& fs, const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options) {
  return CopyJob(fs, destination, options)
      .Run(sources, std::vector<FileSystem*>(sources.size(), &fs));
}

Result<CopyReport> CopyCheckpoints(const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(destination));
  std::vector<FileSystem*> from;
  for (const std::string& source : sources) {
    TENSORMOUNT_ASSIGN_OR_RETURN(from.emplace_back(), FileSystemFor(source));
  }
  return CopyJob(*fs, destination, options).Run(sources, from);
}

}  // namespace tensormount
