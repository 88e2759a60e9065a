// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_STAGING_STAGED_HANDLES_H_
#define TENSORMOUNT_FS_STAGING_STAGED_HANDLES_H_

#include <functional>
#include <memory>
#include <string>

#include "tensormount/status.h"

#include "fs/handle.h"
#include "fs/mount_stats.h"
#include "fs/staging/staged_checkpoint.h"

namespace tensormount::fs {

// Arguments of every open file below .staging/. `stat` is a function because an object can be
// renamed while it is open, which changes its name and inode.
struct HandleContext {
  std::shared_ptr<StagedCheckpoint> staged;
  std::string label;  // Such as ".staging/step-3/slices/w[0:4]".
  bool writable = false;
  std::function<Result<Attributes>()> stat;
  MountStats* stats = nullptr;  // Receives failures; outlives the handle.
};

// A file that is open for writing (except a mark) counts as an open writer of its staging from its
// open until its last Flush (or Release, if it is mapped), and again from the next write on. After
// close(2) has returned, a publish does not count a file that is not mapped, although the kernel
// releases it later.

// The kind of handle depends on the file. A tensor or slice has a fixed size and records which
// bytes were written; an object is a plain file; schema.json and common.json are checked as a whole
// when they are closed or synced; of a mark only the name matters.
//
// Opens a tensor's file or a slice.
Result<std::shared_ptr<WriteHandle>> OpenTargetHandle(HandleContext context,
                                                      std::shared_ptr<TargetWriter> target);
// Opens an object part.
Result<std::shared_ptr<WriteHandle>> OpenObjectHandle(HandleContext context,
                                                      std::shared_ptr<BlobWriter> blob);
// Opens schema.json (or common.json) for writing: a private text that begins as `text` and is
// applied when the file is closed or synced.
Result<std::shared_ptr<WriteHandle>> OpenEditHandle(HandleContext context, bool schema,
                                                    std::string text);
// Opens done/RANK. Data written to this file are discarded.
std::shared_ptr<WriteHandle> OpenMarkHandle(HandleContext context);
// Opens a read-only text.
std::shared_ptr<WriteHandle> OpenTextHandle(HandleContext context, std::string text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGED_HANDLES_H_
