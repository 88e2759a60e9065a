// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_PINS_H_
#define TENSORMOUNT_BASE_HOST_PINS_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// Implements FileSystem::PinDirectory: a path that leads to this directory despite renames, as long
// as the result lives (without /proc: only the path itself). Costs a descriptor, which the last
// copy of the pointer closes. Thread-safe. For readers: a checkpoint that is renamed, exchanged or
// moved to trash while it is open is still read from the directory that was opened, never partly
// from its successor.
Result<std::shared_ptr<const std::string>> PinHostDirectory(const std::string& path);

// The descriptor of a pinned directory, by its pinned path; -1 for other paths. The pin owns the
// descriptor and must live while the descriptor is used.
int PinnedDescriptor(const std::string& path);

// `path` for messages: a pinned directory is replaced by its original name.
std::string ShownPath(const std::string& path);

// Status::FromErrno with ShownPath(path), because "/proc/self/fd/17/data/x" means nothing in a
// message. Use it for every failed system call on a path.
Status HostError(int error, std::string_view action, const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_PINS_H_
