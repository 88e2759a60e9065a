// SPDX-License-Identifier: Apache-2.0
// OpenedCheckpoint: opens COMMIT and the index, and the files that index records name. Reads of
// tensors and objects are in checkpoint_read.cc.
//
// An open reads COMMIT and, of a large index, only the tail, because a mount opens every checkpoint
// that a user looks into. Damage that has a substitute (the other copy of COMMIT, an index that
// fsck rebuilt, the manifests) becomes a warning. Without a substitute the open fails.
#include "index/read/checkpoint.h"

#include "base/checked.h"
#include "index/read/derived_index.h"
#include "index/read/file_cache.h"
#include "index/read/foreign_file.h"
#include "index/read/foreign_inventory.h"
#include "index/read/pinned_commit.h"
#include "index/read/proven_ranges.h"
#include "index/read/rebuild.h"
#include "index/read/value_totals.h"
#include "index/records/memory_table.h"

namespace tensormount {

OpenedCheckpoint::OpenedCheckpoint() = default;
OpenedCheckpoint::~OpenedCheckpoint() = default;

Result<std::shared_ptr<OpenedCheckpoint>> OpenedCheckpoint::Open(FileSystem& fs,
                                                                 const std::string& directory,
                                                                 const Options& options) {
  std::shared_ptr<OpenedCheckpoint> opened(new OpenedCheckpoint);
  opened->fs_ = &fs;
  opened->directory_ = directory;
  // The lock is taken first: gc needs the exclusive lock, so it does not delete the checkpoint
  // after this (PinCommit: except without locks).
  TENSORMOUNT_ASSIGN_OR_RETURN(PinnedCommit commit_file, PinCommit(fs, directory, options.pinned));
  opened->pinned_ = std::move(commit_file.directory);
  opened->lock_ = std::move(commit_file.file);
  const std::string& root = *opened->pinned_;
  opened->proven_ = options.proven ? options.proven : std::make_shared<ProvenRanges>();
  opened->totals_ = std::make_unique<ValueTotals>();
  opened->files_ = std::make_unique<Files>(fs, options.max_open_files);
  TENSORMOUNT_ASSIGN_OR_RETURN(opened->commit_, ReadCommitFile(*opened->lock_, kCommitName));
  opened->has_commit_ = true;
  if (opened->commit_.one_copy_damaged) opened->warnings_.push_back(opened->commit_.damage);

  const CommitRecord& commit = opened->commit_.record;
  // The index calls this function when a later read meets a damaged record. The call may come on
  // any thread, and after this object is gone. The function therefore owns copies of the pin and
  // the commit; only the file system is a reference.
  std::function<Result<std::shared_ptr<const Table>>()> again;
  if (options.rebuild_index) {
    again = [&fs, pinned = opened->pinned_, directory,
             commit]() -> Result<std::shared_ptr<const Table>> {
      if (const auto derived = OpenDerivedIndex(fs, directory, commit); derived.ok()) {
        return std::shared_ptr<const Table>(derived.value(), &derived.value()->table());
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const Inventory inventory,
                                   RebuildInventory(fs, *pinned, commit));
      TENSORMOUNT_ASSIGN_OR_RETURN(auto records, CheckpointIndex::RecordsOf(inventory));
      return std::shared_ptr<const Table>(std::move(records));
    };
  }
  Result<std::shared_ptr<const CheckpointIndex>> index =
      CheckpointIndex::OpenSst(fs, root, commit, options.check_index_bytes, std::move(again));
  // An index of another version, an index that is not a regular file, and an index that cannot be
  // read are treated as missing. Manifests have a version of their own.
  const Status damage = index.status();
  // The index that fsck rebuilt is tried first. It costs one read of an index, while a rebuild
  // reads all manifests and keeps all records in memory.
  if (CheckpointIndex::IsCopyDamaged(damage) && options.rebuild_index) {
    index = OpenDerivedIndex(fs, directory, commit);
    if (index.ok()) {
      opened->warnings_.push_back(damage.message() + "; using the index that fsck rebuilt");
    } else {
      Result<Inventory> inventory = RebuildInventory(fs, root, commit);
      if (!inventory.ok()) {
        // A newer manifest version is not damage, so the message must not advise fsck.
        const bool newer = inventory.status().code() == Code::kUnsupported;
        return Status(
            newer ? Code::kUnsupported : Code::kDataLoss,
            damage.message() + "; rebuilding the index failed: " + inventory.status().message());
      }
      index = CheckpointIndex::FromInventory(inventory.value());
      opened->index_rebuilt_ = true;
      opened->warnings_.push_back(damage.message() + "; rebuilt the index from the manifests");
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(index.status());
  opened->index_ = std::move(index).value();
  TENSORMOUNT_ASSIGN_OR_RETURN(
      ForeignBase base,
      CheckMayReadForeign(fs, directory, opened->index_->info(), commit_file.info, options.roots));
  opened->foreign_base_ = std::make_unique<const ForeignBase>(std::move(base));
  return opened;
}

// Includes CheckpointIndex::recovered(), the damage that later reads of the index met.
std::vector<std::string> OpenedCheckpoint::warnings() const {
  std::vector<std::string> all = warnings_;
  if (std::string since = index_->recovered(); !since.empty()) all.push_back(std::move(since));
  return all;
}

// Like Open, except that the index is in memory, commit() is null, and the files are foreign.
Result<std::shared_ptr<OpenedCheckpoint>> OpenedCheckpoint::OpenForeign(FileSystem& fs,
                                                                        ForeignInventory inventory,
                                                                        const std::string& path,
                                                                        const Options& options) {
  std::shared_ptr<OpenedCheckpoint> opened(new OpenedCheckpoint);
  opened->fs_ = &fs;
  opened->directory_ = path;
  opened->pinned_ = std::make_shared<const std::string>(path);
  opened->proven_ = options.proven ? options.proven : std::make_shared<ProvenRanges>();
  opened->totals_ = std::make_unique<ValueTotals>();
  opened->files_ = std::make_unique<Files>(fs, options.max_open_files);
  opened->resolver_ = std::move(inventory.resolver);
  opened->warnings_ = std::move(inventory.warnings);
  opened->lost_ = std::move(inventory.lost);
  opened->beside_ = std::move(inventory.beside);
  const Inventory& found = inventory.inventory;
  for (const FileRecord& file : found.files) {
    if (file.placement != Placement::kForeign || found.info.self_contained) {
      return Status(Code::kInternal, path + ": " + file.name + " is not recorded as foreign");
    }
  }
  // A foreign checkpoint of one file. Its name is the file's name without the extension.
  opened->is_file_ =
      found.files.size() == 1 && JoinPath(found.info.root, found.files[0].name) == path;
  TENSORMOUNT_ASSIGN_OR_RETURN(opened->index_, CheckpointIndex::FromInventory(found));
  opened->foreign_base_ = std::make_unique<const ForeignBase>(
      ForeignBase{found.info.root, "", std::move(inventory.bounds)});
  return opened;
}

std::string OpenedCheckpoint::name() const {
  std::string_view name = directory_;
  while (name.size() > 1 && name.ends_with('/')) name.remove_suffix(1);
  if (const std::size_t slash = name.rfind('/'); slash != std::string_view::npos) {
    name.remove_prefix(slash + 1);
  }
  if (is_file_) {
    const std::size_t dot = name.rfind('.');
    if (dot != std::string::npos && dot > 0) name = name.substr(0, dot);
  }
  return std::string(name);
}

// The path is for messages and cache keys, and the access path of a foreign file.
std::string OpenedCheckpoint::FilePath(std::uint32_t file) const {
  const FileRecord& record = index_->files()[file];
  return JoinPath(record.placement == Placement::kForeign ? index_->info().root : directory_,
                  record.name);
}

bool OpenedCheckpoint::IsForeignFile(std::uint32_t file) const {
  return index_->files()[file].placement == Placement::kForeign;
}

std::string OpenedCheckpoint::AccessPath(std::uint32_t file) const {
  const FileRecord& record = index_->files()[file];
  return record.placement == Placement::kForeign ? FilePath(file) : JoinPath(*pinned_, record.name);
}

// A checkpoint's own files are opened below the pinned directory without following links; foreign
// files are opened below their root.
Result<std::unique_ptr<File>> OpenedCheckpoint::OpenFile(std::uint32_t file) const {
  if (source_) return source_->OpenFile(file);
  const FileRecord& record = index_->files()[file];
  if (record.placement != Placement::kForeign) return OpenListedFile(*fs_, *pinned_, record.name);
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> opened,
                               OpenForeignFile(*fs_, *foreign_base_, record, has_commit_));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, opened->Stat());
  TENSORMOUNT_RETURN_IF_ERROR(files_->changes.Check(file, record, info));
  return opened;
}

std::shared_ptr<const void> OpenedCheckpoint::ReadInOrder() const {
  if (source_) return source_->ReadInOrder();
  files_->ahead.Begin();
  return {nullptr, [files = files_.get()](const void*) { files->ahead.End(); }};
}

Result<std::shared_ptr<File>> OpenedCheckpoint::SharedFile(std::uint32_t file) const {
  if (source_) return source_->SharedFile(file);
  Result<std::shared_ptr<OpenDataFile>> open = files_->Open(*this, file);
  if (open.status().code() == Code::kNotFound) {
    return Status(Code::kDataLoss, FilePath(file) + ": the file is missing");
  }
  if (!open.ok()) return open.status();
  File* const shared = &open.value()->file();
  return std::shared_ptr<File>(std::move(open).value(), shared);
}

void OpenedCheckpoint::EvictFile(std::uint32_t file) const {
  if (source_) return source_->EvictFile(file);
  files_->open.Erase(FilePath(file));
}

// Compares size and mtime with the record, and the change time with its last accepted value
// (ForeignChanges). A program can restore an mtime but not a change time.
Status OpenedCheckpoint::CheckFileUnchanged(std::uint32_t file, File& open) const {
  if (source_) return source_->CheckFileUnchanged(file, open);
  const FileRecord& record = index_->files()[file];
  if (record.placement != Placement::kForeign) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, open.Stat());
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(record, info, has_commit_));
  return files_->changes.Check(file, record, info);
}

