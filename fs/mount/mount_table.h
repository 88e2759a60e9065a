// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_MOUNT_TABLE_H_
#define TENSORMOUNT_FS_MOUNT_MOUNT_TABLE_H_

#include <optional>
#include <string>

namespace tensormount::fs {

// What /proc/self/mountinfo says of the topmost mount at a path.
// `device` is what fusermount and /sys/class/bdi call it.
struct MountEntry {
  std::string device;  // "0:52"
  std::string type;    // "fuse.tensormount"
};

// Nothing where nothing is mounted at exactly this path. Works for mounts whose server has died.
// From /proc: stat of a mount whose server has died answers ENOTCONN and says nothing.
std::optional<MountEntry> FindMount(const std::string& path);

// The type of our mounts.
inline constexpr const char* kMountType = "fuse.tensormount";

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_MOUNT_TABLE_H_
