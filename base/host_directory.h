// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_DIRECTORY_H_
#define TENSORMOUNT_BASE_HOST_DIRECTORY_H_

#include <string>
#include <vector>

#include "base/file_system.h"

// The directory operations of HostFileSystem() that need descriptors of directories.

namespace tensormount {

// The entries sorted by name; ELOOP if the last component of `path` is a symlink.
Result<std::vector<DirectoryEntry>> ListHostDirectory(const std::string& path);
// Which symlinks a path below a directory may contain: those that stay inside it, or none.
enum class HostLinks { kInside, kNone };
// Opens `name` below `directory` with these flags of open(2). kInside: links as in
// FileSystem::OpenReadBeneath; kNone: any link is ELOOP. Returns a descriptor for the caller to
// close, or a negative number and errno. `walk`: for tests, as if the kernel had no openat2.
int OpenHostBeneath(const std::string& directory, const std::string& name, int flags,
                    HostLinks links = HostLinks::kInside, bool walk = false);
Result<std::vector<DirectoryEntry>> ListHostBeneath(const std::string& directory,
                                                    const std::string& name);
// fsync of the directory: makes the names in it durable, not the files' contents.
Status SyncHostDirectory(const std::string& path);
// rm -r by descriptors, so that a directory exchanged for a symlink meanwhile does not redirect the
// removal. Gives the owner of each directory missing permissions, so that its entries can be
// removed.
Status RemoveHostTree(const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_DIRECTORY_H_
