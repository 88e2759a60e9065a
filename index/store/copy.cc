// SPDX-License-Identifier: Apache-2.0
// Copies of checkpoints to another store (docs/format.md, "Copies").
//
// A copy is put together in a folder of its own below the destination's .staging/, whose name says
// which checkpoint it is: whoever copies that one again finds it and goes on. A file gets its name
// there when it is whole and synced; whatever stands there is compared with its hashes before it is
// relied on. The folder becomes the checkpoint by one rename, as in every publish.
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

// Read, hashed and written at a time.
constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
// The device begins with what is written after so much; the sync at the end waits for less then.
constexpr std::uint64_t kWritebackBytes = std::uint64_t{8} << 20;
// Below the folder of a copy: what becomes the checkpoint, and files that are not whole yet.
constexpr std::string_view kWholeFolder = "checkpoint";
constexpr std::string_view kPartPrefix = "part-";

// Says how far the copy is, and holds it back to its rate. For one thread.
class Pace {
 public:
  Pace(const CopyOptions& options, std::uint64_t total) : options_(options), total_(total) {}

  // So many bytes were read.
  Status Read(std::uint64_t bytes) {
    TENSORMOUNT_RETURN_IF_ERROR(Tell());
    if (options_.limit_rate == 0) return Status();
    using Clock = std::chrono::steady_clock;
    // What was not used of a moment in which nothing could be read is not made up for afterwards.
    next_ = std::max(next_, Clock::now() - std::chrono::milliseconds(100));
    next_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
        static_cast<double>(bytes) / static_cast<double>(options_.limit_rate)));
    const Deadline until = Deadline::At(next_);
    while (!until.Passed()) {
      const std::chrono::nanoseconds most = std::chrono::milliseconds(100);
      std::this_thread::sleep_for(std::min(most, until.Left()));
      TENSORMOUNT_RETURN_IF_ERROR(Tell());
    }
    return Status();
  }
  // So many bytes of a checkpoint are where they should be.
  Status Done(std::uint64_t bytes) {
    done_ += bytes;
    return Tell();
  }
  // How much is read at a time: where the rate is low, less than a block.
  std::size_t Block() const {
    if (options_.limit_rate == 0) return kBlockBytes;
    return static_cast<std::size_t>(
        std::clamp<std::uint64_t>(options_.limit_rate / 4, kLeafBytes, kBlockBytes));
  }

 private:
  Status Tell() const { return options_.watch ? options_.watch(done_, total_) : Status(); }

  const CopyOptions& options_;
  const std::uint64_t total_;
  std::uint64_t done_ = 0;
  std::chrono::steady_clock::time_point next_{};
};

// A checkpoint that is to be copied, as it was when the copy began.
struct WantedCopy {
  std::string directory;
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  std::uint64_t bytes = 0;
  std::uint64_t files = 0;
  Status problem;       // Why it cannot even be looked at.
  bool of_all = false;  // Nobody named it: the whole store is copied.
};

// The same where it is held open, with all that its bytes are compared with.
struct OpenedSource {
  PinnedCommit pinned;
  std::string commit;  // The file, as it is.
  CommitRecord record;
  Inventory inventory;
  std::map<std::string, std::vector<ScanRange>, std::less<>> ranges;  // By file; by rising offset.

  // Whether it was deleted under us: no code of a failed open or read says so.
  bool Deleted() const {
    const Result<FileInfo> now = pinned.file->Stat();
    return now.status().code() == Code::kStale || (now.ok() && now.value().links == 0);
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

// Compares a file, whose bytes come in order, with what COMMIT vouches for: each stored range of a
// data file with its chunk hash (these make the file root, which RebuildInventory has compared with
// COMMIT), any other file as a whole.
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
      return DataLoss(entry_.name, "it ends before what its manifest says");
    }
    return Status();
  }

 private:
  Status Differs(const std::string& what) const {
    return DataLoss(entry_.name, what + "checksum differs").With({.file = entry_.name});
  }

  const OpenedSource& source_;
  const CommitRecord::Entry& entry_;
  const std::vector<ScanRange>* ranges_ = nullptr;
  std::vector<CheckedRange> hashed_;  // Of ranges_.
  std::optional<RangeCheck> check_;
  std::optional<Xxh3Stream> whole_;
};

