// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_MOUNT_TABLE_H_
#define TENSORMOUNT_FS_MOUNT_MOUNT_TABLE_H_

#include <optional>
#include <string>

namespace tensormount::fs {

// The entry of the topmost mount at a path in /proc/self/mountinfo. `device` is also its name in
// /sys/class/bdi.
struct MountEntry {
  std::string device;  // Such as "0:52".
  std::string type;    // Such as "fuse.tensormount".
};

// The topmost mount at this path; nullopt if nothing is mounted at exactly this path. Reads /proc,
// because stat(2) of a mount whose daemon is dead only returns ENOTCONN.
std::optional<MountEntry> FindMount(const std::string& path);

// The filesystem type of our mounts.
inline constexpr const char* kMountType = "fuse.tensormount";

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_MOUNT_TABLE_H_
