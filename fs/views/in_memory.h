// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_IN_MEMORY_H_
#define TENSORMOUNT_FS_VIEWS_IN_MEMORY_H_

#include <cstddef>

namespace tensormount::fs {

// Whether all pages of this part of a mapping are in memory, so that a reply from it will not wait
// for storage: by the time a reply is sent, a caller that gives up can no longer be answered. What
// is not there is read instead, with readahead, and is there next time. By mincore, which says yes
// to a process that neither owns the file nor may write it.
bool InMemory(const std::byte* data, std::size_t size);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_IN_MEMORY_H_