Result<std::shared_ptr<const ExtentTable>> OpenedCheckpoint::Extents(
    const TensorEntry& tensor) const {
  if (!tensor.pending) return index_->Extents(tensor);
  if (source_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry stored, WholeSourceOf(tensor));
    return source_->Extents(stored);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  return lookup->shared_table();
}

// Keeps the file of the previous chunk open, because neighbouring chunks are often in the same
// file.
Result<std::shared_ptr<const ExtentTable>> OpenedCheckpoint::ResolvePending(
    const TensorEntry& tensor, const ExtentTable& table) const {
  const TensorMeta& meta = tensor.meta;
  auto resolved = std::make_shared<ExtentTable>(table.rank(), table.wide());
  resolved->Reserve(table.size());
  std::shared_ptr<OpenDataFile> file;
  std::uint32_t number = kNoFile;
  for (std::size_t i = 0; i < table.size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, table.At(i));
    if (chunk.pending) {
      const auto failed = [&](const Status& why) {
        return why.WithContext("tensor " + meta.key() + " " + chunk.region.ToString());
      };
      if (!resolver_ || chunk.file >= index_->files().size()) {
        return failed(Status(Code::kDataLoss, "index: the location of its bytes is not recorded"));
      }
      if (!file || number != chunk.file) {
        Result<std::shared_ptr<OpenDataFile>> open = files_->Open(*this, chunk.file);
        if (open.status().code() == Code::kNotFound) {
          return failed(Status(Code::kDataLoss, open.status().message()));
        }
        if (!open.ok()) return failed(open.status());
        file = std::move(open).value();
        number = chunk.file;
      }
      // The resolver may change offset, length and strides, but not the region, which was checked
      // when the checkpoint was opened.
      const Region region = chunk.region;
      const Status found = resolver_(meta, file->file(), chunk);
      // The file is checked after the item was read and before the result is used. If the file
      // changed, an error of the resolver does not prove damage.
      if (Status still = CheckFileUnchanged(number, file->file()); !still.ok())
        return failed(still);
      if (!found.ok()) return failed(found);
      chunk.pending = false;
      chunk.region = region;
      chunk.file = number;
      // The resolver parses another program's archive, so its result is checked like metadata.
      if (!RangeWithin(chunk.offset, chunk.length, index_->files()[number].length)) {
        return failed(
            Status(Code::kDataLoss, index_->files()[number].name +
                                        ": the bytes of a tensor reach past the end of the file"));
      }
      if (!region.is_flat() &&
          ArePackedStrides(meta.dtype(), region.box().extent(), chunk.strides)) {
        chunk.strides = Dims();
      }
    }
    resolved->Append(chunk);
  }
  return std::shared_ptr<const ExtentTable>(std::move(resolved));
}

