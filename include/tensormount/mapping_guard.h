// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MAPPING_GUARD_H_
#define TENSORMOUNT_MAPPING_GUARD_H_

#include "tensormount/visibility.h"

namespace tensormount {

// The fastest way to short runs of stored bytes is to read them where the file is mapped. A mapped
// file that is cut short, or a block that the disk does not give, raises SIGBUS, and signals are
// the program's: so until it allows the library to handle that one, the library first makes sure of
// each page by system calls, or copies bytes with pread, which is slower (docs/performance.md) and
// never raises it.
//
// From now on, in all threads, SIGBUS that a page of a checkpoint raises in a function of the
// library becomes the error of that function; any other SIGBUS goes to the handler that was there
// before, as if ours were not. Once a process, at its start, after it has set its own handlers
// (Python: after faulthandler.enable()). A handler that is set later takes ours away, and the
// library reads as before. When the library is unloaded the former handler is put back, where ours
// is still the one in use. Thread-safe, and once is enough; false where the system refused, or ours
// was taken away.
TENSORMOUNT_EXPORT bool EnableMappingGuard();

}  // namespace tensormount

#endif  // TENSORMOUNT_MAPPING_GUARD_H_
