// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_RENAME_H_
#define TENSORMOUNT_BASE_HOST_RENAME_H_

#include <string>

#include "tensormount/status.h"

namespace tensormount {

// What HostFileSystem's RenameNoReplace does where the filesystem refuses RENAME_NOREPLACE (NFS).
// A folder: must have entries, for then plain rename is atomic and fails on any name that holds a
// folder with entries or a file; an empty folder that appears under the name at this moment would
// be replaced, which loses nothing. A file: link, which fails on any taken name, then unlink.
// Apart from tests only for base/host_file_system.cc.
Status RenameNoReplaceWithoutFlag(const std::string& from, const std::string& to);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_RENAME_H_