Result<std::optional<ExtentLookup::FileRun>> OpenedCheckpoint::FileRunOf(
    const TensorEntry& tensor) const {
  if (source_) return MappedFileRun(tensor);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  return lookup->file_run();
}

// In a mount the kernel reads such a file directly (passthrough), so the checks of an open are made
// here: the size, that it is a regular file, and that it did not change.
Result<std::uint32_t> OpenedCheckpoint::WholeFileOf(const TensorEntry& tensor) const {
  if (source_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry stored, WholeSourceOf(tensor));
    return source_->WholeFileOf(stored);
  }
  const Status none(Code::kNotFound, "tensor " + tensor.meta.key() +
                                         ": the tensor is not stored in a file of its own");
  if (tensor.meta.bytes() == 0 || tensor.chunks == 0) return none;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  if (!lookup->file_run() || lookup->file_run()->offset != 0) return none;
  const std::uint32_t file = lookup->file_run()->file;
  if (file >= index_->files().size() || index_->files()[file].length != tensor.meta.bytes()) {
    return none;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs_->LinkStat(AccessPath(file)));
  const bool foreign = index_->files()[file].placement == Placement::kForeign;
  if (foreign && info.kind == FileKind::kSymlink) return none;  // Only OpenFile checks links.
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(index_->files()[file], info, has_commit_));
  if (info.kind != FileKind::kFile || info.size != tensor.meta.bytes()) {
    return Status(Code::kDataLoss, "tensor " + tensor.meta.key() + ": " +
                                       index_->files()[file].name + ": " + "the file has " +
                                       std::to_string(info.size) + " bytes, " +
                                       std::to_string(tensor.meta.bytes()) + " expected");
  }
  return file;
}

}  // namespace tensormount
