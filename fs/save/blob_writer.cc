// SPDX-License-Identifier: Apache-2.0
// BlobWriter: objects written through a mount, at any position and with overwrites, in a pack or a
// file of their own.
#include "fs/save/blob_writer.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "shard/chunk_accumulator.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kBlobBlockBytes = 256 * 1024;

}  // namespace

BlobWriter::BlobWriter(std::shared_ptr<StagedParts> shared, std::string key, const Dims& index)
    : shared_(std::move(shared)), key_(std::move(key)), index_(index) {}

std::string BlobWriter::Name() const {
  return "object " + key_ + (index_.rank() == 0 ? "" : index_.ToString());
}

Status BlobWriter::Check() const {
  if (shared_->files.closed())
    return Status(Code::kStale, Name() + ": its staging directory was published or removed");
  return failure_;
}

std::uint64_t BlobWriter::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

Result<std::size_t> BlobWriter::Read(std::uint64_t offset, void* out, std::size_t size) {
  const std::lock_guard lock(mutex_);
  if (offset >= size_) return std::size_t{0};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, size_ - offset));
  TENSORMOUNT_RETURN_IF_ERROR(area_.file->Read(area_.offset + offset, out, size));
  return size;
}

// Writes zeros in blocks, so that a hole of gigabytes needs little memory.
Status BlobWriter::Zero(std::uint64_t begin, std::uint64_t end) {
  if (begin >= end) return {};
  const std::vector<std::byte> zeros(std::min<std::uint64_t>(kBlobBlockBytes, end - begin));
  for (std::uint64_t at = begin; at < end;) {
    const std::size_t n = std::min<std::uint64_t>(zeros.size(), end - at);
    TENSORMOUNT_RETURN_IF_ERROR(area_.file->Write(area_.offset + at, zeros.data(), n));
    at += n;
  }
  return {};
}

// There are three cases: the area may be written from `begin` on and reaches to `end`; it can be
// extended, because no other area follows it in the pack; or everything moves to a new area. A move
// for lack of room doubles the room, so that an object that grows by appending is copied O(log n)
// times instead of n times.
Status BlobWriter::MakeWritable(std::uint64_t begin, std::uint64_t end) {
  const bool good = area_.file != nullptr && !area_.file->condemned() && begin >= recorded_;
  if (good && (end <= area_.size || shared_->files.Extend(area_, end - area_.size))) return {};
  const std::uint64_t room = good ? std::max(end, 2 * area_.size) : end;
  DataFiles::Area area;
  // A file of its own has unlimited room, so an object there never moves for lack of room.
  if (room > StagedParts::kOwnFileBytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(area.file, shared_->files.Create('o', Placement::kPack));
    area.size = std::numeric_limits<std::uint64_t>::max() / 2;
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(area, shared_->files.Allocate(room));
  }
  std::vector<std::byte> buffer(std::min<std::uint64_t>(kBlobBlockBytes, size_));
  for (std::uint64_t at = 0; at < size_;) {
    const std::size_t n = std::min<std::uint64_t>(buffer.size(), size_ - at);
    TENSORMOUNT_RETURN_IF_ERROR(area_.file->Read(area_.offset + at, buffer.data(), n));
    TENSORMOUNT_RETURN_IF_ERROR(area.file->Write(area.offset + at, buffer.data(), n));
    at += n;
  }
  area_ = std::move(area);
  used_ = size_;
  recorded_ = 0;
  return {};
}

// The order matters: room first, then zeros over bytes that were cut off before, then the data, and
// the new size only when all data are written.
Status BlobWriter::WriteLocked(std::uint64_t offset, const void* data, std::size_t size) {
  TENSORMOUNT_RETURN_IF_ERROR(Check());
  if (!RangeWithin(offset, size, kMaxObjectBytes)) return Status::FromErrno(EFBIG, "write", Name());
  if (size == 0) return {};
  const std::uint64_t end = std::max(size_, offset + size);
  TENSORMOUNT_RETURN_IF_ERROR(MakeWritable(std::min(offset, size_), end));
  changed_ = true;
  TENSORMOUNT_RETURN_IF_ERROR(Zero(size_, std::min(offset, used_)));
  used_ = std::max(used_, end);
  TENSORMOUNT_RETURN_IF_ERROR(area_.file->Write(area_.offset + offset, data, size));
  size_ = end;
  shared_->bytes_written.fetch_add(size, std::memory_order_relaxed);
  return {};
}

Status BlobWriter::Write(std::uint64_t offset, const void* data, std::size_t size) {
  const std::lock_guard lock(mutex_);
  return WriteLocked(offset, data, size);
}

Status BlobWriter::Overwrite(std::uint64_t offset, const void* data, std::size_t size) {
  const std::lock_guard lock(mutex_);
  if (offset >= size_) return Check();
  return WriteLocked(offset, data,
                     static_cast<std::size_t>(std::min<std::uint64_t>(size, size_ - offset)));
}

Result<std::uint64_t> BlobWriter::Append(const void* data, std::size_t size) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t at = size_;
  TENSORMOUNT_RETURN_IF_ERROR(WriteLocked(at, data, size));
  return at;
}

