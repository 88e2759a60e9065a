// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_HANDLE_H_
#define TENSORMOUNT_FS_HANDLE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "tensormount/status.h"

#include "fs/attributes.h"

namespace tensormount::fs {

// A file that somebody has opened for writing below .staging/ (files of published checkpoints are
// VirtualFile). What the kernel asks of it, without the kernel. Thread-safe; every call may block
// for as long as storage does, and runs where that is allowed (fs/mount/blocking_work.h).
// Calls of several descriptors and threads may run at once; each sees what returned before it
// began.
class WriteHandle {
 public:
  virtual ~WriteHandle() = default;

  // Names the file in errors: ".staging/step-3/slices/w[0:4]".
  virtual const std::string& label() const = 0;
  // Up to `size` bytes, fewer only at the end. ENODATA for bytes that nobody has written.
  virtual Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) = 0;
  // All or an error. ESTALE once the staging has left its name; EFBIG past the end of a file whose
  // size the schema fixes; ENODATA, EIO, ENOSPC of storage.
  virtual Status Write(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // O_APPEND: at what is the end now; gives where that was.
  virtual Result<std::uint64_t> Append(const void* data, std::size_t size) = 0;
  // A tensor's file or a slice: to 0 forgets what was written there, to the full size does nothing,
  // between forgets what lies past it. A free file (schema.json, objects): its new size.
  virtual Status Truncate(std::uint64_t size) = 0;
  // close(2) of one descriptor, maybe not the last: like Sync, and what is checked at close
  // (schema.json) is checked now. Its error is what close(2) returns.
  virtual Status Flush() = 0;
  // fsync(2): when it returns, what was written survives a power cut and counts at publish.
  virtual Status Sync() = 0;
  virtual Result<Attributes> Stat() = 0;
  // lseek(2) with SEEK_DATA (`data`) or SEEK_HOLE: the first byte from `offset` on that was
  // written, or that was not. ENXIO at and past the end, and where no data follow.
  virtual Result<std::uint64_t> Seek(std::uint64_t offset, bool data) = 0;
  // The kernel reads pages for a mapping. What is written to those it says later, maybe long after
  // close(2): until Release() such a file counts as open for writing.
  virtual Status NoteMapping() = 0;
  // Pages that were written to through a shared mapping. Bytes past the end are dropped, they are
  // nobody's. Where cells that nobody wrote would count as written, the file is condemned instead:
  // its Flush and Sync then fail with ENODEV, and so does the publish.
  virtual Status WritePages(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // The kernel has let go of the file, mappings too: nothing can come any more. Needed where
  // writing() is true then: what came after the last Flush is made durable as it would have.
  virtual Status Release() = 0;
  virtual bool writing() = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_HANDLE_H_
