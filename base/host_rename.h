// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_RENAME_H_
#define TENSORMOUNT_BASE_HOST_RENAME_H_

#include <string>

#include "tensormount/status.h"

namespace tensormount {

// Fallback of HostFileSystem's RenameNoReplace for filesystems without RENAME_NOREPLACE (NFS). A
// directory must have entries: a plain rename of it is atomic, and fails if the new name is a file
// or a directory with entries. An empty directory that gets the new name at this moment is
// replaced, which loses nothing. A file is linked to the new name, which fails if the name is
// taken, and then unlinked from the old name. Used only by base/host_file_system.cc and tests.
Status RenameNoReplaceWithoutFlag(const std::string& from, const std::string& to);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_RENAME_H_
