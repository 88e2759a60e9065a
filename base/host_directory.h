// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_DIRECTORY_H_
#define TENSORMOUNT_BASE_HOST_DIRECTORY_H_

#include <string>
#include <vector>

#include "base/file_system.h"

// The folder operations of HostFileSystem() that need descriptors of folders.

namespace tensormount {

// Sorted by name; ELOOP where the last component is a symlink.
Result<std::vector<DirectoryEntry>> ListHostDirectory(const std::string& path);
// Which links a path below a folder may go through.
enum class HostLinks { kInside, kNone };
// Opens `name` below `directory` with these flags of open(2). kInside: what
// FileSystem::OpenReadBeneath says of links; kNone: any link is ELOOP. A descriptor for the caller
// to close; negative: errno says why. `walk`: as where the kernel has no openat2, for tests.
int OpenHostBeneath(const std::string& directory, const std::string& name, int flags,
                    HostLinks links = HostLinks::kInside, bool walk = false);
Result<std::vector<DirectoryEntry>> ListHostBeneath(const std::string& directory,
                                                    const std::string& name);
// fsync of the folder: the names in it, not the files that they lead to.
Status SyncHostDirectory(const std::string& path);
// Goes from descriptor to descriptor: a folder that somebody exchanges for a symlink meanwhile
// leads nowhere else. Folders without write permission are given it first.
Status RemoveHostTree(const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_DIRECTORY_H_
