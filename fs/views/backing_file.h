// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_
#define TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_

#include <cstdint>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/file_segments.h"
#include "fs/views/shown_checkpoint.h"

namespace tensormount::fs {

// Number of the one file of the checkpoint that is byte for byte this content from offset 0, and
// nothing more. Literal bytes are compared with the file's; for tensors and objects the index is
// believed. kNotFound where there is none; kDataLoss where a file is not as long as the index says.
Result<std::uint32_t> FindBackingFile(FileSystem& fs, const ShownCheckpoint& shown,
                                      const FileSegments& segments);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_BACKING_FILE_H_
