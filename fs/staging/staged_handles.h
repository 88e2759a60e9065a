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

// What every open file below .staging/ is made with.
// `stat` is a call instead of a value because an object can be renamed while it is open, and then
// has another name and inode.
struct HandleContext {
  std::shared_ptr<StagedCheckpoint> of;
  std::string label;  // ".staging/step-3/slices/w[0:4]"
  bool writable = false;
  std::function<Result<Attributes>()> stat;
  MountStats* stats = nullptr;  // Where failures are told; outlives the handle.
};

// Files open for writing count as open writers of their staging from Begin on, until the last thing
// that happened to them is Flush (of mapped ones Release), and again from the next write on: after
// close(2) has returned a publish does not find them, although the kernel releases them later.

// Which kind of handle a file gets is decided by what its bytes are. A tensor or slice has a fixed
// size and remembers which of its bytes were written; an object is a plain file; schema.json and
// common.json are texts that are judged as a whole when they are closed; a mark is what its name
// says, whatever is written into it.
// A tensor's file or a slice.
Result<std::shared_ptr<WriteHandle>> OpenTargetHandle(HandleContext context,
                                                      std::shared_ptr<TargetWriter> target);
// An object part.
Result<std::shared_ptr<WriteHandle>> OpenObjectHandle(HandleContext context,
                                                      std::shared_ptr<BlobWriter> blob);
// schema.json (or common.json) to be written: a text of this handle alone, which begins with
// `text` and is taken when the file is closed or synced.
Result<std::shared_ptr<WriteHandle>> OpenEditHandle(HandleContext context, bool schema,
                                                    std::string text);
// done/<rank>: what is written to it is dropped.
std::shared_ptr<WriteHandle> OpenMarkHandle(HandleContext context);
// Read-only text.
std::shared_ptr<WriteHandle> OpenTextHandle(HandleContext context, std::string text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGED_HANDLES_H_
