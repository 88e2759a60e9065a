// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_BLOB_WRITER_H_
#define TENSORMOUNT_FS_SAVE_BLOB_WRITER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "fs/save/staged_part.h"

namespace tensormount::fs {

// A part of an object, a file of any size. Always one area, of the pack or, where it is large, of a
// file of its own. What a record names of the area is never written again: a change there moves
// everything to a new one. Calls come one after the other; hashed at the sync. Same rules as those
// of TargetWriter but for holes: an object counts as a whole, so its holes are zeros.
class BlobWriter final : public StagedPart {
 public:
  BlobWriter(std::shared_ptr<StagedParts> shared, std::string key, const Dims& index);

  std::uint64_t size() const;
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size);
  Status Write(std::uint64_t offset, const void* data, std::size_t size);
  // Where there are bytes already: what lies past the end is dropped.
  Status Overwrite(std::uint64_t offset, const void* data, std::size_t size);
  Result<std::uint64_t> Append(const void* data, std::size_t size);
  Status Truncate(std::uint64_t size);
  Status Sync();

  // It has no name any more: later syncs record nothing. Recorded itself, not yet durable.
  Status Remove();
  // To be called once it was synced: all that was recorded is now of another name, in records that
  // are appended together; not yet durable. Later syncs record it under that. kNotFound once it was
  // removed.
  Status MoveTo(const std::string& key, const Dims& index);
  // Another one is about to take its name: no sync of it may record anything after that. Fails
  // where one of its syncs failed, which only removing it takes back.
  // RenameObject calls Sync and MoveTo of the one that moves, and Leave of the one that had the
  // name before; where MoveTo fails, Stay takes that back.
  Status Leave();
  void Stay();  // The other did not.
  std::string key() const;
  Dims index() const;

  Status Prepare(PendingPart& pending) override;
  void Finish(PendingPart& pending, const Status& status) override;

 private:
  std::string Name() const;
  // With the lock held.
  Status Check() const;
  Status WriteLocked(std::uint64_t offset, const void* data, std::size_t size);
  // Makes bytes from `begin` on writable, and room for `end` bytes.
  Status MakeWritable(std::uint64_t begin, std::uint64_t end);
  // What was cut off by Truncate is still in the file; it must read as zeros when the object grows
  // over it again.
  Status Zero(std::uint64_t begin, std::uint64_t end);

  const std::shared_ptr<StagedParts> shared_;
  // Changed with a turn and the lock.
  std::string key_;
  Dims index_;

  Turn turn_;  // Of syncs; taken before mutex_.
  mutable std::mutex mutex_;
  // What is appended behind `recorded_` is written in place while the area has room; only a change
  // before it moves the whole object.
  DataFiles::Area area_;  // No file: nothing in it.
  std::uint64_t size_ = 0;
  std::uint64_t used_ = 0;      // Of the area: behind it are zeros.
  std::uint64_t recorded_ = 0;  // Of the area: never written again.
  bool changed_ = true;         // Not recorded as it is.
  StagedObject last_;           // As it was recorded last.
  bool removed_ = false;
  // Of a sync that failed; all that follows fails with it.
  Status failure_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_BLOB_WRITER_H_