// What two checkpoints list alike where they may share a file.
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

// Failures of one checkpoint, after which others can be copied.
bool IsOfOne(const Status& status) {
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

  // What of `keys` the destination has, and under which names it has which checkpoints.
  Status LookAtDestination(Keys keys) {
    keys_ = std::move(keys);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, store_.Names());
    for (const std::string& name : names) {
      CommitRecord record;
      const CheckpointListing listing = store_.Look(name, &record);
      if (!listing.problem.ok()) continue;
      names_[listing.uuid] = name;
      Remember(name, record);
    }
    return Status();
  }

  Status Copy(const WantedCopy& wanted, CopiedCheckpoint& out);
  // Takes away what copies that are done needed. Failing is no harm: gc does it.
  void CleanUp();

 private:
  Status CopySteps(const WantedCopy& wanted, const std::string& outer, OpenedSource& source,
                   CopiedCheckpoint& out);
  Result<OpenedSource> Open(const WantedCopy& wanted);
  CheckpointListing LookHere(const std::string& name) const;
  Status CheckName(const WantedCopy& wanted, CopiedCheckpoint& out);
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
  Status Publish(const WantedCopy& wanted, const std::string& outer, const std::string& inner,
                 CopiedCheckpoint& out);
  Status MakeDurable(const std::string& checkpoint, const std::string& from);

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
      proven_[{info.value().device, info.value().inode}] = FileStamp::OfOurs(info.value());
    }
  }

  FileSystem& fs_;
  const Store& store_;
  Pace pace_;
  Keys keys_;
  std::unordered_map<Hash128, std::string, KeyHasher> holders_;  // A checkpoint that has the file.
  std::map<Uuid, std::string> names_;                            // Of checkpoints there.
  // Files in the destination whose bytes were compared by this copy, and their states then.
  std::map<std::pair<std::uint64_t, std::uint64_t>, FileStamp> proven_;
  std::vector<std::string> finished_;  // Folders of copies that are done.
  std::vector<std::byte> buffer_;
};

