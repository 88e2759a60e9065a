// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_MAPPING_H_
#define TENSORMOUNT_BASE_MAPPING_H_

#include <cstddef>

#include "tensormount/mapping_guard.h"

// Safe reads of mapped files. If another program truncates a mapped file, reading it raises SIGBUS,
// which ends the process; a daemon must return EIO instead.
//
// Why mmap: hashes and copies read mapped bytes in place, while pread copies them first, and a
// mapping can be passed to readers without a copy (OpenedCheckpoint::MappedRange).

namespace tensormount {

// Whether the guard is active: enabled (tensormount/mapping_guard.h), and its handler not replaced.
// If not, files that others may truncate should not be mapped. A system call; call it once per
// range to read.
bool MappingGuarded();

// Restores the previous handler if ours is still installed. For unloading the library, while no
// other thread reads. The guard may be enabled again.
void DisableMappingGuard();

// Calls fn(argument), which reads from a mapping and must not own resources (a longjmp leaves it
// without destructors). False if a page could not be read. Without the guard it only calls fn.
// SIGBUS is unblocked meanwhile, because a blocked SIGBUS ends the process.
bool RunOnMapping(void (*fn)(void*), void* argument);

// Like RunOnMapping above, for a lambda that captures by reference (it must not own resources).
template <typename Fn>
bool RunOnMapping(Fn&& fn) {
  return RunOnMapping([](void* f) { (*static_cast<Fn*>(f))(); }, &fn);
}

// Brings all pages of this range of a mapping into memory. False if a page cannot be read, or
// before Linux 5.14: then reading the range without a guard is not safe. The result may become
// outdated at once, if the file is truncated or the pages are evicted. `mincore_is_true`: mincore
// may be trusted (see InMemory), which makes Populate ten times as fast if all pages are in memory.
bool Populate(const std::byte* data, std::size_t size, bool mincore_is_true);

// Whether all pages of this range are in memory, so that reading does not wait for storage. Uses
// mincore, which always says yes to a process that neither owns the file nor may write it: good
// enough to choose a way to read, but for safety only if the process owns the file.
bool InMemory(const std::byte* data, std::size_t size);
// Like InMemory, but checks only one page in 64 KiB, because checking all pages of a large range
// costs a fifth of reading them.
bool LooksInMemory(const std::byte* data, std::size_t size);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_MAPPING_H_
