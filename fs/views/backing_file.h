// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_
#define TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_

#include <cstdint>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/formats/file_segments.h"
#include "fs/views/shown_checkpoint.h"

namespace tensormount::fs {

// Number of the file of the checkpoint whose bytes are exactly those of `segments`. Literal bytes
// are compared with the file's; for tensors and objects the index is trusted. kNotFound: no such
// file was found (shown files that are symlinks, or that consist of several objects or of boxes of
// tensors, are not looked for); kDataLoss:
// a file's length differs from the index; kStale: a foreign file changed.
// The kernel can read such a file itself (passthrough), with one copy in the page cache, and an
// export can clone or link it. The file must not be longer than the segments, because passthrough
// shows the file's size.
// Trusting the index is safe: unless --verify is off, leaf hashes, if there are any, are checked
// before a file is handed to the kernel (VirtualFile::Prove), and an export reads everything that
// it shares. Literal bytes have no hashes, so they are compared here.
// Cost: index lookups for a tensor or object in its own file; for a file of many tensors, the
// extents of each tensor until one is not at its position. May read literal bytes (a header) from
// the stored file, so do not call it where a mount must answer at once.
Result<std::uint32_t> FindBackingFile(const ShownCheckpoint& shown, const FileSegments& segments);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_