Result<OpenedSource> Copier::Open(const WantedCopy& wanted) {
  OpenedSource source;
  TENSORMOUNT_ASSIGN_OR_RETURN(source.pinned, PinCommit(fs_, wanted.directory));
  TENSORMOUNT_ASSIGN_OR_RETURN(source.commit, ReadCommitBytes(*source.pinned.file, kCommitName));
  TENSORMOUNT_ASSIGN_OR_RETURN(DecodedCommit decoded, DecodeCommit(source.commit, kCommitName));
  // A copy of it would be as damaged, and one with both copies mended another file.
  if (decoded.one_copy_damaged) return DataLoss(decoded.damage).With({.file = "COMMIT"});
  source.record = std::move(decoded.record);
  if (source.record.uuid != wanted.uuid) {
    return Status(Code::kStale, wanted.directory + ": it was replaced by another checkpoint");
  }
  Result<Inventory> inventory = RebuildInventory(fs_, *source.pinned.directory, source.record);
  if (!inventory.ok()) {
    if (source.Deleted()) {
      return Status(Code::kStale, wanted.directory + ": it was deleted while it was copied");
    }
    return inventory.status();
  }
  source.inventory = std::move(inventory).value();
  if (!source.inventory.info.self_contained) {
    return Status(
        Code::kUnsupported,
        wanted.directory + ": an adopted checkpoint: its data are files of others below " +
            source.inventory.info.root + "; copy these, and adopt the copy, or import it");
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

// What the destination itself holds: a link to a checkpoint elsewhere is no copy of it.
CheckpointListing Copier::LookHere(const std::string& name) const {
  const std::string path = store_.CheckpointPath(name);
  const Result<FileInfo> info = fs_.LinkStat(path);
  if (!info.ok() || info.value().kind == FileKind::kDirectory) return store_.Look(name);
  CheckpointListing listing;
  listing.name = name;
  listing.state = CheckpointListing::State::kNoCheckpoint;
  listing.problem = Status(Code::kDataLoss, info.value().kind == FileKind::kSymlink
                                                ? "a symbolic link, and no checkpoint of this store"
                                                : "no folder");
  return listing;
}

// Ok: the name is free, or `out.was_there`.
Status Copier::CheckName(const WantedCopy& wanted, CopiedCheckpoint& out) {
  const std::string path = store_.CheckpointPath(wanted.name);
  const CheckpointListing now = LookHere(wanted.name);
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
  const CheckpointListing other = LookHere(named->second);
  if (!other.problem.ok() || other.uuid != wanted.uuid) return Status();
  return Status(Code::kAlreadyExists,
                store_.CheckpointPath(named->second) + ": is this checkpoint, under another name");
}

// Gc and other copies of the same checkpoint keep away from it while this is held. Where the
// filesystem has no locks nobody does; then files and the checkpoint are still named by renames
// that replace nothing.
Result<std::unique_ptr<File>> Copier::Lock(const std::string& outer) {
  return store_moves::LockWorkFolder(fs_, outer, "another copy of this checkpoint is under way");
}

// What an earlier copy left that belongs to no copy: COMMIT, too, which is written last.
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

// Whether the file that stands in `folder` is that of the source, byte for byte. Only what ends the
// copy is an error.
Result<bool> Copier::IsWhole(const OpenedSource& source, const CommitRecord::Entry& entry,
                             const std::string& folder, bool sealed) {
  const Result<std::unique_ptr<File>> file = OpenListedFile(fs_, folder, entry.name);
  if (!file.ok()) return false;
  const Result<FileInfo> info = file.value()->Stat();
  if (!info.ok() || info.value().size != entry.length) return false;
  if (sealed && !info.value().sealed()) return false;
  const FileStamp stamp = FileStamp::OfOurs(info.value());
  const std::pair<std::uint64_t, std::uint64_t> id{info.value().device, info.value().inode};
  if (const auto known = proven_.find(id);
      known != proven_.end() && stamp.SameBytes(known->second)) {
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

// False: it is to be copied.
Result<bool> Copier::TryLink(const OpenedSource& source, const CommitRecord::Entry& entry,
                             const std::string& inner, bool sealed, CopiedCheckpoint& out) {
  const auto holder = holders_.find(AlikeKey(entry));
  if (holder == holders_.end()) return false;
  const std::string from = JoinPath(store_.CheckpointPath(holder->second), entry.name);
  const std::string to = JoinPath(inner, entry.name);
  const Status linked = fs_.Link(from, to);
  // That checkpoint was removed, or the file is lost.
  if (linked.code() == Code::kNotFound || linked.code() == Code::kStale) return false;
  if (!linked.ok()) {
    if (!store_moves::LinkIsRefused(linked)) return linked;
    if (out.links_refused++ == 0) out.refusal = linked.message();
    return false;
  }
  // What now has the name is looked at, whoever had the other one.
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool whole, IsWhole(source, entry, inner, sealed));
  if (whole) return true;
  out.warnings.push_back(from + ": damaged or not sealed, so it was copied and not linked");
  holders_.erase(holder);
  TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveFile(to));
  return false;
}

// Under a name of its own until it is whole, sealed and synced.
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
      TENSORMOUNT_RETURN_IF_ERROR(from.ReadExactAt(at, buffer_.data(), n));
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
    (void)fs_.RemoveFile(part);  // The next copy does it otherwise.
  }
  return written;
}

