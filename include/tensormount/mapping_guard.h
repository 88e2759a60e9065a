// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MAPPING_GUARD_H_
#define TENSORMOUNT_MAPPING_GUARD_H_

#include "tensormount/visibility.h"

namespace tensormount {

// The fastest way to read short runs is through mmap. If another program truncates a mapped file,
// or the disk cannot read a block, accessing the page raises SIGBUS, whose handling belongs to the
// program. Without the program's permission the library checks each page by system calls before, or
// uses pread, which is slower (docs/performance.md) and never raises SIGBUS.
//
// From this call on, in all threads, a SIGBUS that a page of a checkpoint raises in a library
// function becomes that function's error; every other SIGBUS goes to the previous handler. Call it
// once per process, at its start, after the program has set its own handlers (Python: after
// faulthandler.enable()). A handler set later replaces ours; then the library reads as without this
// call. Unloading the library restores the previous handler if ours is still installed.
// Thread-safe. Returns false if the system refused, or if our handler was replaced.
TENSORMOUNT_EXPORT bool EnableMappingGuard();

}  // namespace tensormount

#endif  // TENSORMOUNT_MAPPING_GUARD_H_
