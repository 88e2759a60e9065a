// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_HANDLE_H_
#define TENSORMOUNT_FS_HANDLE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "tensormount/status.h"

#include "fs/attributes.h"

namespace tensormount::fs {

// An open file below .staging/, independent of FUSE (files of published checkpoints are
// VirtualFile). Thread-safe. Every call may block as long as storage does, so it runs on threads
// that may block (fs/mount/blocking_work.h).
// Calls of several descriptors and threads may run at once; each sees the effects of calls that
// returned before it began.
class WriteHandle {
 public:
  virtual ~WriteHandle() = default;

  // Name of the file in errors: ".staging/step-3/slices/w[0:4]".
  virtual const std::string& label() const = 0;
  // Reads up to `size` bytes, fewer only at the end. ENODATA: the range has bytes that were never
  // written.
  virtual Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) = 0;
  // Writes all bytes or fails. ESTALE: the staging was published or removed; EFBIG: past the end of
  // a file whose size the schema fixes; ENODEV: the file was changed through a shared mapping; EIO,
  // ENOSPC and others: from storage.
  virtual Status Write(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // Write for a file opened with O_APPEND: writes at the current end and returns that offset.
  virtual Result<std::uint64_t> Append(const void* data, std::size_t size) = 0;
  // For a tensor's file or a slice: size 0 discards what was written there, the full size does
  // nothing, a size between discards the bytes past it. For other files (schema.json, objects):
  // sets the size.
  virtual Status Truncate(std::uint64_t size) = 0;
  // For close(2), which returns the error of this call. Syncs like Sync. Afterwards the file does
  // not count as open for writing, unless it is mapped or written to again.
  virtual Status Flush() = 0;
  // fsync(2): afterwards the written bytes survive a power loss and are part of a publish.
  virtual Status Sync() = 0;
  virtual Result<Attributes> Stat() = 0;
  // lseek(2): the first written byte at or after `offset` if `data` (SEEK_DATA), otherwise the
  // first unwritten one (SEEK_HOLE). ENXIO at and past the end, and with `data` if no data follow.
  virtual Result<std::uint64_t> Seek(std::uint64_t offset, bool data) = 0;
  // To be called when the kernel reads pages for a mapping. The kernel may send writes to these
  // pages long after close(2), so a writable file counts as open for writing until Release().
  virtual Status NoteMapping() = 0;
  // Writes pages that were changed through a shared mapping; bytes past the end are dropped. A
  // tensor's file or a slice is marked failed instead, because whole pages would count as written:
  // Write, Flush, Sync and the publish then fail (the first three with ENODEV).
  virtual Status WritePages(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // Must be called if writing() is true when the kernel has released the file and its mappings:
  // makes bytes durable that were written since the last Flush. No further calls follow.
  virtual Status Release() = 0;
  virtual bool writing() = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_HANDLE_H_