Status Copier::Place(const OpenedSource& source, const CommitRecord::Entry& entry,
                     const std::string& outer, const std::string& inner, CopiedCheckpoint& out) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> from,
                               OpenListedFile(fs_, *source.pinned.directory, entry.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, from->Stat());
  if (info.size != entry.length) {
    return DataLoss(entry.name, std::to_string(info.size) + " bytes, " +
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

Status Copier::MakeDurable(const std::string& checkpoint, const std::string& from) {
  Status synced = fs_.SyncMovedFolder(checkpoint, store_.path(), from);
  // Where there are no locks another copy of it may have taken that folder away, which is durable
  // with the folder that it was in.
  if (synced.code() == Code::kNotFound && fs_.LinkStat(from).status().code() == Code::kNotFound) {
    synced = fs_.SyncMovedFolder(checkpoint, store_.path(), StagingFolder());
  }
  // The claim of its generation, too: it outlives the checkpoint.
  if (synced.ok()) {
    synced = fs_.SyncDirectory(JoinPath(store_.path(), store_paths::kGenerationsFolder));
  }
  if (synced.ok()) return Status();
  return Status(Code::kUnknown, checkpoint + ": it is there, but a power cut may undo it or not: " +
                                    synced.message());
}

Status Copier::Publish(const WantedCopy& wanted, const std::string& outer, const std::string& inner,
                       CopiedCheckpoint& out) {
  const std::string to = store_.CheckpointPath(wanted.name);
  const Status moved = fs_.RenameNoReplace(inner, to);
  if (!moved.ok()) {
    // The truth is where the checkpoint is: over NFS a rename that happened may be reported as
    // failed, and where there are no locks somebody else may have copied it.
    const bool here = fs_.LinkStat(inner).status().code() != Code::kNotFound;
    const CheckpointListing now = LookHere(wanted.name);
    if (!now.problem.ok() || now.uuid != wanted.uuid) {
      if (!here) return Status(Code::kUnknown, to + ": renamed or not: " + moved.message());
      if (moved.code() != Code::kAlreadyExists) return moved;
      return Status(Code::kAlreadyExists, to + ": the name was taken meanwhile");
    }
    out.was_there = here;
  }
  return MakeDurable(to, outer);
}

Status Copier::CopySteps(const WantedCopy& wanted, const std::string& outer, OpenedSource& source,
                         CopiedCheckpoint& out) {
  const std::string inner = JoinPath(outer, kWholeFolder);
  const CommitRecord& record = source.record;
  // Inner ones behind those that they are in.
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
  // As in a publish: names before COMMIT vouches for them, and COMMIT's own before the rename.
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

Status Copier::Copy(const WantedCopy& wanted, CopiedCheckpoint& out) {
  TENSORMOUNT_RETURN_IF_ERROR(wanted.problem);
  if (wanted.generation >= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return InvalidArgument("its generation leaves none for the saves after it");
  }
  const std::string outer =
      JoinPath(StagingFolder(), std::string(store_paths::kCopyPrefix) + wanted.uuid.ToString());
  // What the one that copied it may have failed to make durable.
  const auto already = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(store_.ClaimUpTo(wanted.generation));
    TENSORMOUNT_RETURN_IF_ERROR(MakeDurable(store_.CheckpointPath(wanted.name), StagingFolder()));
    return pace_.Done(wanted.bytes);
  };
  TENSORMOUNT_RETURN_IF_ERROR(CheckName(wanted, out));
  if (out.was_there) {
    // What it left, unless it is still at work there.
    if (fs_.LinkStat(outer).ok() && Lock(outer).ok()) finished_.push_back(outer);
    return already();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(OpenedSource source, Open(wanted));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> lock, Lock(outer));
  // Another copy may have been done while we opened it.
  TENSORMOUNT_RETURN_IF_ERROR(CheckName(wanted, out));
  if (out.was_there) {
    finished_.push_back(outer);
    return already();
  }
  Status copied = CopySteps(wanted, outer, source, out);
  if (!copied.ok()) {
    if ((copied.code() == Code::kDataLoss || copied.code() == Code::kNotFound) &&
        source.Deleted()) {
      return Status(Code::kStale, wanted.directory + ": it was deleted while it was copied");
    }
    if (copied.code() == Code::kNotFound &&
        fs_.LinkStat(outer).status().code() == Code::kNotFound) {
      return Status(Code::kStale, outer + ": it was removed meanwhile: " + copied.message());
    }
    return copied;
  }
  names_[wanted.uuid] = wanted.name;
  Remember(wanted.name, source.record);
  finished_.push_back(outer);
  return Status();
}

// All at once, and what was deleted is made durable at once: without a journal what is copied next
// could get the inode of such a folder, and lose it to a repair after a power cut.
void Copier::CleanUp() {
  if (finished_.empty()) return;
  for (const std::string& outer : finished_) {
    // Another one may have begun there since: what it is about to publish is not ours to delete.
    if (!fs_.LinkStat(outer).ok()) continue;
    const Result<std::unique_ptr<File>> lock = Lock(outer);
    if (lock.ok()) (void)fs_.RemoveTree(outer);
  }
  (void)fs_.SyncFileSystem(StagingFolder());
}

// What the caller named, in the order in which it is copied. Data files of all of them in `keys`.
Result<std::vector<WantedCopy>> FindSources(FileSystem& fs, const std::vector<std::string>& sources,
                                            const std::string& destination, Keys& keys) {
  std::vector<WantedCopy> wanted;
  std::set<std::string> seen;
  const Result<FileInfo> target = fs.Stat(destination);
  for (const std::string& text : sources) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckIsPath(text));
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
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo from, fs.Stat(store.value().path()));
    if (target.ok() && target.value().device == from.device && target.value().inode == from.inode) {
      return InvalidArgument(destination + ": is the store that " + text + " is to be copied from");
    }
    for (const std::string& name : names) {
      WantedCopy one{.directory = store.value().CheckpointPath(name), .name = name, .of_all = all};
      if (!seen.insert(one.directory).second) continue;
      CommitRecord record;
      const CheckpointListing listing = store.value().Look(name, &record);
      // Removed since it was listed, or a folder that never was one.
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
  std::stable_sort(wanted.begin(), wanted.end(), [](const WantedCopy& a, const WantedCopy& b) {
    return std::tie(a.generation, a.uuid) < std::tie(b.generation, b.uuid);
  });
  return wanted;
}

}  // namespace

