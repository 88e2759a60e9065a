// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_MOUNT_CALL_H_
#define TENSORMOUNT_FS_MOUNT_MOUNT_CALL_H_

#include <cstddef>
#include <string>

#include "tensormount/status.h"

namespace tensormount::fs {

// The largest read and write that the kernel sends in one request. More does not pay (measured).
// Agreed on at INIT and given as max_read when the mount is made; the two must be equal.
inline constexpr std::size_t kMaxRequestBytes = std::size_t{1} << 20;

// Read-only is a mount flag as well, so that the kernel refuses writes without asking us.
struct MountCall {
  std::string mount_point;  // Absolute.
  std::string source;       // As the mount table shall show it.
  bool allow_other = false;
  bool read_only = true;
};

// Opens /dev/fuse and mounts it, by mount(2) as root and by fusermount3 otherwise: libfuse's own
// way of mounting would not let us see the INIT reply (fs/mount/fuse_shim.h). Returns the
// descriptor, which the caller closes. kUnavailable: no /dev/fuse or fusermount3;
// kPermissionDenied.
Result<int> MountFuse(const MountCall& call);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_MOUNT_CALL_H_
