// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_DIRECTORY_H_
#define TENSORMOUNT_BASE_HOST_DIRECTORY_H_

#include <string>
#include <vector>

#include "base/file_system.h"

// The folder operations of HostFileSystem() that need descriptors of folders.

namespace tensormount {

Result<std::vector<DirectoryEntry>> ListHostDirectory(const std::string& path);
Status SyncHostDirectory(const std::string& path);
// Goes from descriptor to descriptor: a folder that somebody exchanges for a symlink meanwhile
// leads nowhere else. Folders without write permission are given it first.
Status RemoveHostTree(const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_DIRECTORY_H_