Result<CopyReport> CopyCheckpoints(FileSystem& fs, const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsPath(destination));
  if (sources.empty()) return InvalidArgument("copy to " + destination + ": name what to copy");
  Keys keys;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<WantedCopy> wanted,
                               FindSources(fs, sources, destination, keys));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::OpenOrCreate(fs, destination));
  TENSORMOUNT_RETURN_IF_ERROR(store.PrepareToWrite());
  std::uint64_t total = 0;
  for (const WantedCopy& one : wanted) total += one.bytes;
  Copier copier(fs, store, options, total);
  TENSORMOUNT_RETURN_IF_ERROR(copier.LookAtDestination(std::move(keys)));
  const AtExit clean_up([&copier] { copier.CleanUp(); });
  CopyReport report{.destination = store.path(), .checkpoints = {}};
  for (const WantedCopy& one : wanted) {
    CopiedCheckpoint out{.name = one.name,
                         .uuid = one.uuid.ToString(),
                         .generation = one.generation,
                         .bytes = one.bytes,
                         .files = one.files};
    out.status = copier.Copy(one, out).WithContext("copy " + one.name);
    out.status = retention::WithTrashHint(fs, store.path(), out.status);
    const bool removed =
        (out.status.code() == Code::kNotFound || out.status.code() == Code::kStale) &&
        fs.LinkStat(one.directory).status().code() == Code::kNotFound;
    if (removed) {
      // Somebody prunes the source, and all that it has now is copied.
      if (one.of_all) continue;
      out.status = Status(Code::kStale, "copy " + one.name + ": " + one.directory +
                                            " was removed while it was copied");
    }
    const bool goes_on = out.status.ok() || !one.problem.ok() || IsOfOne(out.status);
    if (!goes_on || (!out.status.ok() && wanted.size() == 1)) return out.status;
    report.checkpoints.push_back(std::move(out));
  }
  return report;
}

Result<CopyReport> CopyCheckpoints(const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options) {
  return CopyCheckpoints(HostFileSystem(), sources, destination, options);
}

}  // namespace tensormount
