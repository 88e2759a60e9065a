// SPDX-License-Identifier: Apache-2.0
// Opens what a copy reads, and proves its bytes.
#include "index/store/copy_source.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "base/coding.h"
#include "base/errors.h"
#include "index/read/proven_ranges.h"
#include "index/read/rebuild.h"
#include "index/store/store.h"

namespace tensormount::copies {
namespace {

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

}  // namespace

bool OpenedSource::Deleted() const {
  const Result<FileInfo> now = pinned.file->Stat();
  return now.status().code() == Code::kStale ||
         (now.ok() && fs->Can(Ability::kStamps) && now.value().links == 0);
}

FileProof::FileProof(const OpenedSource& source, const CommitRecord::Entry& entry)
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

Status FileProof::Add(const std::byte* data, std::size_t size) {
  if (whole_) whole_->Update(data, size);
  if (!check_ || check_->Add(data, size)) return Status();
  const ScanRange& range = (*ranges_)[check_->next()];
  return Differs(RangeName(source_.inventory, range) + ", from byte " +
                 std::to_string(range.offset) + " on: ");
}

Status FileProof::Finish() const {
  if (whole_ && whole_->Value() != entry_.hash) return Differs("");
  if (check_ && !check_->all_good()) {
    return DataLoss(entry_.name, "the file ends before the last range of its manifest");
  }
  return Status();
}

Status FileProof::Differs(const std::string& what) const {
  return DataLoss(entry_.name, what + "checksum mismatch").With({.file = entry_.name});
}

Hash128 AlikeKey(const CommitRecord::Entry& entry) {
  ByteWriter out;
  out.U64(entry.length);
  out.Hash(entry.hash);
  out.Raw(entry.name.data(), entry.name.size());
  return Xxh3(out.bytes());
}

Result<OpenedSource> OpenSource(const CopyRequest& wanted) {
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
Result<std::unique_ptr<File>> OpenFile(const OpenedSource& source, const CommitRecord::Entry& entry,
                                       FileInfo* info) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                               OpenListedFile(*source.fs, *source.pinned.directory, entry.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(*info, file->Stat());
  if (info->size != entry.length) {
    return DataLoss(entry.name, "the file has " + std::to_string(info->size) + " bytes, " +
                                    std::to_string(entry.length) + " expected")
        .With({.file = entry.name});
  }
  return file;
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
    // Objects have no inodes.
    const bool same_folder = target.ok() && info.inode != 0 &&
                             target.value().device == info.device &&
                             target.value().inode == info.inode;
    if (&fs == &to &&
        (same_folder || store.value().path() == WithoutTrailingSlashes(destination))) {
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

}  // namespace tensormount::copies
