// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_ANSWERS_H_
#define TENSORMOUNT_FS_ANSWERS_H_

#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount::fs {

// Errors of a mount, one function for each, so that the same failure always gets the same errno
// (Status::ToErrno).
//
// ENOENT: the directory has no entry of this name.
inline Status NoSuchNameError(std::string_view name) {
  return Status(Code::kNotFound, "no entry " + std::string(name) + " in this directory");
}

// ESTALE: the inode number belongs to no node. `of` names what was searched: "the checkpoint",
// "zarr/".
inline Status StaleNodeError(std::string_view of) {
  return Status(Code::kStale, "stale inode number: " + std::string(of) + " has no such entry");
}

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_ANSWERS_H_
