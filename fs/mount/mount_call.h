// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_MOUNT_CALL_H_
#define TENSORMOUNT_FS_MOUNT_MOUNT_CALL_H_

#include <cstddef>
#include <string>

#include "tensormount/status.h"

namespace tensormount::fs {

// The largest read or write that the kernel sends in one request; larger values are not faster
// (measured). Negotiated at INIT and given as max_read at mount(2); the two must be equal.
inline constexpr std::size_t kMaxRequestBytes = std::size_t{1} << 20;

// Arguments of MountFuse. A read-only mount also has the kernel's flag for that, so that the kernel
// refuses writes itself.
struct MountCall {
  std::string mount_point;  // Absolute path.
  std::string source;       // The name in the mount table.
  bool allow_other = false;
  bool read_only = true;
};

// Opens /dev/fuse and mounts it, by mount(2) as root and by fusermount3 otherwise. Returns the
// descriptor, which the caller closes. libfuse's own mount call would bypass the shim at INIT
// (fs/mount/fuse_shim.h). kUnavailable: no /dev/fuse or fusermount3; kPermissionDenied: this user
// may not mount here.
Result<int> MountFuse(const MountCall& call);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_MOUNT_CALL_H_
