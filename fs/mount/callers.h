// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_CALLERS_H_
#define TENSORMOUNT_FS_MOUNT_CALLERS_H_

#include <sys/types.h>

namespace tensormount::fs {

// What /proc says of a thread that waits for an answer of ours. `thread` is the number that the
// kernel gives with a request: of the thread, in our namespace of processes; 0 where it has none
// there (the daemon runs in a container of its own).

// The process that the thread belongs to; 0 where that cannot be seen.
pid_t ProcessOf(pid_t thread);

// Whether the thread will never run its program again: a signal that ends it is pending, or it is
// gone. The kernel tells of every signal with the same INTERRUPT, of a timer's as of SIGKILL; and
// once a call is interrupted it does not tell of the next one, so that this is asked again and
// again. False where the thread cannot be seen: a caller that lives must not hear EINTR, since
// programs do not expect it of files, and one that dies only dies later.
bool IsBeingKilled(pid_t thread);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_CALLERS_H_
