// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_CALLERS_H_
#define TENSORMOUNT_FS_MOUNT_CALLERS_H_

#include <sys/types.h>

namespace tensormount::fs {

// Information from /proc about a thread that waits for an answer of the mount. `thread` is the id
// in the request, in this process's PID namespace; 0 if the thread is not visible there (the daemon
// runs in its own container).

// The process that the thread belongs to; 0 if not visible.
pid_t ProcessOf(pid_t thread);

// Whether the thread will never run its program again: it is gone, or a signal that ends it is
// pending.
// Polled, because the kernel sends the same INTERRUPT for every signal (a timer's as well as
// SIGKILL) and sends no second one for a call. False if the thread is not visible: a live caller
// must not get EINTR, which programs do not expect from files; a dying one then only ends later.
bool IsBeingKilled(pid_t thread);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_CALLERS_H_