// Shortening writes nothing: `size_` is the end of the object, `used_` the end of old bytes behind
// it.
Status BlobWriter::Truncate(std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Check());
  if (size > kMaxObjectBytes) return Status::FromErrno(EFBIG, "truncate", Name());
  if (size == size_) return {};
  changed_ = true;
  if (size == 0) {
    area_ = {};
    used_ = recorded_ = 0;
  } else if (size > size_) {
    TENSORMOUNT_RETURN_IF_ERROR(MakeWritable(size_, size));
    TENSORMOUNT_RETURN_IF_ERROR(Zero(size_, std::min(size, used_)));
    // Writes the last byte, so that the file is long enough.
    TENSORMOUNT_RETURN_IF_ERROR(Zero(size - 1, size));
    used_ = std::max(used_, size);
  }
  size_ = size;
  return {};
}

// Objects are read back and hashed as a whole, since writes come in any order. The lock is held
// meanwhile, which is short for typical objects (configurations, generator states).
Status BlobWriter::Prepare(PendingPart& pending) {
  pending.sync_lock = std::unique_lock(sync_lock_);
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Check());
  if (removed_ || !changed_) return {};
  TENSORMOUNT_RETURN_IF_ERROR(shared_->files.Open());
  JournalRecord record;
  record.kind = JournalRecord::Kind::kObject;
  record.object.key = key_;
  record.object.index = index_;
  record.object.file = kNoFile;
  record.object.length = size_;
  if (size_ > 0) {
    record.object.file = area_.file->number();
    record.object.offset = area_.offset;
    std::vector<std::byte> buffer(std::min<std::uint64_t>(kBlobBlockBytes, size_));
    const auto read = [&](std::uint64_t at, std::span<std::byte> block) {
      return area_.file->Read(area_.offset + at, block.data(), block.size());
    };
    const auto hashed = [](std::uint64_t, std::span<const std::byte>) { return Status(); };
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkHashes hashes, PassChunk(size_, buffer, read, hashed));
    record.object.leaves = std::move(hashes.leaves);
    pending.files.push_back(area_.file);
  }
  pending.records = EncodeRecord(record);
  last_ = std::move(record.object);
  // From here on these bytes are frozen, even if the sync fails: their record may still become
  // durable.
  recorded_ = std::max(recorded_, size_);
  changed_ = false;
  return {};
}

// After a failed sync the object is marked as failed in the journal, so that a publish by another
// mount, which sees only journals, does not use an older version.
void BlobWriter::Finish(PendingPart& pending, const Status& status) {
  if (!status.ok()) {
    bool first = false;
    {
      const std::lock_guard lock(mutex_);
      first = failure_.ok() && !removed_;
      if (first) failure_ = status.WithContext(Name() + ": an earlier sync failed");
    }
    JournalWriter* const journal = shared_->files.journal();
    if (first && status.code() != Code::kStale && journal != nullptr) {
      JournalRecord record;
      record.kind = JournalRecord::Kind::kCondemn;
      record.number = kNoFile;
      record.file_name = Name();
      record.reason = status.message();
      if (journal->Append(EncodeRecord(record)).ok()) (void)journal->Sync();
    }
  }
  pending.sync_lock.unlock();
}

Status BlobWriter::Sync() {
  StagedPart* const self = this;
  return SyncParts(*shared_, {&self, 1});
}

// Copies nothing: the record of the new name has the same area and hashes.
Status BlobWriter::MoveTo(const std::string& key, const Dims& index) {
  const std::lock_guard sync_lock(sync_lock_);
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Check());
  if (removed_) return Status(Code::kNotFound, Name() + ": removed");
  JournalRecord added;
  added.kind = JournalRecord::Kind::kObject;
  added.object = last_;
  added.object.key = key;
  added.object.index = index;
  JournalRecord removed;
  removed.kind = JournalRecord::Kind::kRemoveObject;
  removed.object.key = key_;
  removed.object.index = index_;
  // The new name is recorded first, so that a power loss between the two leaves both names instead
  // of none.
  TENSORMOUNT_RETURN_IF_ERROR(
      shared_->files.journal()->Append(EncodeRecord(added) + EncodeRecord(removed)));
  last_ = std::move(added.object);
  key_ = key;
  index_ = index;
  return {};
}

Status BlobWriter::ReleaseName() {
  const std::lock_guard sync_lock(sync_lock_);
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Check());
  removed_ = true;
  return {};
}

void BlobWriter::RestoreName() {
  const std::lock_guard lock(mutex_);
  removed_ = false;
}

std::string BlobWriter::key() const {
  const std::lock_guard lock(mutex_);
  return key_;
}

Dims BlobWriter::index() const {
  const std::lock_guard lock(mutex_);
  return index_;
}

// Takes the sync lock: otherwise a running sync that has hashed the object could record it after
// its removal.
Status BlobWriter::Remove() {
  const std::lock_guard sync_lock(sync_lock_);
  const std::lock_guard lock(mutex_);
  removed_ = true;
  if (shared_->files.journal() == nullptr) return {};
  JournalRecord record;
  record.kind = JournalRecord::Kind::kRemoveObject;
  record.object.key = key_;
  record.object.index = index_;
  return shared_->files.journal()->Append(EncodeRecord(record));
}

}  // namespace tensormount::fs
