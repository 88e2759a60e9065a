// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_ANSWERS_H_
#define TENSORMOUNT_FS_ANSWERS_H_

#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount::fs {

// The errnos that a mount answers with are the codes of these statuses (Status::ToErrno), so what
// has one meaning has one function.
// ENOENT for a name that a folder does not have.
inline Status NoSuch(std::string_view name) {
  return Status(Code::kNotFound, "no " + std::string(name) + " here");
}

// ESTALE for a number that is no node's. `of`: "the checkpoint", "zarr/".
inline Status StaleNode(std::string_view of) {
  return Status(Code::kStale, std::string(of) + " has no such node");
}

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_ANSWERS_H_
