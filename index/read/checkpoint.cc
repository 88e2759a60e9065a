// SPDX-License-Identifier: Apache-2.0
// OpenedCheckpoint: opening (COMMIT, then the index, then nothing until somebody reads), and
// finding the files of records. Reads are in region_reader.cc.
//
// Opening reads COMMIT and, of an index that is not small, only its tail: a mount opens every
// checkpoint of a store that somebody looks into, and must not read all of their metadata. Damage
// is made good where that is possible (the other copy of COMMIT, an index that fsck rebuilt, the
// manifests), with a warning that names it; it fails the open only where nothing is left.
#include "index/read/checkpoint.h"

#include "base/checked.h"
#include "index/read/derived_index.h"
#include "index/read/file_cache.h"
#include "index/read/foreign_file.h"
#include "index/read/foreign_inventory.h"
#include "index/read/pinned_commit.h"
#include "index/read/proven_ranges.h"
#include "index/read/rebuild.h"
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
  // First of all, since from here on nobody deletes the checkpoint: gc wants the lock alone.
  TENSORMOUNT_ASSIGN_OR_RETURN(PinnedCommit commit_file, PinCommit(fs, directory, options.pinned));
  opened->pinned_ = std::move(commit_file.directory);
  opened->lock_ = std::move(commit_file.file);
  const std::string& root = *opened->pinned_;
  opened->proven_ = options.proven ? options.proven : std::make_shared<ProvenRanges>();
  opened->files_ = std::make_unique<Files>(fs, options.max_open_files);
  TENSORMOUNT_ASSIGN_OR_RETURN(opened->commit_, ReadCommitFile(*opened->lock_, kCommitName));
  opened->has_commit_ = true;
  if (opened->commit_.one_copy_damaged) opened->warnings_.push_back(opened->commit_.damage);

  const CommitRecord& commit = opened->commit_.record;
  // Called by the index when a record cannot be read, on whatever thread meets the damage, perhaps
  // after this object is gone: so it owns copies of what it needs (the pin, the commit), and refers
  // to the file system alone.
  std::function<Result<std::shared_ptr<const Table>>()> again;
  if (options.rebuild_index) {
    // For damage that shows at a later read.
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
  // An index of another version is as good as none, manifests have versions of their own; and so is
  // what is no file, or cannot be read.
  const Status damage = index.status();
  // What fsck rebuilt first: it costs no more than a whole index; a rebuild reads all manifests and
  // keeps all records in memory.
  if (CheckpointIndex::IsLost(damage) && options.rebuild_index) {
    index = OpenDerivedIndex(fs, directory, commit);
    if (index.ok()) {
      opened->warnings_.push_back(damage.message() + "; using the one that fsck rebuilt");
    } else {
      Result<Inventory> inventory = RebuildInventory(fs, root, commit);
      if (!inventory.ok()) {
        // A manifest of a newer version is no damage: say so, instead of sending the user to fsck.
        const bool newer = inventory.status().code() == Code::kUnsupported;
        return Status(newer ? Code::kUnsupported : Code::kDataLoss,
                      damage.message() + "; rebuilding it failed: " + inventory.status().message());
      }
      index = CheckpointIndex::FromInventory(inventory.value());
      opened->index_rebuilt_ = true;
      opened->warnings_.push_back(damage.message() + "; rebuilt from the manifests");
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

// recovered(): damage that showed in a later read of the index.
std::vector<std::string> OpenedCheckpoint::warnings() const {
  std::vector<std::string> all = warnings_;
  if (std::string since = index_->recovered(); !since.empty()) all.push_back(std::move(since));
  return all;
}

// From here on a foreign checkpoint is like any other: the same index (in memory), the same plans
// and reads. What differs is told by placement of its files and by a null commit().
Result<std::shared_ptr<OpenedCheckpoint>> OpenedCheckpoint::OpenForeign(FileSystem& fs,
                                                                        ForeignInventory inventory,
                                                                        const std::string& path,
                                                                        const Options& options) {
  std::shared_ptr<OpenedCheckpoint> opened(new OpenedCheckpoint);
  opened->fs_ = &fs;
  opened->directory_ = path;
  opened->pinned_ = std::make_shared<const std::string>(path);
  opened->proven_ = options.proven ? options.proven : std::make_shared<ProvenRanges>();
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
  // Its name then is that of the file without its extension.
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

// For messages and for keys of caches; AccessPath is the one to open.
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

// Files of ours are opened below the pinned folder with no link followed, foreign ones below their
// root.
Result<std::unique_ptr<File>> OpenedCheckpoint::OpenFile(std::uint32_t file) const {
  const FileRecord& record = index_->files()[file];
  if (record.placement != Placement::kForeign) return OpenListedFile(*fs_, *pinned_, record.name);
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> opened,
                               OpenForeignFile(*fs_, *foreign_base_, record, has_commit_));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, opened->Stat());
  TENSORMOUNT_RETURN_IF_ERROR(files_->changes.Check(file, record, info));
  return opened;
}

std::shared_ptr<const void> OpenedCheckpoint::ReadInOrder() const {
  files_->ahead.Begin();
  return {nullptr, [files = files_.get()](const void*) { files->ahead.End(); }};
}

void OpenedCheckpoint::LetGo(std::uint32_t file) const { files_->open.Erase(FilePath(file)); }

// Size and mtime against the record, then the change time against what it was when this process saw
// the file first: an mtime can be put back, a change time cannot.
Status OpenedCheckpoint::CheckStill(std::uint32_t file, File& open) const {
  const FileRecord& record = index_->files()[file];
  if (record.placement != Placement::kForeign) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, open.Stat());
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(record, info, has_commit_));
  return files_->changes.Check(file, record, info);
}

