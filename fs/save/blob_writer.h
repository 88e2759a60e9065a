// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_BLOB_WRITER_H_
#define TENSORMOUNT_FS_SAVE_BLOB_WRITER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "fs/save/staged_part.h"

namespace tensormount::fs {

// Writes an object part, a file of up to kMaxObjectBytes. Its bytes are in one area of the mount's
// pack (DataFiles) or, if they are many, in a file of their own. Recorded bytes are never
// overwritten; a change of them moves the whole object to a new area. Calls run one after the
// other, and a sync hashes the whole object. Durability is as for TargetWriter, but holes of an
// object read as zeros.
class BlobWriter final : public StagedPart {
 public:
  BlobWriter(std::shared_ptr<StagedParts> shared, std::string key, const Dims& index);

  std::uint64_t size() const;
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size);
  Status Write(std::uint64_t offset, const void* data, std::size_t size);
  // Writes over existing bytes only; bytes past the end are dropped.
  Status Overwrite(std::uint64_t offset, const void* data, std::size_t size);
  Result<std::uint64_t> Append(const void* data, std::size_t size);
  Status Truncate(std::uint64_t size);
  Status Sync();

  // Records that the object was removed; the record is not durable yet. Later syncs record nothing.
  Status Remove();
  // Gives the object another name. Call it after a sync. Appends the record of the new name and the
  // removal of the old one together; both are not durable yet. Later syncs use the new name.
  // kNotFound once the object was removed.
  Status MoveTo(const std::string& key, const Dims& index);
  // Prepares for another object to take this name: later syncs record nothing. Fails if a sync
  // failed before, which only removing the object clears.
  // StagingWriter::RenameObject calls Sync and MoveTo of the object that moves, and ReleaseName of
  // the object that had the new name; if MoveTo fails, it calls RestoreName.
  Status ReleaseName();
  void RestoreName();  // Reverts ReleaseName.
  std::string key() const;
  Dims index() const;

  Status Prepare(PendingPart& pending) override;
  void Finish(PendingPart& pending, const Status& status) override;

 private:
  std::string Name() const;
  // OK if the object may be changed and synced. Requires mutex_.
  Status Check() const;
  Status WriteLocked(std::uint64_t offset, const void* data, std::size_t size);
  // Makes the object's bytes from `begin` on writable in place, and allocates room up to `end`.
  Status MakeWritable(std::uint64_t begin, std::uint64_t end);
  // Writes zeros over bytes [begin, end). Bytes that Truncate left in the file must read as zeros
  // when the object grows over them again.
  Status Zero(std::uint64_t begin, std::uint64_t end);

  const std::shared_ptr<StagedParts> shared_;
  // Name of the object; changed only while sync_lock_ and mutex_ are held.
  std::string key_;
  Dims index_;

  SyncLock sync_lock_;  // Serializes syncs; taken before mutex_.
  mutable std::mutex mutex_;
  // The object's bytes; without a file the area is empty. Writes at or after `recorded_` are made
  // in place while the area has room; a write before `recorded_` moves the whole object.
  DataFiles::Area area_;
  std::uint64_t size_ = 0;
  std::uint64_t used_ = 0;      // Bytes of area_ that were written; the rest are zeros.
  std::uint64_t recorded_ = 0;  // Bytes of area_ before this position are never overwritten.
  bool changed_ = true;         // Whether the object changed since its last record.
  StagedObject last_;           // The object's last record.
  bool removed_ = false;
  // Failure of a sync; later writes and syncs return it.
  Status failure_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_BLOB_WRITER_H_
