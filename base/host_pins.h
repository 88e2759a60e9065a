// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_PINS_H_
#define TENSORMOUNT_BASE_HOST_PINS_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// A path that leads to this folder while it is kept, whatever the folder is called meanwhile
// (FileSystem::PinDirectory). Costs a descriptor, which the last copy of the pointer closes.
// Thread-safe. For readers: a checkpoint that is
// renamed, exchanged or moved to trash while it is open goes on being read from the folder that was
// opened, and never half from the one that has its name now.
Result<std::shared_ptr<const std::string>> PinHostDirectory(const std::string& path);

// The descriptor of a folder that is pinned, by its pinned path; -1 for any other path. The caller
// keeps the pin while it uses the descriptor, which stays the pin's.
int PinnedDescriptor(const std::string& path);

// `path` as people know it: below a pinned folder by the name under which that was pinned.
std::string ShownPath(const std::string& path);

// Status::FromErrno with the path as people know it. What every failed system call on a path of
// ours ends in: "/proc/self/fd/17/data/x" would tell the reader of a message nothing.
Status HostError(int error, std::string_view action, const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_PINS_H_