Result<std::shared_ptr<const ExtentTable>> OpenedCheckpoint::Extents(
    const TensorEntry& tensor) const {
  if (!tensor.pending) return index_->Extents(tensor.ordinal);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  return lookup->shared_table();
}

// The file of the chunk before is kept open, since neighbours often stand in one file.
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
        return failed(Status(Code::kDataLoss, "index: nothing tells where its bytes are"));
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
      // The resolver may change offset, length and strides. Which cells the chunk holds was checked
      // when the checkpoint was opened, and stays as it was whatever the resolver does.
      const Region region = chunk.region;
      const Status found = resolver_(meta, file->file(), chunk);
      // Asked after the item was read, and before its answer is believed: of a file that changed,
      // damage proves nothing.
      if (Status still = CheckStill(number, file->file()); !still.ok()) return failed(still);
      if (!found.ok()) return failed(found);
      chunk.pending = false;
      chunk.region = region;
      chunk.file = number;
      // A resolver reads archives of others: its result is checked like a number of the metadata.
      if (!RangeWithin(chunk.offset, chunk.length, index_->files()[number].length)) {
        return failed(Status(
            Code::kDataLoss,
            index_->files()[number].name + ": its bytes would end past the end of the file"));
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

// The kernel reads such a file directly (passthrough), so everything that a read would check is
// checked here: size, that it is a file, that it did not change.
Result<std::uint32_t> OpenedCheckpoint::WholeFileOf(const TensorEntry& tensor) const {
  const Status none(Code::kNotFound,
                    "tensor " + tensor.meta.key() + ": no file holds it and nothing else");
  if (tensor.meta.bytes() == 0 || tensor.chunks == 0) return none;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentLookup> lookup, Lookup(tensor));
  if (!lookup->linear_file()) return none;
  const std::uint32_t file = *lookup->linear_file();
  if (file >= index_->files().size() || index_->files()[file].length != tensor.meta.bytes()) {
    return none;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs_->LinkStat(AccessPath(file)));
  const bool foreign = index_->files()[file].placement == Placement::kForeign;
  if (foreign && info.kind == FileKind::kSymlink) return none;  // To be opened with care only.
  TENSORMOUNT_RETURN_IF_ERROR(CheckUnchanged(index_->files()[file], info, has_commit_));
  if (info.kind != FileKind::kFile || info.size != tensor.meta.bytes()) {
    return Status(Code::kDataLoss, "tensor " + tensor.meta.key() + ": " +
                                       index_->files()[file].name + ": " +
                                       std::to_string(info.size) + " bytes, " +
                                       std::to_string(tensor.meta.bytes()) + " expected");
  }
  return file;
}

}  // namespace tensormount
