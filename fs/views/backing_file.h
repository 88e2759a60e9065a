// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_
#define TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_

#include <cstdint>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/formats/file_segments.h"
#include "fs/views/shown_checkpoint.h"

namespace tensormount::fs {

// Number of the one file of the checkpoint that is byte for byte these segments from offset 0, and
// nothing more. Literal bytes are compared with the file's; for tensors and objects the index is
// believed. kNotFound where there is none; kDataLoss where a file is not as long as the index says.
// Why it matters: the kernel can then read that file by itself (passthrough), at the speed of the
// file and with one copy in the page cache, and an export can clone or link it instead of writing
// its bytes again. "Nothing more" is part of it, because passthrough shows the size of the stored
// file.
// Believing the index for data is safe: a file that has other bytes there is found by the hashes of
// its leaves, which whoever hands the file to the kernel checks first (VirtualFile::Prove), or by
// the export, which reads all that it shares. Literal bytes have no hashes in the index, so they
// are read and compared here.
// Costs nothing but look-ups in the index for a tensor or object that is a file of its own; for a
// file of many tensors, the extents of each, until one does not fit. Most are refused by the length
// of the first one's file. May read the header from disk: not to be called where a mount must
// answer at once.
Result<std::uint32_t> FindBackingFile(FileSystem& fs, const ShownCheckpoint& shown,
                                      const FileSegments& segments);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_
