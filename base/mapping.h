// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_MAPPING_H_
#define TENSORMOUNT_BASE_MAPPING_H_

#include <cstddef>

#include "tensormount/mapping_guard.h"

// What is particular about memory that is a mapped file. Reading a mapped file that somebody cuts
// short raises SIGBUS, which ends the process. A daemon that serves everybody's reads must answer
// EIO instead.
//
// Why map at all: a hash or a copy reads mapped bytes where they are, while pread copies them
// first, and a mapping can be handed on to readers without any copy
// (OpenedCheckpoint::MappedRange).

namespace tensormount {

// Whether the guard is there now: it was enabled (tensormount/mapping_guard.h), and no other
// handler has been set since. Where not, what others may cut short at any time is better not
// mapped. A system call; ask once for each stretch that is read.
bool MappingGuarded();

// Puts the handler back that was there before, where ours is still in use: for the end of a
// library, whose code goes away, while no other thread reads. May be enabled again.
void DisableMappingGuard();

// Calls fn(argument), which reads from a mapping and may own nothing (it is left by a jump: no
// destructors run). False where a page of it could not be had. Without the guard just calls it.
// SIGBUS is not blocked meanwhile, whatever the thread does with it: a blocked one ends the
// process.
bool RunOnMapping(void (*fn)(void*), void* argument);

// The same for a callable whose captures are references.
template <typename Fn>
bool RunOnMapping(Fn&& fn) {
  return RunOnMapping([](void* f) { (*static_cast<Fn*>(f))(); }, &fn);
}

// Brings all pages of this part of a mapping into memory. False where one cannot be had, or before
// Linux 5.14: then reading it is not safe where nothing is guarded. What is true may end at once,
// where somebody cuts the file short or memory is so scarce that the pages leave again.
// `mincore_is_true`: it may be asked what is there, see InMemory, which makes this ten times as
// fast where all of it is.
bool Populate(const std::byte* data, std::size_t size, bool mincore_is_true);

// Whether all pages of this part of a mapping are in memory, so that reading it does not wait for
// storage. By mincore, which says yes to a process that neither owns the file nor may write it:
// good enough to choose how to read, and for safety only where the process owns the file.
bool InMemory(const std::byte* data, std::size_t size);
// The same of one page in 64 KiB, for large parts: to ask of all costs a fifth of reading them.
bool LooksInMemory(const std::byte* data, std::size_t size);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_MAPPING_H_
