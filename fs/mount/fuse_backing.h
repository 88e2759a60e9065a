// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_BACKING_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_BACKING_H_

#include <string>

#include "fs/mount/open_modes.h"

namespace tensormount::fs {

// Registers files with the kernel through a mount's descriptor of /dev/fuse. The same with every
// libfuse: its own call (3.17) is this ioctl, and keeps the error to itself.
// The only BackingRegistrar outside of tests, which have a fake kernel that checks the rules of
// open_modes.h.
class FuseBacking : public BackingRegistrar {
 public:
  // Before the first Register(). The descriptor stays the caller's and must stay open.
  void SetDevice(int device) { device_ = device; }
  Result<int> Register(int descriptor) override;
  void Unregister(int id) noexcept override;

 private:
  int device_ = -1;
};

// What has to be asked of the kernel at INIT so that files of `source` can be passed through: the
// depth of filesystems (FuseShim::Options::passthrough_depth), 2 where it lies on overlayfs.
// Filesystems that are stacked on others count, and the kernel refuses to stack deeper than 2.
unsigned PassthroughDepth(const std::string& source);
// Why this process will not be allowed to register files, for a person; empty: nothing known.
// Known before anything is tried, so that --tier passthrough can fail before it mounts.
std::string PassthroughObstacle();

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_BACKING_H_
